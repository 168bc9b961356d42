"""Checks of a call's tensors, before any launch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields

import torch

from treegen.backends.kv_views import slots_of, token_major, tokens_at
from treegen.codegen.kernel_signature import cache_strides
from treegen.ir.arrays import INT32_MAX
from treegen.ir.errors import InputError
from treegen.ir.scalars import is_one_of
from treegen.ir.shape import Shape, dtype_name
from treegen.ir.tree import Tree

TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""PyTorch types by their names in Shape."""
KV_TORCH_DTYPES = {**TORCH_DTYPES, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""The same for caches."""

_HEADS_FIRST = (
    "of [batch, heads, tokens, head_dim], as Hugging Face has it, give cache.transpose(1, 2).flatten(0, 1), "
    "and serve pages like that by kv_layout='HND'"
)
_LSE_SCALE = {"ln": 1.0, "log2": 1 / math.log(2)}


def lse_scale(lse_base: str) -> float:
    """Returns the factor from a natural lse to one of this base. Raises InputError for an unknown base."""
    if not is_one_of(lse_base, _LSE_SCALE):
        raise InputError("lse_base", lse_base, "is unknown", f"use one of {', '.join(_LSE_SCALE)}")
    return _LSE_SCALE[lse_base]


def shape_of(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_layout: str = "NHD") -> Shape:
    """Finds the attention shape of three tensors.

    Args:
        q: `[rows, num_qo_heads, head_dim]`.
        k_cache: `[slots, num_kv_heads, head_dim]`, or with pages.
        v_cache: The same with head_dim_v.
        kv_layout: The layout of paged caches, which tensors do not show.

    Raises:
        InputError: The tensors do not fit one another.
        ShapeError: No kernel serves their shape.
    """
    for name, tensor, dims in (("q", q, (3,)), ("k_cache", k_cache, (3, 4)), ("v_cache", v_cache, (3, 4))):
        if not isinstance(tensor, torch.Tensor):
            raise InputError(name, type(tensor).__name__, "is not a tensor", "give a torch.Tensor")
        if tensor.is_meta:
            raise InputError(name, "a meta tensor", "has a shape and no values", "allocate it on the CPU or a GPU")
        if tensor.dim() not in dims:
            form = "[rows, num_qo_heads, head_dim]" if name == "q" else "[slots, num_kv_heads, head_dim] or with pages"
            if name == "q" and tensor.dim() == 4:
                form += "; of Hugging Face's [batch, heads, tokens, head_dim] that is q.transpose(1, 2).flatten(0, 1)"
            raise InputError(name, f"shape {tuple(tensor.shape)}", f"has {tensor.dim()} dimensions", f"give {form}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise InputError(
                name,
                f"strides {tensor.stride()}",
                "is not contiguous in its last dimension",
                f"call {name}.contiguous()",
            )
        if tensor.device != q.device:
            raise InputError(name, tensor.device, f"is not on q's device {q.device}", "move it there")
    in_fp8 = q.dtype in (torch.float16, torch.bfloat16) and k_cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    other, expected = ("k_cache's", k_cache.dtype) if in_fp8 else ("q's", q.dtype)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dtype != expected:
            raise InputError(name, tensor.dtype, f"is not of {other} type {expected}", "convert it")
    if v_cache.shape[:-1] != k_cache.shape[:-1]:
        shapes, reason = f"shape {tuple(v_cache.shape)}", f"differs from k_cache's {tuple(k_cache.shape)}"
        raise InputError("v_cache", shapes, reason, "give equal shapes, but for the last dimension")
    if k_cache.shape[-1] != q.shape[-1]:
        raise InputError(
            "k_cache", f"head_dim {k_cache.shape[-1]}", f"differs from q's {q.shape[-1]}", "give one head_dim"
        )
    heads, of_tokens = q.shape[1], token_major(k_cache, kv_layout).shape
    kv_heads = of_tokens[-2]
    if kv_heads == 0 or heads % kv_heads:
        reason = f"is not a multiple of the cache's {kv_heads} heads"
        fix = "give every KV head the same number of query heads"
        if k_cache.dim() == 4 and kv_layout == "NHD" and k_cache.shape[1] and heads % k_cache.shape[1] == 0:
            fix = _HEADS_FIRST
        raise InputError("q", f"{heads} heads", reason, fix)
    page_size = of_tokens[1] if k_cache.dim() == 4 else 1
    dims, dtype, kv_dtype = (q.shape[2], v_cache.shape[-1]), dtype_name("q", q.dtype), str(k_cache.dtype)
    return Shape(heads, kv_heads, *dims, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size, kv_layout=kv_layout)


def form_of(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor | None,
    besides: tuple[tuple[str, torch.Tensor], ...] = (),
) -> tuple[object, ...] | None:
    """Collects all properties of tensors that checks and machine code depend on; None for what is no plain tensor.

    besides: further tensors that the kernel reads, by name.
    """
    try:
        keys_at, values_at = k_cache.data_ptr(), v_cache.data_ptr()
        requires_grad = q.requires_grad or k_cache.requires_grad or v_cache.requires_grad
        for _, tensor in besides:
            requires_grad = requires_grad or tensor.requires_grad
        form = (
            requires_grad and torch.is_grad_enabled(),
            q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % 16,
            k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.device, keys_at % 16,
            v_cache.shape, v_cache.stride(), v_cache.dtype, v_cache.device, values_at % 16,
            keys_at == values_at,
        )  # fmt: skip
        if out is None:
            return form
        written_grad = out.requires_grad and torch.is_grad_enabled()
        return *form, out.shape, out.stride(), out.dtype, out.device, out.data_ptr() % 16, written_grad
    except (AttributeError, TypeError, RuntimeError):
        return None


def needing_gradients(named: Iterable[tuple[str, torch.Tensor | None]]) -> str:
    """Returns the name of the first tensor that requires gradients; "" for none, or while gradients are disabled."""
    if torch.is_grad_enabled():
        for name, tensor in named:
            if tensor is not None and tensor.requires_grad:
                return name
    return ""


def refuse_gradients(name: str) -> None:
    """Raises InputError for the tensor of this name, unless the name is "" (see needing_gradients)."""
    if name:
        reason = "requires gradients, and kernels have no backward pass"
        raise InputError(name, "a tensor", reason, "call inside torch.no_grad(), or detach it")


def check_output(out: torch.Tensor, q: torch.Tensor, head_dim_v: int) -> None:
    """Raises InputError unless `out` can hold the result for `q`."""
    expected = (*q.shape[:2], head_dim_v)
    if not isinstance(out, torch.Tensor):
        raise InputError("out", type(out).__name__, "is not a tensor", "give a torch.Tensor")
    if tuple(out.shape) != expected or out.dtype != q.dtype or out.device != q.device:
        found = f"{tuple(out.shape)} {out.dtype} on {out.device}"
        raise InputError("out", found, f"needs {expected} {q.dtype} on {q.device}", "allocate it so")
    if out.stride(-1) != 1:
        raise InputError(
            "out", f"strides {out.stride()}", "is not contiguous in its last dimension", "allocate it like q"
        )
    if overlaps(out):
        raise InputError("out", f"strides {out.stride()}", "has elements that share memory", "allocate it like q")


def overlaps(tensor: torch.Tensor) -> bool:
    """Says whether two elements of a tensor may share memory, as in an expanded tensor.

    They do not if each dimension steps over all elements of the dimensions with smaller strides.
    """
    reach = 0
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(dim for dim in dims if dim[1] > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def check_strides(tokens: int, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_layout: str = "NHD") -> None:
    """Raises InputError where offsets within a tile exceed int32, in which kernels compute them.

    tokens: tokens of a full tile. Where pages are not consecutive in memory, the tokens of a page count, too.
    """
    page_size = token_major(k_cache, kv_layout).shape[1] if k_cache.dim() == 4 else 1
    of_caches = {name: cache_strides(cache, kv_layout) for name, cache in (("k_cache", k_cache), ("v_cache", v_cache))}
    by_page = any(page != token * page_size for page, token, _ in of_caches.values())
    counted = max(tokens, page_size) if by_page else tokens
    for name, (_, stride, _) in of_caches.items():
        if stride * counted > INT32_MAX:
            reason = f"puts {counted} tokens 2^31 elements apart or more"
            raise InputError(name, f"a token stride of {stride}", reason, "lay tokens closer together")


def check_fits(tree: Tree, shape: Shape, q: torch.Tensor, found: Shape, most_rows: int | None = None) -> None:
    """Raises InputError unless q has one row per row of the tree and the tensors have the kernel's shape.

    With `most_rows`, q may have more rows than the tree, up to this number.
    """
    if most_rows is not None:
        check_rows(tree, q)
        if len(q) > most_rows:
            raise InputError("q", f"{len(q)} rows", f"the kernel serves {most_rows}", "give fewer, or raise max_rows")
    elif len(q) != tree.num_rows:
        raise InputError("q", f"{len(q)} rows", f"the tree has {tree.num_rows}", "give one row per row of the tree")
    check_shape(shape, found)


def check_shape(shape: Shape, found: Shape) -> None:
    """Raises InputError unless tensors have the kernel's shape."""
    if found != shape:
        differing = [field.name for field in fields(Shape) if getattr(found, field.name) != getattr(shape, field.name)]
        here, there = (", ".join(f"{name} {getattr(one, name)}" for name in differing) for one in (found, shape))
        heads_first = shape.kv_layout == "NHD" and found.page_size == shape.num_kv_heads != found.num_kv_heads
        fix = _HEADS_FIRST if heads_first else "compile another kernel"
        raise InputError("q, k_cache, v_cache", here, f"the kernel serves {there}", fix)


def check_rows(tree: Tree, q: torch.Tensor) -> None:
    """Raises InputError when q has fewer rows than the tree."""
    if len(q) < tree.num_rows:
        raise InputError("q", f"{len(q)} rows", f"the tree has {tree.num_rows}", "give a row per row of the tree")


def check_slots(last_slot: int, k_cache: torch.Tensor, kv_layout: str = "NHD") -> int:
    """Counts the KV slots of a cache. Raises InputError when the tree's highest slot is not among them."""
    keys = token_major(k_cache, kv_layout)
    slots, page_size = slots_of(keys), keys.shape[1] if keys.dim() == 4 else 1
    if last_slot >= slots:
        unit, last = ("slot", last_slot) if page_size == 1 else ("page", last_slot // page_size)
        fix = f"give a cache of at least {last + 1} {unit}s, or correct the tree's kv"
        raise InputError("k_cache", f"{len(keys)} {unit}s", f"the tree refers to {unit} {last}", fix)
    return slots


def check_captured(last_slot: int, slots: int | None) -> None:
    """Raises InputError when a tree's highest slot lies beyond the smallest cache that captured CUDA graphs read.

    slots: the KV slots of that cache; None without graphs.
    """
    if slots is not None and last_slot >= slots:
        reason = f"a CUDA graph that reads the kernel's tables was captured with a cache of {slots} slots"
        raise InputError("tree", f"slot {last_slot}", reason, "capture another kernel or wrapper with a larger cache")


def check_values(
    tree: Tree, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_layout: str = "NHD"
) -> None:
    """Raises InputError when the tree's rows of q, or the K or V of its tokens, hold NaN.

    Waits for the device, so it is for debugging only.
    """
    keys, values = token_major(k_cache, kv_layout), token_major(v_cache, kv_layout)
    if bool(q[: tree.num_rows].isnan().any()):
        raise InputError("q", "NaN", "is not a number", "look for the layer that made it")
    for name, cache in (("k_cache", keys), ("v_cache", values)):
        for start, length in zip(tree.kv.start.tolist(), tree.kv.length.tolist(), strict=True):
            run = tokens_at(cache, torch.arange(start, start + length, device=cache.device))
            run = run.float() if run.element_size() == 1 else run
            if bool(run.isnan().any()):
                place = start + int(run.isnan().flatten(1).any(1).int().argmax())
                raise InputError(name, "NaN", f"slot {place} is not a number", "write the slot before it is read")
