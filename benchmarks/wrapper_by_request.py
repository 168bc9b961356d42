"""Checks and times the wrapper by request, and the search for shared pages, on a GPU.

    python benchmarks/wrapper_by_request.py [--steps 150] [--device cuda]

Sharing that the device finds is compared with sharing that the host finds in the same page tables, and timed. Then
requests come, grow and go in random batches, with and without ids of requests, and with and without a CUDA graph of
several layers. Each step's result is compared with that of a wrapper that plans on the host, and `plan` must not
synchronise (torch.cuda.set_sync_debug_mode). `--device cpu` only tries the script.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

import treegen
from treegen import PageTable
from treegen.backends.find_sharing import SharingReader

PAGE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 16, 32, 8, 128, 3
Rows = list[tuple[np.ndarray, int]]
"""Page ids and tokens of every row."""


def levels(rows: int, pages: int, random: np.random.Generator) -> Rows:
    """Makes groups of 64 rows, and of 8 within them, each with a quarter of the pages in common."""
    new = iter(random.permutation(2 * rows * pages).astype(np.int32).reshape(-1, max(pages // 4, 1)))
    made, outer, inner = [], np.empty(0), np.empty(0)
    for row in range(rows):
        outer = next(new) if row % 64 == 0 else outer
        inner = next(new) if row % 8 == 0 else inner
        ids = np.concatenate([outer, inner, next(new), next(new)])[:pages]
        made.append((ids, len(ids) * PAGE - int(random.integers(PAGE))))
    return [made[row] for row in random.permutation(rows)]


def chain(rows: int, pages: int, random: np.random.Generator) -> Rows:
    """Makes rows that begin with longer and longer parts of one sequence of pages."""
    own = random.permutation((rows + 2) * pages).astype(np.int32).reshape(-1, pages)
    made = []
    for row in range(rows):
        fork = (row + 1) * pages // (rows + 1)
        made.append((np.concatenate([own[0, :fork], own[row + 1, fork:]]), pages * PAGE))
    return made


def same(rows: int, pages: int, random: np.random.Generator) -> Rows:
    """Makes rows with the same pages."""
    return [(random.permutation(pages).astype(np.int32), pages * PAGE)] * rows


def alone(rows: int, pages: int, random: np.random.Generator) -> Rows:
    """Makes rows that share nothing."""
    own = random.permutation(rows * pages).astype(np.int32).reshape(rows, pages)
    return [(ids, pages * PAGE) for ids in own]


def table_of(rows: Rows, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns kv_indptr, kv_indices and kv_last_page_len."""
    parts = (
        np.cumsum([0, *(len(ids) for ids, _ in rows)]),
        np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in rows)]),
        np.array([(tokens - 1) % PAGE + 1 if tokens else 0 for _, tokens in rows]),
    )
    indptr, indices, last = (torch.from_numpy(part.astype(np.int32)).to(device) for part in parts)
    return indptr, indices, last


def median_us(call: Callable[[], object], device: torch.device, repeats: int = 50) -> tuple[float, float]:
    """Returns the median microseconds of the device and of the host."""
    of_device, of_host = [], []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(400_000)  # keeps the host ahead of the device
            begin.record()
        start = time.perf_counter()
        call()
        of_host.append((time.perf_counter() - start) * 1e6)
        if device.type == "cuda":
            end.record()
            torch.cuda.synchronize()
            of_device.append(begin.elapsed_time(end) * 1e3)
    return float(np.median(of_device or [0])), float(np.median(of_host))


def find(device: torch.device, backend: str) -> None:
    """Checks and times the search for shared pages."""
    sizes = ((256, 1000), (4096, 64), (64, 8192), (16, 16)) if device.type == "cuda" else ((16, 16),)
    for rows, pages in sizes:
        for kind in (levels, chain, same, alone):
            made = kind(rows, pages, np.random.default_rng(rows))
            indptr, indices, _ = table_of(made, device)
            lengths = torch.tensor([tokens for _, tokens in made], dtype=torch.int32, device=device)
            table = PageTable(indices, lengths, int(indices.max()) + 1, None, indptr)
            reader, on_host = SharingReader(table, PAGE, backend=backend), SharingReader(table, PAGE, backend="torch")
            reader.start()
            on_host.start()
            found, expected = reader.result(), on_host.result()
            assert np.array_equal(found.shared_tokens, expected.shared_tokens), (kind, rows)
            assert np.array_equal(found.lengths, expected.lengths)
            trees = [treegen.Tree.from_requests(s.lengths, *s[:2], page_size=PAGE).requests for s in (found, expected)]
            assert np.array_equal(trees[0].shared_with, trees[1].shared_with), (kind, rows)
            of_device, of_host = median_us(reader.start, device, 50 if device.type == "cuda" else 1)
            print(
                f"find {kind.__name__:6} {rows:5} rows of {pages:5} pages: {of_device:7.1f} us, host {of_host:6.1f} us"
            )


