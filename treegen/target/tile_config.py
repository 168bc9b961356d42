"""Kernel configs: the kernel specialisations that plans run in, by attention shape and target."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Longs
from treegen.ir.errors import ShapeError
from treegen.ir.kernel_config import MOST_BIT_ROWS, KernelConfig
from treegen.ir.plan import BIT_MASKS, Mask
from treegen.ir.shape import DTYPE_BYTES, FP8, Shape
from treegen.target.targets import Target

RUN_TOKENS = 16
"""Granularity of packed runs: the smallest page that engines commonly use."""

WORK_LIST_RUN_TOKENS = 32
"""The granularity where thread blocks work off lists: registers for more runs per tile would spill."""

MOST_UNROLLED = 8
"""The most runs packed into one tile whose entries kernels keep in registers, loaded one tile ahead."""

SMALL_ROWS = 16
"""The most head rows for which the small tile is taken."""

# (rows, tokens, warps, stages), best first. On Hopper 64 x 64 with 3 stages leaves room for two thread blocks per SM;
# before Hopper, where products come from registers, tiles of 64 tokens spill.
_LARGE = ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2), (64, 16, 4, 2))
# Where K and V have the same head dim of at most 64, twice the tokens take the same registers and shared memory; with
# unequal ones, with caches that have to be converted, and on Blackwell where heads of a KV head do not fill the rows,
# such tiles spill.
_LARGE_NARROW = ((64, 128, 4, 3), *_LARGE)
_LARGE_BEFORE_HOPPER = ((64, 32, 4, 3), (64, 32, 4, 2), (64, 16, 4, 2))
_SMALL = ((16, 32, 2, 3), (16, 32, 2, 2), (16, 16, 2, 2))
# Words of caches in 8 bits: on an H200 one warp is 1.07 to 1.3 times as fast as two; elsewhere its registers spill.
# With 16 bits it is between 0.94 and 1.12 times as fast.
_SMALL_IN_WORDS = ((16, 32, 1, 3), (16, 32, 1, 2), (16, 16, 1, 2))
# Values of more than 256 dims: 64 rows of results take half of the registers of eight warps, so an SM holds one block.
# On an H200 tiles of 64 tokens take 0.7 of the time of those of 32 with 128:1 heads, and 0.75 with 16:1. Tiles of 32
# spill 14 registers on sm_80, 24 on sm_90, and 44 with a tile of values beside the keys'; those of 16 tokens 0 and 8.
_LARGE_LATENT = ((64, 64, 8, 2), (64, 32, 8, 2), (64, 16, 8, 2), (32, 16, 8, 2))
_LARGE_LATENT_BESIDE = ((64, 16, 8, 2), (32, 16, 8, 2))
# With keys that are converted, 64 rows spill up to 210 registers, and 32 up to 12.
_LARGE_LATENT_FP8 = ((32, 32, 8, 2), (32, 16, 8, 2))
_SMALL_LATENT = ((16, 64, 4, 2), (16, 32, 4, 3), (16, 32, 4, 2), (16, 16, 4, 2))
# fp32 is computed in IEEE arithmetic without tensor cores: registers are the limit, not shared memory.
_LARGE_FP32 = ((32, 32, 4, 2), (32, 16, 4, 2))
_SMALL_FP32 = ((16, 32, 2, 2), (16, 16, 2, 2))
_HOPPER, _BLACKWELL = 90, 100
MOST_RESIDENT = 8
"""The most warps, and so thread blocks, that an SM holds: a warp takes 8,192 of its 65,536 registers."""
_RESERVED = 1024  # shared memory that the driver keeps per thread block
_BLACKWELL_SCRATCH = 1028  # added by Triton for tensor memory, as its metadata shows


MATRIX_ROWS = 64
"""The fewest head rows of a tile for which Hopper's matrix instructions take operands from shared memory."""

ELEMENTS_PER_WORD = 4
"""Elements in 8 bits that are read as one word."""

_DIMS_IN_WORDS = frozenset({64, 128, 256})
"""Head dims that need no padding and are at least four times the 16 that a matrix instruction takes."""

