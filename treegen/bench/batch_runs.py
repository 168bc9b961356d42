"""Runs of the suite of batches: each provider's time of a layer, time to plan, and time of whole steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from treegen.backends import oracle
from treegen.bench.batch_case import BatchCase, BatchShapes, BatchStart
from treegen.bench.batch_providers import BatchProvider, BatchServer, TreegenBatches, TreegenExact
from treegen.bench.batch_results import BatchOutcome, BatchResult, StepTimes
from treegen.bench.flashinfer_batch_cascade import FlashInferBatchCascade
from treegen.bench.flashinfer_batch_decode import FlashInferBatchDecode, FlashInferBatchMla
from treegen.bench.flashinfer_batch_prefill import FlashInferBatchPrefill
from treegen.bench.providers import UnavailableError
from treegen.codegen.compile_counter import expected_compiles
from treegen.ir.errors import InputError
from treegen.ir.positions import windowed_requests
from treegen.ir.shape import Shape
from treegen.tuning.timing import graph_of, median_us
from treegen.tuning.worker import problem_of
from treegen.workloads.batch_pages import BatchPages, live_batch_of
from treegen.workloads.served_batch import ServedBatch

_PROVIDERS: tuple[BatchProvider, ...] = (
    TreegenBatches(),
    TreegenExact(),
    TreegenBatches(batch_invariant=True),
    FlashInferBatchDecode(tensor_cores=False),
    FlashInferBatchDecode(tensor_cores=True),
    FlashInferBatchDecode(tensor_cores=False, exact=True),
    FlashInferBatchDecode(tensor_cores=True, exact=True),
    FlashInferBatchCascade("fa2"),
    FlashInferBatchCascade("auto"),
    FlashInferBatchPrefill(),
    FlashInferBatchMla(),
)
BATCH_PROVIDERS = tuple(provider.name for provider in _PROVIDERS)
"""Names of all providers of batches."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How batches are measured.

    Args:
        steps: Steps of the course.
        layers: Attention layers of a step's graph.
        repeats: Timed replays of a layer.
        capture: Captures a call; returns a replay, and the tensor that the replay fills.
        timer: Returns the microseconds of a call, from this number of repeats.
        window_left: Tokens before its own that a row sees, -1 for all.
    """

    steps: int = 200
    layers: int = 32
    repeats: int = 20
    capture: Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]] = graph_of
    timer: Callable[[Callable[[], object], int], float] = median_us
    window_left: int = -1


def batch_providers_from(names: str | None) -> tuple[BatchProvider, ...]:
    """Returns the providers of a list of names with commas; all for None. Raises InputError."""
    if names is None:
        return _PROVIDERS
    by_name = dict(zip(BATCH_PROVIDERS, _PROVIDERS, strict=True))
    for name in (wanted := [name.strip() for name in names.split(",")]):
        if name not in by_name:
            raise InputError("providers", name, "serves no batches", f"use some of {', '.join(BATCH_PROVIDERS)}")
    return tuple(by_name[name] for name in wanted)


def run_batches(
    batches: Sequence[ServedBatch],
    shapes: BatchShapes,
    providers: Sequence[BatchProvider],
    settings: BatchSettings,
    device: torch.device,
    gbps: float,
) -> Iterator[BatchResult]:
    """Measures all providers on each batch with each shape. gbps: the device's copy rate in GB/s, for the floors."""
    for batch in batches:
        start = BatchStart.of(batch, settings.steps)
        for shape in shapes.of(batch):
            yield run_batch(start, shape, providers, settings, device, gbps)


def run_batch(
    start: BatchStart,
    shape: Shape,
    providers: Sequence[BatchProvider],
    settings: BatchSettings,
    device: torch.device,
    gbps: float,
) -> BatchResult:
    """Measures all providers on a batch with one shape. gbps: the device's copy rate in GB/s, for the floor."""
    case = BatchCase(start, shape, settings.layers, device, settings.window_left)
    outcomes = tuple(measure_batch(provider, case, settings) for provider in providers)
    return batch_result(start.batch, shape, settings, gbps, outcomes)


def batch_result(
    batch: ServedBatch, shape: Shape, settings: BatchSettings, gbps: float, outcomes: Sequence[BatchOutcome]
) -> BatchResult:
    """Makes the result of a batch with one shape. gbps: the device's copy rate in GB/s."""
    return BatchResult(
        batch.name,
        batch.family,
        batch.seed,
        _heads_text(shape, batch.mla, settings.window_left),
        shape.page_size,
        len(batch.requests),
        batch.tokens,
        batch.unique_tokens,
        settings.steps,
        settings.layers,
        _floor_us(batch, shape, gbps, settings.window_left),
        tuple(outcomes),
    )


def _heads_text(shape: Shape, mla: bool, window_left: int) -> str:
    """Returns heads as tables show them; MLA has head dims of its own."""
    texts = [f"{shape.num_qo_heads}:{shape.num_kv_heads}"]
    texts += [f"x{shape.head_dim}"] if shape.head_dim != 128 and not mla else []
    texts += [shape.dtype] if shape.dtype != "bf16" else []
    texts += [f"KV {shape.kv_dtype}"] if shape.kv_dtype != shape.dtype else []
    texts += [f"window_left {window_left}"] if window_left >= 0 else []
    return " ".join(texts)


