"""The signature of emitted kernels: what each parameter is, and the arguments that launches give for it.

`kernel_signature` is the only list of a kernel's parameters. Templates print it. Launches and compilation ahead of time
look arguments up in its order. Bound calls read from it which arguments are pointers that every call gives anew.

Triton specialises machine code for the arguments' types, for integers that are 1 or multiples of 16, for pointers that
are multiples of 16 bytes, and for the caches' strides by token and head, which are constants of it: code that was
compiled ahead is found again only if all of these are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from treegen.ir.keys import KernelKey, MergeKey
from treegen.ir.shape import Shape
from treegen.target.targets import starts_launches_early
from treegen.target.tile_config import value_is_slice


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
    """The tensors of a call, named as the parameters of kernels and in their order: q, the caches, the results, the
    partial results and the flags. A kernel takes some neighbours of them; only kernels that wait take flags.
    """

    q: TensorLike
    k: TensorLike
    v: TensorLike
    out: TensorLike
    lse: TensorLike
    part_out: TensorLike
    part_lse: TensorLike
    flags: TensorLike


class ItemTables(NamedTuple):
    """The tables of a kernel config, named as the parameters of partial kernels."""

    items: TensorLike
    rows: TensorLike
    tiles: TensorLike
    runs: TensorLike
    work_indptr: TensorLike
    work: TensorLike
    epilogue_indptr: TensorLike
    epilogue_partials: TensorLike
    row_positions: TensorLike


class MergeTables(NamedTuple):
    """The tables of a round's merges, named as the parameters of merge kernels."""

    merge_rows: TensorLike
    merge_indptr: TensorLike
    merge_partials: TensorLike


class ParameterKind(Enum):
    """What a parameter of a kernel is."""

    TENSOR = "a tensor of the call"
    TABLE = "a table of the schedule, of 32-bit integers"
    COUNT = "a number of the schedule"
    HEAD_VALUES = "a tensor with a number for every head"
    SIZE = "a size or a stride of the call's tensors"
    FLOAT = "a floating-point number"
    CAPTURED = "a tensor that scores are made of"
    CAPTURED_SIZE = "a size of such a tensor"
    CAPTURED_STRIDE = "a stride of such a tensor"
    TIMES = "where thread blocks record when they ran, as 64-bit integers"
    SWITCH = "a fact about the launch that machine code is made for"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an emitted kernel.

    line: the line of the parameter list on which it stands. constant: whether its value is a constant of the machine
    code. specialized: whether Triton may specialise machine code for its value.
    """

    name: str
    kind: ParameterKind
    line: int = 0
    constant: bool = False
    specialized: bool = True

    @property
    def declaration(self) -> str:
        """The parameter as the kernel declares it."""
        return f"{self.name}: tl.constexpr" if self.constant else self.name


@cache
def kernel_signature(key: KernelKey | MergeKey) -> tuple[Parameter, ...]:
    """The parameters of a key's kernel, in order. The tensors of the call come first, in the order of Tensors."""
    lines = _partial_lines(key) if isinstance(key, KernelKey) else _merge_lines(key)
    return tuple(replace(parameter, line=number) for number, line in enumerate(lines) for parameter in line)


def _partial_lines(key: KernelKey) -> Iterator[tuple[Parameter, ...]]:
    tensors = _each(ParameterKind.TENSOR, *Tensors._fields)
    yield (*tensors, *_each(ParameterKind.COUNT, "parts")) if key.fused_merge else tensors[:-1]
    yield _each(ParameterKind.TABLE, "items", "rows", "tiles", "runs")
    if key.work_list:
        yield _each(ParameterKind.TABLE, "work_indptr", "work")
    if key.in_turns:
        yield _each(ParameterKind.COUNT, "second_item")
    if key.epilogue_merge:
        yield _each(ParameterKind.TABLE, "epilogue_indptr", "epilogue_partials")
    if key.scaled:
        yield _each(ParameterKind.HEAD_VALUES, "k_scales", "v_scales")
    yield _each(ParameterKind.SIZE, "kv_heads")
    yield _each(ParameterKind.SIZE, "q_stride_row", "q_stride_head")
    for one in ("k", "v"):
        yield (
            Parameter(f"{one}_stride_page", ParameterKind.SIZE),
            Parameter(f"{one}_stride_token", ParameterKind.SIZE, constant=True),
            Parameter(f"{one}_stride_head", ParameterKind.SIZE, constant=True),
        )
    yield _each(ParameterKind.SIZE, "out_stride_row", "out_stride_head")
    yield _each(ParameterKind.FLOAT, "score_scale", "lse_scale")
    if key.scoring is not None and key.scoring.positions:
        yield _each(ParameterKind.TABLE, "row_positions")
    if key.sinks:
        yield _each(ParameterKind.HEAD_VALUES, "sinks")
    for number, (_, dims) in enumerate(key.scoring.captured if key.scoring else ()):
        names = _CapturedNames.of(number, dims)
        yield _each(ParameterKind.CAPTURED, names.tensor)
        yield from ((Parameter(size, ParameterKind.CAPTURED_SIZE, specialized=False),) for size in names.sizes)
        yield from ((Parameter(stride, ParameterKind.CAPTURED_STRIDE, specialized=False),) for stride in names.strides)
    if key.recorded:
        yield _each(ParameterKind.TIMES, "times")
    yield (Parameter("INTERPRETED", ParameterKind.SWITCH, constant=True),)
    yield (Parameter("DEPENDENT", ParameterKind.SWITCH, constant=True),)


