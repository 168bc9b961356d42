"""Measures every strategy on every tree of a table on the current CUDA device: errors and times.

    python benchmarks/measured_cases.py fasttree_kernel_bench.json reasoning_*.json --json result.json

Arguments are tables of level trees (`{"trees": [{"nodes_per_level", "tokens_per_node"}], "heads": [[qo, kv], ...]}`),
speculative token trees (`{"paths": [...]}`), or files of reasoning templates. Of templates, some are measured in the
middle of their decoding. Errors are those against the float64 oracle. A time is the median of `--repeats` calls on a
cold L2 cache, without the host's launch time (treegen.tuning.timing).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

import treegen
from treegen.backends import oracle
from treegen.strategies import Strategy, cohort, strategy_from, strategy_names
from treegen.tuning.timing import median_us
from treegen.workloads.recorded_decodings import load_templates

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
USUAL_HEADS = (32, 8)
SPECULATIVE_PREFIXES = (1000, 8000)
HEAD_DIM = 128
SLOW_MICROSECONDS = 5000
"""Calls that take longer are timed only three times."""


@dataclass(frozen=True)
class Case:
    """A tree with a setting of heads: (query heads, KV heads)."""

    name: str
    tree: treegen.Tree
    heads: tuple[int, int]


@dataclass(frozen=True)
class Result:
    """A strategy on a case. Errors are relative to the oracle's largest value."""

    case: str
    heads: str
    dtype: str
    strategy: str
    out_error: float
    lse_error: float
    passed: bool
    repeatable: bool
    microseconds: float
    launches: int


def cases(paths: list[Path], reasoning_trees: int) -> Iterator[Case]:
    """Yields the cases of all files."""
    templates = []
    for path in paths:
        table = json.loads(path.read_text())
        if isinstance(table, dict) and "paths" in table:
            for prefix in SPECULATIVE_PREFIXES:
                tree = treegen.Tree.from_token_tree(table["paths"], prefix)
                yield Case(f"{path.stem} over {prefix}", tree, USUAL_HEADS)
        elif isinstance(table, dict):
            for heads in table["heads"]:
                for entry in table["trees"]:
                    tree = treegen.Tree.from_levels(entry["nodes_per_level"], entry["tokens_per_node"])
                    yield Case(tree.text or "", tree, (heads[0], heads[1]))
        else:
            listed = load_templates(path)
            templates += [(f"{path.stem}#{index}", listed[index]) for index in range(0, len(listed), 5)]
    for name, template in templates[:: max(1, len(templates) // reasoning_trees)][:reasoning_trees]:
        yield Case(name, template.at(template.middle), USUAL_HEADS)


def measured_strategies() -> list[Strategy]:
    """Returns all registered strategies except `auto`, and path cohorts with other options."""
    variants = (cohort(head_rows=32), cohort(head_rows=16), cohort(split=512), cohort(split=1024))
    return [*map(strategy_from, strategy_names()), *variants]


def label(strategy: Strategy) -> str:
    """Returns the name of a strategy with default options, or the text of one with other options."""
    return strategy.name if strategy == strategy_from(strategy.name) else str(strategy)


def inputs(case: Case, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes standard-normal q, k and v for a case."""
    heads, kv_heads = case.heads
    generator = torch.Generator("cuda").manual_seed(0)
    slots = case.tree.kv.last_slot + 1
    shapes = ((case.tree.num_rows, heads, HEAD_DIM), (slots, kv_heads, HEAD_DIM), (slots, kv_heads, HEAD_DIM))
    q, k, v = (
        torch.randn(s, generator=generator, device="cuda", dtype=torch.float32).to(DTYPES[dtype]) for s in shapes
    )
    return q, k, v


def measure(case: Case, dtype: str, repeats: int) -> list[Result]:
    """Measures all strategies on a case with an element type."""
    q, k, v = inputs(case, dtype)
    expected_out, expected_lse = oracle.reference(case.tree, q, k, v)
    results = []
    for strategy in (*measured_strategies(), "auto"):
        kernel = treegen.compile(case.tree, strategy=strategy)
        out, lse = kernel(q, k, v, return_lse=True)
        again = kernel(q, k, v)
        errors = oracle.error(out, expected_out), oracle.error(lse, expected_lse)
        time_us = median_us(lambda kernel=kernel, out=out: kernel(q, k, v, out=out), 3)
        if time_us < SLOW_MICROSECONDS:
            time_us = median_us(lambda kernel=kernel, out=out: kernel(q, k, v, out=out), repeats)
        name = f"auto: {kernel.choice.strategy}" if strategy == "auto" else label(strategy)
        results.append(
            Result(
                case.name,
                f"{case.heads[0]}/{case.heads[1]}",
                dtype,
                name,
                *errors,
                max(errors) <= oracle.TOLERANCE[dtype],
                torch.equal(out, again),
                time_us,
                kernel.schedule.launches,
            )
        )
    return results


def compile_kernels(argument: tuple[tuple[int, int], str, str]) -> None:
    """Runs small trees of every kind to fill Triton's cache."""
    heads, dtype, strategy = argument
    for text in ("1,16/100,3", "1,2/100,100", "1,64/100,100", "100*3", "3*3"):
        case = Case(text, treegen.Tree.parse(text), heads)
        treegen.compile(case.tree, strategy=strategy)(*inputs(case, dtype))


def main() -> None:
    """Measures, prints a line per case, and writes all results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="JSON files of trees")
    parser.add_argument("--json", type=Path, help="write all results to this file (default: not written)")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of a median (default: %(default)s)")
    parser.add_argument("--reasoning-trees", type=int, default=20, help="most templates to measure (default: 20)")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile first (default: %(default)s)")
    arguments = parser.parse_args()

    listed = list(cases(arguments.files, arguments.reasoning_trees))
    settings = {case.heads for case in listed}
    jobs = [(heads, dtype, name) for heads in sorted(settings) for dtype in DTYPES for name in strategy_names()]
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_kernels, jobs))
    results = [r for case in listed for dtype in DTYPES for r in measure(case, dtype, arguments.repeats)]
    if arguments.json:
        device = torch.cuda.get_device_name()
        arguments.json.write_text(
            json.dumps(
                {"device": device, "torch": torch.__version__, "results": [asdict(r) for r in results]}, indent=1
            )
        )
    names = [*map(label, measured_strategies()), "auto"]
    titles = (name.replace("head_rows=", "").replace("split=", "/") for name in names)
    print(f"{'tree':44} {'heads':6}{'type':5}" + "".join(f"{title:>16}" for title in titles) + "  worst error")
    for begin in range(0, len(results), len(names)):
        row = results[begin : begin + len(names)]
        marks = ["" if r.passed and r.repeatable else "!" for r in row]
        times = "".join(f"{mark + format(r.microseconds, '.1f'):>16}" for mark, r in zip(marks, row, strict=True))
        worst = max(max(r.out_error, r.lse_error) for r in row)
        print(f"{row[0].case[:43]:44} {row[0].heads:6}{row[0].dtype:5}{times}  {worst:.1e}  {row[-1].strategy}")
    wrong = [r for r in results if not (r.passed and r.repeatable)]
    print(f"{len(results)} results, {len(wrong)} wrong or not repeatable")


if __name__ == "__main__":
    main()
