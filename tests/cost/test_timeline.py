"""Timelines: list scheduling, agreement with the estimate, tail and imbalance, and folding."""

from __future__ import annotations

from dataclasses import replace
from heapq import heapreplace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegen import Shape, Tree, strategies
from treegen.cost.account import assess
from treegen.cost.analytic import Times
from treegen.cost.launch_work import launch_work
from treegen.cost.piece_costs import costed_work
from treegen.cost.predicted_timeline import in_order, predicted_timeline
from treegen.cost.timeline import BlockSpans, LaunchSpan, Timeline
from treegen.ir.schedule import Schedule
from treegen.schedule.lower import lower
from treegen.schedule.passes.fuse_merge import with_fused_merge
from treegen.strategies import Strategy, strategy_from
from treegen.target.problem import Problem
from treegen.target.targets import targets
from treegen.workloads.tree_batches import FASTTREE_TREES

SHAPE = Shape(32, 8, 128, dtype="fp16")
NAMES = ("query", "deft-flatten", "flashforge", "fasttree", "cohort")


def planned(tree: Tree, strategy: str | Strategy, shape: Shape = SHAPE) -> tuple[Schedule, Problem, Times]:
    """The schedule that the account counts, and the parts of its time."""
    problem = Problem(tree, shape, targets()["h200"])
    plan = strategy_from(strategy).choose(problem).strategy.plan(problem)
    lowered = lower(plan, problem)
    return with_fused_merge(lowered), problem, assess(plan, lowered, problem)[1]


def spans(*blocks: tuple[int, int, float, float]) -> BlockSpans:
    """Spans of (launch, sm, start, end)."""
    launch, sm, start, end = (np.array(column) for column in zip(*blocks, strict=True))
    one = np.ones(len(sm), np.int64)
    own = np.arange(len(sm)), one, 0 * one, one, 16 * one, 64 * one
    return BlockSpans(launch, sm, start.astype(float), end.astype(float), *own)


def on_sms(sms: int, *blocks: tuple[int, int, float, float]) -> Timeline:
    end = max(block[3] for block in blocks)
    return Timeline(sms, 2, end, (LaunchSpan("work items", 0.0, end),), spans(*blocks))


def one_by_one(costs: list[float], free: list[float]) -> list[tuple[float, int]]:
    """What in_order computes, block by block."""
    heap = sorted((time, slot) for slot, time in enumerate(free))
    placed = []
    for cost in costs:
        placed.append(heap[0])
        heapreplace(heap, (heap[0][0] + cost, heap[0][1]))
    return placed


