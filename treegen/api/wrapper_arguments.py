"""Arguments of TreeAttentionWrapper in FlashInfer's form: checks and conversions."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy.typing as npt
import torch

from treegen.backends.check_inputs import overlaps
from treegen.ir.arrays import host_array
from treegen.ir.errors import InputError
from treegen.ir.shape import DTYPES, FP8, dtype_name

PagedCache: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
"""K and V pages as a pair, or one tensor `[pages, 2, ...]` of both."""


def refuse(name: str, value: object, allowed: tuple[object, ...], fix: str) -> None:
    """Raises InputError for a value that is not among the allowed ones."""
    try:
        is_allowed = value in allowed
    except Exception:  # comparing an array of several entries gives no single answer
        is_allowed = False
    if not is_allowed:
        raise InputError(name, value, "is not supported", fix)


def refuse_unserved(pos_encoding_mode: object, rope_scale: object, rope_theta: object, q_len_per_req: object) -> None:
    """Raises InputError for position encodings, which FlashInfer's kernels apply, and for several query rows."""
    refuse("pos_encoding_mode", pos_encoding_mode, ("NONE",), "apply it to q and k")
    refuse("rope_scale", rope_scale, (None,), "apply it to q and k")
    refuse("rope_theta", rope_theta, (None,), "apply it to q and k")
    refuse("q_len_per_req", q_len_per_req, (1,), "describe several query rows of a request by a Tree")


def refuse_of_calls(q_scale: object, k_scale: object, v_scale: object, sinks: object, enable_pdl: object) -> None:
    """Raises InputError for scales, sinks and launches of a call."""
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        refuse(name, scale, (None, 1, 1.0), "scale q, or out, or use treegen.compile_batch")
    refuse("sinks", sinks, (None,), "use treegen.compile_batch")
    refuse("enable_pdl", enable_pdl, (None, False), "leave it out")


def kv_data_type_of(kv_data_type: Any, others: dict[str, Any]) -> Any:
    """Returns the type of caches, by further arguments of FlashInfer's `plan` where it is None.

    Raises InputError for those that say how its kernels divide requests, and TypeError for arguments that it has not.
    """
    if unknown := others.keys() - {"data_type", "block_tables", "seq_lens", "fixed_split_size", "disable_split_kv"}:
        raise TypeError(f"plan() got an unexpected keyword argument {sorted(unknown)[0]!r}")
    fix = "leave it out; treegen.compile_batch(batch_invariant=True) has bits that no other request changes"
    refuse("fixed_split_size", others.get("fixed_split_size"), (None, -1), fix)
    refuse("disable_split_kv", others.get("disable_split_kv"), (None, False), fix)
    return others.get("data_type") if kv_data_type is None else kv_data_type


def length_of(part: Any) -> int:
    """Counts the entries of an array; 0 for anything without a length."""
    try:
        return len(part)
    except TypeError:
        return 0


def on_host(name: str, part: Any) -> npt.NDArray[Any]:
    """Returns an array on the host, which waits for a tensor on a GPU."""
    return host_array(name, part.cpu() if getattr(part, "is_cuda", False) else part)


def element_types(q: str | torch.dtype, kv: str | torch.dtype | None, out: str | torch.dtype | None) -> tuple[str, str]:
    """Returns the names of the element types of q and of the caches, by default that of q. Raises InputError."""
    dtype = dtype_name("q_data_type", q)
    if out is not None and dtype_name("o_data_type", out) != dtype:
        raise InputError("o_data_type", out, f"differs from q's {dtype}", "leave it out")
    return dtype, dtype if kv is None else dtype_name("kv_data_type", kv, (*DTYPES, *FP8))


def graph_buffers(
    buffers: dict[str, torch.Tensor | None], limits: dict[str, int | None], use_cuda_graph: bool
) -> tuple[tuple[torch.Tensor | None, ...] | None, tuple[int, int] | None]:
    """Returns the buffers of a wrapper, and the requests and pages, of all of them, that page tables there can have.

    Both are None without CUDA graphs. buffers: for indptr, indices and last_page_len, in this order, by name. limits:
    other arguments for graphs. Raises InputError.
    """
    if not isinstance(use_cuda_graph, bool):
        raise InputError("use_cuda_graph", use_cuda_graph, "is not a bool", "give True or False")
    if use_cuda_graph:
        return tuple(buffers.values()), _buffer_sizes(buffers)
    for name, value in {**buffers, **limits}.items():
        if value is not None:
            fix = "give use_cuda_graph=True, or leave it out"
            raise InputError(name, "given", "is used only with use_cuda_graph", fix)
    return None, None


def _buffer_sizes(buffers: dict[str, torch.Tensor | None]) -> tuple[int, int]:
    lengths = []
    for name, buffer in buffers.items():
        if not isinstance(buffer, torch.Tensor) or buffer.dim() != 1:
            found = f"shape {tuple(buffer.shape)}" if isinstance(buffer, torch.Tensor) else type(buffer).__name__
            raise InputError(name, found, "is not a flat tensor", "use_cuda_graph needs one: allocate it")
        lengths.append(len(buffer))
    indptr, indices, last_page_len = lengths
    if last_page_len == 0:
        raise InputError(
            "paged_kv_last_page_len_buffer", "no entries", "holds no request", "allocate an entry per request"
        )
    if indptr != last_page_len + 1:
        reason = f"does not match {last_page_len} entries of paged_kv_last_page_len_buffer"
        raise InputError("paged_kv_indptr_buffer", f"{indptr} entries", reason, f"allocate {last_page_len + 1}")
    return last_page_len, indices


def pages_of(cache: PagedCache, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns K and V pages, as views where the cache is one tensor. Raises InputError. layout: "NHD" or "HND"."""
    if isinstance(cache, torch.Tensor):
        if cache.dim() != 5 or cache.shape[1] != 2:
            found, fix = f"shape {tuple(cache.shape)}", "give [pages, 2, ...] of five dimensions, or a pair"
            raise InputError("paged_kv_cache", found, "does not hold K and V", fix)
        return cache[:, 0], cache[:, 1]
    if not isinstance(cache, tuple | list) or len(cache) != 2:
        raise InputError("paged_kv_cache", type(cache).__name__, "is not a pair of tensors", "give (k, v)")
    for name, pages in zip(("paged_kv_cache's k", "paged_kv_cache's v"), cache, strict=True):
        if not isinstance(pages, torch.Tensor) or pages.dim() != 4:
            found = f"shape {tuple(pages.shape)}" if isinstance(pages, torch.Tensor) else type(pages).__name__
            raise InputError(name, found, "is not a tensor of four dimensions", f"give pages in layout {layout}")
    return cache[0], cache[1]


def check_lse(lse: object, q: object, return_lse: bool) -> None:
    """Raises InputError unless `lse` is None, or can take the log-sum-exp of the rows of `q`, which is asked for."""
    if lse is not None and not return_lse:
        raise InputError("lse", "given", "is used only with return_lse", "give return_lse=True")
    if lse is None or not isinstance(q, torch.Tensor):
        return
    if not isinstance(lse, torch.Tensor):
        raise InputError("lse", type(lse).__name__, "is not a tensor", "give a torch.Tensor")
    if lse.shape != q.shape[:2] or lse.dtype != torch.float32 or lse.device != q.device or overlaps(lse):
        shared = ", elements that share memory" if overlaps(lse) else ""
        found = f"{tuple(lse.shape)} {lse.dtype} on {lse.device}{shared}"
        needed = f"needs {tuple(q.shape[:2])} torch.float32 on {q.device}"
        raise InputError("lse", found, needed, "allocate such a tensor")
