"""Schedules of trees for an H200, and what their work items walk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from support.h200 import H200
from treegen import Shape, Tree, strategies
from treegen.ir.schedule import Schedule
from treegen.schedule.lower import lower
from treegen.strategies import Strategy
from treegen.target.problem import Problem

SHAPE = Shape(32, 8, 128, dtype="bf16")  # a group of 4 heads: 16 rows in a tile of 64 head rows
ONE_HEAD = Shape(8, 8, 128, dtype="bf16")


def schedule_of(tree: Tree | str, strategy: Strategy | None = None, shape: Shape = SHAPE) -> Schedule:
    tree = Tree.parse(tree) if isinstance(tree, str) else tree
    return lower((strategy or strategies.deft_node()).plan(Problem(tree, shape, H200)), Problem(tree, shape, H200))


def entries(schedule: Schedule, number: int) -> Iterator[tuple[int, int, int, int]]:
    """(slot, length, lo, hi) of what item `number` walks, without padding."""
    item = schedule.work_items[number]
    tile = schedule.configs[np.searchsorted(schedule.config_indptr, number, side="right") - 1]
    yield from map(tuple, schedule.tiles[item.tile0 : item.tile0 + item.tiles].tolist())
    packed = schedule.packed_runs[item.run0 : item.run0 + item.packed_tiles * tile.runs_per_tile].tolist()
    yield from (tuple(entry) for entry in packed if entry[1])


def tokens_of(schedule: Schedule) -> list[int]:
    return [sum(length for _, length, _, _ in entries(schedule, item)) for item in range(len(schedule.items))]


def rows_of(schedule: Schedule, number: int) -> list[int]:
    item = schedule.work_items[number]
    return schedule.rows[item.row0 : item.row0 + item.rows].tolist()