def measure_batch(provider: BatchProvider, case: BatchCase, settings: BatchSettings) -> BatchOutcome:
    """Measures a provider on a case, after it has served the two stand-ins and if its outputs are right."""
    try:
        with expected_compiles():
            return _measured(provider, case, settings)
    except UnavailableError as cause:
        return BatchOutcome(provider.name, "unavailable", detail=str(cause))
    except Exception as cause:
        return BatchOutcome(provider.name, "failed", detail=problem_of(cause))
    finally:
        gc.collect()
        if case.device.type == "cuda":
            torch.cuda.empty_cache()


class _Graphs:
    """A server's CUDA graphs of one layer and of a whole step, captured at the first plan."""

    def __init__(self, server: BatchServer, layers: int, settings: BatchSettings, whole: bool) -> None:
        def step() -> torch.Tensor:
            server.begin()
            outs = [server.attend(layer) for layer in range(layers)]
            return outs[-1]

        server.begin()
        server.attend(0)  # compiles outside of the capture
        self.layer, self.layer_out = settings.capture(lambda: server.attend(0))
        self.step, self.step_out = settings.capture(step) if whole else (self.layer, self.layer_out)


def _measured(provider: BatchProvider, case: BatchCase, settings: BatchSettings) -> BatchOutcome:
    server, start = provider.prepare(case), case.start
    graphs: _Graphs | None = None
    for earlier in start.earlier if provider.replans else ():
        pages = start.pages(earlier)
        _plan(server, case, pages, whole=True)
        graphs = graphs or _Graphs(server, case.layers, settings, whole=True)
        graphs.step()
    pages = start.pages(start.batch)
    plan_ms = _plan(server, case, pages, whole=True)
    graphs = graphs or _Graphs(server, case.layers, settings, whole=False)
    server.begin()
    graphs.layer()
    error = case.error_of(graphs.layer_out, pages, 0, server.order)
    tolerance = oracle.TOLERANCE[case.shape.dtype]
    if not error <= tolerance:
        return BatchOutcome(provider.name, "wrong", error, detail=f"error {error:.1e} at the first step")
    run_us = settings.timer(graphs.layer, settings.repeats)
    if not provider.replans:
        return BatchOutcome(provider.name, "right", error, run_us, first_plan_ms=plan_ms)
    planned, whole = _steps(server, case, pages, graphs)
    error = max(error, case.error_of(graphs.step_out, pages, case.layers - 1, server.order))
    if not error <= tolerance:
        detail = f"error {error:.1e} after {len(whole)} steps"
        return BatchOutcome(provider.name, "wrong", error, detail=detail)
    return BatchOutcome(provider.name, "right", error, run_us, plan_ms, StepTimes.of(planned), StepTimes.of(whole))


def _plan(server: BatchServer, case: BatchCase, pages: BatchPages, *, whole: bool = False) -> float:
    """Plans for a step, and returns the milliseconds of the host. whole: includes the host work after the launch."""
    case.upload(pages)
    pages.groups()  # outside of the timing, because an engine knows its groups
    _synchronize(case.device)
    begin = time.perf_counter_ns()
    server.plan(pages)
    if whole:
        server.behind()
    return (time.perf_counter_ns() - begin) / 1e6


def _steps(server: BatchServer, case: BatchCase, pages: BatchPages, graphs: _Graphs) -> tuple[list[float], list[float]]:
    """Runs the steps of the course, and returns the milliseconds of each: to plan, and in total.

    A step's clock starts with its plan, when the page table and lengths are on the device. It stops when the last layer
    is computed and the host work after the launch is done.
    """
    planned, whole = [], []
    with _quiet_collector():
        for events in case.start.events:
            pages.apply(events)
            planned.append(_plan(server, case, pages))
            begin = time.perf_counter_ns()
            graphs.step()
            server.behind()
            _synchronize(case.device)
            whole.append(planned[-1] + (time.perf_counter_ns() - begin) / 1e6)
    return planned, whole


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Freezes existing objects, so garbage collection inside the block only looks at new ones."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _floor_us(batch: ServedBatch, shape: Shape, gbps: float, window_left: int) -> float:
    """Returns the microseconds to move a layer's unique KV that rows see, q and out once."""
    moved = _seen_tokens(batch, window_left) * shape.kv_token_bytes
    rows = sum(request.queries for request in batch.requests)
    moved += rows * shape.num_qo_heads * (shape.head_dim + shape.head_dim_v) * shape.dtype_bytes
    return moved / (gbps * 1e3)


def _seen_tokens(batch: ServedBatch, window_left: int) -> int:
    """Returns the tokens that some row sees at the first step, each counted once."""
    if window_left < 0:
        return batch.unique_tokens
    return windowed_requests(live_batch_of(batch).tree(), window_left, 1).unique_tokens