class Engine:
    """Requests that come, grow by a token per step, and go. New requests often begin like others."""

    def __init__(self, seed: int, rows: int, pages: int, most_pages: int) -> None:
        self.random, self.rows, self.most_pages = np.random.default_rng(seed), rows, most_pages
        self.free, self.held = self.random.permutation(pages).tolist(), np.zeros(pages, int)
        self.batch: dict[int, tuple[list[int], int]] = {}
        self.next = 0

    def arrive(self) -> None:
        """Adds a request."""
        shared: list[int] = []
        if self.batch and self.random.random() < 0.8:
            ids, tokens = self.batch[list(self.batch)[self.random.integers(len(self.batch))]]
            shared = ids[: int(self.random.integers(tokens // PAGE + 1))]
        tokens = (len(shared) + int(self.random.integers(self.most_pages - len(shared)))) * PAGE
        tokens += int(self.random.integers(1, PAGE))
        ids = shared + [self.free.pop() for _ in range(-(-tokens // PAGE) - len(shared))]
        self.held[ids] += 1
        self.batch[self.next] = ids, tokens
        self.next += 1

    def finish(self, name: int) -> None:
        """Ends a request, and frees pages that no other request has."""
        for page in self.batch.pop(name)[0]:
            self.held[page] -= 1
            if not self.held[page]:
                self.free.append(page)

    def step(self) -> None:
        """Lets all requests grow by a token, some finish and others arrive."""
        for name, (ids, tokens) in list(self.batch.items()):
            if tokens == self.most_pages * PAGE:
                self.finish(name)
            else:
                new = [self.free.pop()] if tokens % PAGE == 0 else []
                self.held[new] += 1
                self.batch[name] = ids + new, tokens + 1
        if self.batch and self.random.random() < 0.1:
            self.finish(list(self.batch)[self.random.integers(len(self.batch))])
        while len(self.batch) < self.rows and self.random.random() < 0.3:
            self.arrive()

    def made(self) -> Rows:
        """Returns the page ids and tokens of all requests."""
        return [(np.array(ids, np.int32), tokens) for ids, tokens in self.batch.values()]


def serve(device: torch.device, steps: int, *, named: bool, graphed: bool) -> None:
    """Compares random batches with a wrapper that plans on the host."""
    on_gpu = device.type == "cuda"
    rows, most_pages = (48, 128) if on_gpu else (4, 6)
    engine = Engine(1, rows, 2 * rows * most_pages, most_pages)
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (rows + 1, rows * most_pages, rows)]
    options = {"max_tokens": most_pages * PAGE, "by_request": True}
    wrapper = treegen.TreeAttentionWrapper(None, "NHD", graphed, False, *(buffers if graphed else []), **options)
    exact = treegen.TreeAttentionWrapper(None, "NHD", by_request=False)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    caches = torch.randn(LAYERS, 2 * rows * most_pages, 2, PAGE, KV_HEADS, HEAD_DIM, device=device).to(dtype)
    q = torch.randn(rows, HEADS, HEAD_DIM, device=device).to(dtype)
    out = torch.empty(LAYERS, *q.shape, device=device, dtype=dtype)
    graph, host_us = None, []
    for step in range(steps):
        for _ in range(rows // 2 if step == 0 else 1):
            engine.step()
        made = engine.made()
        ids: list[int | None] = list(engine.batch)
        if graphed:
            made, ids = made + [(np.empty(0, np.int32), 0)] * (rows - len(made)), ids + [None] * (rows - len(ids))
        table = table_of(made, device)
        host_table = [part.cpu() for part in table]
        shape = (HEADS, KV_HEADS, HEAD_DIM, PAGE)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        start = time.perf_counter()
        wrapper.plan(*table, *shape, q_data_type=dtype, request_ids=ids if named else None)
        host_us.append((time.perf_counter() - start) * 1e6)
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
        used = q[: len(made)]
        if graph is not None:
            graph.replay()
        else:
            for layer in range(LAYERS):
                wrapper.run(used, caches[layer], out=out[layer, : len(made)])
        if graphed and graph is None and on_gpu:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for layer in range(LAYERS):
                    wrapper.run(used, caches[layer], out=out[layer])
        exact.plan(*host_table, *shape, q_data_type=dtype)
        for layer in range(LAYERS):
            expected = exact.run(used, caches[layer])
            torch.testing.assert_close(out[layer, : len(made)], expected, rtol=2e-2, atol=2e-2)
    print(
        f"serve {steps} steps, ids {named}, graph {graphed}: plan {np.median(host_us[5:]):.0f} us of the host, ", end=""
    )
    print(f"90 % below {np.quantile(host_us[5:], 0.9):.0f} us; {wrapper.batch_kernel.counters()}")


def main() -> None:
    """Prints a line per check, and fails where one does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="decoding steps (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="torch device (default: %(default)s)")
    given = parser.parse_args()
    device = torch.device(given.device)
    find(device, "triton" if device.type == "cuda" else "torch")
    for named in (True, False):
        for graphed in (False, True):
            serve(device, given.steps, named=named, graphed=graphed)


if __name__ == "__main__":
    main()
