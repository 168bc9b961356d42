"""Compares the wrapper with plain attention over each request's own pages, for random page tables.

    python benchmarks/wrapper_sweep.py [--tables 500] [--device cuda]

Page tables are shared and unshared, ragged, with empty requests, and in both layouts. One wrapper plans all tables of a
page size, as in an engine. Every request's result is compared with float64 attention over the tokens in its own row of
the page table, without any tree. On a GPU, further tables, a quarter of the number, are then planned between replays of
one CUDA graph.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

import treegen
from treegen.backends import oracle

PAGE_SIZES = (1, 16, 32, 64)
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
MOST_PAGES = 400
GRAPH_REQUESTS, GRAPH_PAGES = 16, 2048
"""Requests of a batch that a graph serves, and the most entries of its page tables."""

PageTable = tuple[np.ndarray, np.ndarray, np.ndarray]


def page_table(random: np.random.Generator, page_size: int, count: int) -> PageTable:
    """Makes (kv_indptr, kv_indices, kv_last_page_len) of `count` requests, which often begin like an earlier one."""
    free = iter(random.permutation(MOST_PAGES).tolist())
    requests: list[list[int]] = []
    for _ in range(count):
        kind = random.random()
        begin: list[int] = []
        if requests and kind < 0.7:
            earlier = requests[int(random.integers(len(requests)))]
            begin = earlier[: int(random.integers(len(earlier) + 1))]
        own = [] if kind > 0.95 else [next(free) for _ in range(int(random.integers(0, 12)))]
        requests.append(begin + own)
    indptr = np.cumsum([0, *map(len, requests)])
    # A request that ends in a page has to see all of it if another request continues after this page.
    last = random.integers(1, page_size + 1, len(requests))
    inner = {page for pages in requests for page in pages[:-1]}
    full = [bool(pages) and pages[-1] in inner for pages in requests]
    last = np.where(full, page_size, last)
    return indptr, np.array([page for pages in requests for page in pages], np.int64), last


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: PageTable
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yields (request, out, base-2 lse) of every request with tokens, in float64."""
    indptr, indices, last = tables
    for request, (begin, end) in enumerate(pairwise(indptr.tolist())):
        if end > begin:
            pages = torch.from_numpy(indices[begin:end]).to(q.device)
            tokens = (end - begin - 1) * k.shape[1] + int(last[request])
            keys, values = (
                c[pages].flatten(0, 1)[:tokens].double().repeat_interleave(HEADS // KV_HEADS, 1) for c in (k, v)
            )
            scores = torch.einsum("hd,thd->ht", q[request].double(), keys) * HEAD_DIM**-0.5
            yield request, torch.einsum("ht,thd->hd", scores.softmax(1), values), scores.logsumexp(1) / np.log(2)


def errors(
    results: tuple[torch.Tensor, torch.Tensor], q: torch.Tensor, cache: torch.Tensor, tables: PageTable
) -> tuple[float, float]:
    """Returns the largest errors of out and lse; infinity where a request without tokens is not 0 and -inf."""
    out, lse = results
    worst, worst_lse, empty = 0.0, 0.0, torch.ones(len(q), dtype=torch.bool, device=q.device)
    for request, own, own_lse in expected(q, cache[0], cache[1], tables):
        empty[request] = False
        worst = max(worst, oracle.error(out[request], own))
        worst_lse = max(worst_lse, oracle.error(lse[request], own_lse))
    if bool(out[empty].any()) or bool((lse[empty] != -np.inf).any()):
        return np.inf, np.inf
    return worst, worst_lse


def replayed(random: np.random.Generator, cache: torch.Tensor, page_size: int, count: int) -> tuple[float, float]:
    """Returns the largest errors over `count` page tables that are planned between replays of one graph."""
    sizes = GRAPH_REQUESTS + 1, GRAPH_PAGES, GRAPH_REQUESTS
    buffers = (torch.empty(size, dtype=torch.int32, device=cache.device) for size in sizes)
    wrapper = treegen.TreeAttentionWrapper(None, "NHD", True, False, *buffers)
    q = torch.randn(GRAPH_REQUESTS, HEADS, HEAD_DIM, device=cache.device).half()
    graph, results, worst = torch.cuda.CUDAGraph(), None, (0.0, 0.0)
    for _ in range(count):
        tables = page_table(random, page_size, GRAPH_REQUESTS)
        wrapper.plan(*tables, HEADS, KV_HEADS, HEAD_DIM, page_size, q_data_type=torch.float16)
        if results is None:
            wrapper.run_return_lse(q, tuple(cache))  # compiles
            with torch.cuda.graph(graph):
                results = wrapper.run_return_lse(q, tuple(cache))
        q.copy_(torch.randn_like(q))
        graph.replay()
        found = errors(results, q, cache, tables)
        worst = max(worst[0], found[0]), max(worst[1], found[1])
    return worst


def main() -> None:
    """Prints a line per page size, and raises SystemExit: 1 when a result is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", type=int, default=500, help="page tables of all sizes (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="torch device (default: %(default)s)")
    arguments = parser.parse_args()
    random, limit, wrong = np.random.default_rng(0), oracle.TOLERANCE["fp16"], False
    for page_size in PAGE_SIZES:
        worst, worst_lse, planning = 0.0, 0.0, 0.0
        count = -(-arguments.tables // len(PAGE_SIZES))
        layouts = {layout: treegen.TreeAttentionWrapper(kv_layout=layout) for layout in ("NHD", "HND")}
        cache = torch.randn(2, MOST_PAGES, page_size, KV_HEADS, HEAD_DIM, device=arguments.device).half()
        before = None
        for number in range(count):
            tables = page_table(random, page_size, int(random.integers(1, 24)))
            layout = ("NHD", "HND")[number % 2]
            begin = time.perf_counter()
            layouts[layout].plan(*tables, HEADS, KV_HEADS, HEAD_DIM, page_size, q_data_type=torch.float16)
            planning += time.perf_counter() - begin
            q = torch.randn(len(tables[2]), HEADS, HEAD_DIM, device=arguments.device).half()
            pages = tuple(c if layout == "NHD" else c.transpose(1, 2) for c in cache)
            found = errors(layouts[layout].run_return_lse(q, pages), q, cache, tables)
            worst, worst_lse = max(worst, found[0]), max(worst_lse, found[1])
            if number == 3:
                before = treegen.kernel_counts()
        wrong |= not max(worst, worst_lse) <= limit
        loaded = treegen.kernel_counts().loaded - (before.loaded if before else 0)
        print(
            f"pages of {page_size:2}: {count} tables, worst error {worst:.1e}, lse {worst_lse:.1e}; "
            f"plan() {1e3 * planning / count:.2f} ms on average, {loaded} kernels loaded after the fourth table",
            flush=True,
        )
        if cache.is_cuda:
            worst, worst_lse = replayed(random, cache, page_size, -(-count // 4))
            wrong |= not max(worst, worst_lse) <= limit
            print(f"  replays of one graph: {-(-count // 4)} tables, worst error {worst:.1e}, lse {worst_lse:.1e}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
