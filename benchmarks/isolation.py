"""Checks that rows of isolated kernels do not depend on values of other requests, and measures what isolation costs.

    python benchmarks/isolation.py [--trees 12] [--repeats 15] [TREE ...]

For random trees in random pages, every format and every way to hide tokens: the bits of a row's out and lse are
compared before and after K and V of all tokens that the row does not see are overwritten with infinity, and with NaN.
Outputs are checked against the float64 oracle. Then trees are timed without isolation and with it, plain and with a
window: medians on a cold L2 cache (treegen.tuning.timing). Without a CUDA device the torch backend is checked, and
nothing is timed. Exits with 1 when a row changes or an output is wrong.
"""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from typing import Any

import numpy as np
import torch

import treegen
from treegen.backends.check_inputs import KV_TORCH_DTYPES, TORCH_DTYPES
from treegen.backends.devices import default_device
from treegen.codegen.compile_counter import expected_compiles
from treegen.tuning.timing import median_us
from treegen.workloads.generate import in_shuffled_pages

TREES = (
    "1,4,16,512/1024,256,128,32",
    "1,10/4000,400",
    "1,4,16,64,256,1024/256,8,256,64,32,256",
    "64*1024",
)
SHAPES = (
    treegen.Shape(32, 8, 128, dtype="fp16"),
    treegen.Shape(8, 1, 128, dtype="bf16", page_size=16),
    treegen.Shape(8, 8, 64, dtype="bf16"),
    treegen.Shape(32, 8, 128, dtype="bf16", kv_dtype="e4m3"),
    treegen.Shape(16, 1, 576, 512, dtype="bf16", shared_kv=True),
)
STRATEGIES = ("auto", "cohort", "deft-node", "query")
MOST_NODES, MOST_TOKENS = 24, 200


def odd(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A mask_mod that shows two tokens of three, depending on the row, and a row's own token."""
    return (kv_idx % 3 != b % 3) | (kv_idx == q_idx)


def hidden(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A score_mod that hides the same tokens."""
    return torch.where(odd(b, h, q_idx, kv_idx), score * 0.5, -math.inf)


WINDOW = 50
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": WINDOW},
    "mask_mod": {"mask_mod": odd},
    "score_mod": {"score_mod": hidden},
}


def random_tree(seed: int, page_size: int) -> treegen.Tree:
    """Makes a forest with its KV in shuffled pages."""
    source = np.random.default_rng(seed)
    nodes = int(source.integers(1, MOST_NODES))
    parents = [int(source.integers(-1, node)) if node else -1 for node in range(nodes)]
    return in_shuffled_pages(
        treegen.Tree.from_parents(parents, source.integers(1, MOST_TOKENS, nodes)), max(page_size, 8)
    )


def tensors(tree: treegen.Tree, shape: treegen.Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes standard-normal q and caches, with KV slots up to the tree's last."""
    device, pages = default_device(), -(-(tree.kv.last_slot + 1) // shape.page_size)
    q = torch.randn(tree.num_rows, shape.num_qo_heads, shape.head_dim, device=device).to(TORCH_DTYPES[shape.dtype])
    k, v = (torch.randn(size, device=device).to(KV_TORCH_DTYPES[shape.kv_dtype]) for size in shape.cache_sizes(pages))
    return q, k, k[..., : shape.head_dim_v] if shape.shared_kv else v


def unseen(tree: treegen.Tree, row: int, name: str, slots: int) -> torch.Tensor:
    """Returns a mask of the KV slots of tokens that a row does not see."""
    own = torch.from_numpy(tree.slots(row).astype(np.int64))
    place, last = torch.arange(len(own)), len(own) - 1
    if name == "window":
        own = own[last - place <= WINDOW]
    elif name != "plain":
        own = own[(place % 3 != row % 3) | (place == last)]
    others = torch.ones(slots, dtype=torch.bool)
    others[own] = False
    return others.to(default_device())


def keeps(kernel: treegen.Kernel, inputs: tuple[torch.Tensor, ...], row: int, name: str) -> bool:
    """Returns whether a row keeps its bits when infinity and NaN are written to tokens that it does not see."""
    q, k, v = inputs
    out, lse = kernel(q, k, v, return_lse=True)
    kept = True
    for value in (math.inf, math.nan):
        caches = []
        for cache in (k,) if kernel.shape.shared_kv else (k, v):
            poisoned, poison = cache.clone(), torch.tensor(value, device=cache.device).to(cache.dtype)
            flat = poisoned.view(-1, *cache.shape[-2:])
            if cache.element_size() == 1:  # PyTorch cannot fill fp8 by a mask
                flat, poison = flat.view(torch.uint8), poison.view(torch.uint8)
            flat[unseen(kernel.tree, row, name, len(flat))] = poison
            caches.append(poisoned)
        other = caches[-1][..., : kernel.shape.head_dim_v]
        found = kernel(q, caches[0], other, return_lse=True)
        kept = kept and torch.equal(found[0][row], out[row]) and torch.equal(found[1][row], lse[row])
    return kept


def check(shape: treegen.Shape, name: str, trees: int) -> bool:
    """Checks a format with a way to hide tokens, and prints a line."""
    compared, changed, wrong, worst = 0, 0, 0, 0.0
    for seed in range(trees):
        tree = random_tree(seed, shape.page_size)
        inputs = tensors(tree, shape)
        strategy = STRATEGIES[seed % len(STRATEGIES)]
        with expected_compiles():
            kernel = treegen.compile(tree, strategy=strategy, shape=shape, isolated=True, **OPTIONS[name])
            report = kernel.verify(*inputs)
            for row in {0, tree.num_rows // 2, tree.num_rows - 1}:
                compared += 1
                changed += not keeps(kernel, inputs, row, name)
        wrong, worst = wrong + (not report), max(worst, report.out_error)
    print(
        f"{shape}, {name}: {trees} trees, {compared} rows, {changed} change, {wrong} wrong, error {worst:.1e}",
        flush=True,
    )
    return not changed and not wrong


def time_tree(text: str, repeats: int) -> None:
    """Prints a tree's times without isolation and with it."""
    shape, times = SHAPES[0], []
    tree = treegen.Tree.parse(text)
    q, k, v = tensors(tree, shape)
    out = torch.empty_like(q)
    for options in ({}, {"window_left": 512}):
        for isolated in (False, True):
            kernel = treegen.compile(tree, shape=shape, isolated=isolated, **options)
            with expected_compiles():
                assert kernel.verify(q, k, v)
                times.append((median_us(partial(kernel, q, k, v, out=out), repeats), kernel.choice.strategy))
    (plain, _), (alone, chosen), (window, _), (both, _) = times
    print(
        f"{text}: {plain:.1f} us, isolated {alone:.1f} us ({alone / plain:.2f}x, {chosen}); "
        f"window of 512 {window:.1f} us, isolated {both:.1f} us ({both / window:.2f}x)",
        flush=True,
    )


def main() -> None:
    """Prints a line per check, and a line per tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "texts", nargs="*", default=TREES, metavar="TREE", help=f"trees to time (default: {' '.join(TREES)})"
    )
    parser.add_argument("--trees", type=int, default=12, help="random trees of each check (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of a median (default: %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    right = [check(shape, name, arguments.trees) for shape in SHAPES for name in OPTIONS]
    if torch.cuda.is_available():
        for text in arguments.texts:
            time_tree(text, arguments.repeats)
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
