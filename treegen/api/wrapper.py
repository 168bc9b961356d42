"""A wrapper with the interface of FlashInfer's paged decode wrappers: plan once per step, run once per layer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from typing import Any

import torch

import treegen.api.wrapper_arguments as arguments
from treegen.api.host_kernel import host_kernel
from treegen.api.request_batches import RequestBatches
from treegen.api.request_choice import choose_requests
from treegen.api.request_room import Settings
from treegen.api.wrapper_arguments import PagedCache
from treegen.api.wrapper_options import WrapperOptions
from treegen.ir.errors import InputError
from treegen.ir.live_batch import LiveBatch
from treegen.ir.scalars import is_one_of
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.runtime.batch_kernel import BatchKernel
from treegen.runtime.call_options import check_sm_scale
from treegen.runtime.copies import Copyable
from treegen.runtime.kernel import Kernel
from treegen.runtime.limits import WantedLimits
from treegen.scoring.options import ScoreOptions
from treegen.strategies import Strategy


class TreeAttentionWrapper(Copyable):
    """Decode attention over a paged KV cache, in place of FlashInfer's BatchDecodeWithPagedKVCacheWrapper.

    Call `plan` once per step and `run` once per layer, as for FlashInfer. Give the page table by position: here its
    parts have other names. Arguments that only concern FlashInfer's kernels are ignored, others served or refused.

    **By request.** Page tables on a GPU stay there. `plan` copies them to buffers, computes lengths and launches the
    step kernels of a `treegen.compile_batch` kernel on the current stream, and waits for nothing. The device also finds
    out which requests share pages, whenever requests come or go and after a number of plans. One or two steps later a
    plan uses the result; until then new requests are served alone, which is correct but slower. A row with page ids
    beyond the cache gives 0. The first `run` makes the kernel (`batch_kernel`).

    **On the host.** Page tables on the host are planned there. So are, after a copy and with a PerformanceWarning, page
    tables on a GPU that cannot be served by request: with a page size that is not a power of two up to 128; with
    `isolated`, `max_items` or `max_slots`; with a strategy whose plans need launches of their own, or
    `batch_invariant`; with buffers that are not int32 on the device; and with tables above 1 GB.

    **CUDA graphs.** With `use_cuda_graph`, replays of a graph captured from `run` use the latest plan. The lengths of
    the three buffers, which are then needed, fix the batch size and the most pages of a batch; a page that several
    requests share counts for each of them. The first `plan` settles the attention shape, and whether batches are served
    by request. Call `run` once before capturing. By request, `plan` writes page tables to the buffers, and kernels read
    them there. On the host, the buffers are not written to, and the first `plan` also settles the strategy for "auto"
    and makes a kernel of fixed capacity. `cohort`, `query` (which "auto" mostly takes) and strategies without partial
    results then serve every page table that fits the buffers. Others may need more: `plan` then raises InputError, and
    the previous plan stays.

    A wrapper belongs to one thread at a time. Calls on several streams may overlap, but not with `plan`. `copy`,
    `deepcopy` and `pickle` make a wrapper with a kernel of its own, as they do for Kernel. A copy of a wrapper that
    serves by request has to plan before it runs.

    Args:
        float_workspace_buffer, use_tensor_cores: Ignored. Scratch memory is allocated on the stream of a call.
        kv_layout: "NHD" for pages `[page_size, num_kv_heads, head_dim]`, "HND" for `[num_kv_heads, page_size,
            head_dim]`.
        use_cuda_graph: Whether graphs are captured from `run`.
        paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: With use_cuda_graph: tensors of
            `batch + 1` entries, of the most page ids of a batch, and of `batch` entries.
        backend: "auto" or "fa2"; ignored.
        jit_args: Refused.
        strategy: As in treegen.compile.
        max_items, max_slots: With use_cuda_graph: the most work items of a launch, and the most partial slots, instead
            of the bounds that follow from the buffers.
        isolated: As in treegen.compile.
        by_request: True also serves page tables on the host by request; False copies all page tables to the host and
            plans there. By default page tables on a GPU are served by request.
        max_tokens: By request: the most tokens of a request; by default the tokens of all pages together. For each row
            and each of these tokens, tables take about a byte with pages of 16, and nine with pages of one token. A
            longer request gives 0, and a later `plan` raises InputError.

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
        if not is_one_of(backend, ("auto", "fa2")):
            raise InputError("backend", backend, "belongs to FlashInfer's kernels", "leave it at auto")
        if jit_args is not None:
            raise InputError("jit_args", type(jit_args).__name__, "belong to FlashInfer's kernels", "leave them out")
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        for_graphs = arguments.graph_buffers(buffers, {"max_items": max_items, "max_slots": max_slots}, use_cuda_graph)
        limits = WantedLimits(None, max_items, max_slots)
        self._options = WrapperOptions(kv_layout, strategy, isolated, by_request, max_tokens, limits, *for_graphs)
        self._requests: RequestBatches | None = None
        self._kernel: Kernel | None = None
        self._settings: Settings | None = None

    def _state(self) -> dict[str, Any]:
        # Batches by request read tensors of the caller, so a copy starts without a plan.
        return dict(vars(self)) if self._requests is None else {**vars(self), "_requests": None, "_settings": None}

    def _restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def _given(self) -> dict[str, object]:
        return {"strategy": self._options.strategy}

    def __copy__(self) -> TreeAttentionWrapper:
        made = super().__copy__()
        made._kernel = copy(self._kernel)
        made._options = self._options.with_own_buffers()
        return made

    def __repr__(self) -> str:
        if self._requests is not None:
            return f"<treegen.TreeAttentionWrapper {self._options.layout}: by request, {self._requests.live}>"
        return f"<treegen.TreeAttentionWrapper {self._options.layout}: {self._kernel or 'no plan yet'}>"

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
        **others: Any,
    ) -> None:
        """Plans for a batch of requests with one query row each.

        A plan for another batch of the same shape reuses all kernels.

        Args:
            kv_indptr, kv_indices, kv_last_page_len: The page table, as in Tree.from_page_table: offsets of each
                request's page ids `[requests + 1]`, page ids, and tokens of each request's last page `[requests]`.
            num_qo_heads, num_kv_heads, head_dim, page_size: The attention shape; head_dim is that of q, K and V.
            window_left, logits_soft_cap, sm_scale: As in treegen.compile.
            q_data_type, kv_data_type, o_data_type: Element types of q, the caches and out: a torch dtype or its name.
            pos_encoding_mode, rope_scale, rope_theta, q_len_per_req: Refused, unless left at their defaults.
            non_blocking: Ignored.
            others: `data_type` is kv_data_type where that is left out. `block_tables` and `seq_lens` are ignored.
                `fixed_split_size` and `disable_split_kv` are refused, unless left at their defaults.
            request_ids: By request: a hashable id for the request in each row, None for rows without a request. Without
                ids row i counts as request i, and the device looks for sharing more often.

        Raises:
            TreeError: The page table is wrong. Values are not checked where batches are served by request.
            ShapeError: The attention shape is not supported.
            InputError: An option is not supported, or the batch does not fit the captured graphs.
        """
        arguments.refuse_unserved(pos_encoding_mode, rope_scale, rope_theta, q_len_per_req)
        check_sm_scale(sm_scale)
        kv = arguments.kv_data_type_of(kv_data_type, others)
        dtype, kv_dtype = arguments.element_types(q_data_type, kv, o_data_type)
        shape = Shape(
            num_qo_heads, num_kv_heads, head_dim, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size,
            kv_layout=self._options.layout,
        )  # fmt: skip
        settings = shape, sm_scale, ScoreOptions(logits_soft_cap=logits_soft_cap, window_left=window_left)
        table = kv_indptr, kv_indices, kv_last_page_len
        requests = choose_requests(table, settings, self._options, self._requests, self._settings)
        if requests is not None:
            requests.plan(*table, request_ids)
            self._requests, self._settings, self._kernel = requests, settings, None
        else:
            self._plan_on_host(*table, settings)
            self._requests = None

    begin_forward = plan

    def _plan_on_host(self, kv_indptr: Any, kv_indices: Any, kv_last_page_len: Any, settings: Settings) -> None:
        indptr, indices = arguments.on_host("kv_indptr", kv_indptr), arguments.on_host("kv_indices", kv_indices)
        self._options.check_graph(indptr.size - 1, indices.size, settings, self._settings)
        last = arguments.on_host("kv_last_page_len", kv_last_page_len)
        tree = Tree.from_page_table(indptr, indices, last, settings[0].page_size)
        if self._kernel is not None and self._settings == settings:
            self._kernel.update(tree)
        else:
            self._kernel, self._settings = host_kernel(tree, settings, self._options), settings

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
        sinks: None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Computes attention of the planned batch.

        Args:
            q: `[requests, num_qo_heads, head_dim]`.
            paged_kv_cache: K and V pages as a pair, or one tensor `[pages, 2, ...]` of both, in the wrapper's layout.
            q_scale, k_scale, v_scale, sinks: Refused, unless None, or 1 for a scale.
            out: The tensor to write the result to; by default a new one.
            lse: The tensor to write the log-sum-exp to; only with return_lse.
            return_lse: Whether to return the log-sum-exp as well.
            enable_pdl: Refused, unless None or False.
            window_left: Refused, unless None or the value given to `plan`.

        Returns:
            out, with the shape and element type of q; with return_lse also the base-2 log-sum-exp
            `[requests, num_qo_heads]` in float32. A request without tokens gives 0 and -inf.

        Raises:
            InputError: There is no plan yet, or an argument does not fit the plan.
        """
        if self._kernel is None and self._requests is None:
            raise InputError("run", "no plan", "there is no plan yet", "call plan() first")
        arguments.refuse_of_calls(q_scale, k_scale, v_scale, sinks, enable_pdl)
        planned = -1 if self._settings is None else self._settings[2].window_left
        arguments.refuse("window_left", window_left, (None, planned), "give it to plan")
        arguments.check_lse(lse, q, return_lse)
        pages = arguments.pages_of(paged_kv_cache, self._options.layout)
        if self._requests is not None:
            made = self._requests.run(q, *pages, out, return_lse=return_lse)
        elif return_lse:
            made = self.kernel(q, *pages, out=out, return_lse=True, lse_base="log2")
        else:
            made = self.kernel(q, *pages, out=out)
        if isinstance(made, torch.Tensor) or lse is None:
            return made
        return made[0], lse.copy_(made[1])

    def run_return_lse(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Calls `run` with return_lse=True and returns (out, lse)."""
        result = self.run(q, paged_kv_cache, **options, return_lse=True)
        assert isinstance(result, tuple)
        return result

    @property
    def kernel(self) -> Kernel:
        """The kernel of the current plan. Raises InputError before the first plan, and for batches by request."""
        if self._requests is not None:
            raise InputError("kernel", "a batch by request", "is served by another kernel", "use batch_kernel")
        if self._kernel is None:
            raise InputError("kernel", "no plan", "there is no plan yet", "call plan() first")
        return self._kernel

    @property
    def batch_kernel(self) -> BatchKernel:
        """The kernel of batches by request. Raises InputError before the first `run` of such a batch."""
        if self._requests is None or (kernel := self._requests.kernel) is None:
            fix = "give tensors on a GPU to plan, and call run"
            raise InputError("batch_kernel", "the wrapper", "has none before the first run of a batch by request", fix)
        return kernel

    @property
    def live_batch(self) -> LiveBatch:
        """The running requests of a batch by request, as far as the wrapper knows them. Raises InputError otherwise."""
        if self._requests is None:
            raise InputError("live_batch", "the wrapper", "serves no batch by request", "give tensors on a GPU to plan")
        return self._requests.live
