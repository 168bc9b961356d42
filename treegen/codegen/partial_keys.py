"""The keys of partial kernels: a kernel config, a shape and what callers ask for become a KernelKey."""

from __future__ import annotations

from typing import NamedTuple

from treegen.ir.kernel_config import KernelConfig
from treegen.ir.keys import KernelKey, ScoreCode
from treegen.ir.shape import Shape
from treegen.target.tile_config import loads_once, reads_packed_fp8

_FIRST_WITH_E4M3 = 89


class KernelOptions(NamedTuple):
    """What is asked of partial kernels besides a kernel config, a shape and a page size.

    scoring, scaled, emulate_e4m3, sinks, guarded: see KernelKey. shared_kv: whether one load serves K and V; None where
    the shape decides it. packed_fp8: whether tensors allow words to be read; the tile and the shape have to allow it,
    too, and guarded kernels read none. request_page, in_turns, recorded: see KernelKey.
    """

    scoring: ScoreCode | None = None
    scaled: bool = False
    emulate_e4m3: bool = False
    sinks: bool = False
    guarded: bool = False
    shared_kv: bool | None = None
    packed_fp8: bool = True
    request_page: int = 0
    in_turns: bool = False
    recorded: bool = False


NO_OPTIONS = KernelOptions()


def emulates_e4m3(shape: Shape, capability: int) -> bool:
    """Says whether kernels have to put e4m3 together out of bytes.

    GPUs below compute capability (times ten) 89 do, and so does the interpreter, whose capability is 0.
    """
    return shape.kv_dtype == "e4m3" and capability < _FIRST_WITH_E4M3


def kernel_key(
    config: KernelConfig, shape: Shape, page_size: int = 1, options: KernelOptions = NO_OPTIONS
) -> KernelKey:
    """Makes the key of the partial kernel for a kernel config; `page_size` 1 addresses the cache by slot."""
    shared = loads_once(shape) if options.shared_kv is None else options.shared_kv
    allows_words = options.packed_fp8 and not shared and not options.guarded
    return KernelKey(
        dtype=shape.dtype,
        kv_dtype=shape.kv_dtype,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
        group=shape.group,
        page_size=page_size,
        mask=config.mask,
        tile_rows=config.rows,
        tile_tokens=config.tokens,
        run_tokens=config.run_tokens,
        work_list=config.work_list,
        epilogue_merge=config.epilogue_merge,
        has_full_tiles=config.has_full_tiles,
        fused_merge=config.fused_merge,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        scoring=options.scoring,
        sinks=options.sinks,
        shared_kv=shared,
        scaled=options.scaled,
        emulate_e4m3=options.emulate_e4m3,
        packed_fp8=allows_words and reads_packed_fp8(config.rows, shape),
        guarded=options.guarded,
        request_page=options.request_page,
        in_turns=options.in_turns,
        recorded=options.recorded,
    )
