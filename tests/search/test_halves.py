"""Halves of whole paths that one launch merges: auto takes them where they pay, fixed capacities never."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import treegen
from support.forests import examples, forests
from support.h200 import H200
from treegen import Shape, Tree
from treegen.cost.account import account
from treegen.ir.verify import verify, verify_schedule
from treegen.report.explain import explain
from treegen.schedule.passes.fuse_merge import with_fused_merge
from treegen.search.auto import by_estimate, time_of
from treegen.search.halves import PlannedStrategy, best_halves, halved, large_cohorts
from treegen.search.weigh import weights_of
from treegen.strategies import cohort, query
from treegen.strategies.cohort import Cohort
from treegen.target.problem import Problem

SHAPE = Shape(16, 1, 128, dtype="fp16")
SMALL, FULL = Tree.parse("1,4,8,256/8,256,256,32"), Tree.parse("1,4,16,1024/8,256,256,64")


@example(SMALL, SHAPE)
@example(Tree.parse("1,4,8,64/40,16,16,16"), Shape(32, 8, 64))
@example(Tree.parse("1,16,64,256/128,64,64,64"), Shape(28, 4, 128))
@examples(60)
@given(forests(40, 900, salt=33), st.sampled_from([SHAPE, Shape(32, 8, 64), Shape(28, 4, 128)]))
def test_halves_are_plans_of_the_tree_in_one_launch(tree: Tree, shape: Shape) -> None:
    if not tree.num_rows or not tree.unique_tokens:
        return
    for whole in large_cohorts(shape):
        half = halved(whole, Problem(tree, shape, H200))
        if half is not None:
            verify(half.plan, tree)
            made = with_fused_merge(half.schedule)
            verify_schedule(made, tree.num_rows)
            assert made.launches == 1
            assert isinstance(half.strategy, Cohort)
            assert (half.strategy.head_rows, half.strategy.merge) == (whole.head_rows, "final")


def test_explain_counts_one_launch() -> None:
    problem = Problem(SMALL, SHAPE, H200)
    found = by_estimate(problem).strategy
    (entry,) = explain(SMALL, ["auto"], SHAPE, H200).entries
    assert entry.strategy == found
    assert entry.estimate.launches == 1
    assert entry.estimate.time_us == pytest.approx(time_of(found, problem))


def test_a_cut_that_merges_last_is_told_by_the_launch_that_is_made() -> None:
    """What the space holds as two launches counts as one where it is one."""
    apart = cohort(head_rows=64, split_shared_rows=64, merge="final")
    entry, two = explain(SMALL, [apart], SHAPE, H200).entries[0], PlannedStrategy.of(apart, Problem(SMALL, SHAPE, H200))
    assert two.takes_one_launch
    as_two = account(two.plan, two.schedule, Problem(SMALL, SHAPE, H200), fixed=True)
    assert (entry.estimate.launches, as_two.launches) == (1, 2)
    assert entry.estimate.time_us < as_two.time_us
    assert time_of(apart, Problem(SMALL, SHAPE, H200)) == entry.estimate.time_us


@pytest.mark.parametrize(
    ("tree", "shape", "some"),
    [(SMALL, SHAPE, True), (FULL, Shape(32, 2, 128, dtype="fp16"), False),
     (SMALL, Shape(16, 1, 256, dtype="fp16"), False), (Tree.parse("200*32+3000*32"), SHAPE, False)],
    ids=["room", "full SMs", "wide values", "uneven paths"],
)  # fmt: skip
def test_halves_are_weighed_where_there_is_room_and_paths_are_alike(tree: Tree, shape: Shape, some: bool) -> None:
    problem = Problem(tree, shape, H200)
    weights = weights_of(problem)
    assert weights is not None
    found = best_halves(weights, problem, float("inf"))
    assert (found is not None) == some
    if found is not None:
        assert PlannedStrategy.of(found[0], problem).takes_one_launch
        assert best_halves(weights, problem, found[1]) is None


def test_kernels_of_fixed_capacity_do_without() -> None:
    free = treegen.compile(SMALL, shape=SHAPE, target="h100")
    fixed = treegen.compile(SMALL, shape=SHAPE, target="h100", max_rows=256)
    assert free.estimate.launches == 1
    assert free.choice.strategy.options["merge"] == "final"
    assert fixed.choice.strategy.options.get("merge", "reduce") == "reduce"
    named = treegen.compile(SMALL, strategy=free.choice.strategy, shape=SHAPE, target="h100", max_rows=256)
    assert named.choice.strategy == free.choice.strategy
    assert named.estimate.launches == 2


def test_plain_decoding_has_none() -> None:
    assert not PlannedStrategy.of(query(), Problem(SMALL, SHAPE, H200)).takes_one_launch
