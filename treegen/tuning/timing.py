"""Timing on a CUDA device: medians on a cold L2 cache, without the host's launch time.

Before each call 256 MB are read, as a model reads the weights of its other layers before attention. To overwrite memory
instead would leave L2 full of lines that the call has to write back for others: up to 12 us of its time on an H200,
which no layer of a model takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

Returned = TypeVar("Returned")

_READ_BYTES = 256 << 20
_PAUSE_CYCLES = 1_000_000
_WARM_UP = 3
_COPY_BYTES = 2 << 30
_COPIES = 10


def median_us(call: Callable[[], object], repeats: int) -> float:
    """Returns the median time of `call()` on the current stream in microseconds.

    Before each of `repeats` calls L2 is filled with other data. A pause on the device after that hides the time of the
    host's launch.
    """
    others = _other_data()
    for _ in range(_WARM_UP):
        call()
    pairs = [_timed(call, others) for _ in range(repeats)]
    torch.cuda.synchronize()
    return float(statistics.median(1e3 * begin.elapsed_time(end) for begin, end in pairs))


def each_us(call: Callable[[], object], repeats: int) -> Iterator[float]:
    """Yields the microseconds of each of `repeats` calls, under the conditions of `median_us`, once the device is done.

    The caller may read what a call wrote before the next one begins.
    """
    others = _other_data()
    for _ in range(_WARM_UP):
        call()
    for _ in range(repeats):
        begin, end = _timed(call, others)
        torch.cuda.synchronize()
        yield 1e3 * begin.elapsed_time(end)


def _other_data() -> torch.Tensor:
    return torch.zeros(_READ_BYTES // 4, dtype=torch.int32, device="cuda")


def _timed(call: Callable[[], object], others: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Enqueues a call on a cold L2, between two events."""
    others.sum()
    torch.cuda._sleep(_PAUSE_CYCLES)  # type: ignore[no-untyped-call]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    return begin, end


def graph_of(call: Callable[[], Returned]) -> tuple[Callable[[], None], Returned]:
    """Captures a call as a CUDA graph; returns its replay on the current stream, and the result of the captured call.

    Raises RuntimeError when it cannot be captured.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    return graph.replay, result


def copy_gbps() -> float:
    """Returns the GB/s of device memory that a copy moves, counting both bytes read and bytes written."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / (1e3 * median_us(lambda: target.copy_(source), _COPIES))
