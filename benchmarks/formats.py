"""What a number format, a head dim, a page size and a group size cost: measured times over those of fp16, head dim 128,
slots and 32:8 heads, scaled by the bytes that have to move.

    python benchmarks/formats.py [--tune] [TREE ...]

A ratio of 1 is a time that grows and shrinks as its bytes do. All runs are in one process on the current CUDA device:
medians on a cold L2 cache (treegen.tuning.timing), every output checked against the float64 oracle before it is timed.
Pages lie in random order. What a call takes whatever its bytes (launches, merges: some 15 us) makes ratios of shorter
work larger: these trees take 250 us and more.
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
    """A row of the table: an attention shape under a name."""

    name: str
    shape: treegen.Shape


FORMATS = (
    Format("bf16", replace(BASE, dtype="bf16", kv_dtype="bf16")),
    Format("head dim 64", replace(BASE, head_dim=64, head_dim_v=64)),
    Format("pages of 16", replace(BASE, page_size=16)),
    Format("28:4 heads", replace(BASE, num_qo_heads=28, num_kv_heads=4)),
)


def moved_bytes(tree: treegen.Tree, shape: treegen.Shape) -> int:
    """Bytes that any kernel has to move: K and V once, q and out."""
    rows = tree.num_rows * shape.num_qo_heads * (shape.head_dim + shape.head_dim_v) * shape.dtype_bytes
    return int(tree.tokens.sum()) * shape.kv_token_bytes + rows


def placed(tree: treegen.Tree, page_size: int) -> treegen.Tree:
    """The tree with its nodes in pages that lie in random order."""
    counts = -(-tree.tokens.astype(np.int64) // page_size)
    pages = np.random.default_rng(0).permutation(int(counts.sum()))
    return tree.with_kv(KVRuns.from_pages(tree.tokens, np.split(pages, np.cumsum(counts))[:-1], page_size))


def main() -> None:
    """Prints one line per tree and format."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", nargs="*", default=TREES)
    parser.add_argument("--repeats", type=int, default=15)
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
