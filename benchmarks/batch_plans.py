"""Host time of plans for running batches, beside FlashInfer's plan for the same numbers of requests and pages.

    python benchmarks/batch_plans.py [--heads 32:8] [--steps 1200]

Microseconds on one core, medians. On a GPU they include the copies to it, which are not waited for; on the CPU, where
plans are not copied, they include packing a plan for the copy. Batches have 64 to 4,096 requests of up to 1,000 and up
to 100,000 tokens in pages of 16: groups of 8 that share half of their tokens, requests that share nothing, and requests
that branch off one another.

- plan: `BatchKernel.update` after one request ended and another one came; numpy: the same without the C code. Both
  lengths and both ways take turns, because a host's speed changes within a minute.
- tables, of groups: the same, with sharing found anew: `treegen.shared_prefixes`, `LiveBatch.found` and
  `BatchKernel.update`. The block table is on the host, in int32 with random page ids.
- choose: a policy for a batch whose bucket is new to the kernel.
- seat: of a request that is added, forked or finished: the call of LiveBatch, and `BatchKernel.seat`. prepare: of one
  that ended and one that came in its place. Both also without the C code.
- loop: steps in which requests come, grow and end, with `prepare` before each and `refresh` after it. Plans are the
  calls that planned; the largest is compared with their median.

The last table is a summary of groups of 8. flashinfer is its decode wrapper's `plan`, where that can be imported and
there is a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import treegen
from replaced_requests import PAGE_SIZE, Batch, HostTable
from replan import flashinfer_wrapper
from treegen import PageTable, Shape
from treegen.backends.batch_form import BatchForm
from treegen.compiled import c_library
from treegen.compiled.batch_tree import BatchTree
from treegen.compiled.table_words import TableWords
from treegen.ir.request_tables import NO_REQUEST
from treegen.runtime.batch_kernel import BatchKernel
from treegen.search.batch_choices import BatchChoices
from treegen.target.targets import target_from

SIZES, LENGTHS, TURNS = (64, 256, 1024, 4096), (1_000, 100_000), 5
ON_GPU = torch.cuda.is_available()


class PackedOnly:
    """A program that packs plans as on a GPU, and runs nothing."""

    def __init__(self, form: BatchForm) -> None:
        self._words = TableWords(form.room)
        self._seats = NO_REQUEST.repeat(form.room.seats, 1)

    def load(self, made: Any, requests: Any) -> None:
        """Packs a plan."""
        self._words.write(made, np.empty(self._words.places.copied, np.int32))
        self.seat(requests)

    def seat(self, requests: Any) -> None:
        """Takes the running requests."""
        self._seats[:, : requests.shape[1]] = requests

    def step(self) -> None:
        """Does nothing."""


def kernel_of(shape: Shape, requests: int, tokens: int) -> BatchKernel:
    """Makes a kernel for a batch of this size. Its page table, which nothing reads here, has one row for all."""
    device = "cuda" if ON_GPU else "cpu"
    table = torch.zeros(1, -(-tokens // PAGE_SIZE), dtype=torch.int32, device=device)
    lengths, rows = torch.zeros(2, requests, dtype=torch.int32, device=device)
    pages = PageTable(table, lengths, 1 << 16, rows)
    kernel = treegen.compile_batch(shape, pages, max_tokens=tokens, target=None if ON_GPU else target_from("h200"))
    if not ON_GPU:
        kernel._program = PackedOnly(kernel.form)  # type: ignore[assignment]
    return kernel


def median_us(call: Callable[[], object], before: Callable[[], object] = lambda: None, repeats: int = 60) -> float:
    """Returns the median time of a call. `before` is called before each, untimed, and then the GPU is waited for."""
    times = []
    for _ in range(repeats):
        before()
        if ON_GPU:
            torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times[3:]) / 1e3


@contextmanager
def without_c() -> Iterator[None]:
    """In its block plans are made in NumPy."""
    with patch.object(c_library, "library", lambda: None):
        yield


Served = tuple[BatchKernel, Batch, HostTable | None]
"""A kernel, its batch, and the batch's page table where it is on the host, too."""


def plans_us(served: Sequence[Served]) -> list[tuple[float, float, float, float]]:
    """Returns for each batch the times of a plan, of one in NumPy, of one for the sharing in a table on the host (0
    where there is no table), and of a choice for a bucket that is new.
    """
    turns: list[list[tuple[float, float, float, float]]] = [[] for _ in served]
    for _ in range(TURNS):
        for times, (kernel, batch, table) in zip(turns, served, strict=True):
            update, replace = partial(kernel.update, batch.live), batch.replace if table is None else table.replace
            in_c = median_us(update, replace, 20)
            with without_c():
                in_numpy = median_us(update, replace, 20)
            of_table = 0.0 if table is None else median_us(partial(table.update, kernel), replace, 20)
            times.append((in_c, in_numpy, of_table, choice_us(kernel, batch)))
    return [tuple(map(statistics.median, zip(*times, strict=True))) for times in turns]


def choice_us(kernel: BatchKernel, batch: Batch) -> float:
    """Returns the time of a choice for a bucket that is new."""
    form, tree, h200 = kernel.form, BatchTree.of_batch(batch.live), target_from("h200")
    return median_us(lambda: BatchChoices(form.shape, h200, form.config, form.room.items).choose(tree), repeats=20)


