"""Kernel variants: all modules that `auto` can launch for an attention shape, whatever the tree.

Choices of lowering that depend on the tree are listed with all their values; choices that it never makes are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from treegen.codegen.emit import Source, emit_merge, emit_partial
from treegen.codegen.merge_forms import merge_keys
from treegen.codegen.partial_keys import KernelOptions, kernel_key, reads_bits
from treegen.ir.errors import ShapeError
from treegen.ir.schedule import TileClass, TileMask
from treegen.ir.shape import Shape
from treegen.schedule.passes.single_loop import can_be_one_loop
from treegen.search.walk_layout import named_class
from treegen.strategies.fasttree import FastTree
from treegen.target.targets import Target
from treegen.target.tile_config import (
    BLOCK_TOKENS,
    DEALT_BLOCK_TOKENS,
    SMALL_ROWS,
    rows_per_tile,
    tile_class,
    wanted_class,
)


def kernel_sources(shape: Shape, target: Target) -> list[Source]:
    """Returns all modules that a plan chosen by `auto` can launch for this shape, each once, those for slots first.

    A cache with pages (page_size above 1) is addressed by page, any other by slot. Policies that another space or a
    person put into the policy cache may use further tiles. Raises ShapeError when no tile fits the shape.
    """
    classes = kernel_classes(shape, target)
    sizes, options = dict.fromkeys((1, shape.page_size)), KernelOptions(by_bits=reads_bits(shape, target.capability))
    keys = [kernel_key(tile, shape, size, options) for size in sizes for tile in classes]
    return [*map(emit_partial, keys), *map(emit_merge, merge_keys(shape))]


def kernel_classes(shape: Shape, target: Target) -> list[TileClass]:
    """Returns all tile classes of such plans, each once.

    The tiles are the two that suit few and many rows, those that policies name, and FastTree's two. Each comes with and
    without a mask, with runs packed in blocks or by slot, and in two loops or one
    (treegen.schedule.passes.single_loop), as trees and KV slots decide. These classes cannot occur and are left out:

    - row intervals where a tile holds one query row: a work item reads only what some of its rows sees;
    - bit masks, except for the class of single rows: only SpecInfer stores them, and its groups are single rows;
    - dealt classes with a tile that a strategy names: only FlashForge's are dealt, and lowering chooses its tile;
    - merging and waiting classes of FastTree's tiles, and dealt ones: only cohorts merge last, and dealt work has one
      round; waiting ones with small tiles, by slot or without a mask (treegen.schedule.passes.fuse_merge);
    - all of Medusa's: it runs unfused.
    """
    suited = [tile_class(shape, target, rows) for rows in (1, SMALL_ROWS + 1)]
    tile = named_class(shape, target)
    named = [] if tile is None else [tile]
    fasttree = FastTree()
    phases = _wanted(zip(fasttree.tile_q, fasttree.tile_kv, strict=True), shape, target)
    made: list[TileClass] = []
    for tile in (*suited, *named):
        for merging in (False, True):
            made += _variants(replace(tile, merging=merging), "interval", BLOCK_TOKENS, shape)
    for tile in suited:
        made += _variants(replace(tile, dealt=True), "interval", DEALT_BLOCK_TOKENS, shape)
    made += _variants(suited[0], "bits", BLOCK_TOKENS, shape)
    large = [tile for tile in (*suited, *named) if tile.rows > SMALL_ROWS]
    made += [replace(tile, mask="interval", waiting=True) for tile in large]
    for tile in phases:
        made += _variants(tile, "interval", BLOCK_TOKENS, shape)
    made += [replace(tile, full=False) for tile in made if can_be_one_loop(tile)]
    return list(dict.fromkeys(made))


def _wanted(sizes: Iterable[tuple[int, int]], shape: Shape, target: Target) -> Iterator[TileClass]:
    """Yields the classes of these tiles that fit; no plan with another class is lowered."""
    for rows, tokens in sizes:
        with suppress(ShapeError):
            yield wanted_class(rows, tokens, shape, target)


def _variants(tile: TileClass, mask: TileMask, block: int, shape: Shape) -> Iterator[TileClass]:
    """Yields a class without and with this mask, with runs packed in blocks and by slot."""
    masks: tuple[TileMask, ...] = ("none", mask)
    if mask == "interval" and rows_per_tile(tile.rows, shape.group) == 1:
        masks = ("none",)
    for chosen in masks:
        for tokens in dict.fromkeys((min(block, tile.tokens), 1)):
            yield replace(tile, mask=chosen, block=tokens)
