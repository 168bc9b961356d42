"""What the templates of partial kernels read: a kernel key with its consequences spelled out.

Templates choose between texts by these values. They compute nothing of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from treegen.codegen.kernel_signature import Parameter, kernel_signature, unspecialized
from treegen.codegen.tile_context import FullTileContext, PackedTileContext
from treegen.ir.keys import KernelKey, ScoreCode
from treegen.ir.shape import FP8
from treegen.target.tile_config import MATRIX_ROWS, key_slices, padded, rows_per_tile

_DIVIDED = (MATRIX_ROWS, 64, 8)  # rows and tokens of a tile, warps
_CHUNK = 8
"""Head rows and dims of a tile of results of which a warp has two each in every thread."""
_MOST_PAIRED_TOKENS = 64
"""Tokens of a tile up to which kernels that merge read partials into the registers of results; on Blackwell more spill.
"""


class EntryLoad(NamedTuple):
    """How a captured tensor is read: instruction, register and type of what it loads, and the type it is used in."""

    instruction: str
    register: str
    loaded: str
    result: str


_LOADS = {
    "uint8": EntryLoad("u8", "r", "int32", "int32"),
    "int8": EntryLoad("s8", "r", "int32", "int32"),
    "int16": EntryLoad("s16", "r", "int32", "int32"),
    "int32": EntryLoad("b32", "r", "int32", "int32"),
    "int64": EntryLoad("b64", "l", "int64", "int32"),
    "float16": EntryLoad("b16", "h", "float16", "float32"),
    "bfloat16": EntryLoad("b16", "h", "bfloat16", "float32"),
    "float32": EntryLoad("b32", "r", "float32", "float32"),
}


@dataclass(frozen=True, slots=True)
class DimContext:
    """Head dims of keys and values, and their padded sizes.

    rest: the size of the second slice of keys, 0 where they are one slice. mask, rest_mask, mask_v: the names of masks
    where padding has to be left out, else empty.
    """

    head_dim: int
    head_dim_v: int
    padded: int
    rest: int
    padded_v: int
    mask: str
    rest_mask: str
    mask_v: str

    @classmethod
    def of(cls, key: KernelKey) -> DimContext:
        """Spells out a key's head dims."""
        whole, rest = (*key_slices(key.head_dim, key.head_dim_v), 0)[:2]
        padded_v = padded(key.head_dim_v)
        return cls(
            head_dim=key.head_dim,
            head_dim_v=key.head_dim_v,
            padded=whole,
            rest=rest,
            padded_v=padded_v,
            mask="d_mask" if not rest and whole != key.head_dim else "",
            rest_mask="rest_mask" if rest and whole + rest != key.head_dim else "",
            mask_v="dv_mask" if padded_v != key.head_dim_v else "",
        )


@dataclass(frozen=True, slots=True)
class KVContext:
    """How caches are read.

    page_size: 1 by slot, else the tokens of a page. shared: whether values are the first slice of keys. converted:
    whether elements in 8 bits are converted one by one, with emulate_e4m3 out of bytes. packed_fp8: whether they are
    read four at a time; planes: the function that then converts them. scaled: whether keys and values have scales by
    head.
    """

    page_size: int
    shared: bool
    converted: bool
    emulate_e4m3: bool
    packed_fp8: bool
    planes: str
    scaled: bool

    @classmethod
    def of(cls, key: KernelKey) -> KVContext:
        """Spells out how a key's caches are read."""
        of_e4m3 = "e4m3_planes_from_bits" if key.emulate_e4m3 else "e4m3_planes"
        return cls(
            page_size=key.page_size,
            shared=key.shared_kv,
            converted=key.kv_dtype in FP8 and not key.packed_fp8,
            emulate_e4m3=key.emulate_e4m3,
            packed_fp8=key.packed_fp8,
            planes="e5m2_planes" if key.kv_dtype == "e5m2" else of_e4m3,
            scaled=key.scaled,
        )