@given(st.lists(st.integers(1, 5), max_size=120), st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_blocks_go_to_the_slot_that_is_free_first(costs: list[int], free: list[int]) -> None:
    slot, start = in_order(np.array(costs, np.float64), np.array(free, np.float64))
    assert list(zip(start.tolist(), slot.tolist(), strict=True)) == one_by_one(costs, free)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", FASTTREE_TREES[:10])
def test_timelines_of_launches_one_after_another_end_with_the_estimate(text: str, name: str) -> None:
    schedule, problem, times = planned(Tree.parse(text), name)
    timeline = predicted_timeline(schedule, problem, times)
    early = any(costed.starts_early for costed in costed_work(schedule, problem, times))
    if early:
        assert 0.8 * times.total <= timeline.total_us <= times.total + 1e-6
    else:
        assert timeline.total_us == pytest.approx(times.total, rel=1e-9)
    assert timeline.total_us == pytest.approx(timeline.blocks.end_us.max())


def test_launches_that_merge_in_their_items_start_in_the_tail_of_the_launch_before() -> None:
    tree = Tree.from_levels([1, 3, 300], [4096, 512, 64])
    schedule, problem, times = planned(tree, strategies.cohort(split=512, merge="final"))
    assert len(schedule.configs) > 1
    first, last = predicted_timeline(schedule, problem, times).launches
    assert first.start_us < last.start_us < first.end_us < last.end_us
    before_hopper = problem._replace(target=replace(problem.target, capability=80))
    first, last = predicted_timeline(schedule, before_hopper, times).launches
    assert last.start_us == pytest.approx(first.end_us + problem.target.constants.next_launch_us)


@pytest.mark.parametrize("name", NAMES)
def test_stretch_is_moderate(name: str) -> None:
    """The list schedule alone is near the estimate: what stretches it is traffic and the soft maximum."""
    for text in FASTTREE_TREES[:6]:
        schedule, problem, times = planned(Tree.parse(text), name)
        timeline = predicted_timeline(schedule, problem, times)
        for number, costed in enumerate(costed_work(schedule, problem, times)):
            if costed.work.config < 0:
                continue
            of_launch = timeline.blocks.launch == number
            lasting = (timeline.blocks.end_us - timeline.blocks.start_us)[of_launch]
            alone = np.maximum(costed.lone_us, costed.full_us) + costed.join_us
            assert float((lasting / alone).min()) > 0.4
            assert float((lasting / alone).max()) < 8 * costed.resident


def test_every_piece_of_work_is_placed_once_and_no_slot_has_two() -> None:
    schedule, problem, times = planned(Tree.from_levels([1, 8, 200], [700, 130, 40]), "flashforge")
    timeline = predicted_timeline(schedule, problem, times)
    works = list(launch_work(schedule, SHAPE))
    for number, work in enumerate(works):
        placed = timeline.blocks.at(np.flatnonzero(timeline.blocks.launch == number))
        assert np.array_equal(placed.first_item, work.item)
        assert int(placed.kv_bytes.sum()) == int(work.kv_bytes.sum())
        assert int(placed.slots().max()) < timeline.slots
    assert timeline.blocks.sm.max() < timeline.sms == problem.target.sms
    assert len(timeline.launches) == len(works)


def test_plans_that_run_unfused_have_no_blocks() -> None:
    schedule, problem, times = planned(Tree.parse("6(2*2)"), "medusa")
    timeline = predicted_timeline(schedule, problem, times)
    assert (len(timeline.blocks.sm), timeline.launches, timeline.tail_us, timeline.imbalance) == (0, (), 0.0, 1.0)
    assert timeline.total_us == times.total


def test_tail_and_imbalance() -> None:
    timeline = on_sms(4, (0, 0, 1.0, 5.0), (0, 0, 2.0, 9.0), (0, 1, 1.0, 4.0), (0, 1, 6.0, 7.0))
    assert timeline.busy_us.tolist() == [8.0, 4.0, 0.0, 0.0]
    assert timeline.tail_us == 8.0  # SMs 2 and 3 have been idle since the first block started
    assert timeline.imbalance == 8.0 / 3.0
    assert timeline.idle_sms == 2
    assert on_sms(2, (0, 0, 1.0, 5.0), (0, 1, 1.0, 4.5)).tail_us == 0.5


def test_slots_keep_spans_apart() -> None:
    timeline = on_sms(2, (0, 1, 0.0, 3.0), (0, 1, 1.0, 2.0), (0, 1, 2.0, 4.0), (0, 1, 3.0, 4.0), (0, 0, 1.0, 9.0))
    assert timeline.blocks.slots().tolist() == [0, 1, 1, 0, 0]


def test_folding_keeps_ends_items_and_bytes() -> None:
    schedule, problem, times = planned(Tree.from_levels([1, 16, 2000], [700, 130, 40]), "deft-flatten")
    timeline = predicted_timeline(schedule, problem, times)
    assert timeline.folded(10**6) is timeline
    folded = timeline.folded(1000)
    assert len(folded.blocks.sm) <= 1000 < len(timeline.blocks.sm)
    for name in ("items", "tokens", "kv_bytes"):
        assert int(getattr(folded.blocks, name).sum()) == int(getattr(timeline.blocks, name).sum())
    assert folded.tail_us == pytest.approx(timeline.tail_us)
    assert folded.blocks.end_us.max() == timeline.blocks.end_us.max()
    assert (folded.blocks.start_us <= folded.blocks.end_us).all()
