"""Even shares: thread blocks that take work items by falling length end at about the same time."""

from __future__ import annotations

from heapq import heapreplace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from treegen import Shape
from treegen.ir.tree import Tree
from treegen.ir.verify import verify
from treegen.strategies.cohort import Cohort
from treegen.strategies.context_cuts import MOST_PARTS, even_share
from treegen.target.problem import Problem
from treegen.target.targets import target_from

SHAPE = Shape(32, 8, 128, page_size=16)
H200 = target_from("h200")


def planned(lengths: list[int], blocks: float) -> list[int]:
    """The tokens of the work items of requests that share nothing."""
    tree = Tree.from_requests(lengths, page_size=16)
    plan = Cohort(4, shares=blocks).plan(Problem(tree, SHAPE, H200))
    verify(plan, tree)
    found: list[int] = plan.group_tokens.tolist()
    return found


def busiest(items: list[int], blocks: int) -> int:
    """The tokens of the thread block that ends last."""
    loads = [0] * blocks
    for tokens in sorted(items, reverse=True):
        heapreplace(loads, loads[0] + tokens)
    return max(loads)


@given(
    st.one_of(
        st.lists(st.integers(1, 20_000), min_size=1, max_size=120),
        st.tuples(st.integers(64, 20_000), st.integers(1, 120)).map(lambda pair: [pair[0]] * pair[1]),
    ),
    st.sampled_from((1, 2.0625, 4.125, 8.25, 16.5, 33, 66)),
)
@example([2048] * 34, 33)
@example([8192] * 34, 33)
@example([4096] * 67, 33)
@example([64, 949, 1358, 3534, 3534, 7886, 16590, 16590, 16590], 33)
def test_no_thread_block_ends_late(lengths: list[int], blocks: float) -> None:
    share = int(even_share(float(sum(lengths)), blocks))
    items, parts = planned(lengths, blocks), sum(-(-tokens // share) for tokens in lengths)
    assert sum(items) == sum(lengths)
    if parts <= MOST_PARTS * int(blocks):
        assert busiest(items, int(blocks)) <= share + max(share // 8, 128) + 128
    else:
        assert len(items) == parts


@pytest.mark.parametrize(
    ("lengths", "blocks", "expected"),
    [
        ([2048] * 133, 264, [1088] * 133 + [960] * 131 + [128] * 14 + [64] * 2),  # 131 blocks have room for 128 tokens
        ([1000] * 8, 8, [1000] * 8),  # one part for each block
        ([4000, 200, 100], 2, [2240, 1760, 200, 100]),  # what follows fits in whole
    ],
    ids=["cut", "whole", "fits"],
)
def test_parts_that_would_follow_whole_are_cut(lengths: list[int], blocks: float, expected: list[int]) -> None:
    assert sorted(planned(lengths, blocks), reverse=True) == expected


def test_parts_are_cut_in_order_and_rows_stay_together() -> None:
    """Each request's tokens are read once, in pieces that follow one another."""
    tree = Tree.from_requests([8192] * 34, page_size=16)
    plan = Cohort(16, shares=33).plan(Problem(tree, SHAPE, H200))
    verify(plan, tree)
    rows = list(zip(plan.row_lo.tolist(), plan.row_hi.tolist(), strict=True))
    assert len(rows) == 36
    assert len({lo for lo, _ in rows}) == 9
    segments = plan.segments.T[np.lexsort((plan.segments[1], plan.segments[0]))]
    for before, after in zip(segments[:-1].tolist(), segments[1:].tolist(), strict=True):
        assert after[0] > before[0] or after[1] == before[2]
