"""Links between ranks: their latency and speed, assumed or measured, for the choice of a way to merge states."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from treegen.cost.communication import Link
from treegen.cost.known_links import link_named
from treegen.distributed.collectives import all_gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SMALL, _LARGE = 1 << 12, 1 << 26
"""Bytes that each rank gathers in the two measurements."""
_REPEATS = 20

_measured: WeakKeyDictionary[ProcessGroup, Link] = WeakKeyDictionary()


def link_of(group: ProcessGroup) -> Link:
    """Returns the link between the ranks of a group: the measured one, or else that between Hopper GPUs by NVLink."""
    return _measured.get(group) or link_named("nvlink")


def measure_link(group: ProcessGroup, device: torch.device) -> Link:
    """Measures the link between the ranks of a group, by all-gathers of two sizes; all ranks call it.

    `merge_across` of the group takes it from then on. All ranks get the figures of the slowest one, so that they choose
    alike.

    Args:
        group: The ranks.
        device: The device of this rank.
    """
    import torch.distributed as dist

    times = torch.tensor([_time(group, device, size) for size in (_SMALL, _LARGE)], dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    small, large = times.tolist()
    ranks, assumed = group.size(), link_named("nvlink")
    gigabytes = (ranks - 1) * (_LARGE - _SMALL) / max(large - small, 1e-3) / 1e3
    hop_us = min(assumed.hop_us, small / ranks)
    link = Link("measured", max(small - hop_us * max(ranks - 2, 0), 0.0), hop_us, gigabytes)
    _measured[group] = link
    return link


def _time(group: ProcessGroup, device: torch.device, size: int) -> float:
    """Returns the median microseconds of an all-gather in which each rank has this many bytes."""
    import torch.distributed as dist

    own = torch.zeros(size, dtype=torch.uint8, device=device)
    of_all = own.new_empty(group.size() * size)

    times: list[float] = []
    for _ in range(_REPEATS + 3):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(device)
            dist.barrier(group=group)
            begin.record()
            all_gather(of_all, own, group)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        else:
            dist.barrier(group=group)
            began = time.perf_counter()
            all_gather(of_all, own, group)
            times.append((time.perf_counter() - began) * 1e6)
    return median(times[3:])
