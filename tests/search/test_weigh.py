"""Choosing by weight: weights against accounts of plans, limits of items and of work."""

import random
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.forests import examples, forests
from support.h200 import H200
from support.weighed_problems import FAMILIES, SHAPES, one_prefix, problems, weights
from treegen import Shape, Tree
from treegen.ir.arrays import INT32_MAX
from treegen.ir.errors import ShapeError
from treegen.ir.tree.kv import KVRuns
from treegen.runtime.batch_room import batch_config
from treegen.schedule.lower import lower
from treegen.search.auto import time_of
from treegen.search.split_estimates import EVEN_ROW
from treegen.search.walk_layout import walk_fields
from treegen.search.weigh import MOST_POLICIES, Weights, least, weighed, weights_of
from treegen.strategies.context_cuts import SPLIT_STEP, even_share
from treegen.target.problem import Problem
from treegen.target.tile_config import lanes_of

MOST_CALLS = 400


def places(found: Weights) -> list[tuple[int, int]]:
    """All places of policies."""
    return list(np.ndindex(found.times_us.shape))  # type: ignore[arg-type]


def ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The rank of every value; equal ones share their mean rank."""
    _, place, count = np.unique(values.round(6), return_inverse=True, return_counts=True)
    mean: npt.NDArray[np.float64] = (np.cumsum(count) - (count - 1) / 2)[place.ravel()]
    return mean


def test_weights_rank_policies_as_accounts_do() -> None:
    """Spearman's correlation over all policies of a tree."""
    correlations = []
    for problem in problems(12, 9, (32, 64)):
        found = weights(problem)
        accounts = np.array([time_of(found.policy(place), problem) for place in places(found)])
        correlations.append(np.corrcoef(ranks(accounts), ranks(found.times_us.ravel()))[0, 1])
    assert min(correlations) >= 0.93
    assert np.median(correlations) >= 0.99


@given(st.lists(st.integers(64, 20_000), min_size=1, max_size=300), st.sampled_from(((32, 8), (8, 1), (16, 2))))
@examples(60)
@example([64, 949, 1358, 3534, 3534, 7886, 16590, 16590, 16590], (32, 8))
def test_even_shares_are_those_of_all_thread_blocks(lengths: list[int], heads: tuple[int, int]) -> None:
    """Requests that are longer than a share are cut; tests/strategies/test_even_shares.py says when blocks end."""
    shape = Shape(*heads, 128, page_size=16)
    config, tree = batch_config(shape, H200), Tree.from_requests(lengths, page_size=16)
    found = weights_of(Problem(tree, shape, H200), config)
    assert found is not None
    walk = next(place for place, walk in enumerate(found.walks) if walk.head_rows == 1)
    blocks = 2 * H200.sms / lanes_of(config, shape)
    share = even_share(float(sum(lengths)), blocks)
    assert sum(lengths) <= share * blocks <= 1.04 * sum(lengths) + blocks * SPLIT_STEP
    policy, expected = found.policy((EVEN_ROW, walk)), found.walks[walk]
    assert policy == (replace(expected, shares=blocks) if share < max(lengths) else expected)
    assert found.splits[EVEN_ROW, walk] == (share if share < max(lengths) else INT32_MAX)


@given(forests(25, 400, salt=1611), st.sampled_from(SHAPES))
@examples(80)
def test_whole_paths_weigh_what_their_accounts_say(tree: Tree, shape: Shape) -> None:
    """Nothing is estimated where no path is cut or split, every node is one run of KV, and no cohort is empty."""
    problem = Problem(tree.with_kv(KVRuns.contiguous(tree.tokens)), shape, H200)
    found = weights_of(problem)
    if found is None:
        assert not tree.unique_tokens
        return
    for index, walk in enumerate(found.walks):
        first, count = found.cohorts.first[index], found.cohorts.counts[index]
        if walk.split_shared_rows is None and (found.cohorts.tokens[first : first + count] > 0).all():
            assert found.times_us[0, index] == pytest.approx(time_of(walk, problem))


@given(forests(25, 400, salt=1612), st.sampled_from(SHAPES))
@examples(60)
def test_items_are_counted_as_lowered(tree: Tree, shape: Shape) -> None:
    problem = Problem(tree, shape, H200)
    found = weights_of(problem)
    for place in [] if found is None else places(found)[::5]:
        assert found is not None
        assert found.items(place) == len(lower(found.policy(place).plan(problem), problem).items)


