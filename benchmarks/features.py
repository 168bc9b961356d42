"""Checks all options besides plain attention on the current device, and measures what they cost.

    python benchmarks/features.py [--rows 24] [--repeats 15] [--workers 8] [TREE ...]

Every option is compiled with several strategies for every tree, and some rows of its output are compared with the
float64 oracle. On a CUDA device its time is then compared with that of the plain kernel of the same strategy and tree
(medians on a cold L2 cache, treegen.tuning.timing). A second table compares fp8 caches with fp16 caches on trees that
memory bounds. Without a CUDA device the torch backend is checked, and nothing is timed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from statistics import geometric_mean
from typing import Any

import torch

import treegen
from treegen.backends import oracle
from treegen.backends.devices import default_device
from treegen.scoring.options import ScoreOptions
from treegen.tuning.kernel_meter import checked_rows
from treegen.tuning.timing import copy_gbps, median_us

TREES = ("1,64/4096,256", "1,4,16,512/1024,256,128,32", "1024*256")
BOUND_TREES = (
    "1,4,16,64,256,1024/256,8,256,64,32,256", "1,16,32,64,256,1024/256,128,64,16,16,16", "1,256/256,256",
    "1,64/4096,1024", "1,32/1024,4096", "4096*256",
)  # fmt: skip
SHARING_TREES = ("1,4,16,512/1024,256,128,32", "1,64,256/4000,200,50")
"""Trees whose shared KV takes most of the time; converting it costs more than reading its bytes."""
BOUND_US, BOUND_FRACTION = 75, 0.7
"""Memory bounds a tree if its floor in fp16 has at least this number of microseconds, and the fp16 kernel reaches at
least this fraction of the floor's rate."""
STRATEGIES = ("auto", "deft-node", "cohort")
BASE = treegen.Shape(32, 8, 128, dtype="fp16")


