"""Partials merged by the last round's items: whose they are, in how many launches, what is refused and counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from support.final_merges import PROGRAMS, SHAPE, assert_attention, cut, entries, scheduled
from support.h200 import H200
from treegen import Tree, strategies
from treegen.backends.torch_program import TorchProgram
from treegen.codegen.emit import emit
from treegen.cost.account import account
from treegen.cost.analytic import terms_of
from treegen.cost.launch_counts import item_launches
from treegen.ir.errors import PlanError
from treegen.ir.groups import Group, Segment
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.verify import verify, verify_schedule
from treegen.strategies.groupings import by_node
from treegen.strategies.passes import DivideContext, LevelRounds, MergeLast, SplitContext, StoreMask, TrimRows
from treegen.target.problem import Problem

# By hand


def test_two_levels_by_hand() -> None:
    """Leaves merge what their ancestors left: two launches, and no partial of a leaf."""
    tree = Tree.parse("40(20(5,6),30(7,8))")
    schedule = scheduled(cut(tree, 2, 1), tree)
    assert [(item.group, item.rows, item.partial0) for item in schedule.work_items] == [
        (0, 4, 0), (2, 2, 4), (1, 2, 6), (6, 1, -1), (5, 1, -1), (4, 1, -1), (3, 1, -1),
    ]  # fmt: skip
    assert schedule.epilogue_indptr.tolist() == [0, 2, 4, 6, 8]
    assert schedule.epilogue_partials.tolist() == [0, 6, 1, 7, 2, 4, 3, 5]
    assert [tile.epilogue_merge for tile in schedule.configs] == [False, True]
    assert schedule.round_indptr.tolist() == [0, 1, 2]
    assert (schedule.num_partials, len(schedule.merge_rows), schedule.launches) == (8, 0, 2)
    assert "4 rows merged in epilogues, 2 launches" in schedule.text().splitlines()[0]
    assert str(schedule.configs[1]).endswith("stages, merge in the epilogue")
    assert [source.key.epilogue_merge for source in emit(schedule, SHAPE)] == [False, True]
    verify_schedule(schedule, 4)
    for program in PROGRAMS:
        assert_attention(schedule, tree, SHAPE, program)


def test_rows_without_an_item_in_the_last_round_are_merged_behind_it() -> None:
    """Row 0 ends above the cut, at the root; row 3 below the root; row 4 sees nothing; row 5 is alone in its tree."""
    tree = Tree.from_parents(
        [-1, 0, 1, 0, -1, -1], [40, 20, 5, 6, 0, 9], rows=[(0, 40), (2, 5), (3, 6), (1, 3), (4, 0), (5, 9)]
    )
    schedule = scheduled(cut(tree, 2, 8, trim=True), tree)
    assert schedule.launches == 3
    assert schedule.merge_round_indptr.tolist() == [0, 0, 4]
    assert schedule.merge_rows.tolist() == [0, 2, 3, 4]  # row 2 ends at depth 1 as well
    assert np.diff(schedule.merge_indptr).tolist() == [1, 2, 2, 0]
    assert {row: len(slots) for row, slots in entries(schedule).items()} == {1: 2}
    finals = [(item.group, item.rows) for item in schedule.work_items if item.partial0 < 0]
    assert len(finals) == 2  # node 2 below the cut; and node 5, whose row nobody else works on
    verify_schedule(schedule, 6)
    for program in PROGRAMS:
        assert_attention(schedule, tree, SHAPE, program)


def test_a_cohort_merges_different_numbers_of_slots_per_row() -> None:
    """One item of three rows: two partials, one (below the cut it is alone in its tree with a node above), and none."""
    tree = Tree.from_parents([-1, 0, 1, -1, 3, -1, 5], [30, 20, 5, 9, 7, 0, 4], rows=[(2, 5), (4, 7), (6, 4)])
    groups = [
        Group(((0, 1),), (Segment(0, 0, 30, (0, 1)),)),
        Group(((0, 1),), (Segment(1, 0, 20, (0, 1)),)),
        Group(((1, 2),), (Segment(3, 0, 9, (0, 1)),)),
        Group(((0, 3),), (Segment(2, 0, 5, (0, 1)), Segment(4, 0, 7, (1, 2)), Segment(6, 0, 4, (2, 3))), 1),
    ]
    plan = dataclasses.replace(Plan.from_groups("by hand", groups), merge="final")
    verify(plan, tree)
    schedule = scheduled(plan, tree)
    assert entries(schedule) == {0: [0, 1], 1: [2], 2: []}
    assert len(schedule.merge_rows) == 0
    verify_schedule(schedule, 3)
    for program in PROGRAMS:
        assert_attention(schedule, tree, SHAPE, program)


def test_a_single_round_merges_as_ever() -> None:
    """A plan of one round has no earlier partials, so its rows are merged in a launch of their own."""
    tree = Tree.parse("40(20,30)+7")
    plan = strategies.deft_node().plan(Problem(tree, SHAPE, H200))
    schedule = scheduled(MergeLast().apply(plan, tree), tree)
    assert schedule.to_json() == scheduled(plan, tree).to_json()
    alone = scheduled(MergeLast().apply(strategies.cohort().plan(Problem(tree, SHAPE, H200)), tree), tree)
    assert (alone.launches, alone.num_partials) == (1, 0)


def test_a_last_round_that_reads_nothing_gives_no_epilogue() -> None:
    tree = Tree.parse("40(20,30)")
    groups = [*by_node(tree).groups, Group(((0, 2),), (), 3)]
    plan = dataclasses.replace(Plan.from_groups("by hand", groups), merge="final")
    verify(plan, tree)
    schedule = scheduled(plan, tree)
    assert (schedule.num_rounds, schedule.launches, len(schedule.merge_rows)) == (1, 2, 2)
    verify_schedule(schedule, 2)
    assert_attention(schedule, tree, SHAPE, TorchProgram)


# Errors


def test_a_context_that_is_split_in_the_last_round_is_refused() -> None:
    tree = Tree.parse("40(20(50,6),30(7,8))")
    plan = SplitContext(25).apply(cut(tree, 2, 1), tree)
    assert plan.merge == "final"
    with pytest.raises(PlanError, match=r"^merge = final: cannot merge the partials of row 0 in 2 items of the last"):
        scheduled(plan, tree)
    scheduled(dataclasses.replace(plan, merge="reduce"), tree)


def test_rows_without_partials_of_earlier_rounds_may_be_split() -> None:
    """Rows of the second tree have no node above the cut: their pieces are merged behind, the first tree's within."""
    tree = Tree.from_parents([-1, 0, 0, -1, 3, 3], [60, 20, 24, 0, 50, 30])
    plan = SplitContext(25).apply(cut(tree, 1, 1), tree)
    schedule = scheduled(plan, tree)
    assert schedule.merge_rows.tolist() == [2, 3]
    assert {row: len(slots) for row, slots in entries(schedule).items() if slots} == {0: 3, 1: 3}
    verify_schedule(schedule, 4)
    for program in PROGRAMS:
        assert_attention(schedule, tree, SHAPE, program)


