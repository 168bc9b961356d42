"""Links between ranks: their latency and speed, assumed or measured, for the choice of a way to merge states."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from treegen.cost.communication import Link
from treegen.cost.known_links import link_named
from treegen.distributed.collectives import all_gather
from treegen.distributed.peer_memory import buffers_for, reach_each_other

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SMALL, _LARGE = 1 << 12, {"cuda": 1 << 22, "cpu": 1 << 21}
"""Bytes that each rank gathers in the two measurements, the second by the type of the device: what merges send."""
_CALLS, _REPEATS = 8, 9
"""Calls in a row, and how often these are timed."""
_LEAD = 4
"""Replays before the timed one. With one, a slow host launched the next replay after it had ended, and a direct merge
seemed to take 8.5 us in place of 4.7."""

_measured: WeakKeyDictionary[ProcessGroup, Link] = WeakKeyDictionary()


def link_of(group: ProcessGroup) -> Link:
    """Returns the link between the ranks of a group: the measured one, or else that between Hopper GPUs by NVLink."""
    return _measured.get(group) or link_named("nvlink")


def measure_link(group: ProcessGroup, device: torch.device) -> Link:
    """Measures the link between the ranks of a group, by all-gathers of two sizes and a small direct merge.

    All ranks call it. `merge_across` of the group takes it from then on. All ranks get the figures of the slowest one,
    so that they choose alike.

    Args:
        group: The ranks.
        device: The device of this rank.
    """
    import torch.distributed as dist

    large_bytes = _LARGE["cuda" if device.type == "cuda" else "cpu"]
    measured = [_gather_us(group, device, size) for size in (_SMALL, large_bytes)]
    reached = reach_each_other(group, device)
    measured.append(_direct_us(group, device) if reached else 0.0)
    times = torch.tensor(measured, dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    small, large, direct = times.tolist()
    ranks, assumed = group.size(), link_named("nvlink")
    gigabytes = (ranks - 1) * (large_bytes - _SMALL) / max(large - small, 1e-3) / 1e3
    hop_us = min(assumed.hop_us, small / ranks)
    latency_us = max(small - hop_us * max(ranks - 2, 0), 0.0)
    link = Link("measured", latency_us, hop_us, gigabytes, direct if reached else None)
    _measured[group] = link
    return link


def _direct_us(group: ProcessGroup, device: torch.device) -> float:
    """Returns the median microseconds of a direct merge of one row of 32 heads."""
    buffers = buffers_for(group, 32, 128, torch.bfloat16, device)
    assert buffers is not None, "no graph is captured here"
    out = torch.zeros(1, 32, 128, dtype=torch.bfloat16, device=device)
    lse = torch.zeros(1, 32, device=device)

    def merge() -> None:
        for _ in range(_CALLS):
            buffers.merge(out, lse, False, 1.0)

    return median(_replays(merge, group, device)) / _CALLS


def _gather_us(group: ProcessGroup, device: torch.device, size: int) -> float:
    """Returns the median microseconds of an all-gather in which each rank has this many bytes."""
    own = torch.zeros(size, dtype=torch.uint8, device=device)
    of_all = own.new_empty(group.size() * size)

    def gather() -> None:
        for _ in range(_CALLS):
            all_gather(of_all, own, group)

    times = _replays(gather, group, device) if device.type == "cuda" else _calls(gather, group)
    return median(times) / _CALLS


def _replays(call: Callable[[], None], group: ProcessGroup, device: torch.device) -> list[float]:
    """Returns the microseconds of a call on a GPU, as replays of a graph, so that the host's time does not count."""
    with torch.cuda.device(device):
        call()  # libraries connect at the first call, which cannot be captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        times: list[float] = []
        for _ in range(_REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            _meet(group, device)
            for _ in range(_LEAD):  # ranks that begin late wait here
                graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
    return times


def _calls(call: Callable[[], None], group: ProcessGroup) -> list[float]:
    """Returns the microseconds of a call on the host."""
    call()
    times: list[float] = []
    for _ in range(_REPEATS):
        _meet(group, torch.device("cpu"))
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    return times


def _meet(group: ProcessGroup, device: torch.device) -> None:
    """Waits until all ranks are here."""
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1, device=device), group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
