"""A wrapper with the life of FlashInfer's paged decode wrappers: plan once per step from page tables, run once per
layer. What requests share is found from their page tables.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, TypeAlias

import numpy.typing as npt
import torch

from treegen.api.compile import compile as compile_tree
from treegen.api.compile import in_isolation
from treegen.api.request_batches import RequestBatches, Settings, obstacle, room_for
from treegen.backends.check_inputs import overlaps
from treegen.backends.devices import default_device, resolve_target
from treegen.backends.page_buffers import PageBuffers
from treegen.ir.arrays import host_array
from treegen.ir.errors import InputError, PerformanceWarning, warn
from treegen.ir.scalars import is_one_of
from treegen.ir.shape import DTYPES, FP8, KV_LAYOUTS, Shape, dtype_name
from treegen.ir.tree import Tree
from treegen.runtime.batch_kernel import BatchKernel
from treegen.runtime.call_options import CallOptions
from treegen.runtime.copies import Copyable
from treegen.runtime.kernel import Kernel
from treegen.runtime.limits import PageBounds, WantedLimits
from treegen.runtime.prepared import prepare
from treegen.scoring.options import ScoreOptions, Scoring
from treegen.strategies import Strategy, strategy_from
from treegen.target.problem import Problem
from treegen.tuning.planner import Planner

PagedCache: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"


class TreeAttentionWrapper(Copyable):
    """Decode attention over a paged KV cache, in place of FlashInfer's BatchDecodeWithPagedKVCacheWrapper.

    Call `plan` once per step and `run` once per layer. Calls that are written for FlashInfer work as they stand: the
    wrapper accepts arguments that only concern FlashInfer's kernels and ignores them (see below). It serves or refuses
    all other arguments.

    Page tables on a GPU are served by request. `plan` copies them on the device, computes lengths and launches the step
    kernels of a `treegen.compile_batch` kernel there, on the current stream, and waits for nothing. The device also
    finds out which requests share pages, whenever requests come or go and after a number of plans. The plan that uses
    this follows when the host knows the result, one or two steps later. Until then new requests are served alone, which
    is right and slower. Values are read as they are: rows with page ids beyond the cache give 0. The first `run` makes
    the kernel (`batch_kernel`). Page tables that cannot be served by request are copied to the host, with a
    PerformanceWarning:

    - pages whose size is no power of two up to 128;
    - `isolated`, `max_items` and `max_slots`;
    - strategies whose plans need launches of their own;
    - buffers that are not int32 on the device, and tables above 1 GB.

    With `use_cuda_graph` batches are planned between replays of a graph that was captured from `run`, and replays use
    the latest plan. The three buffers are then needed, and their lengths fix the batch size and the most
    pages of a batch; a page that requests share counts for each of them. The first `plan` settles the shape, and
    whether batches are served by request. Call `run` once before capturing. By request, `plan` writes page tables to
    the buffers, and kernels read them there. Otherwise nothing is written to the buffers, and the first `plan` also
    settles the strategy for "auto" and makes a kernel of fixed capacity. This kernel serves every page table that fits
    the buffers with strategies without partial results, and with `cohort` and `query`, which "auto" mostly takes. Other
    strategies may need more; `plan` then raises InputError before anything changes for replays.

    A wrapper belongs to one thread at a time. Calls on several streams may overlap, but not with `plan`. `copy`,
    `deepcopy` and `pickle` make a wrapper with a kernel of its own, as of Kernel. The copy of a wrapper that serves
    batches by request has to plan anew.

    Args:
        float_workspace_buffer: Ignored: scratch memory is allocated on the stream of a call.
        kv_layout: "NHD" for pages `[page_size, num_kv_heads, head_dim]`, "HND" for `[num_kv_heads, page_size,
            head_dim]`.
        use_cuda_graph: Whether graphs are captured from `run`.
        use_tensor_cores: Ignored.
        paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: With use_cuda_graph: tensors of
            `batch + 1` entries, of the most page ids of a batch, and of `batch` entries.
        backend: "auto" or "fa2"; ignored.
        jit_args: Refused.
        strategy: As of treegen.compile.
        max_items, max_slots: With use_cuda_graph: the most work items of a launch, and slots of partial results, in
            place of the bounds that follow from the buffers.
        isolated: As of treegen.compile.
        by_request: True to serve other arrays and tensors by request, too; False to copy all page tables to the host
            and to plan there. By default page tables on a GPU are served by request.
        max_tokens: By request: the most tokens of a request, by default those of all pages together. Tables take about
            a byte for each row and each of these tokens. A longer request gives 0, until a later `plan` raises
            InputError.

    Raises:
        InputError: An argument is not supported.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: object = None,
        *,
        strategy: str | Strategy = "auto",
        max_items: int | None = None,
        max_slots: int | None = None,
        isolated: bool = False,
        by_request: bool | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if not is_one_of(kv_layout, KV_LAYOUTS):
            raise InputError("kv_layout", kv_layout, "is unknown", f"use one of {', '.join(KV_LAYOUTS)}")
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        self._sizes = _buffer_sizes(buffers) if use_cuda_graph else None
        for name, value in {**buffers, "max_items": max_items, "max_slots": max_slots}.items():
            if value is not None and not use_cuda_graph:
                raise InputError(name, "given", "is for use_cuda_graph", "give use_cuda_graph=True, or leave it out")
        if not is_one_of(backend, ("auto", "fa2")):
            raise InputError("backend", backend, "is another library's", "leave it at auto")
        if jit_args is not None:
            raise InputError("jit_args", type(jit_args).__name__, "are another library's", "leave them out")
        self._wanted = WantedLimits(None, max_items, max_slots)
        if not isinstance(isolated, bool):
            raise InputError("isolated", isolated, "is not a bool", "give True or False")
        if by_request is not None and not isinstance(by_request, bool):
            raise InputError("by_request", by_request, "is not a bool", "give True, False or None")
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise InputError("max_tokens", max_tokens, "is not a number of tokens", "give those of the longest request")
        self._by_request, self._max_tokens = by_request, max_tokens
        self._buffers = tuple(buffers.values()) if use_cuda_graph else None
        self._requests: RequestBatches | None = None
        self._layout, self._strategy, self._isolated = kv_layout, strategy, isolated
        self._kernel: Kernel | None = None
        self._settings: Settings | None = None

    def _state(self) -> dict[str, Any]:
        # Batches by request follow the tensors of their callers, so that a copy has no plan yet.
        return dict(vars(self)) if self._requests is None else {**vars(self), "_requests": None, "_settings": None}

    def _restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def _given(self) -> dict[str, object]:
        return {"strategy": self._strategy}

    def __copy__(self) -> TreeAttentionWrapper:
        made = super().__copy__()
        made._kernel = copy(self._kernel)
        if self._buffers is not None:
            made._buffers = tuple(None if buffer is None else buffer.clone() for buffer in self._buffers)
        return made

    def __repr__(self) -> str:
        if self._requests is not None:
            return f"<treegen.TreeAttentionWrapper {self._layout}: by request, {self._requests.live}>"
        return f"<treegen.TreeAttentionWrapper {self._layout}: {self._kernel or 'no plan yet'}>"

    def plan(
        self,
        kv_indptr: Any,
        kv_indices: Any,
        kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_len_per_req: int = 1,
        request_ids: Sequence[Hashable | None] | None = None,
    ) -> None:
        """Plans for a batch of requests with one query row each.

        A plan for another batch of the same shape reuses all kernels.

        Args:
            kv_indptr, kv_indices, kv_last_page_len: The page table, as of Tree.from_page_table.
            num_qo_heads, num_kv_heads, head_dim, page_size: The attention shape; head_dim of q, K and V.
            window_left, logits_soft_cap, sm_scale: As of treegen.compile.
            q_data_type, kv_data_type, o_data_type: Types of q, the caches and out, by torch dtype or by name.
            pos_encoding_mode, rope_scale, rope_theta, q_len_per_req, non_blocking: To be left at their defaults.
            request_ids: By request: a hashable id of the request in each row, None for rows without one. Without ids
                row i counts as request i, and sharing is looked for more often.

        Raises:
            TreeError, ShapeError: The page table is wrong (on a GPU it is not checked), or the shape not supported.
            InputError: An option is not supported, or the batch does not fit the captured graphs.
        """
        _refuse("pos_encoding_mode", pos_encoding_mode, ("NONE",), "apply it to q and k")
        _refuse("rope_scale", rope_scale, (None,), "apply it to q and k")
        _refuse("rope_theta", rope_theta, (None,), "apply it to q and k")
        _refuse("q_len_per_req", q_len_per_req, (1,), "describe such rows by a Tree")
        dtype = dtype_name("q_data_type", q_data_type)
        if o_data_type is not None and dtype_name("o_data_type", o_data_type) != dtype:
            raise InputError("o_data_type", o_data_type, f"differs from q's {dtype}", "leave it out")
        shape = Shape(
            num_qo_heads,
            num_kv_heads,
            head_dim,
            dtype=dtype,
            kv_dtype=dtype if kv_data_type is None else dtype_name("kv_data_type", kv_data_type, (*DTYPES, *FP8)),
            page_size=page_size,
            kv_layout=self._layout,
        )
        options = ScoreOptions(logits_soft_cap=logits_soft_cap, window_left=window_left)
        settings = shape, sm_scale, options
        table = kv_indptr, kv_indices, kv_last_page_len
        if (requests := self._served_by_request(table, settings)) is not None:
            requests.plan(*table, request_ids)
            self._requests, self._settings, self._kernel = requests, settings, None
            return
        indptr, indices = _on_host("kv_indptr", kv_indptr), _on_host("kv_indices", kv_indices)
        if self._sizes is not None:
            self._check_graph(self._sizes, indptr.size - 1, indices.size, settings)
        tree = Tree.from_page_table(indptr, indices, _on_host("kv_last_page_len", kv_last_page_len), page_size)
        if self._kernel is not None and self._settings == settings:
            self._kernel.update(tree)
        else:
            self._kernel = self._compiled(tree, *settings)
            self._settings = settings
        self._requests = None

    begin_forward = plan

    def _served_by_request(self, table: tuple[Any, Any, Any], settings: Settings) -> RequestBatches | None:
        """What serves a page table by request; None where it is planned for on the host."""
        if self._sizes is not None and self._settings is not None and self._requests is None:
            return None  # graphs are captured for kernels that the host plans for
        on_gpu = [part for part in table if getattr(part, "is_cuda", False)]
        present, graphed = self._requests, self._sizes is not None
        if not (self._by_request or (self._by_request is None and on_gpu) or (present is not None and graphed)):
            return None
        rows, pages = max(_length(table[0]) - 1, 0), _length(table[1])
        if self._sizes is not None:
            self._check_graph(self._sizes, rows, pages, settings)
        if present is not None and present.settings == settings and (graphed or present.holds(rows, pages)):
            return present
        device = on_gpu[0].device if on_gpu else default_device()
        buffers = None
        if self._buffers is not None:
            buffers = PageBuffers.of_tensors(self._buffers)
            device = device if buffers is None else buffers.indices.device
        why_not = self._obstacle(settings, device, buffers, rows, pages)
        if why_not is not None and self._by_request:
            raise InputError("by_request", True, *why_not)
        if why_not is not None:
            warn(PerformanceWarning, f"the page table is copied to the host, which waits for it: {why_not[0]}")
            return None
        if present is not None and present.settings == settings and present.device == device:
            return present
        return RequestBatches(settings, self._strategy, device, buffers, self._max_tokens)

    def _obstacle(
        self, settings: Settings, device: torch.device, buffers: PageBuffers | None, rows: int, pages: int
    ) -> tuple[str, str] | None:
        """Why a batch cannot be served by request, and what to do about it; None where it can."""
        if self._isolated:
            return "isolated plans are made by page ids", "leave isolated out"
        if self._wanted.max_items is not None or self._wanted.max_slots is not None:
            return "max_items and max_slots are limits of plans by page ids", "leave them out"
        if self._buffers is not None and buffers is None:
            return "buffers are not int32 on one device, and contiguous", "allocate them so"
        room = room_for(rows, pages) if buffers is None else (buffers.rows, buffers.pages)
        return obstacle(settings, self._strategy, device, *room, self._max_tokens)

    def _check_graph(self, sizes: tuple[int, int], requests: int, pages: int, settings: Settings) -> None:
        """Raises InputError for a batch that captured graphs cannot serve."""
        if requests != sizes[0]:
            reason = f"do not match the {sizes[0]} of the buffers, for which graphs are captured"
            raise InputError("kv_indptr", f"{requests} requests", reason, "fill up with requests without pages")
        if pages > sizes[1]:
            reason = f"exceed the {sizes[1]} of paged_kv_indices_buffer"
            raise InputError("kv_indices", f"{pages} pages", reason, "make another wrapper with a larger buffer")
        if self._settings not in (None, settings):
            reason = "differs from the first plan's, for which graphs are captured"
            raise InputError("shape, sm_scale, scores", settings, reason, "make another wrapper")

    def _compiled(self, tree: Tree, shape: Shape, sm_scale: float | None, options: ScoreOptions) -> Kernel:
        """A kernel for the first batch; with use_cuda_graph one of a capacity for all that fit the buffers."""
        cap, left = options.logits_soft_cap, options.window_left
        if self._sizes is None:
            return compile_tree(
                tree,
                strategy=self._strategy,
                shape=shape,
                sm_scale=sm_scale,
                logits_soft_cap=cap,
                window_left=left,
                isolated=self._isolated,
            )
        wanted = replace(self._wanted, pages=PageBounds(*self._sizes, shape.page_size))
        chosen, scoring = strategy_from(self._strategy), Scoring.of(options)
        if self._isolated:
            chosen, scoring = in_isolation(chosen, scoring)
        planner, problem = Planner(chosen), Problem(tree, shape, resolve_target(None))
        prepared = prepare(problem, planner, scoring, wanted)
        return Kernel(prepared, planner, CallOptions(sm_scale=sm_scale, scoring=scoring), wanted)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Computes attention of the planned batch.

        Args:
            q: `[requests, num_qo_heads, head_dim]`.
            paged_kv_cache: K and V pages as a pair, or one tensor `[pages, 2, ...]` of both, in the wrapper's layout.
            q_scale, k_scale, v_scale: Refused, unless None or 1.
            out: Where the result goes; by default a new tensor.
            lse: Where the log-sum-exp goes; only with return_lse.
            return_lse: Whether to return the log-sum-exp as well.
            enable_pdl: Refused, unless None or False.
            window_left: Refused, unless None or the value that `plan` got.

        Returns:
            out, like q; with return_lse also the base-2 log-sum-exp `[requests, num_qo_heads]` in float32. A request
            without tokens gives 0 and -inf.

        Raises:
            InputError: There is no plan yet, or an argument does not fit it.
        """
        if self._kernel is None and self._requests is None:
            raise InputError("run", "no plan", "there is no plan yet", "call plan() first")
        for name, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
            _refuse(name, scale, (None, 1, 1.0), "scale q, or out")
        _refuse("enable_pdl", enable_pdl, (None, False), "leave it out")
        planned = -1 if self._settings is None else self._settings[2].window_left
        _refuse("window_left", window_left, (None, planned), "give it to plan")
        if lse is not None and not return_lse:
            raise InputError("lse", "given", "is not asked for", "give return_lse=True")
        if lse is not None and isinstance(q, torch.Tensor):
            _check_lse(lse, q)
        k_pages, v_pages = self._pages(paged_kv_cache)
        made = self._attended(q, k_pages, v_pages, out, return_lse=return_lse)
        if isinstance(made, torch.Tensor):
            return made
        result, log_sum = made
        return result, log_sum if lse is None else lse.copy_(log_sum)

    def _attended(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        out: torch.Tensor | None,
        *,
        return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self._requests is not None:
            return self._requests.run(q, k_pages, v_pages, out, return_lse=return_lse)
        if not return_lse:
            return self.kernel(q, k_pages, v_pages, out=out)
        return self.kernel(q, k_pages, v_pages, out=out, return_lse=True, lse_base="log2")

    def run_return_lse(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Calls `run` with return_lse=True and returns (out, lse)."""
        result = self.run(q, paged_kv_cache, **options, return_lse=True)
        assert isinstance(result, tuple)
        return result

    def _pages(self, cache: PagedCache) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V apart, views in the wrapper's layout."""
        if isinstance(cache, torch.Tensor):
            if cache.dim() != 5 or cache.shape[1] != 2:
                form = "[pages, 2, ...] of five dimensions, or a pair"
                raise InputError(
                    "paged_kv_cache", f"shape {tuple(cache.shape)}", "does not hold K and V", f"give {form}"
                )
            return cache[:, 0], cache[:, 1]
        return self._pair(cache)

    def _pair(self, cache: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(cache, tuple | list) or len(cache) != 2:
            raise InputError("paged_kv_cache", type(cache).__name__, "is no pair of tensors", "give (k, v)")
        for name, pages in zip(("paged_kv_cache's k", "paged_kv_cache's v"), cache, strict=True):
            if not isinstance(pages, torch.Tensor) or pages.dim() != 4:
                found = f"shape {tuple(pages.shape)}" if isinstance(pages, torch.Tensor) else type(pages).__name__
                raise InputError(
                    name, found, "is not a tensor of four dimensions", f"give pages in layout {self._layout}"
                )
        return cache[0], cache[1]

    @property
    def kernel(self) -> Kernel:
        """The kernel of the current plan. Raises InputError before the first plan, and for batches by request."""
        if self._requests is not None:
            raise InputError("kernel", "a batch by request", "is served by another kernel", "ask for batch_kernel")
        if self._kernel is None:
            raise InputError("kernel", "no plan", "there is no plan yet", "call plan() first")
        return self._kernel

    @property
    def batch_kernel(self) -> BatchKernel:
        """The kernel of batches by request. Raises InputError before the first `run` of such a batch."""
        if self._requests is None or self._requests.kernel is None:
            reason = "has none before the first run of a batch by request"
            raise InputError("batch_kernel", "the wrapper", reason, "give plan tensors of a GPU, and call run")
        return self._requests.kernel


def _length(part: Any) -> int:
    """The entries of an array, 0 for what has none."""
    try:
        return len(part)
    except TypeError:
        return 0


def _buffer_sizes(buffers: dict[str, torch.Tensor | None]) -> tuple[int, int]:
    """Requests, and pages of all of them, that page tables in these buffers may have."""
    lengths = []
    for name, buffer in buffers.items():
        if not isinstance(buffer, torch.Tensor) or buffer.dim() != 1:
            found = f"shape {tuple(buffer.shape)}" if isinstance(buffer, torch.Tensor) else type(buffer).__name__
            raise InputError(name, found, "is no flat tensor, as use_cuda_graph needs it", "allocate it so")
        lengths.append(len(buffer))
    indptr, indices, last_page_len = lengths
    if last_page_len == 0:
        raise InputError("paged_kv_last_page_len_buffer", "no entries", "holds no request", "allocate one for each")
    if indptr != last_page_len + 1:
        reason = f"does not match {last_page_len} entries of paged_kv_last_page_len_buffer"
        raise InputError("paged_kv_indptr_buffer", f"{indptr} entries", reason, "give one entry more than there")
    return last_page_len, indices


def _refuse(name: str, value: object, allowed: tuple[object, ...], fix: str) -> None:
    try:
        is_allowed = value in allowed
    except Exception:  # arrays of several entries are neither equal to something nor different
        is_allowed = False
    if not is_allowed:
        raise InputError(name, value, "is not supported", fix)


def _check_lse(lse: object, q: torch.Tensor) -> None:
    """Raises InputError unless `lse` can take the log-sum-exp of the rows of `q`."""
    if not isinstance(lse, torch.Tensor):
        raise InputError("lse", type(lse).__name__, "is not a tensor", "give a torch.Tensor")
    if lse.shape != q.shape[:2] or lse.dtype != torch.float32 or lse.device != q.device or overlaps(lse):
        shared = ", elements that share memory" if overlaps(lse) else ""
        found = f"{tuple(lse.shape)} {lse.dtype} on {lse.device}{shared}"
        needed = f"needs {tuple(q.shape[:2])} torch.float32 on {q.device}"
        raise InputError("lse", found, needed, "allocate it so")


def _on_host(name: str, part: Any) -> npt.NDArray[Any]:
    return host_array(name, part.cpu() if getattr(part, "is_cuda", False) else part)
