"""Runs every provider on every case. Outputs are checked before times are taken."""

from __future__ import annotations

import math
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from treegen.backends import oracle
from treegen.backends.devices import default_device
from treegen.bench.providers import Provider, TimedCall, UnavailableError
from treegen.bench.results import ProviderOutcome, Result
from treegen.codegen.compile_counter import expected_compiles
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.target.targets import Target
from treegen.tuning.kernel_meter import Case, Timer
from treegen.tuning.timing import graph_of, median_us
from treegen.tuning.worker import problem_of
from treegen.version import VERSION

PACKAGES = ("torch", "triton", "flashinfer-python")


@dataclass(frozen=True, slots=True)
class Timers:
    """How a call is timed.

    Args:
        eager: Times the call itself; None to leave this out.
        graph: Times the call's replay as a CUDA graph; None to leave this out.
    """

    eager: Timer | None
    graph: Timer | None


ON_DEVICE = Timers(median_us, median_us)
"""Timers for the current CUDA device."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How cases are measured.

    Args:
        repeats: Timed calls.
        rows: The most rows to compare with the oracle.
        gbps: The device's copy rate in GB/s, for the floors.
        timers: How a call is timed.
    """

    repeats: int
    rows: int
    gbps: float
    timers: Timers = ON_DEVICE


def run(
    trees: Iterable[tuple[str, Tree]],
    shapes: Sequence[Shape],
    providers: Sequence[Provider],
    target: Target,
    settings: RunSettings,
    on_case: Callable[[], None] = lambda: None,
) -> Iterator[Result]:
    """Measures all providers on every tree with every shape, and calls `on_case` after each case."""
    listed = list(trees)
    for shape in shapes:
        for name, tree in listed:
            result = run_case((name, tree), shape, providers, target, settings)
            on_case()
            yield result


def run_case(
    named: tuple[str, Tree], shape: Shape, providers: Sequence[Provider], target: Target, settings: RunSettings
) -> Result:
    """Measures all providers on a tree, which comes with its name."""
    case = Case.of(named[1], shape, default_device(), settings.rows)
    outcomes = (measure(provider, case, settings.repeats, settings.timers) for provider in providers)
    return result_of(named, shape, target, settings.gbps, outcomes)


def result_of(
    named: tuple[str, Tree], shape: Shape, target: Target, gbps: float, outcomes: Iterable[ProviderOutcome]
) -> Result:
    """Makes the result of a tree, which comes with its name. gbps: the device's copy rate in GB/s."""
    name, tree = named
    heads = f"{shape.num_qo_heads}/{shape.num_kv_heads}"
    facts = shape.head_dim, shape.dtype, shape.page_size, tree.num_rows, tree.unique_tokens
    return Result(name, heads, *facts, floor_us(tree, shape, target, gbps), tuple(outcomes))


def measure(provider: Provider, case: Case, repeats: int, timers: Timers) -> ProviderOutcome:
    """Prepares a provider for a case, checks its output, and takes its times if the output is right."""
    try:
        with expected_compiles():
            call = provider.prepare(case)
            first = call().clone()
            error = case.error_of(first)
            if not error <= oracle.TOLERANCE[case.shape.dtype]:
                return ProviderOutcome(provider.name, "wrong", error, detail=f"error {error:.1e}")
            repeatable = torch.equal(first, call())
        del first
        eager = None if timers.eager is None else timers.eager(call, repeats)
        graph, detail = _graph_us(call, case, repeats, timers)
        return ProviderOutcome(provider.name, "right", error, eager, graph, repeatable, detail)
    except UnavailableError as cause:
        return ProviderOutcome(provider.name, "unavailable", detail=str(cause))
    except Exception as cause:
        return ProviderOutcome(provider.name, "failed", detail=problem_of(cause))


def _graph_us(call: TimedCall, case: Case, repeats: int, timers: Timers) -> tuple[float | None, str]:
    """Checks and times a call's replay as a CUDA graph; returns microseconds, or None and the reason."""
    if timers.graph is None:
        return None, ""
    try:
        replay, out = graph_of(call)
        out.fill_(math.nan)
        replay()
        error = case.error_of(out)
        if not error <= oracle.TOLERANCE[case.shape.dtype]:
            return None, f"a replay of its CUDA graph is wrong: error {error:.1e}"
        return timers.graph(replay, repeats), ""
    except RuntimeError as cause:
        torch.cuda.synchronize()
        return None, f"no CUDA graph: {problem_of(cause)}"


def floor_us(tree: Tree, shape: Shape, target: Target, gbps: float) -> float:
    """Returns the microseconds to move all seen KV, q and out once, or for the arithmetic, whichever is longer.

    gbps: the device's copy rate in GB/s.
    """
    moved = tree.unique_tokens * shape.kv_token_bytes
    moved += tree.num_rows * shape.num_qo_heads * (shape.head_dim + shape.head_dim_v) * shape.dtype_bytes
    flops = tree.path_tokens * shape.num_qo_heads * 2 * (shape.head_dim + shape.head_dim_v)
    return max(moved / (gbps * 1e3), flops / (target.tensor_tflops * 1e6))


def checkout_commit() -> str:
    """Returns the commit of the checkout that runs, with `+` where files differ from it; empty outside of one."""
    root = Path(__file__).resolve().parent.parent.parent
    try:
        asked = [
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True)
            for words in (["rev-parse", "--show-prefix", "--short=12", "HEAD"], ["status", "--porcelain", "-uno"])
        ]
    except (OSError, subprocess.SubprocessError):
        return ""
    prefix, _, commit = asked[0].stdout.partition("\n")
    return "" if prefix else commit.strip() + ("+" if asked[1].stdout.strip() else "")


def machine(gbps: float) -> dict[str, object]:
    """Describes the machine: device, copy rate, versions of packages, the commit, and the command line."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": torch.cuda.get_device_name(),
        "copy_gbps": round(gbps),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "treegen": VERSION,
        **({"commit": commit} if (commit := checkout_commit()) else {}),
        **versions,
        "command": " ".join(["treegen", *sys.argv[1:]]),
    }
