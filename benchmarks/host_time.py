"""Host time of a call with `out` and known tensor forms, minus the host time of an empty Triton launch.

    python benchmarks/host_time.py

Times are medians of 1,000 calls, on the current CUDA device. The empty kernel is launched in the same run, in the same
direct way as treegen's kernels. Every few calls the benchmark waits for the device, outside of the timing, to keep the
queue short.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import triton

import treegen

CASES = (("1,64/256,32", "query"), ("1,2,64/8,256,32", "auto"), ("1,10/4000,400", "auto"), ("1,64/256,32", "deft-node"))
CALLS = 1000
BETWEEN_WAITS = 20


@triton.jit
def nothing() -> None:
    """An empty kernel."""


def median_us(call: Callable[[], object]) -> float:
    """Returns the median host time of a call in microseconds."""
    times = []
    for index in range(CALLS + BETWEEN_WAITS):
        if index % BETWEEN_WAITS == 0:
            torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    torch.cuda.synchronize()
    return statistics.median(times[BETWEEN_WAITS:]) / 1e3


def empty_launch() -> Callable[[], object]:
    """Compiles the empty kernel, and returns its launch. It asks for the current stream, as treegen's calls do."""
    from triton.runtime import driver

    run = nothing.warmup(grid=(1,))[(1, 1, 1)]
    current_stream = driver.active.get_current_stream
    return lambda: run(stream=current_stream(0))


def main() -> None:
    """Prints a line per case."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    empty = median_us(empty_launch())
    print(f"an empty launch: {empty:.1f} us")
    shape = treegen.Shape(32, 8, 128, dtype="fp16")
    for text, strategy in CASES:
        tree = treegen.Tree.parse(text)
        kernel = treegen.compile(tree, strategy=strategy, shape=shape)
        q = torch.randn(tree.num_rows, 32, 128, device="cuda", dtype=torch.float16)
        k, v = torch.randn(2, tree.kv.last_slot + 1, 8, 128, device="cuda", dtype=torch.float16)
        out = torch.empty_like(q)
        kernel(q, k, v, out=out)
        taken = median_us(lambda kernel=kernel, q=q, k=k, v=v, out=out: kernel(q, k, v, out=out))
        report = kernel.verify(q, k, v)
        print(
            f"{text} by {kernel.choice.strategy}, {kernel.schedule.launches} launches: {taken:.1f} us, "
            f"less an empty launch {taken - empty:.1f} us ({report})"
        )


if __name__ == "__main__":
    main()
