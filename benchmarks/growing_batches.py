"""Checks and times one captured graph over thousands of steps, in which requests grow and plans are swapped.

    python benchmarks/growing_batches.py [--steps 2000]

The engine writes page table and lengths on the device. `steps`: results of every 50th step are compared with float64
attention, and nothing waits, allocates or plans between swaps, which is counted. `fresh`: the graph's time over that of
a kernel whose plan was made for the same lengths. `late`: the wall time of a step with `refresh` after it, over that
without. `step kernels`: the launches that read page table and lengths, alone in a graph and in a row of 20.
"""

from __future__ import annotations

import argparse
import time
from statistics import mean

import numpy as np
import torch

import treegen
from treegen.backends.oracle import error
from treegen.backends.softmax import softmax
from treegen.tuning.timing import median_us

PAGE, REPEATS = 16, 15
SHAPE = treegen.Shape(32, 8, 128, dtype="bf16", page_size=PAGE)


class Server:
    """Requests on a device, whose table has all pages that they will need. Groups of `group` share a prompt."""

    def __init__(self, requests: int, group: int, prompt: int, own: int, grow: int, device: torch.device) -> None:
        self.rows, self.prompt, self.device = requests, prompt // PAGE * PAGE, device
        most = self.prompt + own + grow
        width, shared = -(-most // PAGE) + 1, self.prompt // PAGE
        pages = np.random.default_rng(0).permutation(requests * width).astype(np.int32).reshape(requests, width)
        pages[:, :shared] = pages[np.arange(requests) // group * group, :shared]
        self.table = torch.from_numpy(pages).to(device)
        self.lengths = torch.full((requests,), self.prompt + own, dtype=torch.int32, device=device)
        self.pages = treegen.PageTable(self.table, self.lengths, requests * width)
        generator = torch.Generator(device).manual_seed(0)
        sizes = SHAPE.cache_sizes(requests * width)
        made = [torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) for size in sizes]
        self.k_cache, self.v_cache = made
        self.q = torch.randn(requests, 32, 128, generator=generator, device=device, dtype=torch.bfloat16)
        self.batch = treegen.LiveBatch(page_size=PAGE)
        owners: list[int] = []
        for request in range(requests):
            owner = None if request % group == 0 else owners[request // group]
            seat = self.batch.add(self.prompt + own, owner, 0 if owner is None else self.prompt)
            if owner is None:
                owners.append(seat)
        self.max_tokens = most

    def kernel(self) -> treegen.BatchKernel:
        """Makes a kernel with a plan for the present lengths."""
        kernel = treegen.compile_batch(SHAPE, self.pages, max_tokens=self.max_tokens)
        kernel.update(self.batch)
        return kernel

    def error_of(self, out: torch.Tensor) -> float:
        """Compares some rows with float64 attention over their own pages."""
        worst = 0.0
        for row in range(0, self.rows, max(1, self.rows // 5)):
            length = int(self.lengths[row])
            place = torch.arange(length, device=self.device)
            page = self.table[row, place // PAGE].long()
            keys, values = (cache[page, place % PAGE].double() for cache in (self.k_cache, self.v_cache))
            query = self.q[row].double().view(8, 4, 128)
            weights, _ = softmax(torch.einsum("hgd,thd->hgt", query, keys) * 128**-0.5, -1)
            expected = torch.einsum("hgt,thd->hgd", weights, values).view(32, 128)
            worst = max(worst, error(out[row], expected))
        return worst


def captured(kernel: treegen.BatchKernel, server: Server, layers: int = 1) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Captures a step with this number of layers; returns it and the result that replays fill."""
    out = torch.empty_like(server.q)
    kernel.step()
    kernel(server.q, server.k_cache, server.v_cache, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.step()
        for _ in range(layers):
            kernel(server.q, server.k_cache, server.v_cache, out=out)
    return graph, out


def long_run(name: str, own: int, steps: int, swaps: int) -> None:
    """Replays a graph while requests grow; prints errors, counts, and its time over that of fresh plans."""
    device = torch.device("cuda")
    server = Server(64, 8, 2048, own, steps + 1, device)
    kernel = server.kernel()
    graph, out = captured(kernel, server)
    one = torch.ones_like(server.lengths)
    ratios, worst, plans = [], 0.0, kernel.counters()["plans"]
    allocations = 0
    swap_at = set(np.linspace(0, steps, swaps + 2).astype(int)[1:-1].tolist())
    for step in range(1, steps + 1):
        torch.cuda.set_sync_debug_mode("error")
        server.lengths += one
        server.batch.grow()
        if step in swap_at:
            kernel.update(server.batch)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        allocations += torch.cuda.memory_stats()["allocation.all.allocated"] - before
        torch.cuda.set_sync_debug_mode("default")
        if step % 50 == 0:
            worst = max(worst, server.error_of(out))
        if step % 200 == 0:
            made = server.kernel()  # which has to outlive its graph
            fresh, _ = captured(made, server)
            ratios.append(median_us(graph.replay, REPEATS) / median_us(fresh.replay, REPEATS))
    counters = kernel.counters()
    print(
        f"{name}: {steps} steps, error {worst:.1e}, swaps {counters['plans'] - plans}, rows alone "
        f"{counters['steps'] * 64 - counters['planned']}, allocations in replays {allocations}; "
        f"over fresh plans mean {mean(ratios):.3f}, worst {max(ratios):.3f}, last {ratios[-1]:.3f}"
    )
    assert worst < 1.5e-2


def late_steps(steps: int) -> None:
    """Prints the wall time of steps with and without `refresh`."""
    figures = {}
    for refreshes in (False, True, False, True):
        server = Server(64, 8, 2048, 100, steps + 1, torch.device("cuda"))
        kernel = server.kernel()
        graph, _ = captured(kernel, server, layers=32)
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            server.lengths += 1
            server.batch.grow()
            kernel.prepare(server.batch)
            graph.replay()
            if refreshes:
                kernel.refresh(server.batch)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e6)
        figures[refreshes, len(figures)] = np.percentile(times, [50, 99]).round(1).tolist()
    print("late: p50 and p99 us of steps, without and with refresh:", figures)


def step_kernels() -> None:
    """Prints the time of the step kernels."""
    device = torch.device("cuda")
    for name, requests, group, prompt, own in (
        ("256 that share 4,096", 256, 256, 4096, 16), ("256 of 13,000", 256, 1, 0, 13_000),
        ("4,096 of 1,024", 4096, 1, 0, 1024),
    ):  # fmt: skip
        rows = np.arange(requests * (-(-(prompt + own) // PAGE) + 2), dtype=np.int32).reshape(requests, -1)
        if group > 1:
            rows[:, : prompt // PAGE] = rows[0, : prompt // PAGE]
        table = torch.from_numpy(rows).to(device)
        lengths = torch.full((requests,), prompt + own, dtype=torch.int32, device=device)
        kernel = treegen.compile_batch(
            SHAPE, treegen.PageTable(table, lengths, table.numel()), max_tokens=prompt + own + 16
        )
        batch = treegen.LiveBatch(page_size=PAGE)
        first = batch.add(prompt + own)
        for _ in range(requests - 1):
            batch.add(prompt + own, first if group > 1 else None, prompt if group > 1 else 0)
        kernel.update(batch)
        kernel.step()
        kernel.step()
        torch.cuda.synchronize()
        times = []
        for count in (1, 20):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(count):
                    kernel.step()
            times.append(median_us(graph.replay, REPEATS) / count)
        empty = torch.cuda.CUDAGraph()
        with torch.cuda.graph(empty):
            lengths.zero_()
        lengths.fill_(prompt + own)
        fill = median_us(empty.replay, REPEATS)
        print(f"step kernels, {name}: alone {times[0]:.1f} us, each of 20 {times[1]:.1f}, a fill alone {fill:.1f}")


def main() -> None:
    """Runs all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="steps of the long runs")
    arguments = parser.parse_args()
    step_kernels()
    long_run("from 4,096 tokens, no swap", 4096, arguments.steps, 0)
    long_run("from 4,096 tokens, 10 swaps", 4096, arguments.steps, 10)
    long_run("from 100 tokens, 10 swaps", 100, arguments.steps, 10)
    late_steps(500)


if __name__ == "__main__":
    main()