def by_head(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A score_mod that depends on all its arguments except b, without tensors."""
    return torch.where(kv_idx % 3 == 0, score * 0.5, score) - 0.01 * (q_idx - kv_idx) / (1 + h)


def strided(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A mask_mod that shows every fourth token, and the last hundred."""
    return (kv_idx % 4 == 0) | (q_idx - kv_idx < 100)


@dataclass(frozen=True)
class Feature:
    """A row of the first table: an attention shape, and options of treegen.compile.

    slopes, sinks, scales: whether tensors for these options are added.
    """

    name: str
    shape: treegen.Shape = BASE
    options: dict[str, Any] = field(default_factory=dict)
    slopes: bool = False
    sinks: bool = False
    scales: bool = False


FEATURES = (
    Feature("soft-cap", options={"logits_soft_cap": 5.0}),
    Feature("ALiBi", slopes=True),
    Feature("window 511", options={"window_left": 511}),
    Feature("sinks", sinks=True),
    Feature("score_mod", options={"score_mod": by_head}),
    Feature("mask_mod", options={"mask_mod": strided}),
    Feature("all of these", options={"logits_soft_cap": 5.0, "window_left": 511, "score_mod": by_head}, sinks=True),
    Feature("pages of 16, HND", replace(BASE, page_size=16, kv_layout="HND")),
    Feature("head dims 192, 128", replace(BASE, head_dim=192)),
    Feature("e4m3, scales", replace(BASE, kv_dtype="e4m3"), scales=True),
    Feature("e5m2", replace(BASE, kv_dtype="e5m2")),
    Feature("MLA", treegen.Shape(16, 1, 576, 512, dtype="bf16", shared_kv=True), {"sm_scale": 192**-0.5}),
    Feature("MLA 128 heads", treegen.Shape(128, 1, 576, 512, dtype="bf16", shared_kv=True), {"sm_scale": 192**-0.5}),
)


@dataclass(frozen=True)
class Tensors:
    """A tree's q and caches for a shape, and an output."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor

    @classmethod
    def of(cls, tree: treegen.Tree, shape: treegen.Shape, device: torch.device) -> Tensors:
        """Makes standard-normal tensors, always the same ones."""
        generator = torch.Generator(device).manual_seed(0)
        dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

        def normal(kind: str, *sizes: int) -> torch.Tensor:
            made = torch.randn(*sizes, generator=generator, device=device, dtype=dtypes[shape.dtype])
            return made.to(dtypes[kind])

        q = normal(shape.dtype, tree.num_rows, shape.num_qo_heads, shape.head_dim)
        sizes = shape.cache_sizes(-(-(tree.kv.last_slot + 1) // shape.page_size))
        k = normal(shape.kv_dtype, *sizes[0])
        v = k[..., : shape.head_dim_v] if shape.shared_kv else normal(shape.kv_dtype, *sizes[1])
        return cls(q, k, v, torch.empty(*q.shape[:2], shape.head_dim_v, dtype=q.dtype, device=device))


def options_of(feature: Feature, device: torch.device) -> dict[str, Any]:
    """Returns the options of a feature with its tensors."""
    heads, kv_heads = feature.shape.num_qo_heads, feature.shape.num_kv_heads
    options = dict(feature.options)
    if feature.slopes:
        options["alibi_slopes"] = torch.linspace(0.001, 0.1, heads, device=device)
    if feature.sinks:
        options["sinks"] = torch.linspace(-1, 4, heads, device=device)
    if feature.scales:
        options |= {"k_scale": torch.linspace(0.5, 1, kv_heads, device=device), "v_scale": 2.0}
    return options


def error_of(kernel: treegen.Kernel, tensors: Tensors, options: dict[str, Any], rows: int) -> float:
    """Returns the larger error of out and lse, on at most `rows` rows."""
    options, tree = dict(options), kernel.tree
    scale, k_scale, v_scale = (options.pop(name, None) for name in ("sm_scale", "k_scale", "v_scale"))
    chosen = checked_rows(tree, rows)
    out, lse = kernel(tensors.q, tensors.k, tensors.v, return_lse=True)
    given = oracle.OracleOptions(scale, kernel.shape.kv_layout, k_scale, v_scale, ScoreOptions(**options))
    expected = oracle.reference(tree, tensors.q, tensors.k, tensors.v, given, chosen)
    picked = torch.tensor(chosen.tolist(), device=out.device)
    return max(oracle.error(found[picked], wanted) for found, wanted in zip((out, lse), expected, strict=True))


def timed(kernel: treegen.Kernel, tensors: Tensors, repeats: int) -> float:
    """Returns the median time of a call in microseconds; NaN without a CUDA device."""
    if tensors.q.device.type != "cuda":
        return math.nan
    return median_us(lambda: kernel(tensors.q, tensors.k, tensors.v, out=tensors.out), repeats)


def kernels(feature: Feature, text: str, device: torch.device) -> Iterator[tuple[treegen.Kernel, treegen.Kernel]]:
    """Yields for every strategy the kernel with a feature, and the plain kernel to compare it with."""
    tree, options = treegen.Tree.parse(text), options_of(feature, device)
    for strategy in STRATEGIES:
        plain = treegen.compile(tree, strategy=strategy, shape=plain_shape(feature))
        yield treegen.compile(tree, strategy=strategy, shape=feature.shape, **options), plain


def plain_shape(feature: Feature) -> treegen.Shape:
    """Returns the shape of the plain kernel: the feature's own if that only has a scale, otherwise BASE."""
    return feature.shape if feature.options.get("sm_scale") else BASE


def bound_kernels(text: str) -> Iterator[treegen.Kernel]:
    """Yields the kernels of the second table, for fp16 and for e4m3 caches."""
    for kind in ("fp16", "e4m3"):
        yield treegen.compile(treegen.Tree.parse(text), shape=treegen.Shape(32, 32, 128, dtype="fp16", kv_dtype=kind))


def compile_kernels(task: tuple[int, str], device: torch.device) -> None:
    """Runs the kernels of a line of a table once to fill Triton's cache."""
    number, text = task
    made = (
        [one for pair in kernels(FEATURES[number], text, device) for one in pair]
        if number >= 0
        else bound_kernels(text)
    )
    for kernel in made:
        tensors = Tensors.of(kernel.tree, kernel.shape, device)
        kernel(tensors.q, tensors.k, tensors.v, out=tensors.out)


def features(trees: Sequence[str], rows: int, repeats: int, device: torch.device) -> Iterator[str]:
    """Yields a line for every feature and tree: the worst error over strategies, and times over plain kernels."""
    for feature in FEATURES:
        options, tolerance = options_of(feature, device), oracle.TOLERANCE[feature.shape.dtype]
        for text in trees:
            tree, errors, ratios = treegen.Tree.parse(text), [], []
            tensors, plain = Tensors.of(tree, feature.shape, device), Tensors.of(tree, plain_shape(feature), device)
            for kernel, base in kernels(feature, text, device):
                errors.append(error_of(kernel, tensors, options, rows))
                ratios.append(timed(kernel, tensors, repeats) / timed(base, plain, repeats))
            verdict = "right" if max(errors) <= tolerance else "WRONG"
            shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in zip(STRATEGIES, ratios, strict=True))
            times = f"; time over plain: {shown}" if device.type == "cuda" else ""
            yield f"{feature.name:20} {text:30} {verdict}, error {max(errors):.1e}{times}"


