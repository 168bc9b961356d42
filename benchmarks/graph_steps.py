"""Checks the use of kernels in a server, step after step: graphs, compiled code, streams, memory.

    python benchmarks/graph_steps.py

(a) A CUDA graph of one call is replayed over 200 steps of a growing tree, with an update before each step, and compared
with an eager call of a new kernel. A tree beyond the capacity is refused, and the graph still works. (b) A call under
torch.compile(fullgraph=True) gives the results of an eager call, also after updates, and compiles once. (c) Two kernels
on two streams (on the CPU: threads) give right results, 1,000 times. (d) Over 1,000 steps neither host memory nor
device memory nor the host time of a step grows (on the CPU, where a step computes, its time is only printed). (e) A
kernel that is edited by `step`, `append`, `branch` and `prune` gives the results of a new kernel at every step.

Needs a CUDA device; `--device cpu` tries the logic of (b) to (e) with fewer steps. Prints a line per check, and exits
with 1 when one fails.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np
import torch

import treegen
from treegen import Shape, Tree
from treegen.backends import oracle
from treegen.ir.errors import InputError

ROWS, PROMPT, FIRST_TAIL = 64, 2000, 30
TRUNK = (ROWS, 500)  # the second tree: the same number of rows over another prompt
GROWTH_ALLOWED_MB = 64
SLOWER_ALLOWED = 1.5
"""The largest ratio of a late step's time to an early step's; late trees have many times the private tokens."""
ROOM = {"max_items": 4096, "max_slots": 8192}


class FailedCheckError(Exception):
    """A check failed."""


def growing(steps: int, prompt: int = PROMPT) -> Iterator[Tree]:
    """Yields a tree whose rows grow by a token per step. Node 0 is the prompt; tails have fixed ranges of KV slots."""
    for step in range(steps):
        tails = [FIRST_TAIL + step] * ROWS
        starts = [prompt + row * (FIRST_TAIL + steps) for row in range(ROWS)]
        slots = [range(prompt), *(range(start, start + tail) for start, tail in zip(starts, tails, strict=True))]
        runs = treegen.KVRuns.from_runs([prompt, *tails], [[(run.start, len(run))] for run in slots])
        yield Tree.from_parents([-1] + [0] * ROWS, [prompt, *tails], kv=runs)


def tensors(
    shape: Shape, rows: int, slots: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes standard-normal q and caches."""
    dtype = torch.float16 if shape.dtype == "fp16" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((rows, shape.num_qo_heads), (slots, shape.num_kv_heads), (slots, shape.num_kv_heads))
    q, k, v = (torch.randn(*s, shape.head_dim, device=device, dtype=dtype, generator=generator) for s in sizes)
    return q, k, v


def require(holds: bool, what: str) -> None:
    """Raises FailedCheckError unless the condition holds."""
    if not holds:
        raise FailedCheckError(what)


def check_graph(shape: Shape, device: torch.device, steps: int) -> str:
    """Checks (a), replays of a graph."""
    trees = list(growing(steps))
    slots = PROMPT + ROWS * (FIRST_TAIL + steps)
    most = 2 * ROWS
    q, k, v = tensors(shape, most, slots, device)
    equal, worst = 0, 0.0
    for strategy in ("auto", "deft-node", "cascade", treegen.strategies.cohort(split_shared_rows=2, merge="final")):
        kernel = treegen.compile(trees[0], strategy=strategy, shape=shape, max_rows=most, **ROOM)
        fixed_out = torch.full_like(q, 7)
        kernel(q, k, v, out=fixed_out)  # allocates, compiles
        fixed_out.fill_(7)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, lse = kernel(q, k, v, out=fixed_out, return_lse=True)
        for step, tree in enumerate(trees):
            kernel.update(tree)
            graph.replay()
            again = treegen.compile(tree, strategy=kernel.choice.strategy, shape=shape, max_rows=most)
            expected, expected_lse = again(q, k, v, return_lse=True)
            same = torch.equal(fixed_out[:ROWS], expected[:ROWS]) and torch.equal(lse[:ROWS], expected_lse[:ROWS])
            exact = treegen.compile(tree, strategy=kernel.choice.strategy, shape=shape)(q[:ROWS], k, v)
            error = oracle.error(fixed_out[:ROWS], exact)
            require(error < oracle.TOLERANCE[shape.dtype], f"{strategy}: step {step}: error {error:.1e}")
            same_classes = again.schedule.configs == kernel.schedule.configs
            require(same or not same_classes, f"{strategy}: step {step}: replay differs from an eager call")
            require(bool((fixed_out[ROWS:] == 7).all()), f"{strategy}: step {step}: surplus rows were written")
            equal, worst = equal + same, max(worst, error)
        before = fixed_out.clone()
        try:
            kernel.update(Tree.parse(f"1,{most + 1}/{PROMPT},3"))
        except InputError as error:
            require(error.argument == "max_rows", f"{strategy}: {error}")
        else:
            raise FailedCheckError(f"{strategy}: a tree beyond the capacity was taken")
        graph.replay()
        require(torch.equal(fixed_out, before), f"{strategy}: a refused tree changed the plan")
    return f"{4 * steps} replays, {equal} bit-equal to a fresh kernel of fixed capacity, error at most {worst:.1e}"


