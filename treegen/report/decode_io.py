"""IO over whole decodings: the bytes that every strategy reads and writes, summed over all steps of a workload.

Counts follow the papers (DeFT, tables 4 and 12): only rows that are alive at a step and their ancestors count, every
group's read range counts once, and ratios are taken of sums over all steps and decodings. Between two events lengths
grow linearly, so counts that depend on lengths alone need only the first and the last step. Counts that need a plan are
taken there and every `stride` steps, and are interpolated in between.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt

from treegen.cost.account import account
from treegen.ir.arrays import Floats, Longs, positive_int
from treegen.ir.errors import StrategyError
from treegen.ir.json_form import FORMAT
from treegen.ir.shape import DEFAULT_SHAPE, Shape
from treegen.ir.tree import Tree
from treegen.ir.verify import verify
from treegen.report.decode_batches import Batch, batches
from treegen.schedule.forest_counts import count
from treegen.schedule.lower import lower
from treegen.search.weigh import weighed
from treegen.strategies import Strategy, Traffic, strategy_from
from treegen.target.problem import Problem
from treegen.target.targets import Target, target_from
from treegen.workloads.traces import CourseSegment, Workload

DEFAULT_LAYERS = 32
DEFAULT_STRIDE = 64
_SCORE_TRIPS = 8  # QK^T, its scaling, the sum with the mask, and softmax, each written and read
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class StrategyIO:
    """The bytes that a strategy moves over all steps, decodings and layers."""

    name: str
    kv_hbm_bytes: int  # every group's read range once
    score_bytes: int  # materialised scores, written and read
    mask_bytes: int  # masks, read
    partial_bytes: int  # partial out and lse, written once and read once


@dataclass(frozen=True, slots=True)
class WorkloadIO:
    """The account of a workload.

    Args:
        workload: The workload.
        shape: The attention shape.
        layers: Attention layers.
        steps: Steps of all decodings together.
        path_kv_bytes: Bytes of KV that `query` reads, the base of `kv_reduction`.
        strategies: The bytes of each strategy.
    """

    workload: Workload
    shape: Shape
    layers: int
    steps: int
    path_kv_bytes: int
    strategies: tuple[StrategyIO, ...]

    def kv_reduction(self, entry: StrategyIO) -> float:
        """Returns the fraction of the KV bytes of `query` that a strategy saves; 0 where nothing is read at all."""
        return 1 - entry.kv_hbm_bytes / self.path_kv_bytes if self.path_kv_bytes else 0.0

    def text(self) -> str:
        """Returns a plain table with a line per strategy, below the workload, the shape and titles."""
        decodes = f"{len(self.workload.decodes)} decodings, " if len(self.workload.decodes) > 1 else ""
        rows = [["strategy", "KV", "scores", "masks", "partials", "less KV than query"]]
        for entry in self.strategies:
            cells = [decimal_bytes(getattr(entry, field.name)) for field in fields(StrategyIO)[1:]]
            rows.append([entry.name, *cells, f"{100 * self.kv_reduction(entry):.2f} %"])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            f"workload {self.workload.name}: {decodes}{self.steps} steps",
            f"shape {self.shape}, {self.layers} layers",
        ]
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join((row[0].ljust(widths[0]), *cells)))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def to_json(self) -> str:
        """Returns a JSON object: format, workload, shape with layers, strategies."""
        return json.dumps(
            {
                "format": FORMAT,
                "workload": self.workload.name,
                "shape": {**asdict(self.shape), "layers": self.layers},
                "strategies": [asdict(entry) for entry in self.strategies],
            }
        )


def decode_io(
    workload: Workload,
    strategies: Sequence[str | Strategy],
    shape: Shape = DEFAULT_SHAPE,
    target: str | Target | None = None,
    *,
    layers: int = DEFAULT_LAYERS,
    stride: int = DEFAULT_STRIDE,
    on_progress: Callable[[float], None] | None = None,
) -> WorkloadIO:
    """Counts the bytes that strategies read and write over a workload, without torch or a GPU.

    Args:
        workload: The workload.
        strategies: Names of strategies, or strategies.
        shape: The attention shape.
        target: The target, by name or as an object; by default h200.
        layers: Attention layers.
        stride: Steps between plans, for counts that need a plan.
        on_progress: Called with the number of decodings (or the fraction of one) done since its last call.

    Raises:
        TreegenError: A name is unknown, or a plan cannot be made.
    """
    on_target = target_from(target)
    layers, stride = positive_int("layers", layers, StrategyError), positive_int("stride", stride, StrategyError)
    made = [strategy_from(strategy) for strategy in strategies]
    totals = [[0] * 4 for _ in made]
    steps = paths = 0
    for decode in workload.decodes:
        sums = np.zeros((len(made), 4))
        own_steps = own_paths = 0.0
        segments = list(decode.segments())
        chosen = [policy_of_decode(segments, shape, on_target) if s.automatic else s for s in made]
        all_steps = sum(len(segment.grown) for segment in segments) * max(len(chosen), 1)
        for batch in batches(segments, stride):
            part = float(batch.weight.sum()) / all_steps
            own_steps += float(batch.weight.sum())
            own_paths += float(batch.paths @ batch.weight)
            known: dict[str, Floats] = {}
            for index, strategy in enumerate(chosen):
                if str(strategy) not in known:
                    known[str(strategy)] = _moved(strategy, batch, shape, on_target, known)
                sums[index] += known[str(strategy)] @ batch.weight
                if on_progress:
                    on_progress(part)
        steps += round(own_steps)
        paths += round(own_paths)
        for total, own in zip(totals, sums.tolist(), strict=True):
            total[:] = [before + round(amount) for before, amount in zip(total, own, strict=True)]
    entries = [
        StrategyIO(strategy.name, *(layers * amount for amount in total))
        for strategy, total in zip(made, totals, strict=True)
    ]
    return WorkloadIO(workload, shape, layers, steps, layers * paths * shape.kv_token_bytes, tuple(entries))


def score_elements(rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> Longs:
    """Returns the elements per query head and layer that unfused attention writes and reads, K and V aside.

    rows, tokens: all rows attend to all tokens (DeFT, table 4).
    """
    return _SCORE_TRIPS * rows * tokens


def decimal_bytes(amount: int) -> str:
    """Formats bytes in the largest decimal unit that leaves at least 1: `1.68 TB`, as in DeFT's table 12."""
    value, units = float(amount), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{amount} B" if units[0] == "B" else f"{value:.2f} {units[0]}"