@pytest.mark.parametrize(
    ("levels", "tokens", "shape"),
    [([1, 7, 70], [500, 3000, 100], Shape(32, 8, 128)), ([1, 8], [8000, 2500], Shape(16, 2, 64))],
)
def test_paths_are_cut_where_that_pays(levels: list[int], tokens: list[int], shape: Shape) -> None:
    problem = Problem(Tree.from_levels(levels, tokens), shape, H200)
    found = weights(problem)
    chosen = found.policy(found.best())
    whole = [policy for policy in map(found.policy, places(found)) if policy.split_shared_rows is None]
    assert chosen.split_shared_rows is not None
    assert time_of(chosen, problem) <= 0.95 * min(time_of(policy, problem) for policy in whole)


def test_choices_are_the_same_again() -> None:
    """By the same tree made anew, and without what earlier calls have left."""
    first = [weighed(problem) for problem in problems(12, 5)]
    walk_fields.cache_clear()
    assert [weighed(problem) for problem in problems(12, 5)] == first


@pytest.mark.parametrize("problem", problems(6, 3), ids=lambda problem: f"{problem.tree.num_rows} rows")
def test_no_more_items_than_asked_for(problem: Problem) -> None:
    """Every limit gives the best of the policies within it, and one that is too low what comes closest."""
    found = weights(problem)
    items = {place: found.items(place) for place in places(found)}
    for most in sorted(set(items.values())):
        least_us = min(found.times_us[place] for place in items if items[place] <= most)
        best = found.best(most)
        assert len(lower(found.policy(best).plan(problem), problem).items) == items[best] <= most
        assert found.times_us[best] == least_us
    assert items[found.best(0)] == min(items.values())


def test_the_list_is_short() -> None:
    assert MOST_POLICIES <= 48
    for heads, kv in ((32, 8), (28, 4), (12, 12), (16, 1), (128, 1), (80, 1)):
        for problem in problems(6, 1):
            found = weights(problem._replace(shape=Shape(heads, kv, 128)))
            assert found.times_us.size <= MOST_POLICIES
            assert len(set(found.walks)) == len(found.walks)


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_do_not_grow_with_the_tree(family: Callable[[random.Random, int], Tree]) -> None:
    """No loop over rows, nodes or cohorts: a large tree takes about as many calls of functions as a small one."""
    counts = []
    for rows in (64, 4096):
        problem = Problem(family(random.Random(1), rows), SHAPES[0], H200)
        weighed(problem)
        counts.append(calls(lambda problem=problem: weighed(problem)))  # type: ignore[misc]
    assert max(counts) <= MOST_CALLS


def calls(function: Callable[[], object]) -> int:
    """Calls of functions of C that a call makes."""
    made = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal made
        made += event == "c_call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return made


def test_reasons_compare_with_plain_decoding() -> None:
    problem = Problem(one_prefix(random.Random(2), 64), SHAPES[0], H200)
    found = weights(problem)
    chosen = weighed(problem)
    assert chosen.reason.startswith(f"least estimated time of {found.times_us.size} policies, ")
    assert chosen.reason.endswith(" us")
    assert "; plain per-row decoding takes " in chosen.reason
    assert found.times_us.min() < found.query_us


def test_nothing_to_do() -> None:
    """A tree without tokens, and rows that see nothing."""
    empty = Tree.from_parents([-1, 0, 0], [0, 0, 0])
    blind = Tree.from_parents([-1], [10], rows=[(0, 0), (0, 0)])
    for tree in (empty, blind):
        problem = Problem(tree, SHAPES[0], H200)
        chosen = weighed(problem)
        assert chosen == least(problem, None)
        assert chosen.reason == "nothing to do"
        assert len(chosen.strategy.plan(problem)) == 0


def test_shapes_that_do_not_fit_are_named() -> None:
    tiny = replace(H200, name="tiny", shared_bytes=1024, shared_bytes_per_sm=2048)
    with pytest.raises(ShapeError, match="shared memory of tiny"):
        weighed(Problem(Tree.from_parents([-1], [10]), SHAPES[0], tiny))