def check_compiled(shape: Shape, device: torch.device, steps: int) -> str:
    """Checks (b), compiled code."""
    from torch._dynamo.testing import CompileCounterWithBackend

    trees = list(growing(steps))
    kernel = treegen.compile(trees[0], shape=shape, max_rows=ROWS)
    q, k, v = tensors(shape, ROWS, PROMPT + ROWS * (FIRST_TAIL + steps), device)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    counter = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, backend=counter)
    def layer(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = kernel(q, k, v, return_lse=True)
        return out, lse + 1

    for step, tree in enumerate(trees):
        kernel.update(tree)
        expected, expected_lse = kernel(q, k, v, return_lse=True)
        out, lse = layer(q)
        require(torch.equal(out, expected) and torch.equal(lse, expected_lse + 1), f"step {step} differs from eager")
    require(counter.frame_count == 1, f"{counter.frame_count} graphs instead of 1")
    return f"{steps} steps by {backend}, one graph, equal to eager calls"


def check_streams(shape: Shape, device: torch.device, steps: int) -> str:
    """Checks (c), streams."""
    trees = (next(growing(1)), next(growing(1, TRUNK[1])))
    kernels = [treegen.compile(tree, strategy="deft-node", shape=shape) for tree in trees]
    inputs = [tensors(shape, ROWS, tree.kv.last_slot + 1, device) for tree in trees]
    expected = [kernel(*given) for kernel, given in zip(kernels, inputs, strict=True)]
    for tree, given, wanted in zip(trees, inputs, expected, strict=True):
        error = oracle.error(wanted, oracle.reference(tree, *given)[0])
        require(error < oracle.TOLERANCE[shape.dtype], f"error {error:.1e} before any overlap")
    wrong = torch.zeros(2, dtype=torch.int64, device=device)
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize()

    def serve(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()) if on_cuda else nullcontext():
            for _ in range(steps):
                wrong[index] += (kernels[index](*inputs[index]) != expected[index]).any()

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if on_cuda:
        torch.cuda.synchronize()
    require(not wrong.any(), f"wrong results, by stream: {wrong.tolist()}")
    return f"{steps} calls on each of two {'streams' if on_cuda else 'threads'}, all bits as expected"


def check_growth(shape: Shape, device: torch.device, steps: int) -> str:
    """Checks (d), memory and time."""
    q, k, v = tensors(shape, ROWS, PROMPT + ROWS * (FIRST_TAIL + steps), device)
    lines = []
    on_cuda = device.type == "cuda"
    tenth = max(1, steps // 10)
    for name, options in (("fixed", {"max_rows": ROWS, **ROOM}), ("exact", {})):
        times, memory, allocated = [], [], []
        kernel: treegen.Kernel | None = None
        out = torch.empty_like(q)
        for tree in growing(steps):
            begin = time.perf_counter()
            if kernel is None:
                kernel = treegen.compile(tree, strategy="deft-node", shape=shape, **options)
            else:
                kernel.update(tree)
            kernel(q, k, v, out=out)
            times.append(1e3 * (time.perf_counter() - begin))
            if on_cuda:
                torch.cuda.synchronize()
            memory.append(resident_mb())
            allocated.append(torch.cuda.memory_allocated() / 2**20 if on_cuda else 0.0)
        first, last = statistics.median(times[1 : tenth + 1]), statistics.median(times[-tenth:])
        grown, more = memory[-1] - memory[tenth], allocated[-1] - allocated[tenth]
        lines.append(f"{name}: {first:.2f} -> {last:.2f} ms a step, host {grown:+.1f} MB, device {more:+.2f} MB")
        require(grown < GROWTH_ALLOWED_MB, f"host memory grows: {lines[-1]}")
        # Exact tables grow with the tree; those of a fixed capacity do not.
        require(more <= (0 if options else 1), f"device memory grows: {lines[-1]}")
        require(not on_cuda or last < SLOWER_ALLOWED * first + 0.2, f"steps become slower: {lines[-1]}")
    return "; ".join(lines)


def check_live(shape: Shape, device: torch.device, steps: int) -> str:
    """Checks (e), edits."""
    random, most = np.random.default_rng(0), 2 * ROWS
    apart = 2 * steps + FIRST_TAIL
    q, k, v = tensors(shape, most, PROMPT + (ROWS + steps) * apart, device)
    worst = 0.0
    for strategy in ("deft-node", "cohort"):
        kernel = treegen.compile(next(growing(1)), strategy=strategy, shape=shape)
        free = kernel.tree.kv.last_slot + 1
        for _ in range(steps):
            rows, kind = kernel.tree.num_rows, random.random()
            if kind < 0.05 and rows < most:
                kernel.branch(int(random.integers(rows)), 2)
            elif kind < 0.1 and rows > 1:
                kernel.prune([int(random.integers(rows))])
            elif kind < 0.3:
                some = np.sort(random.permutation(rows)[: 1 + int(random.integers(rows))])
                kernel.append(some, 2, np.arange(free, free + 2 * len(some)).reshape(-1, 2))
                free += 2 * len(some)
            else:
                kernel.step(np.arange(free, free + rows))
                free += rows
            tree = kernel.tree
            fresh = treegen.compile(tree, strategy=strategy, shape=shape)(q[: tree.num_rows], k, v)
            error = oracle.error(kernel(q[: tree.num_rows], k, v), fresh)
            require(error < oracle.TOLERANCE[shape.dtype], f"{strategy}: error {error:.1e} at {tree.num_rows} rows")
            worst = max(worst, error)
        error = oracle.error(fresh, oracle.reference(tree, q[: tree.num_rows], k, v)[0])
        require(error < oracle.TOLERANCE[shape.dtype], f"{strategy}: error {error:.1e} of a fresh kernel")
    return f"{2 * steps} steps as a fresh kernel, error at most {worst:.1e}"


def resident_mb() -> float:
    """Returns the resident memory of this process in MB, or its peak so far where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    """Runs the checks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="device (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="steps of each check (default: 200, 20, 1000, 1000, 200; on cpu 10)")
    options = parser.parse_args()
    on_cuda = options.device == "cuda"
    if on_cuda and not torch.cuda.is_available():
        sys.exit("graph_steps needs a CUDA device; --device cpu tries (b) to (e)")
    device = torch.device(options.device)
    shape = Shape(32, 8, 128, dtype="fp16") if on_cuda else Shape(4, 2, 16, dtype="fp32")
    checks: list[tuple[str, Callable[[Shape, torch.device, int], str], int]] = [
        ("graph", check_graph, 200), ("compiled", check_compiled, 20),
        ("streams", check_streams, 1000), ("growth", check_growth, 1000), ("live", check_live, 200),
    ]  # fmt: skip
    failed = False
    for name, check, steps in checks if on_cuda else checks[1:]:
        try:
            result = check(shape, device, options.steps or (steps if on_cuda else 10))
        except FailedCheckError as failure:
            failed, result = True, f"FAILED: {failure}"
        print(f"{name:9} {result}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