def policy_of_decode(segments: Sequence[CourseSegment], shape: Shape, target: Target) -> Strategy:
    """Returns the choice of `auto` for a whole decoding: the best policy for the middle of its widest segment."""
    widest = max(segments, key=lambda segment: segment.tree.num_rows)
    tree = widest.at((widest.first + widest.last) // 2)
    return weighed(Problem(tree, shape, target)).strategy


def _moved(strategy: Strategy, batch: Batch, shape: Shape, target: Target, known: Mapping[str, Floats]) -> Floats:
    """Returns bytes per layer, `[KV, scores, masks, partials; trees]`. known: the results of other strategies."""
    if strategy.proven and strategy.traffic:
        return _told(strategy, strategy.traffic, batch, shape, target)
    picks: dict[str, list[int]] = {}
    made: dict[str, Strategy] = {}
    moved = np.zeros((4, len(batch.trees)))
    for index, tree in enumerate(batch.trees):
        pick = strategy.choose(Problem(tree, shape, target)).strategy
        if pick is strategy:
            moved[:, index] = _accounted(strategy, tree, shape, target)
        else:
            picks.setdefault(str(pick), []).append(index)
            made[str(pick)] = pick
    for name, chosen in picks.items():
        if name in known:
            moved[:, chosen] = known[name][:, chosen]
        else:
            moved[:, chosen] = _moved(made[name], batch.take(np.array(chosen)), shape, target, {})
    return moved


def _accounted(strategy: Strategy, tree: Tree, shape: Shape, target: Target) -> tuple[int, ...]:
    """Accounts for the plan of one tree. Plans of strategies that are not proven are verified."""
    plan = strategy.plan(Problem(tree, shape, target))
    if not strategy.proven:
        verify(plan, tree)
    estimate = account(plan, lower(plan, Problem(tree, shape, target)), Problem(tree, shape, target))
    return estimate.kv_hbm_bytes, estimate.score_bytes, estimate.mask_bytes, estimate.partial_bytes


def _told(strategy: Strategy, traffic: Traffic, batch: Batch, shape: Shape, target: Target) -> Floats:
    """Returns the result of _moved from the strategy's declared traffic, with plans only where that needs them."""
    rows, tokens = batch.rows, batch.tokens
    planned = np.zeros((3, len(batch.trees)), np.int64)
    if traffic.kv == "plan" or traffic.partials != "none":
        planned = _counted(strategy, traffic, batch, shape, target)
    kv = {"paths": batch.paths, "tree": tokens, "tree per row": rows * tokens, "plan": planned[0]}[traffic.kv]
    mask = {
        "intervals": planned[1] * _WORD_BYTES,
        "element per row": rows * tokens * shape.dtype_bytes,
        "bit per row": rows * tokens / 8,
        "word per token": tokens * _WORD_BYTES,
    }[traffic.mask]
    scores = score_elements(rows, tokens) * traffic.scores
    partials = 2 * planned[2] * shape.partial_bytes
    score_bytes = scores * shape.num_qo_heads * shape.dtype_bytes
    return np.stack([kv * shape.kv_token_bytes, score_bytes, mask, partials]).astype(np.float64)


def _counted(strategy: Strategy, traffic: Traffic, batch: Batch, shape: Shape, target: Target) -> Longs:
    """Returns tokens read, masked runs and partial rows of every tree's plan.

    One tree per segment is planned where all counts depend on nodes and rows alone. Masked runs depend on lengths.
    """
    if traffic.partials == "nodes" and traffic.kv != "plan":
        _, first, segment = np.unique(batch.segment, return_index=True, return_inverse=True)
        counted = _planned(strategy, batch.take(first), shape, target)
        if not counted[1].any():
            return counted[:, segment]
    return _planned(strategy, batch, shape, target)


def _planned(strategy: Strategy, batch: Batch, shape: Shape, target: Target) -> Longs:
    """Returns the result of _counted from plans of all trees."""
    counted = np.zeros((3, len(batch.trees)), np.int64)
    for trees, forest, plan in strategy.plans_of_forest(batch.forest, shape, target):
        found = count(plan, forest.joined, forest.first_row, shape, target)
        owner = np.searchsorted(forest.first_node, plan.node, side="right") - 1
        read = np.bincount(owner, plan.read_tokens, len(trees)).astype(np.int64)
        counted[:, trees] = np.stack([read, found.mask_runs, found.partial_rows])
    return counted