def _merge_lines(key: MergeKey) -> Iterator[tuple[Parameter, ...]]:
    yield _each(ParameterKind.TENSOR, "out", "lse", "part_out", "part_lse")
    yield _each(ParameterKind.TABLE, *MergeTables._fields)
    if key.in_turns:
        yield _each(ParameterKind.COUNT, "first_merges", "second_merges")
    yield _each(ParameterKind.SIZE, "heads")
    yield _each(ParameterKind.SIZE, "out_stride_row", "out_stride_head")
    yield _each(ParameterKind.FLOAT, "lse_scale")
    if key.sinks:
        yield _each(ParameterKind.HEAD_VALUES, "sinks")
    if key.recorded:
        yield _each(ParameterKind.TIMES, "times")
        yield (Parameter("INTERPRETED", ParameterKind.SWITCH, constant=True),)
    yield (Parameter("DEPENDENT", ParameterKind.SWITCH, constant=True),)


def unspecialized(parameters: tuple[Parameter, ...]) -> tuple[str, ...]:
    """Names the parameters whose values machine code is not made for."""
    return tuple(parameter.name for parameter in parameters if not parameter.specialized)


def _each(kind: ParameterKind, *names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, kind, specialized=kind is not ParameterKind.COUNT) for name in names)


class _CapturedNames(NamedTuple):
    """The names of the parameters that describe a captured tensor."""

    tensor: str
    sizes: tuple[str, ...]
    strides: tuple[str, ...]

    @classmethod
    def of(cls, number: int, dims: int) -> _CapturedNames:
        tensor = f"captured_{number}"
        sizes, strides = (tuple(f"{tensor}_{what}_{axis}" for axis in range(dims)) for what in ("size", "stride"))
        return cls(tensor, sizes, strides)


@dataclass(frozen=True, slots=True, eq=False)
class KernelSignature:
    """How launches of a kernel order their arguments.

    arguments(values) gives the arguments out of values by parameters' names. tensors: which of Tensors the kernel
    takes: neighbours, as its first arguments.
    """

    arguments: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    tensors: slice

    @classmethod
    def of(cls, key: KernelKey | MergeKey) -> KernelSignature:
        """The order of a key's parameters."""
        parameters = kernel_signature(key)
        names = [parameter.name for parameter in parameters if parameter.kind is ParameterKind.TENSOR]
        first = Tensors._fields.index(names[0])
        taken = slice(first, first + len(names))
        assert names == list(Tensors._fields[taken])
        assert names == [parameter.name for parameter in parameters[: len(names)]]
        return cls(itemgetter(*(parameter.name for parameter in parameters)), taken)


def call_values(shape: Shape, tensors: Tensors, sm_scale: float, lse_scale: float) -> dict[str, Any]:
    """What kernels take of a call, by parameters' names: its tensors, their sizes and strides, and its scales, which
    TritonProgram explains.
    """
    q, out = tensors.q, tensors.out
    values = {
        **tensors._asdict(),
        "heads": shape.num_qo_heads, "kv_heads": shape.num_kv_heads,
        "q_stride_row": q.stride(0), "q_stride_head": q.stride(1),
        "out_stride_row": out.stride(0), "out_stride_head": out.stride(1),
        "score_scale": sm_scale / math.log(2), "lse_scale": lse_scale * math.log(2),
    }  # fmt: skip
    for one, kv in (("k", tensors.k), ("v", tensors.v)):
        page, token, head = cache_strides(kv, shape.kv_layout)
        values |= {f"{one}_stride_page": page, f"{one}_stride_token": token, f"{one}_stride_head": head}
    return values


def captured_values(tensors: Iterable[TensorLike]) -> dict[str, Any]:
    """What kernels take of captured tensors, by parameters' names."""
    values: dict[str, Any] = {}
    for number, tensor in enumerate(tensors):
        names = _CapturedNames.of(number, tensor.dim())
        values[names.tensor] = tensor
        values |= zip(names.sizes, tensor.shape, strict=True)
        values |= ((name, tensor.stride(axis)) for axis, name in enumerate(names.strides))
    return values


def switch_values(*, interpreted: bool, capability: int) -> dict[str, bool]:
    """What machine code is made for, by parameters' names. capability: compute capability times ten, 0 where no GPU
    runs the kernel.
    """
    return {"INTERPRETED": interpreted, "DEPENDENT": starts_launches_early(capability)}


def cache_strides(cache: TensorLike, kv_layout: str) -> tuple[int, int, int]:
    """(page, token, head) strides in elements; with one token per page, both of the first are the page's."""
    if cache.dim() == 3:
        return cache.stride(0), cache.stride(0), cache.stride(1)
    token, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    return cache.stride(0), cache.stride(token if cache.shape[token] > 1 else 0), cache.stride(head)


def by_slot(shape: Shape, tensors: Tensors) -> bool:
    """Whether slots follow one another across pages in both caches, so that pages need not be told apart."""
    strides = (cache_strides(cache, shape.kv_layout) for cache in (tensors.k, tensors.v))
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
    """Whether one load serves K and V: V is the first slice of K, in the same memory."""
    return value_is_slice(shape.head_dim, shape.head_dim_v) and in_same_place(tensors.k, tensors.v)