def seat_us(kernel: BatchKernel, batch: Batch) -> dict[str, float]:
    """Returns the times of one request more or less."""
    live, seats = batch.live, [int(batch.live.seats[-1])]
    live.finish(seats[0])
    owner, times = int(live.seats[0]), {}
    shared = int(live.tokens[owner]) // 2

    def called(call: Callable[[], int | None]) -> None:
        seats.append(call() or 0)
        kernel.seat(live)

    def finish() -> None:
        live.finish(seats[-1])

    for name, new in (("add", partial(live.add, shared + 9, owner, shared)), ("fork", partial(live.fork, owner))):
        seats.append(new())
        times[name] = median_us(partial(called, new), finish)
        finish()
    times["finish"] = median_us(lambda: called(finish), lambda: seats.append(live.fork(owner)))
    batch.arrive()
    kernel.update(live)
    times["prepare"] = median_us(lambda: kernel.prepare(live), batch.replace)
    return times


def seat_line(shape: Shape) -> str:
    """Describes the times of one request more or less, and of one in the place of another."""
    kernel, batch = kernel_of(shape, 256, 20_000), Batch("groups", 256, 8_000)
    kernel.prepare(batch.live)
    return ", ".join(f"{name} {us:.0f}" for name, us in seat_us(kernel, batch).items())


def loop(kernel: BatchKernel, batch: Batch, steps: int) -> str:
    """Runs a server's loop, and describes its times."""
    plans, others = [], []
    for step in range(steps):
        batch.live.grow()
        if step % 4 == 0:
            batch.replace()
        kernel.step()
        kernel.replanning.calls = 32
        for call in (kernel.prepare, kernel.refresh):
            begin = time.perf_counter_ns()
            (plans if call(batch.live) else others).append((time.perf_counter_ns() - begin) / 1e3)
    median, of_others = statistics.median(plans), statistics.median(others)
    return (
        f"loop of {steps} steps, {len(batch.live)} requests: {len(plans)} plans, median {median:.0f}, "
        f"most {max(plans):.0f} ({max(plans) / median:.1f} medians); "
        f"other calls: median {of_others:.1f}, most {max(others):.0f}"
    )


def flashinfer_us(shape: Shape, batch: Batch) -> str:
    """Returns the time of FlashInfer's plan for the same lengths, as text."""
    wrapper = flashinfer_wrapper()
    if wrapper is None:
        return "-"
    counts = -(-batch.live.tokens[batch.live.seats] // PAGE_SIZE)
    indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    indices = torch.arange(int(indptr[-1]), dtype=torch.int32, device="cuda")
    last = torch.full((len(counts),), PAGE_SIZE, dtype=torch.int32)
    heads = shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, PAGE_SIZE
    plan = partial(wrapper.plan, indptr, indices, last, *heads, q_data_type=torch.bfloat16)
    return f"{median_us(plan, repeats=20):.0f}"


def served_of(shape: Shape, kind: str, requests: int, tokens: int) -> Served:
    """Makes a batch, the kernel for it, and for groups its page table on the host."""
    batch = Batch(kind, requests, tokens)
    return kernel_of(shape, requests, tokens), batch, HostTable(batch, tokens) if kind == "groups" else None


def tables(shape: Shape, steps: int) -> Iterator[str]:
    """Yields the lines of all tables."""
    names = "plan", "numpy", "flashinfer", "tables", "choose"
    heads = [head for name in names for head in (f"{name} 1k", "100k")]
    summary = [f"{'groups of 8':>12}" + "".join(f"{head:>13}" for head in heads)]
    for requests in SIZES:
        cells: list[str] = []
        for kind in ("groups", "unshared", "branches"):
            found = []
            served = [served_of(shape, kind, requests, tokens) for tokens in LENGTHS]
            times = plans_us(served)
            for tokens, (kernel, batch, table), (plan, numpy, of_table, choose) in zip(
                LENGTHS, served, times, strict=True
            ):
                beside = flashinfer_us(shape, batch) if kind == "groups" else ""
                found.append((f"{plan:.0f}", f"{numpy:.0f}", beside, f"{of_table:.0f}", f"{choose:.0f}"))
                how = "" if kernel.choice is None else f", by {kernel.choice.strategy}"
                from_table = "" if table is None else f"tables {of_table:5.0f}, "
                yield (
                    f"{requests:5} requests of {tokens:6}, {kind:8}: plan {plan:5.0f}, "
                    f"numpy {numpy:5.0f}, {from_table}choose {choose:5.0f}{how}"
                )
            del served, table  # tables may be large
            cells = cells or [cell for column in zip(*found, strict=True) for cell in column]
        summary.append(f"{requests:12}" + "".join(f"{cell:>13}" for cell in cells))
    summary.append(f"seat among 256: {seat_line(shape)}")
    with without_c():
        summary.append(f"in NumPy:       {seat_line(shape)}")
    kernel, batch = kernel_of(shape, 256, 20_000), Batch("groups", 256, 8_000)
    kernel.prepare(batch.live)
    yield from (*summary, loop(kernel, batch, steps))


def main() -> None:
    """Prints a line per batch, and a short table last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", default="32:8", help="query heads:KV heads (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1200, help="steps of the loop (default: %(default)s)")
    chosen = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    shape = Shape(*map(int, chosen.heads.split(":")), 128, dtype="bf16", page_size=PAGE_SIZE)
    for line in tables(shape, chosen.steps):
        print(line, flush=True)


if __name__ == "__main__":
    main()
