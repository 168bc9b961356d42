"""The keys of partial kernels: a tile class, a shape and what callers ask for become a KernelKey."""

from __future__ import annotations

from typing import NamedTuple

from treegen.ir.keys import KernelKey, ScoreCode
from treegen.ir.schedule import TileClass
from treegen.ir.shape import Shape
from treegen.target.tile_config import loads_once, reads_words

_FIRST_WITH_E4M3 = 89


class KernelOptions(NamedTuple):
    """What is asked of partial kernels besides a tile class, a shape and a page size.

    scoring, scaled, by_bits, sinks, guarded: see KernelKey. shared_kv: whether one load serves K and V; None where the
    shape decides it. words: whether tensors allow words to be read; the tile and the shape have to allow it, too, and
    guarded kernels read none. request_page: see KernelKey.
    """

    scoring: ScoreCode | None = None
    scaled: bool = False
    by_bits: bool = False
    sinks: bool = False
    guarded: bool = False
    shared_kv: bool | None = None
    words: bool = True
    request_page: int = 0


NO_OPTIONS = KernelOptions()


def reads_bits(shape: Shape, capability: int) -> bool:
    """Says whether kernels have to put e4m3 together out of bytes.

    GPUs below compute capability (times ten) 89 do, and so does the interpreter, whose capability is 0.
    """
    return shape.kv_dtype == "e4m3" and capability < _FIRST_WITH_E4M3


def kernel_key(tile: TileClass, shape: Shape, page_size: int = 1, options: KernelOptions = NO_OPTIONS) -> KernelKey:
    """Makes the key of the partial kernel for a tile class; `page_size` 1 addresses the cache by slot."""
    shared = loads_once(shape) if options.shared_kv is None else options.shared_kv
    allows_words = options.words and not shared and not options.guarded
    return KernelKey(
        dtype=shape.dtype,
        kv_dtype=shape.kv_dtype,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
        group=shape.group,
        page_size=page_size,
        mask=tile.mask,
        tile_rows=tile.rows,
        tile_tokens=tile.tokens,
        block_tokens=tile.block,
        dealt=tile.dealt,
        merging=tile.merging,
        full=tile.full,
        waiting=tile.waiting,
        warps=tile.warps,
        stages=tile.stages,
        scoring=options.scoring,
        sinks=options.sinks,
        shared_kv=shared,
        scaled=options.scaled,
        by_bits=options.by_bits,
        words=allows_words and reads_words(tile.rows, shape),
        guarded=options.guarded,
        request_page=options.request_page,
    )
