"""Measured timelines without a GPU: records of interpreted kernels, clocks that are made up, and errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treegen import Shape, Tree, strategies
from treegen.backends import oracle
from treegen.backends.recorded_program import RECORD_FIELDS, RecordedProgram
from treegen.cost.launch_work import LaunchWork, launch_work
from treegen.ir.arrays import Longs
from treegen.ir.errors import BackendError
from treegen.schedule.pipeline import planned_device_schedule
from treegen.strategies import Strategy, strategy_from
from treegen.target.problem import Problem
from treegen.target.targets import targets
from treegen.tuning.kernel_meter import Case
from treegen.tuning.measured_timeline import check_measurable, record
from treegen.tuning.recorded_times import clock_times, resolution_ns, timeline_of

SHAPE = Shape(4, 2, 16, dtype="fp32")
TREE = Tree.from_levels([1, 3, 6], [70, 40, 20])


def work_of(pieces: int, name: str = "work items", rows: int = 1) -> LaunchWork:
    number = np.arange(pieces)
    return LaunchWork(name, 0, number, number, 0 * number, 0 * number + rows, 0 * number + 16, 0 * number + 64)


def records_of(*pieces: tuple[int, int, int]) -> Longs:
    """Records of pieces (SM, start, end) in nanoseconds, of SMs with a clock of 2 GHz and offsets of their own."""
    table = np.array(pieces, np.int64)
    offset = 10_000 * (table[:, 0] + 1)
    return np.stack([table[:, 0], table[:, 1], 2 * table[:, 1] + offset, table[:, 2], 2 * table[:, 2] + offset], axis=1)


@pytest.mark.parametrize(
    "strategy",
    [
        strategies.query(),
        strategies.deft_flatten(),
        strategies.flashforge(),
        strategies.cohort(split=32, merge="final"),
    ],
    ids=str,
)
def test_interpreted_kernels_record_every_piece_and_compute_the_same(strategy: Strategy) -> None:
    problem = Problem(TREE, SHAPE, targets()["h200"])
    schedule = planned_device_schedule(strategy.plan(problem), problem)
    case = Case.of(TREE, SHAPE, torch.device("cpu"))
    program = RecordedProgram(schedule, SHAPE, torch.device("cpu"))
    assert case.check(program) <= oracle.TOLERANCE["fp32"]
    records, works = program.records(), list(launch_work(schedule, SHAPE))
    assert len(records) == len(works) > 0
    for each, work in zip(records, works, strict=True):
        assert each.shape[1] == RECORD_FIELDS
        assert len(each) % len(work.item) == 0
        assert (each == [0, 1, 1, 1, 1]).all()
    timeline = timeline_of(records, works, 25.0, problem.target.sms)
    assert [each.name for each in timeline.launches] == [work.name for work in works]
    assert int(timeline.blocks.kv_bytes.sum()) == sum(int(work.kv_bytes.sum()) for work in works)


def test_time_that_no_block_shows_is_put_in_front() -> None:
    timeline = timeline_of([records_of((0, 5_000, 7_000), (3, 5_500, 9_032))], [work_of(2)], 10.0, 132)
    assert timeline.blocks.start_us.tolist() == pytest.approx([5.968, 6.468])
    assert timeline.blocks.end_us.tolist() == pytest.approx([7.968, 10.0])
    assert (timeline.total_us, timeline.sms, timeline.slots) == (10.0, 132, 1)
    assert timeline.launches[0].start_us == pytest.approx(5.968)


def test_blocks_of_a_merged_row_are_all_there_and_pieces_without_work_are_not() -> None:
    merge = records_of((0, 9_000, 9_100), (1, 9_000, 9_200), (0, 9_100, 9_300), (1, 9_200, 9_400))
    items = records_of((0, 5_000, 7_000), (1, 5_000, 7_000))
    items[1, 3:] = 0
    timeline = timeline_of([items, merge], [work_of(2), work_of(2, "merge")], 20.0, 2)
    assert timeline.blocks.launch.tolist() == [0, 1, 1, 1, 1]
    assert timeline.blocks.first_item.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("seed", range(5))
def test_cycles_stand_in_for_a_coarse_clock(seed: int) -> None:
    random = np.random.default_rng(seed)
    sm = np.repeat(np.arange(20), 6)
    start = random.integers(0, 60_000, len(sm)) + 1_000_000_000_000
    end = start + random.integers(2_000, 40_000, len(sm))
    exact = records_of(*zip(sm.tolist(), start.tolist(), end.tolist(), strict=True))
    coarse = exact.copy()
    coarse[:, [1, 3]] = coarse[:, [1, 3]] // 1024 * 1024
    assert resolution_ns(coarse) == 1024
    starts, ends = clock_times(coarse)
    # The whole timeline may lie anywhere within the clock's resolution; blocks lie right among themselves.
    wrong = np.stack([starts - start, ends - end])
    assert float(wrong.max() - wrong.min()) < 400
    assert float(np.abs((ends - starts) - (end - start)).max()) < 120
    assert np.array_equal(clock_times(exact)[0], start.astype(np.float64))


def test_a_machine_without_a_gpu_cannot_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    problem = Problem(TREE, SHAPE, targets()["h200"])
    with pytest.raises(BackendError, match="is not a CUDA device to measure timelines on; run it on"):
        record(strategy_from("query").plan(problem), problem)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(BackendError, match="TRITON_INTERPRET"):
        check_measurable()