@dataclass(frozen=True, slots=True)
class JoinContext:
    """Which partials final items join: those of earlier launches (epilogue_merge) or of their own
    (fused_merge).

    paired: whether partials are read into the registers of results, two at a time. chunk_rows, chunk_dims: rows and
    dims that lie together in the partial results of a kernel with a fused merge.
    """

    epilogue_merge: bool
    fused_merge: bool
    paired: bool
    chunk_rows: int
    chunk_dims: int

    @classmethod
    def of(cls, key: KernelKey) -> JoinContext:
        """Spells out what a key joins."""
        has_room = key.fused_merge or key.tile_tokens <= _MOST_PAIRED_TOKENS
        return cls(
            epilogue_merge=key.epilogue_merge,
            fused_merge=key.fused_merge,
            paired=has_room and key.dtype != "fp32" and not key.packed_fp8,
            chunk_rows=math.gcd(key.group, _CHUNK),
            chunk_dims=_CHUNK,
        )

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return self.epilogue_merge or self.fused_merge


@dataclass(frozen=True, slots=True)
class PartialContext:
    """The context of a partial kernel.

    rows, tokens: sizes of a tile. group: query heads per KV head, of which a tile takes `heads`, so that a KV head has
    head_tiles tiles. masked: whether rows see some runs only, and bits: whether bit masks say which. leaves_out:
    whether rows with negative numbers are left out. in_turns: see KernelKey. scores: what changes scores; loads:
    how the tensors that it captured are read. values_first: whether values are loaded before keys are multiplied.
    divided: whether a block has an SM to itself, whose warps divide the tokens of a product, and fetches tiles early.
    unspecialized: parameters whose values machine code is not made for. indent: further spaces of the kernel's body.
    recorded: see KernelKey.
    """

    rows: int
    tokens: int
    group: int
    heads: int
    head_tiles: int
    masked: bool
    bits: bool
    leaves_out: bool
    in_turns: bool
    work_list: bool
    indent: int
    sinks: bool
    guarded: bool
    recorded: bool
    values_first: bool
    divided: bool
    scores: ScoreCode | None
    loads: tuple[EntryLoad, ...]
    parameters: tuple[Parameter, ...]
    unspecialized: tuple[str, ...]
    dims: DimContext
    kv: KVContext
    full: FullTileContext | None
    packed: PackedTileContext
    joins: JoinContext

    @classmethod
    def of(cls, key: KernelKey) -> PartialContext:
        """Spells out a key."""
        heads, parameters = min(key.group, key.tile_rows), kernel_signature(key)
        assert rows_per_tile(key.tile_rows, key.group) * heads <= key.tile_rows
        return cls(
            rows=key.tile_rows,
            tokens=key.tile_tokens,
            group=key.group,
            heads=heads,
            head_tiles=-(-key.group // heads),
            masked=key.mask != "none",
            bits=key.mask == "bits",
            leaves_out=key.request_page > 0,
            in_turns=key.in_turns,
            work_list=key.work_list,
            indent=4 if key.work_list or key.in_turns else 0,
            sinks=key.sinks,
            guarded=key.guarded,
            recorded=key.recorded,
            values_first=key.guarded and not key.shared_kv,
            divided=_is_divided(key),
            scores=key.scoring,
            loads=() if key.scoring is None else tuple(_LOADS[kind] for kind, _ in key.scoring.captured),
            parameters=parameters,
            unspecialized=unspecialized(parameters),
            dims=DimContext.of(key),
            kv=KVContext.of(key),
            full=FullTileContext.of(key) if key.has_full_tiles else None,
            packed=PackedTileContext.of(key),
            joins=JoinContext.of(key),
        )


def _is_divided(key: KernelKey) -> bool:
    """Tells whether a kernel has Hopper's large tile for latent keys in 16 bits, and nothing changes scores.

    The tile fits into the shared memory of no other architecture; Triton compiles no such loop for Blackwell. On an
    H200, 64 requests of 1,024 to 8,192 tokens with 128 heads take 0.83 of the time where warps divide tokens, and 0.93
    of that where the next tile is fetched into L2.
    """
    large = key.shared_kv and (key.tile_rows, key.tile_tokens, key.num_warps) == _DIVIDED
    plain = key.scoring is None and not key.guarded and not key.scaled and key.kv_dtype not in FP8
    return large and plain and len(key_slices(key.head_dim, key.head_dim_v)) > 1
