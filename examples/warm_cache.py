"""Fills the caches before a server starts: compiles kernels for a model, and measures policies for its trees.

    python examples/warm_cache.py

`treegen warm few-shot:prompt=2000,width=32,steps=256 --stride 16` does the same. It also takes trees of a running
server: write each to a file that ends in .jsonl, with `print(tree.to_json(), file=trace)`.
"""

import time

import treegen
from treegen.backends.devices import current_target, devices_of
from treegen.tuning.compile_pool import compile_all
from treegen.tuning.warm import jobs_of, kernel_summary, kernels_of, summary, warm
from treegen.workloads.specs import trees_of


def main() -> None:
    """Prints the work, and does it on a GPU."""
    shapes = [treegen.Shape(32, 8, 128, dtype="bf16")]
    target = current_target()
    trees = list(trees_of("few-shot:prompt=2000,width=32,steps=256", stride=16))
    kernels, jobs = kernels_of(shapes, target), jobs_of(trees, shapes, target)
    print(f"on {target.name}: {len(kernels)} kernels, and policies for {len(trees)} trees in {len(jobs)} buckets")
    devices = devices_of(target)
    if not devices:
        print("no GPU here: nothing is compiled or measured")
        return
    begin = time.perf_counter()
    compiled = compile_all(kernels, target)
    print(kernel_summary(compiled, time.perf_counter() - begin))
    begin = time.perf_counter()
    warmed = warm(jobs, target, devices)
    print(summary(warmed, time.perf_counter() - begin))


if __name__ == "__main__":
    main()
