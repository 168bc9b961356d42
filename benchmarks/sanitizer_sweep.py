"""A small sweep of kernel variants for compute-sanitizer.

    python benchmarks/sanitizer_sweep.py                                         # compiles, checks, repeats
    compute-sanitizer --tool memcheck python benchmarks/sanitizer_sweep.py
    compute-sanitizer --tool racecheck --kernel-name kns=partial_attention python benchmarks/sanitizer_sweep.py --small

Variants are masks, packed and gathered runs, pages, splits, both merges, merges in one launch, lists of work, bit
masks, and kernels with one loop and two. The sweep runs on the current CUDA device. Every output is checked against the
float64 oracle, and a second call has to give the same bits.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

import treegen
from treegen.ir.tree.kv import KVRuns
from treegen.strategies import cohort

TREES = ("40(5,7*3)", "600(40*6,9(3*5))")
STRATEGIES = (
    "query", "cascade", "deft-node-chunk", "deft-flatten", "fasttree", "flashforge", "specinfer",
    cohort(), cohort(head_rows=16), cohort(split=64), cohort(split_shared_rows=2),
    cohort(split_shared_rows=2, merge="final"),
    cohort(head_rows=16, split=128, split_shared_rows=2, merge="final"), cohort(split=512, merge="final"),
)  # fmt: skip
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def main() -> None:
    """Prints a line per format, and raises SystemExit: 1 when a result is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="run only the first tree, in fp16 (default: all)")
    small, wrong = parser.parse_args().small, 0
    for dtype, head_dim, page_size in (("fp16", 128, 1), ("bf16", 64, 16))[: 1 if small else None]:
        shape = treegen.Shape(8, 2, head_dim, dtype=dtype, page_size=page_size)
        worst, launches = 0.0, 0
        for text in TREES[: 1 if small else None]:
            tree = treegen.Tree.parse(text)
            counts = -(-tree.tokens.astype(np.int64) // page_size)
            pages = np.random.default_rng(0).permutation(int(counts.sum()))
            if page_size > 1:
                tree = tree.with_kv(KVRuns.from_pages(tree.tokens, np.split(pages, np.cumsum(counts))[:-1], page_size))
            room = (tree.kv.last_slot + 1,) if page_size == 1 else (len(pages), page_size)
            q = torch.randn(tree.num_rows, 8, head_dim, device="cuda", dtype=DTYPES[dtype])
            k, v = torch.randn(2, *room, 2, head_dim, device="cuda", dtype=DTYPES[dtype])
            for strategy in STRATEGIES:
                kernel = treegen.compile(tree, strategy=strategy, shape=shape)
                report = kernel.verify(q, k, v)
                same = torch.equal(kernel(q, k, v), kernel(q, k, v))
                worst, launches = max(worst, report.out_error), launches + kernel.schedule.launches
                if not (report.passed and same):
                    wrong += 1
                    bits = "the same" if same else "different"
                    print(f"{dtype} {text} {strategy}: {report}, {bits} bits in a second call")
        print(f"{dtype}, head dim {head_dim}, pages of {page_size}: {launches} launches, worst error {worst:.1e}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