def halves(repeats: int, device: torch.device) -> Iterator[str]:
    """Yields a line for every tree: times of fp16 caches over fp8 caches, with 32 query and 32 KV heads.

    The last line has the mean over those of BOUND_TREES that memory bounds.
    """
    bound, gbps = [], copy_gbps()
    for text in (*BOUND_TREES, *SHARING_TREES):
        found, errors, floors = [], [], []
        for kernel in bound_kernels(text):
            tensors = Tensors.of(kernel.tree, kernel.shape, device)
            errors.append(error_of(kernel, tensors, {}, 8))
            found.append(timed(kernel, tensors, repeats))
            moved = kernel.tree.unique_tokens * kernel.shape.kv_token_bytes + 2 * tensors.q.nbytes
            floors.append(moved / (1e3 * gbps))
        fractions = [floor / taken for floor, taken in zip(floors, found, strict=True)]
        if text in BOUND_TREES and floors[0] >= BOUND_US and fractions[0] >= BOUND_FRACTION:
            bound.append(found[0] / found[1])
        verdict = "right" if max(errors) <= oracle.TOLERANCE["fp16"] else "WRONG"
        shown = (
            f"{kind} {taken:.1f} us ({fraction:.2f} of the floor)"
            for kind, taken, fraction in zip(("fp16", "e4m3"), found, fractions, strict=True)
        )
        yield f"{text:45} {verdict}, error {max(errors):.1e}; {', '.join(shown)}: {found[0] / found[1]:.2f}x"
    yield f"geometric mean over {len(bound)} that memory bounds: {geometric_mean(bound):.2f}x"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", nargs="*", default=TREES, help=f"trees (default: {' '.join(TREES)})")
    parser.add_argument("--rows", type=int, default=24, help="most rows to check by the oracle (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of a median (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile first (default: %(default)s)")
    given = parser.parse_args(arguments)
    device = default_device()
    if device.type == "cuda":
        tasks = [(number, text) for text in given.trees for number in range(len(FEATURES))]
        tasks += [(-1, text) for text in (*BOUND_TREES, *SHARING_TREES)]
        with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
            list(pool.map(partial(compile_kernels, device=device), tasks))
    for line in features(given.trees, given.rows, given.repeats, device):
        print(line, flush=True)
    if device.type == "cuda":
        for line in halves(given.repeats, device):
            print(line, flush=True)


if __name__ == "__main__":
    main()
