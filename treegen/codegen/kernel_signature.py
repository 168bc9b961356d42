"""The arguments of emitted kernels, in one place for launches and for compilation ahead of them.

Triton specialises machine code for the arguments' types, for integers that are 1 or multiples of 16, for pointers that
are multiples of 16 bytes, and for the caches' strides by token and head, which are constants of it: code that was
compiled ahead is found again only if all of these are the same.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

from treegen.ir.keys import KernelKey, MergeKey
from treegen.ir.shape import Shape
from treegen.target.tile_config import value_is_piece

_HOPPER, _BLACKWELL = 90, 100
_MOST_REGISTERS = 255
"""Of a thread. On Ampere and Blackwell kernels are told that they may take them: by itself the assembler rather spills
some. Those that need most, which merge, work off lists or have tiles of over _FEW_TOKENS, spill less by themselves.
"""
_FEW_TOKENS = 64


class TensorLike(Protocol):
    """What of a tensor the arguments follow from."""

    @property
    def shape(self) -> Any:
        """Sizes."""

    def dim(self) -> int:
        """Dimensions."""

    def stride(self, dim: int, /) -> int:
        """Elements from one entry of a dimension to the next."""

    def data_ptr(self) -> int:
        """Where it begins."""


class Tensors(NamedTuple):
    """q, the caches, the results, the partial results and flags, in the order in which stage-1 kernels take them; only
    those that wait take flags.
    """

    q: TensorLike
    k_cache: TensorLike
    v_cache: TensorLike
    out: TensorLike
    lse: TensorLike
    part_out: TensorLike
    part_lse: TensorLike
    flags: TensorLike


class Tables(NamedTuple):
    """The tables of a tile class; work and epilogue: an indptr and the list behind it; scales: of keys and of values,
    for kernels that have them; parts: of every row, for kernels that wait.
    """

    items: TensorLike
    rows: TensorLike
    tiles: TensorLike
    blocks: TensorLike
    work: tuple[TensorLike, TensorLike]
    epilogue: tuple[TensorLike, TensorLike]
    scales: tuple[TensorLike, ...] = ()
    parts: int = 0


class MergeTables(NamedTuple):
    """The tables of a stage's merges."""

    rows: TensorLike
    indptr: TensorLike
    slots: TensorLike


class Extra(NamedTuple):
    """What kernels with scoring take besides: the table of the rows' positions, the heads' sinks, and captured tensors,
    each with its sizes and strides. Those that a kernel does not take are left out.
    """

    positions: TensorLike | None = None
    sinks: TensorLike | None = None
    captured: tuple[Any, ...] = ()


NO_EXTRA = Extra()


def partial_arguments(
    key: KernelKey,
    shape: Shape,
    tensors: Tensors,
    tables: Tables,
    sm_scale: float,
    lse_scale: float,
    extra: Extra = NO_EXTRA,
) -> tuple[Any, ...]:
    """The positional arguments of `partial_attention`; scales as in TritonProgram."""
    q, out = tensors.q, tensors.out
    return (
        *(tensors if key.waiting else tensors[:-1]), *((tables.parts,) if key.waiting else ()),
        *tables[:4], *(tables.work if key.dealt else ()), *(tables.epilogue if key.merging else ()),
        *(tables.scales if key.scaled else ()),
        shape.num_kv_heads,
        q.stride(0), q.stride(1),
        *cache_strides(tensors.k_cache, shape.kv_layout), *cache_strides(tensors.v_cache, shape.kv_layout),
        out.stride(0), out.stride(1),
        sm_scale / math.log(2), lse_scale * math.log(2),
        *((extra.positions,) if key.scoring is not None and key.scoring.positions else ()),
        *((extra.sinks,) if key.sinks else ()),
        *(extra.captured if key.scoring is not None else ()),
    )  # fmt: skip


def merge_arguments(
    key: MergeKey, shape: Shape, tensors: Tensors, tables: MergeTables, lse_scale: float, extra: Extra = NO_EXTRA
) -> tuple[Any, ...]:
    """The positional arguments of `merge`."""
    out = tensors.out
    return (
        out, tensors.lse, tensors.part_out, tensors.part_lse,
        *tables,
        shape.num_qo_heads,
        out.stride(0), out.stride(1),
        lse_scale * math.log(2),
        *((extra.sinks,) if key.sinks else ()),
    )  # fmt: skip


def partial_options(key: KernelKey, *, interpreted: bool, capability: int) -> dict[str, Any]:
    """The keyword arguments of `partial_attention`. capability: compute capability times ten, 0 if no GPU runs it."""
    dependent, on_hopper = depends_on_launches(capability), _HOPPER <= capability < _BLACKWELL
    needs_most = key.merging or key.dealt or key.tile_tokens > _FEW_TOKENS
    may_take_all = capability > 0 and not on_hopper and not needs_most
    return {
        "INTERPRETED": interpreted,
        "DEPENDENT": dependent,
        "num_warps": key.warps,
        "num_stages": key.stages,
        **({"launch_pdl": True} if dependent and key.merging else {}),
        **({"maxnreg": _MOST_REGISTERS} if may_take_all else {}),
    }


def merge_options(key: MergeKey, *, capability: int) -> dict[str, Any]:
    """The keyword arguments of `merge`. capability: as of partial_options."""
    dependent = depends_on_launches(capability)
    return {"DEPENDENT": dependent, "num_warps": key.warps, **({"launch_pdl": True} if dependent else {})}


def depends_on_launches(capability: int) -> bool:
    """Whether GPUs of a compute capability (times ten) begin a launch before the one that it depends on has ended, and
    let it wait for that where it has to (programmatic dependent launch, from Hopper on).
    """
    return capability >= _HOPPER


def cache_strides(cache: TensorLike, kv_layout: str) -> tuple[int, int, int]:
    """(page, token, head) strides in elements; with one token per page, both of the first are the page's."""
    if cache.dim() == 3:
        return cache.stride(0), cache.stride(0), cache.stride(1)
    token, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    return cache.stride(0), cache.stride(token if cache.shape[token] > 1 else 0), cache.stride(head)


def by_slot(shape: Shape, tensors: Tensors) -> bool:
    """Whether slots follow one another across pages in both caches, so that pages need not be told apart."""
    strides = (cache_strides(cache, shape.kv_layout) for cache in (tensors.k_cache, tensors.v_cache))
    return all(page == token * shape.page_size for page, token, _ in strides)


def in_same_place(k_cache: TensorLike, v_cache: TensorLike) -> bool:
    """Whether V is the beginning of K: in the same memory, with the same strides and at most as long."""
    dims = range(k_cache.dim())
    return (
        k_cache.data_ptr() == v_cache.data_ptr()
        and [k_cache.stride(dim) for dim in dims] == [v_cache.stride(dim) for dim in dims]
        and bool(v_cache.shape[-1] <= k_cache.shape[-1])
    )


def shared_kv(shape: Shape, tensors: Tensors) -> bool:
    """Whether one load serves K and V: V is the first piece of K, in the same memory."""
    return value_is_piece(shape.head_dim, shape.head_dim_v) and in_same_place(tensors.k_cache, tensors.v_cache)
