"""Halves of whole paths that one launch merges: the search takes them where they pay, fixed capacities never."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import treegen
from forests import examples, forests
from treegen import Shape, Tree
from treegen.cost.estimate import account
from treegen.ir.verify import verify, verify_schedule
from treegen.report.explain import explain
from treegen.schedule.passes.fuse_merge import in_one_launch
from treegen.search import search as searching
from treegen.search.halves import Lowered, halved, large_cohorts
from treegen.search.search import search, time_of
from treegen.strategies import cohort, query
from treegen.strategies.cohort import Cohort
from treegen.target.problem import Problem
from treegen.target.targets import target_from

H200 = target_from("h200")
SHAPE = Shape(16, 1, 128, dtype="fp16")
SMALL, FULL = Tree.parse("1,4,8,256/8,256,256,32"), Tree.parse("1,4,16,1024/8,256,256,64")


@example(SMALL, SHAPE, False)
@example(Tree.parse("1,4,8,64/40,16,16,16"), Shape(32, 8, 64), True)
@example(Tree.parse("1,16,64,256/128,64,64,64"), Shape(28, 4, 128), False)
@examples(60)
@given(forests(40, 900, salt=33), st.sampled_from([SHAPE, Shape(32, 8, 64), Shape(28, 4, 128)]), st.booleans())
def test_halves_are_plans_of_the_tree_in_one_launch(tree: Tree, shape: Shape, where_room: bool) -> None:
    if not tree.num_rows or not tree.unique_tokens:
        return
    for whole in large_cohorts(shape):
        half = halved(whole, Problem(tree, shape, H200), where_room=where_room)
        if half is not None:
            verify(half.plan, tree)
            made = in_one_launch(half.schedule)
            verify_schedule(made, tree.num_rows)
            assert made.launches == 1
            assert isinstance(half.strategy, Cohort)
            assert (half.strategy.head_rows, half.strategy.merge) == (whole.head_rows, "final")


def test_the_search_takes_them_where_they_pay() -> None:
    found, fixed = search(Problem(SMALL, SHAPE, H200)), search(Problem(SMALL, SHAPE, H200), for_any_tree=True)
    assert Lowered.of(found.strategy, Problem(SMALL, SHAPE, H200)).takes_one_launch
    assert found.time_us < fixed.time_us
    assert not Lowered.of(fixed.strategy, Problem(SMALL, SHAPE, H200)).takes_one_launch
    (entry,) = explain(SMALL, ["auto"], SHAPE, H200).entries
    assert entry.strategy == found.strategy
    assert entry.estimate.launches == 1
    assert entry.estimate.time_us == pytest.approx(found.time_us)
    assert found.trace[-1].strategy == found.strategy


def test_a_cut_that_merges_last_is_told_by_the_launch_that_is_made() -> None:
    """What the space holds as two launches counts as one where it is one."""
    apart = cohort(head_rows=64, apart=64, merge="final")
    entry, two = explain(SMALL, [apart], SHAPE, H200).entries[0], Lowered.of(apart, Problem(SMALL, SHAPE, H200))
    assert two.takes_one_launch
    as_two = account(two.plan, two.schedule, Problem(SMALL, SHAPE, H200), fixed=True)
    assert (entry.estimate.launches, as_two.launches) == (1, 2)
    assert entry.estimate.time_us < as_two.time_us
    assert time_of(apart, Problem(SMALL, SHAPE, H200)) == entry.estimate.time_us


def test_full_sms_are_not_given_more_blocks() -> None:
    (whole,) = (each for each in large_cohorts(SHAPE) if each.head_rows == 64)
    assert halved(whole, Problem(FULL, SHAPE, H200)) is not None
    assert halved(whole, Problem(FULL, Shape(32, 2, 128, dtype="fp16"), H200), where_room=True) is None
    assert halved(whole, Problem(SMALL, SHAPE, H200), where_room=True) is not None


def test_kernels_of_fixed_capacity_do_without() -> None:
    free = treegen.compile(SMALL, shape=SHAPE, target="l40s")
    fixed = treegen.compile(SMALL, shape=SHAPE, target="l40s", max_rows=256)
    assert free.estimate.launches == 1
    assert free.choice.strategy.options["merge"] == "final"
    assert fixed.choice.strategy.options.get("merge", "reduce") == "reduce"
    named = treegen.compile(SMALL, strategy=free.choice.strategy, shape=SHAPE, target="l40s", max_rows=256)
    assert named.choice.strategy == free.choice.strategy
    assert named.estimate.launches == 2


def test_plain_decoding_has_none() -> None:
    assert not Lowered.of(query(), Problem(SMALL, SHAPE, H200)).takes_one_launch


def test_a_best_that_takes_longer_as_launched_gives_way() -> None:
    """To the best of all others, whether or not it was the best before; steps go on falling."""
    state = searching._State()
    policies = [Cohort(64), Cohort(32), Cohort(64, apart=4, merge="final"), Cohort(16), Cohort(64, split=128)]
    state.consider_all(policies, np.array([30.0, 25.0, 20.0, 21.0, 28.0]))
    assert state.retime(20.5)
    assert (state.best, state.time_us) == (policies[2], 20.5)
    assert not state.retime(24.0)
    assert (state.best, state.time_us) == (policies[3], 21.0)
    assert [step.time_us for step in state.trace] == [30.0, 25.0, 21.0]
    assert not state.retime(26.0)
    assert [(step.strategy, step.time_us) for step in state.trace] == [
        (policies[0], 30.0),
        (policies[1], 25.0),
        (policies[2], 24.0),
    ]
    assert [str(move) for move in state.trace[-1].moves] == [
        "head_rows 32 -> 64",
        "apart None -> 4",
        "merge reduce -> final",
    ]
