"""The cost of an element type, a head dim, a page size and a group size, per byte that has to move.

    python benchmarks/formats.py [--tune] [TREE ...]

A ratio is a measured time over that of fp16, head dim 128, a page size of 1 and 32:8 heads, divided by the ratio of
their bytes: 1 is a time in proportion to its bytes. All runs are in one process on the current CUDA device. Times are
medians on a cold L2 cache (treegen.tuning.timing), and every output is checked against the float64 oracle before it is
timed. Pages are in random order. The fixed time of a call (launches and merges, some 15 us) makes ratios of short work
larger, so these trees take 250 us and more.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

import numpy as np

import treegen
from treegen.backends.devices import current_target
from treegen.ir.tree.kv import KVRuns
from treegen.strategies import strategy_from
from treegen.target.problem import Problem
from treegen.tuning.kernel_meter import KernelMeter
from treegen.tuning.tune import tuned

TREES = (
    "1,4,16,64,256,1024/256,8,256,64,32,256",
    "1,16,64,256/2048,1024,1024,1024",
    "1,4,16,512/1024,256,128,512",
    "64(16384*4)*4",
    "256*4096",
)
BASE = treegen.Shape(32, 8, 128, dtype="fp16")


@dataclass(frozen=True)
class Format:
    """A row of the table: an attention shape with a name."""

    name: str
    shape: treegen.Shape


FORMATS = (
    Format("bf16", replace(BASE, dtype="bf16", kv_dtype="bf16")),
    Format("head dim 64", replace(BASE, head_dim=64, head_dim_v=64)),
    Format("pages of 16", replace(BASE, page_size=16)),
    Format("28:4 heads", replace(BASE, num_qo_heads=28, num_kv_heads=4)),
)


def moved_bytes(tree: treegen.Tree, shape: treegen.Shape) -> int:
    """Returns the bytes that every kernel has to move: K and V once, q and out."""
    rows = tree.num_rows * shape.num_qo_heads * (shape.head_dim + shape.head_dim_v) * shape.dtype_bytes
    return int(tree.tokens.sum()) * shape.kv_token_bytes + rows


def placed(tree: treegen.Tree, page_size: int) -> treegen.Tree:
    """Moves the KV of a tree to pages in random order."""
    counts = -(-tree.tokens.astype(np.int64) // page_size)
    pages = np.random.default_rng(0).permutation(int(counts.sum()))
    return tree.with_kv(KVRuns.from_pages(tree.tokens, np.split(pages, np.cumsum(counts))[:-1], page_size))


def main() -> None:
    """Prints a line per tree and format."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", nargs="*", default=TREES, help=f"trees (default: {' '.join(TREES)})")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of a median (default: %(default)s)")
    parser.add_argument("--tune", action="store_true", help="measure candidates first, as compile(autotune=True) does")
    arguments = parser.parse_args()
    meter, target, auto = KernelMeter(arguments.repeats), current_target(), strategy_from("auto")
    ratios: dict[str, list[float]] = {form.name: [] for form in FORMATS}

    def measured(tree: treegen.Tree, shape: treegen.Shape) -> tuple[float, float]:
        if arguments.tune:
            tuned(Problem(tree, shape, target))
        microseconds, error = meter(Problem(tree, shape, target), auto)
        return microseconds or math.nan, error

    for text in arguments.trees:
        tree = treegen.Tree.parse(text)
        base_us, base_error = measured(tree, BASE)
        print(f"{text}: fp16, head dim 128, 32:8 heads {base_us:.1f} us, error {base_error:.1e}")
        for form in FORMATS:
            own = tree if form.shape.page_size == 1 else placed(tree, form.shape.page_size)
            microseconds, error = measured(own, form.shape)
            scale = moved_bytes(tree, form.shape) / moved_bytes(tree, BASE)
            ratio = microseconds / (scale * base_us)
            ratios[form.name].append(ratio)
            print(f"  {form.name:12} {microseconds:8.1f} us, bytes x {scale:.3f}: ratio {ratio:.3f}, error {error:.1e}")
    print("worst ratios: " + ", ".join(f"{name} {max(found):.3f}" for name, found in ratios.items()))


if __name__ == "__main__":
    main()
