"""Compares treegen with FlexAttention and FlashInfer's masked prefill on token trees over long prefixes.

    python benchmarks/verification.py [--prefixes 1024,4096,16384,32768] [--heads 32:8] [--workers 8] FILE ...

FILE is JSON with `paths`, Medusa's child ranks. Every provider's output is checked against the float64 oracle, and then
timed in the same process on the current CUDA device: medians on a cold L2 cache (treegen.tuning.timing). For a provider
that is not available the reason is printed. Without a CUDA device nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean

import treegen
from treegen.backends import oracle
from treegen.backends.devices import default_device
from treegen.bench.flashinfer_peer import FlashInferDecode, FlashInferPrefill
from treegen.bench.providers import Provider, Treegen, UnavailableError
from treegen.bench.torch_peers import Flex
from treegen.tuning.kernel_meter import Case
from treegen.tuning.timing import median_us

PROVIDERS: tuple[Provider, ...] = (Treegen("auto"), Flex(), FlashInferPrefill(), FlashInferDecode())


def measured(provider: Provider, case: Case, repeats: int) -> tuple[str, float]:
    """Measures a provider on a case; returns a text, and the time in microseconds or NaN."""
    try:
        call = provider.prepare(case)
    except UnavailableError as reason:
        return f"{provider.name}: {reason}", math.nan
    error = case.error_of(call())
    if not error <= oracle.TOLERANCE[case.shape.dtype]:
        return f"{provider.name}: WRONG, error {error:.1e}", math.nan
    if case.q.device.type != "cuda":
        return f"{provider.name}: right, error {error:.1e}", math.nan
    time = median_us(call, repeats)
    return f"{provider.name} {time:.1f} us (error {error:.1e})", time


def cases(files: Sequence[str], prefixes: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yields every file with every prefix."""
    return ((name, prefix) for name in files for prefix in prefixes)


def case_of(name: str, prefix: int, shape: treegen.Shape) -> Case:
    """Makes the tensors of a file's token tree over a prefix."""
    paths = json.loads(Path(name).read_text())["paths"]
    return Case.of(treegen.Tree.from_token_tree(paths, prefix), shape, default_device())


def compile_kernels(task: tuple[str, int], shape: treegen.Shape) -> None:
    """Runs a case once to fill the caches of Triton and PyTorch."""
    case = case_of(*task, shape)
    for provider in PROVIDERS:
        measured(provider, case, 1)


def lines(files: Sequence[str], prefixes: Sequence[int], shape: treegen.Shape, repeats: int) -> Iterator[str]:
    """Yields a line for every tree, and lines with the geometric means of treegen's speed-ups."""
    gains: dict[str, list[float]] = {provider.name: [] for provider in PROVIDERS[1:]}
    for name, prefix in cases(files, prefixes):
        case = case_of(name, prefix, shape)
        texts, times = zip(*(measured(provider, case, repeats) for provider in PROVIDERS), strict=True)
        for provider, time in zip(PROVIDERS[1:], times[1:], strict=True):
            gains[provider.name].append(time / times[0])
        yield f"{case.tree.num_rows} tokens over {prefix}: {'; '.join(texts)}"
    for name, found in gains.items():
        there = [gain for gain in found if not math.isnan(gain)]
        if there:
            yield f"auto over {name}: {geometric_mean(there):.2f}x, least {min(there):.2f}x, {len(there)} cases"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", help="JSON files of token trees")
    parser.add_argument(
        "--prefixes", default="1024,4096,16384,32768", help="tokens of prefixes, with commas (default: %(default)s)"
    )
    parser.add_argument("--heads", default="32:8", help="query heads:KV heads (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of a median (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile first (default: %(default)s)")
    given = parser.parse_args(arguments)
    shape = treegen.Shape(*map(int, given.heads.split(":")), 128, dtype="fp16")
    prefixes = list(map(int, given.prefixes.split(",")))
    if default_device().type == "cuda":
        with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
            list(pool.map(partial(compile_kernels, shape=shape), cases(given.files, prefixes)))
    for line in lines(given.files, prefixes, shape, given.repeats):
        print(line, flush=True)


if __name__ == "__main__":
    main()
