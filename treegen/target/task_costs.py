"""Costs of a thread block's tasks: from a target's measured grid (FlashForge, section 5.2), or the analytic model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Floats, Longs
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.shape import Shape
from treegen.target.cost_terms import ITEMS, term_values
from treegen.target.targets import Target
from treegen.target.tile_config import SMALL_ROWS, kernel_config, resident_blocks, tile_work

Counts: TypeAlias = npt.NDArray[Any]
Costs: TypeAlias = Callable[[Counts, Counts], Floats]
_GRID_TOKEN_BYTES = 2 * 128 * 2
"""Bytes of a token's keys and values per KV head in the shape that grids are measured with."""


def task_costs(shape: Shape, target: Target) -> Costs:
    """Returns a function (rows, tokens) of the microseconds of one thread block's tasks, for one KV head.

    rows are query head rows. Costs come from the target's grid, which is measured in fp16 at head_dim 128; those of
    other shapes are in proportion to the bytes of a token. Without a grid they come from the analytic model.
    """
    if target.grid is None:
        return partial(_analytic_task_us, shape=shape, target=target)
    scale, cost = shape.kv_token_bytes / shape.num_kv_heads / _GRID_TOKEN_BYTES, target.grid.cost
    return lambda rows, tokens: cost(rows, tokens) * scale


def task_rows(rows: Counts, config: KernelConfig, shape: Shape) -> Longs:
    """Returns the query head rows with which items of `rows` rows enter the grid.

    Few rows in a large tile cost the same as the fewest rows that a large tile is chosen for.
    """
    least = 1 if config.rows <= SMALL_ROWS else SMALL_ROWS + 1
    return np.clip(np.asarray(rows, np.int64) * shape.group, least, config.rows)


def source_of_costs(target: Target) -> str:
    """Names the source of `task_costs`, for explanations."""
    if target.grid is None:
        return f"analytic: {target.name} has no measured grid"
    return target.grid.source


def _analytic_task_us(rows: Counts, tokens: Counts, shape: Shape, target: Target) -> Floats:
    """Returns a task's share of an SM that is full of tasks like it, in microseconds."""
    config = kernel_config(shape, target, -(-int(np.max(rows, initial=1)) // shape.group))
    flops, loaded = tile_work(config, shape)
    counts = dict.fromkeys(ITEMS.counts, np.zeros(1))
    for name in ("pieces", "even_pieces"):
        counts[name] = np.ones(1)
    for name, value in (("tile_flops", flops), ("tile_bytes", loaded), ("tile_rows", config.rows)):
        counts[name] = np.full(1, float(value))
    values = term_values(ITEMS, counts, target)
    start, each = float(values["throughput"][0]) * target.sms, float(values["full_tile"][0])
    whole: Floats = (start + np.ceil(tokens / config.tokens) * each + 0.0 * rows) * resident_blocks(
        config, shape, target
    )
    return whole
