"""Partials merged by the last round's items: whose they are, in numbers of launches, plain loops and planted faults."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples, forests, obeys_law
from support.h200 import H200
from support.planted_faults import with_slot
from treegen import KVRuns, Shape, Tree, strategies
from treegen.backends import oracle
from treegen.backends.torch_program import TorchProgram
from treegen.backends.triton_program import ProgramRoom, TritonProgram
from treegen.codegen.emit import emit
from treegen.cost.account import account
from treegen.cost.analytic import terms_of
from treegen.cost.launch_counts import item_launches
from treegen.ir.errors import PlanError
from treegen.ir.groups import Group, Segment
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.verify import verify, verify_schedule
from treegen.schedule.forest_counts import count
from treegen.schedule.lower import lower
from treegen.strategies.forest import Forest
from treegen.strategies.groupings import by_cohort, by_node
from treegen.strategies.passes import DivideContext, LevelRounds, MergeLast, SplitContext, StoreMask, TrimRows
from treegen.target.problem import Problem

SHAPE = Shape(4, 2, 16, dtype="fp32")
MASKS = ("interval", "token-bits", "row-bits")
_PROGRAMS = (TorchProgram, TritonProgram)


def cut(tree: Tree, level: int, width: int, *, steps: bool = False, trim: bool = False, mask: str = "interval") -> Plan:
    """A plan in which nodes above `level` are read by all rows that see them, and the last round reads the nodes below,
    `width` neighbouring rows at a time.

    steps: every level above is a round of its own. trim: rows that see nothing leave their group.
    """
    depth = tree.topology.depth
    groups = [
        dataclasses.replace(group, round=int(depth[group.segments[0].node]) if steps else 0)
        for group in by_node(tree).groups
        if depth[group.segments[0].node] < level
    ]
    for group in by_cohort(tree, width).groups:
        below = tuple(segment for segment in group.segments if depth[segment.node] >= level)
        if below:
            groups.append(Group(group.rows, below, level if steps else 1))
    plan = Plan.from_groups("cut", groups)
    for step in (*((TrimRows(),) if trim else ()), StoreMask(mask), MergeLast()):
        plan = step.apply(plan, tree)
    return plan


def scheduled(plan: Plan, tree: Tree, shape: Shape = SHAPE) -> Schedule:
    return lower(plan, Problem(tree, shape, H200))


def tensors(tree: Tree, shape: Shape = SHAPE) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Standard-normal q, keys and values; the latter by slot, in whole pages."""
    generator = torch.Generator().manual_seed(tree.num_rows)
    slots = -(-(tree.kv.last_slot + 1) // shape.page_size) * shape.page_size
    q = torch.randn(tree.num_rows, shape.num_qo_heads, shape.head_dim, generator=generator)
    keys, values = torch.randn(2, slots, shape.num_kv_heads, shape.head_dim, generator=generator)
    return q, keys, values


def assert_attention(
    schedule: Schedule, tree: Tree, shape: Shape, program: Callable[..., TorchProgram | TritonProgram]
) -> None:
    q, keys, values = tensors(tree, shape)
    caches = [keys, values]
    if shape.page_size > 1:
        # Pages lie farther apart than their tokens reach, so that they are addressed as pages.
        caches = []
        for flat in (keys, values):
            room = torch.zeros(len(flat) // shape.page_size, shape.page_size + 1, *flat.shape[1:])
            room[:, : shape.page_size] = flat.view(-1, shape.page_size, *flat.shape[1:])
            caches.append(room[:, : shape.page_size])
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan)
    sm_scale = shape.head_dim**-0.5
    program(schedule, shape, q.device)(q, *caches, out, lse, sm_scale, 1.0)
    options = oracle.OracleOptions(sm_scale=sm_scale)
    for found, expected in zip((out, lse), oracle.reference(tree, q, keys, values, options), strict=True):
        assert oracle.error(found, expected) <= 1e-5


def entries(schedule: Schedule) -> dict[int, list[int]]:
    """The slots that are listed for the rows of every merging final item."""
    result: dict[int, list[int]] = {}
    for index, tile in enumerate(schedule.configs):
        if tile.epilogue_merge:
            for number in range(schedule.config_indptr[index], schedule.config_indptr[index + 1]):
                item = schedule.work_items[number]
                for entry in range(item.row0, item.row0 + item.rows):
                    bounds = schedule.epilogue_indptr[entry : entry + 2]
                    listed = schedule.epilogue_partials[bounds[0] : bounds[1]].tolist()
                    if item.partial0 < 0:
                        result[int(schedule.rows[entry])] = listed
                    else:
                        assert not listed
    return result


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
    for program in _PROGRAMS:
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
    for program in _PROGRAMS:
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
    for program in _PROGRAMS:
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
    for program in _PROGRAMS:
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


# Any forest


def drawn(data: st.DataObject, tree: Tree) -> Plan:
    """A tree cut at any level, in any widths and forms."""
    return cut(
        tree,
        data.draw(st.sampled_from((1, 2, 3, 9))),
        data.draw(st.sampled_from((1, 3, 16, 200))),
        steps=data.draw(st.booleans()),
        trim=data.draw(st.booleans()),
        mask=data.draw(st.sampled_from(MASKS)),
    )


@examples(150)
@given(data=st.data())
def test_cut_forests(data: st.DataObject) -> None:
    tree = data.draw(forests(40, 60, salt=800))
    plan = drawn(data, tree)
    verify(plan, tree)
    schedule = scheduled(plan, tree)
    verify_schedule(schedule, tree.num_rows)
    assert_attention(schedule, tree, SHAPE, TorchProgram)

    found = entries(schedule)
    finished, worked_on, row_slots = set(), set(), {row: [] for row in range(tree.num_rows)}
    last = int(plan.round.max(initial=0))
    for item in schedule.work_items:
        rows = schedule.rows[item.row0 : item.row0 + item.rows].tolist()
        worked_on |= set(rows)
        if item.partial0 >= 0:
            for place, row in enumerate(rows):
                row_slots[row].append(item.partial0 + place)
        elif plan.round[item.group] == last:
            finished |= set(rows)
        assert item.partial0 < 0 or plan.round[item.group] < last or not plan.round.any()
    if plan.round.any() and schedule.num_rounds > 1:
        unmerged = {row: slots for row, slots in row_slots.items() if row in finished and slots}
        assert {row: slots for row, slots in found.items() if slots} == unmerged
        merged = {
            row for row in range(tree.num_rows) if row not in finished and (row_slots[row] or row not in worked_on)
        }
        assert set(schedule.merge_rows.tolist()) == merged
        assert (np.diff(schedule.merge_round_indptr)[:-1] == 0).all()
    if tree.num_rows:
        counted = count(plan, tree, np.array([0, tree.num_rows]), SHAPE, H200)
        assert counted.partial_rows.tolist() == [schedule.num_partials]
    assert Schedule.from_json(schedule.to_json()).to_json() == schedule.to_json()
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


@examples(30)
@given(data=st.data())
def test_small_cuts_obey_the_law(data: st.DataObject) -> None:
    tree = data.draw(forests(12, 20, salt=801))
    assert obeys_law(drawn(data, tree), tree)


@examples(25)
@given(data=st.data())
def test_trees_counted_together(data: st.DataObject) -> None:
    """Every tree has a last round of its own, whatever rounds others of the forest have."""
    trees = [tree for tree in data.draw(st.lists(forests(20, 40, salt=802), min_size=1, max_size=3)) if tree.num_rows]
    if not trees:
        return
    options = {"steps": data.draw(st.booleans()), "trim": True}
    plans = [cut(tree, level, 16, **options) for tree, level in zip(trees, (2, 1, 3), strict=False)]
    forest = Forest.of(trees)
    found = count(forest.join(plans), forest.joined, forest.first_row, SHAPE, H200)
    expected = [scheduled(plan, tree).num_partials for plan, tree in zip(plans, trees, strict=True)]
    assert found.partial_rows.tolist() == expected


@examples(12)
@given(data=st.data())
def test_cut_forests_in_the_kernels(data: st.DataObject) -> None:
    tree = data.draw(forests(10, 40, salt=803))
    if tree.num_rows:
        assert_attention(scheduled(drawn(data, tree), tree), tree, SHAPE, TritonProgram)


def paged(tree: Tree, page_size: int) -> Tree:
    """The tree with its tokens in shuffled pages; a page of one token leaves it as it is."""
    if page_size == 1:
        return tree
    counts = -(-tree.tokens // page_size)
    pages = np.random.default_rng(page_size).permutation(int(counts.sum()) + 2)
    return tree.with_kv(KVRuns.from_pages(tree.tokens, np.split(pages, np.cumsum(counts))[:-1], page_size))


ATTACHED = [(0, 40), (1, 20), (1, 3), (2, 0), (3, 33), (3, 20), (4, 7), (5, 0), (6, 0), (6, 12), *[(7, 25)] * 8]
"""Rows at and above the cut, inside nodes, and such that see nothing; more than fit into a tile."""


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("mask", ["none", "interval", "token-bits"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_what_kernels_are_specialised_for(group: int, mask: str, page_size: int) -> None:
    tree = Tree.from_parents([-1, 0, 0, 1, 1, -1, 5, 2], [40, 20, 9, 33, 7, 0, 12, 25], rows=ATTACHED)
    tree = paged(tree, page_size)
    shape = Shape(2 * group, 2, 24, dtype="fp32", page_size=page_size)
    plan = cut(tree, 2, 1 if mask == "none" else 8, trim=True, mask="interval" if mask == "none" else mask)
    schedule = scheduled(plan, tree, shape)
    merging = [tile for tile in schedule.configs if tile.epilogue_merge]
    assert [tile.mask for tile in merging] == ["bits" if mask == "token-bits" else mask]
    assert len(schedule.merge_rows)
    for program in _PROGRAMS:
        assert_attention(schedule, tree, shape, program)


@pytest.mark.parametrize("page_size", [1, 16])
def test_more_query_heads_than_tile_rows(page_size: int) -> None:
    """80 query heads per KV head take two or more tiles per row, the last one in part."""
    tree = paged(Tree.from_parents([-1, 0, 0, -1], [20, 5, 7, 0], rows=[(0, 20), (1, 5), (2, 7), (3, 0)]), page_size)
    shape = Shape(160, 2, 16, dtype="fp32", page_size=page_size)
    schedule = scheduled(cut(tree, 1, 2), tree, shape)
    assert [tile.epilogue_merge for tile in schedule.configs] == [False, True]
    for program in _PROGRAMS:
        assert_attention(schedule, tree, shape, program)


@pytest.mark.parametrize("steps", [False, True])
def test_several_kernel_configs_merge(steps: bool) -> None:
    """The first tree's cohort takes the large tile, the second one's the small, in both rounds."""
    tree = Tree.parse("50(20(3*40))+30(9(5,6))")
    plan = dataclasses.replace(cut(tree, 2, 40, steps=steps), tiles=((32, 32), (16, 16)))
    schedule = scheduled(plan, tree)
    assert [tile.epilogue_merge for tile in schedule.configs] == [False] * (4 if steps else 2) + [True, True]
    assert schedule.launches == (6 if steps else 4)
    verify_schedule(schedule, tree.num_rows)
    for program in _PROGRAMS:
        assert_attention(schedule, tree, SHAPE, program)


def test_reduce_and_final_give_the_same() -> None:
    tree = Tree.parse("70(33(20*3),9(40,1))")
    q, keys, values = tensors(tree)
    results = []
    for merge in ("reduce", "final"):
        schedule = scheduled(dataclasses.replace(cut(tree, 2, 2), merge=merge), tree)
        out, lse = torch.empty_like(q), torch.empty(5, 4)
        TritonProgram(schedule, SHAPE, q.device)(q, keys, values, out, lse, 0.25, 1.0)
        results.append((out, lse))
    torch.testing.assert_close(*results)


def test_extreme_partials() -> None:
    """Partials of scores near 200 and -200 on either side of the cut: one vanishes beside the other, without NaN."""
    tree = Tree.parse("40(20,30)")
    q, keys, values = torch.ones(2, 4, 16), torch.zeros(90, 2, 16), torch.randn(90, 2, 16)
    for above, below in ((200.0, -200.0), (-200.0, 200.0), (-200.0, -200.0)):
        keys[:40, :, 0], keys[40:, :, 0] = above, below
        expected = oracle.reference(tree, q, keys, values, oracle.OracleOptions(sm_scale=1.0))
        for program in _PROGRAMS:
            out, lse = torch.empty_like(q), torch.empty(2, 4)
            program(scheduled(cut(tree, 1, 2), tree), SHAPE, q.device)(q, keys, values, out, lse, 1.0, 1.0)
            assert oracle.error(out, expected[0]) < 1e-4
            assert oracle.error(lse, expected[1]) < 1e-5


def test_surplus_room_changes_nothing() -> None:
    tree = Tree.parse("40(20(5,6),30(7,8))")
    schedule = scheduled(cut(tree, 2, 2), tree)
    size = schedule.size
    assert (size.epilogue_rows, size.epilogue_partials) == (4, 8)
    larger = dataclasses.replace(
        size, items=tuple(n + 3 for n in size.items), rows=9, epilogue_rows=20, epilogue_partials=50, slots=60
    )
    q, keys, values = tensors(tree)
    results = []
    for capacity in (size, larger):
        out, lse = torch.full_like(q, math.nan), torch.full((4, 4), math.nan)
        TritonProgram(schedule, SHAPE, q.device, ProgramRoom(capacity))(q, keys, values, out, lse, 0.25, 1.0)
        results.append((out, lse))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    for field in ("epilogue_rows", "epilogue_partials"):
        with pytest.raises(PlanError, match=rf"^capacity\.{field} = "):
            schedule.pack(dataclasses.replace(size, **{field: 1}))


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


# Faults


def faultless() -> tuple[Schedule, Tree]:
    """Rows 0 and 1 merge two slots each in one item, row 2 one in its own; row 3 ends above the cut with two."""
    tree = Tree.from_parents([-1, 0, 1, 1, 0, 4], [40, 20, 5, 6, 0, 7], rows=[(2, 5), (3, 6), (5, 7), (1, 20)])
    schedule = scheduled(cut(tree, 2, 3, trim=True), tree)
    verify_schedule(schedule, 4)
    return schedule, tree


def relisted(schedule: Schedule, lists: list[list[int]]) -> dict[str, np.ndarray]:
    return {
        "epilogue_indptr": np.cumsum([0, *map(len, lists)]),
        "epilogue_partials": np.array([slot for slots in lists for slot in slots]),
    }


def listed(schedule: Schedule) -> list[list[int]]:
    bounds = schedule.epilogue_indptr.tolist()
    return [schedule.epilogue_partials[a:b].tolist() for a, b in pairwise(bounds)]


def with_lists(change: Callable[[list[list[int]]], None]) -> Callable[[Schedule], dict[str, object]]:
    def made(schedule: Schedule) -> dict[str, object]:
        lists = listed(schedule)
        change(lists)
        return relisted(schedule, lists)

    return made


def _exchange(lists: list[list[int]]) -> None:
    full = [i for i, slots in enumerate(lists) if slots]
    lists[full[0]], lists[full[1]] = lists[full[1]], lists[full[0]]


def _first(lists: list[list[int]]) -> list[int]:
    return next(slots for slots in lists if slots)


FAULTS: dict[str, Callable[[Schedule], dict[str, object]]] = {
    "another row's slots": with_lists(_exchange),
    "read twice": with_lists(lambda lists: _first(lists).append(_first(lists)[0])),
    "lost": with_lists(lambda lists: _first(lists).pop()),
    "read by nobody": with_lists(lambda lists: next(slots for slots in lists if not slots).append(_first(lists).pop())),
    "beyond the last slot": with_lists(lambda lists: _first(lists).append(1000)),
    "before the first slot": with_lists(lambda lists: _first(lists).append(-1)),
    "also merged by a kernel": lambda s: {
        "merge_partials": np.append(s.merge_partials, _first(listed(s))[0]),
        "merge_indptr": np.append(s.merge_indptr[:-1], s.merge_indptr[-1] + 1),
    },
    "a kernel's slot": with_lists(lambda lists: _first(lists).append(0)),
    "not merging": lambda s: {"configs": tuple(dataclasses.replace(tile, epilogue_merge=False) for tile in s.configs)},
    "merging in an earlier round": lambda s: {
        "configs": tuple(dataclasses.replace(tile, epilogue_merge=True) for tile in s.configs)
    },
    "written in the same round": lambda s: {
        "round_indptr": np.array([0, len(s.configs)]),
        "merge_round_indptr": np.array([0, len(s.merge_rows)]),
    },
    "written too late": lambda s: {"round_indptr": np.array([0, 0, len(s.configs)])},
    "final output of a partial item": lambda s: {"items": with_slot(s, 0, -1)},
    "partial output of a merging item": lambda s: {"items": with_slot(s, len(s.items) - 1, s.num_partials)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str) -> None:
    schedule, tree = faultless()
    with pytest.raises(PlanError) as caught:
        verify_schedule(dataclasses.replace(schedule, **FAULTS[fault](schedule)), tree.num_rows)
    assert "\n" not in str(caught.value)


@examples(200)
@given(data=st.data())
def test_what_passes_reads_the_rows_own_slots(data: st.DataObject) -> None:
    """Entries of sound lists changed at random: only another order of a row's own slots is not caught."""
    schedule, tree = faultless()
    lists = listed(schedule)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.integers(0, len(lists) - 1))
        kind = data.draw(st.sampled_from(("drop", "add", "replace", "swap", "reverse")))
        at = data.draw(st.integers(0, max(len(lists[place]) - 1, 0)))
        if kind == "add":
            lists[place].insert(at, data.draw(st.integers(0, schedule.num_partials)))
        elif kind == "swap":
            other = data.draw(st.integers(0, len(lists) - 1))
            lists[place], lists[other] = lists[other], lists[place]
        elif kind == "reverse":
            lists[place].reverse()
        elif lists[place] and kind == "drop":
            del lists[place][at]
        elif lists[place]:
            lists[place][at] = data.draw(st.integers(0, schedule.num_partials))
    mutant = dataclasses.replace(schedule, **relisted(schedule, lists))
    same = [sorted(slots) for slots in lists] == [sorted(slots) for slots in listed(schedule)]
    try:
        verify_schedule(mutant, tree.num_rows)
    except PlanError:
        assert not same
        return
    assert same
    assert_attention(mutant, tree, SHAPE, TorchProgram)
