"""Host time of planning for the next step of a batch, which an engine waits for before it launches.

    python benchmarks/replan.py [--json]

Times are medians in microseconds, on one core:

- for a new tree, by the best weighed policy and by other cohorts: `plan` (the strategy), `lower`, `pack` (the arena,
  which is copied to the GPU), and the whole sequence;
- for the tree's rows as requests with pages of 16 tokens, with pages and requests in order or shuffled: the trees
  `from_page_table` and `from_block_table`, the way from the page table to the arena by the best weighed policy
  (`arena`), TreeAttentionWrapper.plan (`wrapper`), and FlashInfer's own plan for its decode kernel (`flashinfer`, where
  that can be imported and there is a GPU).

Plans for running batches are timed by batch_plans.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from treegen import Shape, Tree
from treegen.api.wrapper import TreeAttentionWrapper
from treegen.schedule.lower import lower
from treegen.search.weigh import weighed
from treegen.strategies import Strategy, cohort
from treegen.target.problem import Problem
from treegen.target.targets import Target, target_from

TREES = ("1,256/256,32", "1,4,16,64,256,1024/256,8,256,64,32,256")
PAGE_SIZE = 16
SHAPE = Shape(32, 8, 128, dtype="fp16")
REPEATS = 201
WORKSPACE_BYTES = 128 << 20
"""FlashInfer's recommended size."""


@dataclass(frozen=True)
class Timing:
    """Median microseconds of several steps for one case."""

    case: str
    microseconds: dict[str, float]

    def __str__(self) -> str:
        return f"{self.case}: {', '.join(f'{what} {taken:.0f}' for what, taken in self.microseconds.items())} us"


def median_us(calls: Iterable[Callable[[], object]]) -> float:
    """Returns the median time of calls in microseconds. Each is made once, while the GPU is idle."""
    times = []
    for call in calls:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3


def repeated_us(call: Callable[[], object]) -> float:
    """Returns the median time of a call in microseconds, after a first call."""
    call()
    return median_us([call] * REPEATS)


def arena(tree: Tree, strategy: Strategy, target: Target) -> object:
    """Makes the arena of a tree, which is copied to the GPU."""
    return lower(strategy.plan(Problem(tree, SHAPE, target)), Problem(tree, SHAPE, target)).pack()


def of_tree(text: str, strategy: Strategy, target: Target) -> Timing:
    """Times planning for new copies of a tree."""
    trees = [Tree.parse(text) for _ in range(REPEATS)]
    plans = [strategy.plan(Problem(tree, SHAPE, target)) for tree in trees]
    schedules = [lower(plan, Problem(tree, SHAPE, target)) for plan, tree in zip(plans, trees, strict=True)]
    fresh = [[Tree.parse(text) for _ in range(REPEATS)] for _ in range(2)]
    calls: dict[str, list[Callable[[], object]]] = {
        "plan": [partial(strategy.plan, Problem(tree, SHAPE, target)) for tree in fresh[0]],
        "lower": [partial(lower, plan, Problem(tree, SHAPE, target)) for plan, tree in zip(plans, trees, strict=True)],
        "pack": [schedule.pack for schedule in schedules],
        "whole": [partial(arena, tree, strategy, target) for tree in fresh[1]],
    }
    return Timing(f"{text} by {strategy}", {part: median_us(made) for part, made in calls.items()})


def page_ids(text: str, *, shuffled_pages: bool, shuffled_requests: bool) -> np.ndarray:
    """Returns the pages of a tree's rows, `[requests, pages]`, with lengths rounded up to whole pages."""
    source = np.random.default_rng(0)
    levels, tokens = ([int(number) for number in part.split(",")] for part in text.split("/"))
    pages = Tree.from_levels(levels, [-(-count // PAGE_SIZE) for count in tokens])  # a page as a token
    table = np.stack([pages.slots(row) for row in range(pages.num_rows)])
    if shuffled_pages:
        table = source.permutation(pages.kv.last_slot + 1).astype(np.int32)[table]
    return source.permutation(table) if shuffled_requests else table


def of_pages(text: str, strategy: Strategy, target: Target, *, shuffled_pages: bool, shuffled_requests: bool) -> Timing:
    """Times planning from page tables of a tree's rows."""
    table = page_ids(text, shuffled_pages=shuffled_pages, shuffled_requests=shuffled_requests)
    indptr = np.arange(len(table) + 1, dtype=np.int32) * table.shape[1]
    indices, last = table.reshape(-1), np.full(len(table), PAGE_SIZE, np.int32)
    lengths = np.full(len(table), PAGE_SIZE * table.shape[1], np.int32)
    times = {
        "from_page_table": repeated_us(lambda: Tree.from_page_table(indptr, indices, last, PAGE_SIZE)),
        "from_block_table": repeated_us(lambda: Tree.from_block_table(table, lengths, PAGE_SIZE)),
        "arena": repeated_us(lambda: arena(Tree.from_page_table(indptr, indices, last, PAGE_SIZE), strategy, target)),
    }
    parts = [torch.from_numpy(part.copy()) for part in (indptr, indices, last)]
    heads = SHAPE.num_qo_heads, SHAPE.num_kv_heads, SHAPE.head_dim, PAGE_SIZE
    for name, wrapper in (("wrapper", TreeAttentionWrapper()), ("flashinfer", flashinfer_wrapper())):
        if wrapper is not None:
            times[name] = repeated_us(partial(wrapper.plan, *parts, *heads, q_data_type=torch.float16))
    order = ", ".join(
        f"{name} {'shuffled' if any_order else 'in order'}"
        for name, any_order in (("pages", shuffled_pages), ("requests", shuffled_requests))
    )
    return Timing(f"{text} from page tables, {order}", times)


def flashinfer_wrapper() -> Any:
    """Makes FlashInfer's wrapper as its documentation recommends; None without flashinfer or a GPU."""
    if not torch.cuda.is_available():
        return None
    try:
        import flashinfer
    except ImportError:
        return None
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend="fa2")


def timings() -> Iterable[Timing]:
    """Yields the timings of all cases."""
    target = target_from("h200")
    found = {text: weighed(Problem(Tree.parse(text), SHAPE, target)).strategy for text in TREES}
    for text in TREES:
        usual = [cohort(), cohort(split=128), cohort(split_shared_rows=64), cohort(split_shared_rows=64, merge="final")]
        for strategy in dict.fromkeys([found[text], *usual]):
            yield of_tree(text, strategy, target)
    for text in TREES:
        for pages, requests in ((False, False), (True, False), (False, True), (True, True)):
            yield of_pages(text, found[text], target, shuffled_pages=pages, shuffled_requests=requests)


def main() -> None:
    """Prints a line per case, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects (default: text)")
    chosen = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    if chosen.json:
        made = [{"case": one.case, **one.microseconds} for one in timings()]
        print(json.dumps(made, indent=1))
        return
    for one in timings():
        print(one, flush=True)
    if flashinfer_wrapper() is None:
        print("flashinfer: cannot be imported, or there is no GPU")


if __name__ == "__main__":
    main()
