"""Kernel variants: all modules that `auto` can launch for an attention shape, whatever the tree.

Choices of lowering that depend on the tree are listed with all their values; choices that it never makes are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from treegen.codegen.emit import Source, emit_merge, emit_partial
from treegen.codegen.merge_forms import merge_keys
from treegen.codegen.partial_keys import KernelOptions, emulates_e4m3, kernel_key
from treegen.ir.errors import ShapeError
from treegen.ir.kernel_config import KernelConfig, TileMask
from treegen.ir.shape import Shape
from treegen.schedule.passes.single_loop import can_be_single_loop
from treegen.search.walk_layout import named_config
from treegen.strategies.fasttree import FastTree
from treegen.target.targets import Target
from treegen.target.tile_config import (
    RUN_TOKENS,
    SMALL_ROWS,
    WORK_LIST_RUN_TOKENS,
    kernel_config,
    rows_per_tile,
    wanted_config,
)


def kernel_sources(shape: Shape, target: Target) -> list[Source]:
    """Returns all modules that a plan chosen by `auto` can launch for this shape, each once, those for slots first.

    A cache with pages (page_size above 1) is addressed by page, any other by slot. Policies that another space or a
    person put into the policy cache may use further tiles. Raises ShapeError when no tile fits the shape.
    """
    configs = kernel_configs(shape, target)
    sizes, options = (
        dict.fromkeys((1, shape.page_size)),
        KernelOptions(emulate_e4m3=emulates_e4m3(shape, target.capability)),
    )
    keys = [kernel_key(config, shape, size, options) for size in sizes for config in configs]
    return [*map(emit_partial, keys), *map(emit_merge, merge_keys(shape))]


def kernel_configs(shape: Shape, target: Target) -> list[KernelConfig]:
    """Returns all kernel configs of such plans, each once.

    The tiles are the two that suit few and many rows, those that policies name, and FastTree's two. Each comes with and
    without a mask, with packed runs of several tokens or of one, and in two loops or one
    (treegen.schedule.passes.single_loop), as trees and KV slots decide. These configs cannot occur and are left out:

    - row intervals where a tile holds one query row: a work item reads only what some of its rows sees;
    - bit masks, except for the config of single rows: only SpecInfer stores them, and its groups are single rows;
    - configs with work lists and a tile that a strategy names: only FlashForge's have work lists, and lowering chooses
    its tile; - configs of FastTree's tiles or with work lists, with merges in the epilogue or fused: only cohorts merge
      last, and work lists have one round; fused merges with small tiles, by slot or without a mask
    (treegen.schedule.passes.fuse_merge); - all of Medusa's: it runs unfused.
    """
    suited = [kernel_config(shape, target, rows) for rows in (1, SMALL_ROWS + 1)]
    config = named_config(shape, target)
    named = [] if config is None else [config]
    fasttree = FastTree()
    phases = _wanted(zip(fasttree.tile_q, fasttree.tile_kv, strict=True), shape, target)
    made: list[KernelConfig] = []
    for config in (*suited, *named):
        for merging in (False, True):
            made += _variants(replace(config, epilogue_merge=merging), "interval", RUN_TOKENS, shape)
    for config in suited:
        made += _variants(replace(config, work_list=True), "interval", WORK_LIST_RUN_TOKENS, shape)
    made += _variants(suited[0], "bits", RUN_TOKENS, shape)
    large = [config for config in (*suited, *named) if config.rows > SMALL_ROWS]
    made += [replace(config, mask="interval", fused_merge=True) for config in large]
    for config in phases:
        made += _variants(config, "interval", RUN_TOKENS, shape)
    made += [replace(config, has_full_tiles=False) for config in made if can_be_single_loop(config)]
    return list(dict.fromkeys(made))


def _wanted(sizes: Iterable[tuple[int, int]], shape: Shape, target: Target) -> Iterator[KernelConfig]:
    """Yields the configs of these tiles that fit; no plan with another class is lowered."""
    for rows, tokens in sizes:
        with suppress(ShapeError):
            yield wanted_config(rows, tokens, shape, target)


def _variants(config: KernelConfig, mask: TileMask, run_tokens: int, shape: Shape) -> Iterator[KernelConfig]:
    """Yields a config without and with this mask, with packed runs of several tokens and of one."""
    masks: tuple[TileMask, ...] = ("none", mask)
    if mask == "interval" and rows_per_tile(config.rows, shape.group) == 1:
        masks = ("none",)
    for chosen in masks:
        for tokens in dict.fromkeys((min(run_tokens, config.tokens), 1)):
            yield replace(config, mask=chosen, run_tokens=tokens)