MOST_IN_ONE_SLICE = 256
"""The largest head dim, of K and V alike, for which keys are in one slice."""


def padded(dim: int) -> int:
    """Returns the power of two at or above a head dim, at least 16 (the smallest a matrix instruction takes)."""
    return max(16, 1 << (dim - 1).bit_length())


def key_slices(head_dim: int, head_dim_v: int) -> tuple[int, ...]:
    """Returns the padded sizes of the slices in which a key is loaded and multiplied, along its head dim.

    All but the last are full. There is one slice, or two where that pads less: 192 is 128 and 64. Head dims that are
    the same for K and V, up to 256, are one slice, as kernels were measured with them.
    """
    whole = padded(head_dim)
    first, rest = whole // 2, padded(max(1, head_dim - whole // 2))
    if first + rest >= whole or (head_dim == head_dim_v and head_dim <= MOST_IN_ONE_SLICE):
        return (whole,)
    return first, rest


def value_is_slice(head_dim: int, head_dim_v: int) -> bool:
    """Tells whether V, where it is the beginning of K, is its first slice, so that one load serves both."""
    return min(key_slices(head_dim, head_dim_v)[0], head_dim) == head_dim_v


def is_latent(shape: Shape) -> bool:
    """Tells whether values have too many dims for the usual kernel configs, as in MLA."""
    return padded(shape.head_dim_v) > 256 and shape.dtype != "fp32"


def loads_once(shape: Shape) -> bool:
    """Tells whether kernels for a shape load the elements that K and V share only once."""
    return shape.shared_kv and value_is_slice(shape.head_dim, shape.head_dim_v)


def reads_packed_fp8(rows: int, shape: Shape) -> bool:
    """Tells whether kernels with tiles of `rows` head rows read words of four elements of caches in 8 bits.

    Tiles below MATRIX_ROWS multiply from registers, where a word's elements can be separated at once. Larger ones
    multiply from shared memory, which elements have to reach in order.
    """
    dims = {shape.head_dim, shape.head_dim_v}
    return (
        shape.kv_dtype in FP8 and shape.dtype != "fp32" and rows < MATRIX_ROWS
        and dims <= _DIMS_IN_WORDS and not shape.shared_kv
    )  # fmt: skip


def shared_bytes(rows: int, tokens: int, stages: int, shape: Shape, target: Target) -> int:
    """Returns the most shared memory of one thread block, in bytes.

    It holds the query tile, `stages` tiles of keys and values, and where these are in 8 bits, one of them in the
    query's type. Latent keys have a tile of weights besides, and one stage less where products come from registers.
    """
    of_key = sum(key_slices(shape.head_dim, shape.head_dim_v))
    query = rows * of_key * DTYPE_BYTES[shape.dtype]
    if is_latent(shape) and loads_once(shape) and shape.kv_dtype not in FP8:
        query += rows * tokens * DTYPE_BYTES[shape.dtype]
        stages -= rows < MATRIX_ROWS
    # Blackwell's kernels copy values that are part of keys into tiles of their own.
    of_value = 0 if loads_once(shape) and target.capability < _BLACKWELL else padded(shape.head_dim_v)
    kv = tokens * (of_key + of_value) * DTYPE_BYTES[shape.kv_dtype]
    in_place = shape.kv_dtype not in FP8 or reads_packed_fp8(rows, shape)
    converted = 0 if in_place else tokens * max(of_key, of_value) * DTYPE_BYTES[shape.dtype]
    return query + stages * kv + converted + (_BLACKWELL_SCRATCH if target.capability >= _BLACKWELL else 0)