def test_unknown_modes_and_unfused_plans_are_refused() -> None:
    tree = Tree.parse("40(20,30)")
    with pytest.raises(PlanError, match=r"^merge = last: is unknown; use one of reduce, final"):
        dataclasses.replace(by_node(tree), merge="last")
    with pytest.raises(PlanError, match="mask = dense"):
        scheduled(cut(tree, 1, 1, mask="dense"), tree)
    with pytest.raises(PlanError, match="blocks = 9: needs a single kernel config"):
        scheduled(dataclasses.replace(cut(tree, 1, 1), blocks=9), tree)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {"epilogue_indptr": s.epilogue_indptr[:-1]},
        lambda s: {"epilogue_indptr": s.epilogue_indptr + 1},
        lambda s: {"epilogue_indptr": s.epilogue_indptr[[0, 2, 1, 3, 4]]},
        lambda s: {"epilogue_indptr": np.array([0]), "epilogue_partials": np.empty(0)},
        lambda s: {"epilogue_partials": s.epilogue_partials[1:]},
    ],
)
def test_offsets_that_do_not_fit_are_refused(change: Callable[[Schedule], dict[str, np.ndarray]]) -> None:
    tree = Tree.parse("40(20(5,6),30(7,8))")
    schedule = scheduled(cut(tree, 2, 1), tree)
    with pytest.raises(PlanError, match=r"^epilogue_indptr = "):
        dataclasses.replace(schedule, **change(schedule))


# Passes and accounts


@pytest.mark.parametrize(
    "step", [SplitContext(7), DivideContext(np.array([2, 2, 2])), TrimRows(), StoreMask("row-bits")]
)
def test_passes_carry_the_mode(step: SplitContext | DivideContext | TrimRows | StoreMask) -> None:
    tree = Tree.parse("40(20,30)")
    plan = cut(tree, 1, 1)
    after = step.apply(plan, tree)
    assert (after.merge, set(after.round.tolist())) == ("final", {0, 1})
    assert plan.text().splitlines()[0] == "plan cut: 3 groups, 3 segments, final merge"
    assert "final merge" not in dataclasses.replace(plan, merge="reduce").text()


def test_levels_merged_last() -> None:
    """A chain of levels: a launch for each, and none to merge."""
    tree = Tree.from_levels([1, 3, 6, 12], [30, 20, 9, 5])
    plan = MergeLast().apply(LevelRounds().apply(by_node(tree), tree), tree)
    schedule = scheduled(plan, tree)
    assert MergeLast().name == "merge-last"
    assert (schedule.launches, schedule.num_partials) == (4, 3 * 12)
    assert_attention(schedule, tree, SHAPE, TorchProgram)


def test_the_account_counts_what_epilogues_read() -> None:
    """Two rows with three partials each above the cut, one with a single one; rows in tiles of one head each."""
    tree = Tree.parse("40(20(11(5,6)))+9(4)")
    plan = cut(tree, 3, 1, steps=True)
    groups = [group for group in plan.groups if group.segments[0].node < 5]
    groups += [Group(((2, 3),), (Segment(5, 0, 9, (0, 1)),)), Group(((2, 3),), (Segment(6, 0, 4, (0, 1)),), 3)]
    plan = dataclasses.replace(Plan.from_groups("cut", groups), merge="final")
    verify(plan, tree)
    schedule = scheduled(plan, tree)
    launches = item_launches(plan, schedule, Problem(tree, SHAPE, H200))
    partial, final = 4 * 17 * 4, 4 * (16 * 4 + 4)
    assert launches.longest_merges.tolist() == [0, 0, 0, 3]
    assert launches.memory_bytes[3] - launches.q_bytes[3] == 15 * SHAPE.kv_token_bytes + 3 * final + 7 * partial
    estimate = account(plan, schedule, Problem(tree, SHAPE, H200))
    assert estimate.partial_bytes == 2 * 7 * partial
    chain = terms_of(launches, H200)["chain"]
    unmerged = terms_of(dataclasses.replace(launches, longest_merges=np.zeros(4, np.int64)), H200)["chain"]
    assert chain - unmerged == pytest.approx([0, 0, 0, 3 * H200.constants.merge_step_us])
