"""Schedules of several rounds: what is merged behind each of them, in numbers of launches, loops and planted faults."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.forests import examples, forests, plan_by_row_classes
from support.h200 import H200
from treegen import Shape, Tree, strategies
from treegen.backends import oracle
from treegen.backends.torch_program import TorchProgram
from treegen.backends.triton_program import TritonProgram
from treegen.ir.errors import PlanError
from treegen.ir.groups import Group, Segment
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.verify import verify, verify_schedule
from treegen.schedule.forest_counts import count
from treegen.schedule.lower import lower
from treegen.schedule.merge_lists import kept_between_rounds, merge_lists
from treegen.strategies import Pipeline, Strategy, groupings, strategy_from, strategy_names
from treegen.strategies.passes import StoreMask
from treegen.target.problem import Problem

SHAPE = Shape(4, 2, 16, dtype="fp32")

_generator = torch.Generator().manual_seed(0)
_KEYS, _VALUES = (torch.randn(16_384, 2, 16, generator=_generator) for _ in range(2))
_QUERIES = torch.randn(1_024, 4, 16, generator=_generator)


def scheduled(plan: Plan, tree: Tree) -> Schedule:
    return lower(plan, Problem(tree, SHAPE, H200))


def cascade(tree: Tree | str) -> Schedule:
    tree = Tree.parse(tree) if isinstance(tree, str) else tree
    return scheduled(strategies.cascade().plan(Problem(tree, SHAPE, H200)), tree)


def assert_attention(schedule: Schedule, tree: Tree, program: type[TorchProgram] | type[TritonProgram]) -> None:
    slots = tree.kv.last_slot + 1
    q, keys, values = _QUERIES[: tree.num_rows], _KEYS[:slots], _VALUES[:slots]
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan)
    program(schedule, SHAPE, q.device)(q, keys, values, out, lse, 0.25, 1.0)
    for found, expected in zip((out, lse), oracle.reference(tree, q, keys, values), strict=True):
        assert oracle.error(found, expected) <= 1e-5


def in_rounds(plan: Plan, seed: int, rounds: tuple[int, ...]) -> Plan:
    """The plan with every group in one of `rounds` at random, and nothing dealt: lists of work need a single round."""
    drawn = np.random.default_rng(seed).choice(np.array(rounds), len(plan))
    return dataclasses.replace(plan, round=drawn, blocks=0)


# Launches of a cascade


@pytest.mark.parametrize(
    ("nodes", "tokens"),
    [
        ([1], [50]),
        ([3], [5]),
        ([1, 4], [100, 10]),
        ([1, 2, 6], [70, 1, 33]),
        ([2, 2, 8, 8, 24], [9, 20, 3, 64, 5]),
        ([1, 1, 1, 1, 1, 300], [40, 16, 1, 1, 20, 2]),
    ],
)
def test_a_cascade_launches_twice_per_level_but_once_for_the_first(nodes: list[int], tokens: list[int]) -> None:
    tree = Tree.from_levels(nodes, tokens)
    schedule = cascade(tree)
    levels, rows = len(nodes), tree.num_rows
    assert schedule.launches == 2 * levels - 1
    assert schedule.num_rounds == levels
    assert np.diff(schedule.merge_round_indptr).tolist() == [0] + [rows] * (levels - 1)
    assert np.diff(schedule.merge_indptr).tolist() == [2] * (rows * (levels - 1))
    assert (schedule.merge_rows >= 0).sum() == (rows if levels > 1 else 0)


def test_rows_that_end_at_inner_nodes_leave_the_cascade_early() -> None:
    """Rows at depth 0, 1 and 2: each level merges those that go on, and the row at the root waits for the last."""
    tree = Tree.from_parents([-1, 0, 1], [30, 20, 10], rows=[(0, 30), (1, 20), (2, 10), (1, 5)])
    schedule = cascade(tree)
    assert schedule.launches == 5
    slots = {
        (item.group, row): item.partial0 + i
        for item in schedule.work_items
        for i, row in enumerate(rows(schedule, item))
    }
    assert lists(schedule) == [
        {},
        {1: [slots[0, 1], slots[1, 1]], 3: [slots[0, 3], slots[1, 3]], ~slots[0, 2]: [slots[0, 2], slots[1, 2]]},
        {0: [slots[0, 0]], 2: [slots[0, 2], slots[2, 2]]},
    ]


def rows(schedule: Schedule, item: object) -> list[int]:
    return schedule.rows[item.row0 : item.row0 + item.rows].tolist()


def lists(schedule: Schedule) -> list[dict[int, list[int]]]:
    """Per round what is merged, by row or by -1 - slot."""
    bounds = schedule.merge_indptr
    return [
        {
            int(schedule.merge_rows[i]): schedule.merge_partials[bounds[i] : bounds[i + 1]].tolist()
            for i in range(merges.start, merges.stop)
        }
        for _, merges in schedule.rounds
    ]


def test_levels_without_visible_tokens_are_not_launched() -> None:
    """Depths 0, 2 and 4 are read: an empty level and a level that nobody sees into give neither launch nor round."""
    tree = Tree.from_parents([-1, 0, 1, 2, 3, 4], [8, 0, 8, 0, 8, 9], rows=[(4, 8), (4, 3), (5, 0)])
    schedule = cascade(tree)
    assert (schedule.num_rounds, schedule.launches) == (3, 5)


@examples(100)
@given(tree=forests(40, 60, salt=700))
def test_launches_of_any_cascade(tree: Tree) -> None:
    """A launch per depth at which rows see tokens; a merge behind a depth if some row reads it and one above it.

    Behind the last depth also rows become final that see nothing, or that share an item with rows of several depths.
    """
    read: list[set[int]] = []
    for row in range(tree.num_rows):
        node, sees, depths = tree.row_node.item(row), tree.row_sees.item(row), set()
        while node >= 0:
            if sees:
                depths.add(int(tree.topology.depth[node]))
            node = tree.parent.item(node)
            sees = tree.tokens.item(node)
        read.append(depths)
    schedule = cascade(tree)
    levels = sorted(set().union(*read))
    merging = {depth for depths in read for depth in depths if depth > min(depths)}
    in_shared_items = {row for item in schedule.work_items if item.partial0 >= 0 for row in rows(schedule, item)}
    late = [row for row, depths in enumerate(read) if not depths or (len(depths) == 1 and row in in_shared_items)]
    found = np.flatnonzero(np.diff(schedule.merge_round_indptr))
    last = levels[-1] if levels else 0
    assert {(levels or [0])[round] for round in found} == merging | ({last} if late else set())
    assert schedule.launches == len(levels) + len(found)
    assert schedule.launches <= max(2 * len(levels) - 1, 0) + 1


# Merge lists against plain loops


def drawn_partials(seed: int) -> tuple[list[int], list[int], list[int], list[int], int]:
    """(row, slot, round) of every partial in any order, the rows without any, and the number of rounds."""
    source = random.Random(seed)
    rounds = source.choice((1, 2, 3, 6))
    ids = source.sample(range(40), source.randrange(1, 12))
    blind = ids[: source.randrange(len(ids) + 1)]
    seeing = ids[len(blind) :]
    row = [number for number in seeing for _ in range(source.choice((1, 1, 2, 3, 7)))]
    source.shuffle(row)
    slot = source.sample(range(len(row)), len(row))
    return row, slot, [source.randrange(rounds) for _ in row], sorted(blind), rounds


def merged_by_loops(row: list[int], slot: list[int], round: list[int], blind: list[int], rounds: int) -> list[dict]:
    """What `merge_lists` promises, round by round."""
    result: list[dict[int, list[int]]] = [{} for _ in range(rounds)]
    for number in sorted(set(row)):
        own = [(s, p) for r, p, s in zip(row, slot, round, strict=True) if r == number]
        if len(own) == 1:
            result[-1][number] = [own[0][1]]
            continue
        last, running = max(s for s, _ in own), None
        for s in range(rounds):
            new = [p for at, p in own if at == s]
            listed = ([] if running is None else [running]) + new
            if not new:
                continue
            if s == last:
                result[s][number] = listed
            elif len(listed) > 1:
                result[s][~listed[0]] = listed
            running = listed[0]
    for number in blind:
        result[-1][number] = []
    return result


@examples(250)
@given(seed=st.integers(0, 2**32))
def test_merge_lists_by_loops(seed: int) -> None:
    row, slot, round, blind, rounds = drawn_partials(seed)
    arrays = [np.array(values, np.int64) for values in (row, slot, round, blind)]
    made = merge_lists(*arrays, rounds)
    begin = made.round_indptr.tolist()
    found = [
        {
            int(made.rows[i]): made.slots[made.indptr[i] : made.indptr[i + 1]].tolist()
            for i in range(begin[s], begin[s + 1])
        }
        for s in range(rounds)
    ]
    expected = merged_by_loops(row, slot, round, blind, rounds)
    assert found == expected
    owner = dict(zip(slot, row, strict=True))
    for listed in found:  # ascending by row, whatever a merge's target is
        assert [owner[~target] if target < 0 else target for target in listed] == sorted(
            owner[~target] if target < 0 else target for target in listed
        )
    kept = [owner[~target] for listed in expected for target in listed if target < 0]
    assert sorted(kept_between_rounds(arrays[0], arrays[2], rounds).tolist()) == sorted(kept)


# Any plan, any rounds


PLANS = (*strategy_names(), "row-configs")


def planned(name: str, tree: Tree, seed: int) -> Plan:
    if name == "row-configs":
        return plan_by_row_classes(tree, seed, 1 + seed % 4, unseen=seed % 3 == 0)
    return strategy_from(name).plan(Problem(tree, SHAPE, H200))


@pytest.mark.parametrize("name", PLANS)
@examples(25)
@given(data=st.data())
def test_lawful_plans_stay_right_in_any_rounds(name: str, data: st.DataObject) -> None:
    tree = data.draw(forests(30, 60, salt=710 + PLANS.index(name)))
    seed = data.draw(st.integers(0, 2**20))
    rounds = data.draw(st.sampled_from(((0,), (0, 1), (0, 1, 2, 3), (2, 5, 100), tuple(range(50)))))
    plan = in_rounds(planned(name, tree, seed), seed, rounds)
    verify(plan, tree)
    schedule = scheduled(plan, tree)
    verify_schedule(schedule, tree.num_rows)
    assert schedule.num_rounds == max(1, len(set(plan.round.tolist())))
    for item in schedule.work_items:  # groups of a round are in that round's configs
        assert plan.round[item.group] == sorted(set(plan.round.tolist()))[round_of(schedule, item)]
    assert_attention(schedule, tree, TorchProgram)
    counted = count(plan, tree, np.array([0, tree.num_rows]), SHAPE, H200) if tree.num_rows else None
    if counted is not None and plan.mask == "interval":
        kept = int((schedule.merge_rows < 0).sum())
        assert counted.partial_rows.tolist() == [schedule.num_partials + kept]
        assert schedule.num_partials + kept == len(schedule.merge_partials)  # all that is written is read once


def round_of(schedule: Schedule, item: object) -> int:
    number = int(np.flatnonzero((schedule.items == dataclasses.astuple(item)).all(1))[0])
    index = int(np.searchsorted(schedule.config_indptr, number, side="right")) - 1
    return next(s for s, (configs, _) in enumerate(schedule.rounds) if index in configs)


@pytest.mark.parametrize(
    "strategy", [strategies.query(16), strategies.deft_node_chunk(16), strategies.deft_flatten(16)], ids=str
)
def test_rounds_in_the_kernels(strategy: Strategy) -> None:
    """Partials that wait over rounds without their row, running results of several merges, rows that see nothing."""
    attached = [(0, 40), (1, 20), (1, 3), (2, 0), (3, 33), (3, 20), (4, 7), (5, 0)]
    tree = Tree.from_parents([-1, 0, 0, 1, 1, -1], [40, 20, 9, 33, 7, 0], rows=attached)
    schedule = scheduled(in_rounds(strategy.plan(Problem(tree, SHAPE, H200)), 1, (0, 1, 2)), tree)
    assert schedule.num_rounds == 3
    assert (schedule.merge_rows < 0).any()
    assert_attention(schedule, tree, TritonProgram)
    assert_attention(schedule, tree, TorchProgram)


@examples(8)
@given(tree=forests(10, 40, salt=730), seed=st.integers(0, 2**20))
def test_random_rounds_in_the_kernels(tree: Tree, seed: int) -> None:
    if tree.num_rows:
        assert_attention(
            scheduled(in_rounds(planned("row-configs", tree, seed), seed, (0, 1, 2)), tree), tree, TritonProgram
        )


def test_cascade_is_compiled_on_both_backends() -> None:
    tree = Tree.from_parents([-1, 0, 0, 1, 1], [40, 20, 9, 33, 7], rows=[(0, 40), (1, 3), (2, 9), (3, 33), (4, 0)])
    for backend in ("torch", "triton"):
        kernel = treegen.compile(tree, strategy="cascade", backend=backend)
        assert kernel.verify(_QUERIES[:5], _KEYS[:109], _VALUES[:109]).passed
        assert kernel.schedule.num_rounds == 3


def test_rows_of_several_unfused_groups_are_refused() -> None:
    """Unfused groups write final output: nothing could merge them."""
    tree = Tree.parse("10(5,6)")
    plan = dataclasses.replace(strategies.deft_node().plan(Problem(tree, SHAPE, H200)), mask="dense")
    with pytest.raises(PlanError, match="mask = dense"):
        scheduled(plan, tree)
    apart = Tree.parse("10*3")
    schedule = scheduled(
        Pipeline("apart", groupings.by_node, (StoreMask("dense"),)).plan(Problem(apart, SHAPE, H200)), apart
    )
    assert_attention(schedule, apart, TorchProgram)


# Faults


def three_rounds() -> Schedule:
    """Row 0 has slots in all three rounds, two of them in round 0; row 1 in rounds 0 and 1; row 2 in round 2."""
    tree = Tree.parse("10(5,6)+7")
    groups = [
        Group(((0, 2),), (Segment(0, 0, 4, (0, 2)),), 0),
        Group(((0, 2),), (Segment(0, 4, 6, (0, 2)),), 0),
        Group(((0, 2),), (Segment(0, 6, 10, (0, 2)),), 1),
        Group(((0, 1),), (Segment(1, 0, 5, (0, 1)),), 2),
        Group(((1, 2),), (Segment(2, 0, 6, (0, 1)),), 2),
        Group(((2, 3),), (Segment(3, 0, 7, (0, 1)),), 2),
    ]
    plan = Plan.from_groups("by hand", groups)
    verify(plan, tree)
    schedule = scheduled(plan, tree)
    assert lists(schedule) == [
        {~0: [0, 2], ~1: [1, 3]},
        {~0: [0, 4], ~1: [1, 5]},
        {0: [0, 7], 1: [1, 6]},
    ]
    return schedule


def remade(schedule: Schedule, merges: list[dict[int, list[int]]]) -> Schedule:
    """The schedule with other merge lists."""
    every = [entry for round in merges for entry in round.items()]
    return dataclasses.replace(
        schedule,
        merge_rows=np.array([target for target, _ in every]),
        merge_indptr=np.cumsum([0, *(len(slots) for _, slots in every)]),
        merge_partials=np.array([slot for _, slots in every for slot in slots]),
        merge_round_indptr=np.cumsum([0, *map(len, merges)]),
    )


FAULTS = {
    "merged twice in a round": [{~0: [0, 2, 2], ~1: [1, 3]}, {~0: [0, 4], ~1: [1, 5]}, {0: [0, 7], 1: [1, 6]}],
    "merged again in a later round": [{~0: [0, 2], ~1: [1, 3]}, {~0: [0, 4, 2], ~1: [1, 5]}, {0: [0, 7], 1: [1, 6]}],
    "merged before it is written": [{~0: [0, 2, 4], ~1: [1, 3]}, {~1: [1, 5]}, {0: [0, 7], 1: [1, 6]}],
    "lost": [{~0: [0, 2], ~1: [1, 3]}, {~0: [0, 4], ~1: [1, 5]}, {0: [0, 7], 1: [6]}],
    "left in the first round": [{~0: [0, 2]}, {~0: [0, 4], ~1: [1, 5]}, {0: [0, 7], 1: [1, 6]}],
    "another row's running slot": [{~1: [0, 2], ~0: [1, 3]}, {~0: [0, 4], ~1: [1, 5]}, {0: [0, 7], 1: [1, 6]}],
    "a running slot that nobody reads": [{~2: [0, 2], ~1: [1, 3]}, {~0: [0, 4], ~1: [1, 5]}, {0: [0, 7], 1: [1, 6]}],
    "a running slot of another partial": [{~2: [0], ~1: [1, 3]}, {~2: [2, 4], ~1: [1, 5]}, {0: [2, 7], 1: [1, 6]}],
    "a running slot of a later round": [{~4: [0, 2], ~1: [1, 3]}, {~4: [4], ~1: [1, 5]}, {0: [4, 7], 1: [1, 6]}],
    "a running slot that does not exist": [{~9: [0, 2], ~1: [1, 3]}, {~0: [0, 4], ~1: [1, 5]}, {0: [0, 7], 1: [1, 6]}],
    "a slot before the first": [{~0: [0, 2], ~1: [1, 3]}, {~0: [0, 4], ~1: [1, 5]}, {0: [0, 7], 1: [-7, 6]}],
    "an empty running result": [{~0: [], ~1: [1, 3]}, {~0: [0, 2, 4], ~1: [1, 5]}, {0: [0, 7], 1: [1, 6]}],
    "final too early": [{~0: [0, 2], ~1: [1, 3]}, {0: [0, 4], ~1: [1, 5]}, {1: [1, 6]}],
    "final twice": [{0: [0, 2], ~1: [1, 3]}, {~4: [4], ~1: [1, 5]}, {0: [4, 7], 1: [1, 6]}],
    "another row's slot": [{~0: [0, 3], ~1: [1, 2]}, {~0: [0, 4], ~1: [1, 5]}, {0: [0, 7], 1: [1, 6]}],
    "never written": [{~0: [0, 2], ~1: [1, 3]}, {~0: [0, 4], ~1: [1, 5]}, {0: [0, 7]}],
}  # fmt: skip


def test_the_schedule_of_the_faults_is_sound() -> None:
    schedule = three_rounds()
    verify_schedule(schedule, 3)
    verify_schedule(remade(schedule, lists(schedule)), 3)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str) -> None:
    with pytest.raises(PlanError) as caught:
        verify_schedule(remade(three_rounds(), FAULTS[fault]), 3)
    assert "\n" not in str(caught.value)


def simulated(schedule: Schedule) -> dict[int, list[int]] | None:
    """Per row the items whose results reach its output; None when something else is read or written there.

    All merges of a round run at once: no slot may be written by one and used by another.
    """
    holds: dict[int, tuple[int, list[int]]] = {}
    result: dict[int, list[int]] = {}
    for (configs, merges), listed in zip(schedule.rounds, lists(schedule), strict=True):
        if len(listed) < merges.stop - merges.start:
            return None
        for number in range(schedule.config_indptr[configs.start], schedule.config_indptr[configs.stop]):
            item = schedule.work_items[number]
            for place, row in enumerate(rows(schedule, item)):
                if item.partial0 < 0:
                    result.setdefault(row, []).append(number)
                else:
                    holds[item.partial0 + place] = (row, [number])
        written: dict[int, tuple[int, list[int]]] = {}
        for target, slots in listed.items():
            if any(slot not in holds for slot in slots):
                return None
            read = [holds[slot] for slot in slots]
            items = [number for _, numbers in read for number in numbers]
            owners = {row for row, _ in read}
            if target >= 0:
                if target in result or not owners <= {target}:
                    return None
                result[target] = items
            elif len(owners) == 1 and not any(~target in other for t, other in listed.items() if t != target):
                written[~target] = (owners.pop(), items)
            else:
                return None
        holds |= written
    return result


@examples(200)
@given(data=st.data())
def test_what_passes_reaches_every_row_once(data: st.DataObject) -> None:
    """One or two entries of a sound schedule changed at random: whatever is not caught is sound as well."""
    schedule = three_rounds()
    changed = [{target: list(slots) for target, slots in round.items()} for round in lists(schedule)]
    for _ in range(data.draw(st.integers(1, 2))):
        s = data.draw(st.sampled_from([s for s in range(3) if changed[s]]))
        target = data.draw(st.sampled_from(list(changed[s])))
        slots = changed[s].pop(target)
        kind = data.draw(st.sampled_from(("retarget", "drop", "add", "replace", "move", "remove")))
        if kind == "retarget":
            target = data.draw(st.integers(-9, 3))
        elif kind == "drop" and slots:
            slots.pop(data.draw(st.integers(0, len(slots) - 1)))
        elif kind == "add":
            slots.append(data.draw(st.integers(0, 8)))
        elif kind == "replace" and slots:
            slots[data.draw(st.integers(0, len(slots) - 1))] = data.draw(st.integers(0, 8))
        elif kind == "move":
            s = data.draw(st.integers(0, 2))
        if kind != "remove":
            changed[s][target] = slots
    mutant = remade(schedule, changed)
    try:
        verify_schedule(mutant, 3)
    except PlanError:
        return
    expected = {row: [] for row in range(3)}
    for number, item in enumerate(schedule.work_items):
        for row in rows(schedule, item):
            expected[row].append(number)
    found = simulated(mutant)
    assert found is not None
    assert {row: sorted(items) for row, items in found.items()} == expected


def every_strategy_schedule() -> Iterator[tuple[Schedule, Tree]]:
    tree = Tree.from_parents([-1, 0, 0, 1, 1], [40, 20, 9, 33, 7], rows=[(0, 40), (1, 3), (2, 9), (3, 33), (4, 0)])
    for name in PLANS:
        for seed in range(4):
            plan = planned(name, tree, seed)
            yield scheduled(plan, tree), tree
            yield scheduled(in_rounds(plan, seed, (0, 1, 2)), tree), tree


def test_schedules_reach_every_row_with_every_item_once() -> None:
    """The simulation of the tests above, on schedules as they are made."""
    for schedule, tree in every_strategy_schedule():
        expected = {row: [] for row in range(tree.num_rows)}
        for number, item in enumerate(schedule.work_items):
            for row in rows(schedule, item):
                expected[row].append(number)
        found = simulated(schedule)
        assert found is not None
        assert {row: sorted(items) for row, items in found.items()} == expected


def dealt(blocks: int = 3) -> Schedule:
    tree = Tree.parse("100(20,30,40)")
    return scheduled(strategies.flashforge(blocks).plan(Problem(tree, SHAPE, H200)), tree)


@pytest.mark.parametrize("fault", ["twice", "not at all", "nothing", "unknown", "one lane lost"])
def test_work_that_is_not_dealt_once_is_caught(fault: str) -> None:
    schedule = dealt()
    verify_schedule(schedule, 3)
    work = schedule.work.copy()
    if fault == "twice":
        work[0] = work[-1]
    elif fault == "not at all":
        work = np.append(work[:-1], work[0])
    elif fault == "unknown":
        work[work.argmax()] = len(work)
    indptr = schedule.work_indptr.copy()
    if fault == "nothing":
        work, indptr = work[:0], np.zeros_like(indptr)
    elif fault == "one lane lost":
        work, indptr = work[:-1], np.minimum(indptr, len(work) - 1)
    with pytest.raises(PlanError, match=r"^work = .* do not name all work once"):
        verify_schedule(dataclasses.replace(schedule, work=work, work_indptr=indptr), 3)
