"""Walks: the ways to divide rows into cohorts that are weighed, and the facts about them that no tree changes."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from treegen.ir.arrays import Floats, Longs, ragged
from treegen.ir.errors import ShapeError
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.shape import Shape
from treegen.strategies.cohort import Cohort
from treegen.target.cost_terms import ITEMS, facts_of
from treegen.target.targets import Target
from treegen.target.tile_config import (
    SMALL_ROWS,
    kernel_config,
    lanes_of,
    resident_blocks,
    rows_per_tile,
    tile_work,
    wanted_config,
)

WHOLE = (
    (64, False, True),
    (64, False, False),
    (32, False, True),
    (16, False, True),
    (16, True, True),
    (1, False, True),
)
"""The walks of whole paths: (query head rows of a cohort, whether it takes the large tile in any case, even rows).

Even rows are rounded down to a power of two, so that cohorts end more often where subtrees end. 1 head row stands for
one query row, which is plain per-row decoding.
"""
CUT = 64
"""Query head rows of cohorts where paths are cut. Adding smaller cohorts would make choices less than 1 % better."""


class Tiles(NamedTuple):
    """The tiles of each walk.

    Attributes:
        size: The tile's tokens as an index of WalkLayout.sizes.
        tokens: Tokens of a tile.
        rows: Query head rows of a tile.
        flops: Operations of a tile.
        loaded: Bytes of a tile.
        lanes: Thread blocks of a work item.
        held: Thread blocks that an SM holds at a time.
        lone_us: Microseconds of a tile in a thread block that is alone on its SM.
        full_us: Microseconds of a tile on a full SM.
    """

    size: Longs
    tokens: Floats
    rows: Floats
    flops: Floats
    loaded: Floats
    lanes: Floats
    held: Floats
    lone_us: Floats
    full_us: Floats


class WalkLayout(NamedTuple):
    """The facts about walks that follow from the shape, the target, and the numbers of rows and cuts.

    Chunk i is the first one of walk i. The lower chunks, of the last walks, follow:

        chunks    0 ... walks - cuts - 1    walks - cuts ... walks - 1    walks ... walks + cuts - 1
                  whole paths               upper cohorts of cuts         lower cohorts of the same cuts

    Attributes:
        walks: A policy for each walk, without split and threshold.
        rows: `[walks]`; rows of a cohort.
        tiles: The tile of each walk.
        sizes: The different tokens of tiles.
        walk: `[chunks]`; the walk of each chunk.
        part: `[chunks]`; the spans that each chunk reads: 0 for all, 1 + 2 * c for those above cut c, 2 + 2 * c for
            those below it.
        begin: The first rank of each cohort, of all but lower chunks.
        end: The end of its ranks.
        counts: The cohorts of each of these chunks.
    """

    walks: tuple[Cohort, ...]
    rows: tuple[int, ...]
    tiles: Tiles
    sizes: tuple[int, ...]
    walk: Longs
    part: Longs
    begin: Longs
    end: Longs
    counts: tuple[int, ...]


def named_config(shape: Shape, target: Target) -> KernelConfig | None:
    """Returns the large kernel config that policies name for cohorts that would fit into the small one.

    It is None where no cohort would, or where no config has exactly this tile.
    """
    large = kernel_config(shape, target, SMALL_ROWS + 1)
    if shape.group > SMALL_ROWS:
        return None
    try:
        return wanted_config(large.rows, large.tokens, shape, target)
    except ShapeError:
        return None


def layout_of(shape: Shape, target: Target, num_rows: int, cuts: int, config: KernelConfig | None = None) -> WalkLayout:
    """Returns the layout for a number of rows and cuts.

    Args:
        shape: The attention shape.
        target: The target.
        num_rows: Rows of the tree.
        cuts: Thresholds at which its paths are cut.
        config: The kernel config of all walks, where launches have only one.

    Raises:
        ShapeError: No kernel config fits the shape.
    """
    tallest = (config or kernel_config(shape, target, SMALL_ROWS + 1)).rows
    fields = walk_fields(shape, target, min(num_rows, tallest), tallest, cuts, config)
    rows_of = np.array(fields[1])  # rows of a cohort, by walk
    counts = -(-num_rows // rows_of)
    walk, step = ragged(counts)
    height = rows_of.take(walk)
    begin = step * height
    return WalkLayout(*fields, begin, np.minimum(begin + height, num_rows), tuple(counts.tolist()))


@lru_cache(64)
def walk_fields(
    shape: Shape, target: Target, num_rows: int, tallest: int, cuts: int, config: KernelConfig | None
) -> tuple[tuple[Cohort, ...], tuple[int, ...], Tiles, tuple[int, ...], Longs, Longs]:
    """Returns the first fields of a layout, which are the same for all numbers of rows from `tallest` on.

    tallest: query head rows of the largest tile.
    """
    facts = facts_of(target)
    kinds: dict[tuple[Any, ...], tuple[Cohort, int]] = {}
    cut = [(1 + 2 * index, CUT, False, True) for index in range(cuts)]
    for part, head_rows, in_large, even in [*((0, *kind) for kind in WHOLE), *cut]:
        rows = rows_per_tile(min(head_rows, tallest), shape.group) if num_rows > 1 else 1
        rows = 1 << rows.bit_length() - 1 if even else rows
        tile, most = None, min(rows, num_rows)
        made = config or kernel_config(shape, target, most)
        if in_large and config is None:
            named = named_config(shape, target)
            if named is None:
                continue
            made, tile = named, (named.rows, named.tokens)
        kinds.setdefault((part, most, made), (Cohort(rows * shape.group if rows > 1 else 1, tile=tile), rows))
    configs = [made for _, _, made in kinds]
    sizes = tuple(sorted({made.tokens for made in configs}))
    columns = [
        (
            sizes.index(made.tokens),
            made.tokens,
            made.rows,
            *tile_work(made, shape),
            lanes_of(made, shape),
            resident_blocks(made, shape, target),
        )
        for made in configs
    ]
    size, tokens, tile_rows, flops, loaded, lanes, held = np.array(columns, np.float64).T
    of_tile = SimpleNamespace(tile_flops=flops, tile_bytes=loaded, **facts)
    lone_us, full_us = (ITEMS.terms[name](of_tile) for name in ("lone_tile", "full_tile"))
    walks, rows_of = zip(*kinds.values(), strict=True)
    part_of = [part for part, _, _ in kinds]
    return (
        walks,
        rows_of,
        Tiles(size.astype(np.int64), tokens, tile_rows, flops, loaded, lanes, held, lone_us, full_us),
        sizes,
        np.append(np.arange(len(kinds)), np.arange(len(kinds) - cuts, len(kinds))),
        np.array(part_of + [part + 1 for part in part_of if part]),
    )
