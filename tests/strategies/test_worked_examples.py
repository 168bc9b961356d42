"""Worked examples of strategies: groups written by hand, and trees at the edge."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

import treegen
from support.forests import obeys_law
from support.h200 import H200
from support.strategy_results import SMALL, assert_computes_attention, optioned, run, tensors, tree_of_two_roots
from treegen import Tree, strategies
from treegen.ir.plan import Plan
from treegen.ir.verify import verify_schedule
from treegen.schedule.lower import lower
from treegen.strategies import Strategy
from treegen.target.problem import Problem


def node_tokens(plan: Plan, index: int) -> list[tuple[int, int, int]]:
    return [(segment.node, segment.start, segment.stop) for segment in plan.groups[index].segments]


def test_deft_node_groups() -> None:
    plan = strategies.deft_node().plan(Problem(tree_of_two_roots(), SMALL, H200))
    assert [str(group) for group in plan.groups] == [
        "rows 0-2 | n0[0:100]",
        "rows 0-0 | n1[0:10]",
        "rows 1-2 | n2[0:20]",
        "rows 1-1 | n3[0:5]",
        "rows 2-2 | n4[0:5]",
        "rows 3-3 | n5[0:7]",
    ]


def test_deft_node_masks_rows_inside_a_node() -> None:
    """Causal append: rows after 3, 7 and 10 of 10 tokens, and one below; tokens that only later rows see are masked."""
    tree = Tree.from_parents([-1, 0], [10, 4], rows=[(0, 7), (1, 4), (0, 3), (0, 10)])
    plan = strategies.deft_node().plan(Problem(tree, SMALL, H200))
    assert [str(group) for group in plan.groups] == [
        "rows 0-3 | n0[0:3], n0[3:7] seen 1-3, n0[7:10] seen 2-3",
        "rows 3-3 | n1[0:4]",
    ]


def test_deft_node_leaves_out_what_nobody_sees() -> None:
    tree = Tree.from_parents([-1, 0, 0, -1], [10, 4, 6, 9], rows=[(1, 0), (0, 8)])
    plan = strategies.deft_node().plan(Problem(tree, SMALL, H200))
    assert [str(group) for group in plan.groups] == ["rows 0-1 | n0[0:8], n0[8:10] seen 1-1"]


def test_query_groups() -> None:
    plan = strategies.query().plan(Problem(tree_of_two_roots(), SMALL, H200))
    assert [str(group) for group in plan.groups] == [
        "rows 0-0 | n0[0:100], n1[0:10]",
        "rows 1-1 | n0[0:100], n2[0:20], n3[0:5]",
        "rows 2-2 | n0[0:100], n2[0:20], n4[0:5]",
        "rows 3-3 | n5[0:7]",
    ]
    split = strategies.query(split=60).plan(Problem(tree_of_two_roots(), SMALL, H200))
    assert [str(group) for group in split.groups][:4] == [
        "rows 0-0 | n0[0:60]",
        "rows 0-0 | n0[60:100], n1[0:10]",
        "rows 1-1 | n0[0:60]",
        "rows 1-1 | n0[60:100], n2[0:20]",
    ]


def test_flatten_block_boundaries() -> None:
    """147 tokens in depth-first order, cut every 64 regardless of nodes, with the rows that see any of a block."""
    plan = strategies.deft_flatten(block=64).plan(Problem(tree_of_two_roots(), SMALL, H200))
    assert [str(group) for group in plan.groups] == [
        "rows 0-2 | n0[0:64]",
        "rows 0-2 | n0[64:100], n1[0:10] seen 0-0, n2[0:18] seen 1-2",
        "rows 1-3 | n2[18:20] seen 0-1, n3[0:5] seen 0-0, n4[0:5] seen 1-1, n5[0:7] seen 2-2",
    ]


def test_chunks_of_a_long_node() -> None:
    plan = strategies.deft_node_chunk().plan(Problem(Tree.parse("300(128,129)"), SMALL, H200))
    assert [str(group) for group in plan.groups] == [
        "rows 0-1 | n0[0:128]",
        "rows 0-1 | n0[128:256]",
        "rows 0-1 | n0[256:300]",
        "rows 0-0 | n1[0:128]",
        "rows 1-1 | n2[0:128]",
        "rows 1-1 | n2[128:129]",
    ]


@pytest.mark.parametrize("option", [128, 1000])
@pytest.mark.parametrize("make", [strategies.query, strategies.deft_node_chunk, strategies.deft_flatten])
def test_uneven_suffixes_under_one_prefix(make: Callable[[int], Strategy], option: int) -> None:
    """Rows of one node whose suffixes are split differently never share a partial slot (a known bug elsewhere)."""
    tree = Tree.parse("256(64,4096)")
    schedule = lower(make(option).plan(Problem(tree, SMALL, H200)), Problem(tree, SMALL, H200))
    verify_schedule(schedule, tree.num_rows)
    partial = [item for item in schedule.work_items if item.partial0 >= 0]
    slots = [slot for item in partial for slot in range(item.partial0, item.partial0 + item.rows)]
    assert len(slots) == len(set(slots)) == schedule.num_partials
    items = np.bincount(
        [row for item in schedule.work_items for row in schedule.rows[item.row0 : item.row0 + item.rows]]
    )
    assert items[0] < items[1]  # the rows do have different numbers of partials
    assert_computes_attention(schedule, tree)


@pytest.mark.parametrize("strategy", sorted({*optioned(None), *optioned(32)}, key=str), ids=str)
def test_several_roots(strategy: Strategy) -> None:
    tree = Tree.parse("40(3*3)+0(5,6)+17*2+0")
    plan = strategy.plan(Problem(tree, SMALL, H200))
    assert obeys_law(plan, tree)
    assert {segment.node for group in plan.groups for segment in group.segments} == {0, 1, 2, 3, 5, 6, 7, 8}
    assert_computes_attention(lower(plan, Problem(tree, SMALL, H200)), tree)


@pytest.mark.parametrize("strategy", sorted({*optioned(None), *optioned(50)}, key=str), ids=str)
def test_more_rows_than_a_tile(strategy: Strategy) -> None:
    """Nodes seen by 300 rows are cut into row tiles, the last one not full; rows come from several nodes."""
    tree = Tree.parse("30(90(2*150),4*150)")
    plan = strategy.plan(Problem(tree, SMALL, H200))
    schedule = lower(plan, Problem(tree, SMALL, H200))
    verify_schedule(schedule, tree.num_rows)
    tallest = max(group.num_rows for group in plan.groups)
    assert max(item.rows for item in schedule.work_items) == min(tallest, schedule.configs[0].rows // SMALL.group)
    assert_computes_attention(schedule, tree)


def test_rows_without_any_token_give_zero() -> None:
    tree = Tree.from_parents([-1, 0, -1], [0, 5, 3], rows=[(0, 0), (1, 2), (2, 0), (2, 3)])
    for strategy in optioned(None):
        out, lse = run(lower(strategy.plan(Problem(tree, SMALL, H200)), Problem(tree, SMALL, H200)), tree)
        assert out[[0, 2]].eq(0).all()
        assert lse[[0, 2]].eq(-math.inf).all()
        assert lse[[1, 3]].isfinite().all()


def test_tree_without_rows_gives_empty_tensors() -> None:
    tree = Tree.from_parents([-1, 0], [5, 5], rows=[])
    for strategy in optioned(None):
        kernel = treegen.compile(tree, strategy=strategy, shape=SMALL, backend="torch")
        assert len(kernel.plan) == 0
        assert kernel.schedule.launches == 0
        assert kernel(*tensors(tree)).shape == (0, 4, 16)