def resident_blocks(config: KernelConfig, shape: Shape, target: Target) -> int:
    """Returns the thread blocks of a config that an SM is assumed to hold at a time, by shared memory and registers.

    Kernels are assumed to use all of the 255 registers that a thread can have.
    """
    shared = shared_bytes(config.rows, config.tokens, config.num_stages, shape, target) + _RESERVED
    return max(1, min(target.shared_bytes_per_sm // shared, MOST_RESIDENT // max(config.num_warps, 1)))


def tile_work(config: KernelConfig, shape: Shape) -> tuple[int, int]:
    """Returns the floating-point operations that take the time of one tile, and the bytes of its keys and values.

    Where these are converted from 8 bits on their way through shared memory, operations count three times: on an H200
    such tiles of 64 x 64 take 1.0 us of an SM, others 0.55, and alone on it 1.4 us and 0.8.
    """
    converted = shape.kv_dtype in FP8 and not reads_packed_fp8(config.rows, shape)
    work = tile_operations(config, shape) * (3 if converted else 1)
    return work, config.tokens * shape.kv_token_bytes // shape.num_kv_heads


def tile_operations(config: KernelConfig, shape: Shape) -> int:
    """Returns the floating-point operations of one tile, padding included."""
    dims = sum(key_slices(shape.head_dim, shape.head_dim_v)) + padded(shape.head_dim_v)
    return 2 * config.rows * config.tokens * dims


@cache
def kernel_config(shape: Shape, target: Target, most_rows: int) -> KernelConfig:
    """Returns the kernel config for groups of at most `most_rows` rows.

    It has 16 head rows if all rows fit into them, and is large otherwise. Of several candidates it is the first whose
    shared memory fits twice into an SM, else the first that fits at all. Packed runs have RUN_TOKENS tokens, and
    rows no mask. Raises ShapeError if none fits.
    """
    small = most_rows * shape.group <= SMALL_ROWS
    candidates: tuple[tuple[int, int, int, int], ...]
    if shape.dtype == "fp32":
        candidates = _SMALL_FP32 if small else _LARGE_FP32
    elif small:
        candidates = _SMALL_IN_WORDS if _by_one_warp(shape, target) else _SMALL
    elif target.capability < _HOPPER:
        candidates = _LARGE_BEFORE_HOPPER
    else:
        narrow = shape.head_dim == shape.head_dim_v <= 64 and shape.kv_dtype not in FP8
        fills = target.capability < _BLACKWELL or MATRIX_ROWS % min(shape.group, MATRIX_ROWS) == 0
        candidates = _LARGE_NARROW if narrow and fills else _LARGE
    residents: tuple[int, ...] = (2, 1)
    if is_latent(shape):
        candidates, residents = _LARGE_LATENT if loads_once(shape) else _LARGE_LATENT_BESIDE, (1,)
        if shape.kv_dtype in FP8:
            candidates = _LARGE_LATENT_FP8
        if small:
            candidates, residents = _SMALL_LATENT, (2, 1)
    elif padded(shape.head_dim_v) > 128:
        # The accumulator has twice the size: half the tile, and perhaps twice the warps, keep it in registers.
        wider = _wider(SMALL_ROWS if small else MATRIX_ROWS, shape, target)
        candidates = tuple(
            (rows, tokens // 2, wider * warps, 2) for rows, tokens, warps, _ in candidates if tokens > 16
        )  # fmt: skip

    def fits(rows: int, tokens: int, stages: int, blocks: int) -> bool:
        needed = shared_bytes(rows, tokens, stages, shape, target)
        return needed <= target.shared_bytes and blocks * (needed + _RESERVED) <= target.shared_bytes_per_sm

    for blocks in residents:
        for rows, tokens, warps, stages in candidates:
            if fits(rows, tokens, stages, blocks):
                return KernelConfig(rows, tokens, RUN_TOKENS, "none", warps, stages)
    reason = f"needs more than the {target.shared_bytes} bytes of shared memory of {target.name}"
    raise ShapeError("head_dim", shape.head_dim, reason, "choose a target with more shared memory")


def _wider(rows: int, shape: Shape, target: Target) -> int:
    """Returns the factor by which a tile of `rows` head rows has more warps because values have more than 128 dims.

    It is 1 where products of a warp group come from shared memory, with 64 rows from Hopper on: two thread blocks of
    four warps then fit into an SM. On an H100, batches with values of 256 dims take 0.57 to 0.95 of the time that they
    take by eight warps. Caches that are converted keep eight: four spill.
    """
    by_groups = rows >= MATRIX_ROWS and shape.dtype != "fp32" and target.capability >= _HOPPER
    return 1 if padded(shape.head_dim_v) <= 128 or (by_groups and shape.kv_dtype not in FP8) else 2


def _by_one_warp(shape: Shape, target: Target) -> bool:
    return target.capability == _HOPPER and reads_packed_fp8(SMALL_ROWS, shape)


@cache
def invariant_config(shape: Shape, target: Target, run_tokens: int) -> KernelConfig:
    """Returns the only config of batch-invariant plans with runs of `run_tokens` tokens: large, masked, all packed."""
    return replace(
        kernel_config(shape, target, SMALL_ROWS + 1), mask="interval", run_tokens=run_tokens, has_full_tiles=False
    )


@cache
def wanted_config(rows: int, tokens: int, shape: Shape, target: Target) -> KernelConfig:
    """Returns the kernel config of exactly these sizes.

    Tiles of 16 rows have 2 warps (one for every 32 tokens where the small tile has one), larger ones 4; those of values
    of more than 128 dims may have twice as many. There are three stages if two thread blocks then fit into an SM, else
    two. Raises ShapeError if not even that fits.
    """
    of_small = max(1, tokens // 32) if _by_one_warp(shape, target) else 2
    warps = (of_small if rows <= SMALL_ROWS else 4) * _wider(rows, shape, target)
    for stages, blocks in ((3, 2), (2, 2), (2, 1)):
        needed = shared_bytes(rows, tokens, stages, shape, target)
        if needed <= target.shared_bytes and blocks * (needed + _RESERVED) <= target.shared_bytes_per_sm:
            return KernelConfig(rows, tokens, RUN_TOKENS, "none", warps, stages)
    reason = f"needs more than the {target.shared_bytes} bytes of shared memory of {target.name}"
    raise ShapeError("tile", (rows, tokens), reason, "choose smaller tiles")


def unfused_config(shape: Shape, rows: int) -> KernelConfig:
    """Returns the config of a plan that runs unfused: all its rows at once."""
    return KernelConfig(rows * shape.group, RUN_TOKENS, RUN_TOKENS, "dense", 0, 0)


def rows_per_tile(rows: int, group: int) -> int:
    """Returns the whole query rows in a tile of `rows` head rows; 1 when a row's heads need several tiles."""
    return max(1, rows // group)


def lanes_of(config: KernelConfig, shape: Shape) -> int:
    """Returns the thread blocks of a work item: one for each KV head and tile of its query heads."""
    return shape.num_kv_heads * -(-shape.group // config.rows)


class TileSizes(NamedTuple):
    """The kernel configs that groups may have, larger rows first.

    Attributes:
        configs: The configs.
        tokens: KV tokens of each.
        heights: `[1, configs]`; whole query rows of each.
    """

    configs: tuple[KernelConfig, ...]
    tokens: tuple[int, ...]
    heights: Longs


@cache
def tile_sizes(
    tiles: tuple[tuple[int, int], ...], mask: Mask, most_rows: int, shape: Shape, target: Target
) -> TileSizes:
    """Returns the kernel configs that a plan wants, or the config that suits groups of `most_rows` rows."""
    configs: tuple[KernelConfig, ...]
    if mask == "dense":
        configs = (unfused_config(shape, most_rows),)
    elif tiles:
        configs = tuple(wanted_config(rows, tokens, shape, target) for rows, tokens in tiles)
    else:
        configs = (kernel_config(shape, target, most_rows),)
    return sizes_of(configs, mask, shape)


def sizes_of(configs: tuple[KernelConfig, ...], mask: Mask, shape: Shape) -> TileSizes:
    """Returns the sizes of kernel configs for a plan's mask."""
    heights = [rows_per_tile(config.rows, shape.group) for config in configs]
    if mask in BIT_MASKS:
        heights = [min(height, MOST_BIT_ROWS) for height in heights]
    return TileSizes(configs, tuple(config.tokens for config in configs), np.array([heights]))
