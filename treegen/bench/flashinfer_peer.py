"""FlashInfer's paged decode, multi-level cascade and masked prefill as providers (flashinfer-python 0.7.2).

Plans are made in `prepare`, without the wrappers' mode for CUDA graphs, which restricts plans. A planned `run` only
launches kernels on fixed buffers, so it can be captured until the next plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from treegen.bench.flashinfer_package import check_served, flashinfer_package
from treegen.bench.flashinfer_tables import level_tables, masked_requests, row_table
from treegen.bench.providers import TimedCall, UnavailableError
from treegen.ir.arrays import Ints
from treegen.ir.errors import InputError
from treegen.ir.tree import Tree
from treegen.tuning.kernel_meter import Case

_Table = TypeVar("_Table")

_WORKSPACE_BYTES = 128 << 20
"""FlashInfer's recommended size. Its split-KV partials need less: the GPU's thread blocks bound their number."""
_TENSOR_CORE_GROUP = 4
"""The fewest query heads per KV head for which decode uses tensor cores."""


class FlashInferDecode:
    """BatchDecodeWithPagedKVCacheWrapper: every row is a request and reads its whole path."""

    name = "flashinfer-decode"

    def prepare(self, case: Case) -> TimedCall:
        """See Provider. The call writes to an output of its own."""
        _check(case)
        shape, tree = case.shape, case.tree
        table = _paged(row_table, case)
        flashinfer = flashinfer_package()
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(case), "NHD", use_tensor_cores=shape.group >= _TENSOR_CORE_GROUP, backend="fa2"
        )
        wrapper.plan(
            _tensor(table.indptr),
            _tensor(table.indices),
            _tensor(table.last_page_len),
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            q_data_type=case.q.dtype,
            kv_data_type=case.k_cache.dtype,
            sm_scale=shape.head_dim**-0.5,
        )
        assert len(table) == tree.num_rows
        caches, out = _caches(case), torch.empty_like(case.q)

        def call() -> torch.Tensor:
            wrapper.run(case.q, caches, out=out)
            return out

        call()  # loads what run() loads lazily, outside of any capture
        return call


class FlashInferCascade:
    """MultiLevelCascadeAttentionWrapper: a level for every depth of the tree, merged level by level.

    Rows that see nothing on a level have an empty KV range there; FlashInfer returns an empty state for it. Where the
    tree's rows are not in rank order the call also gathers q and scatters out.

    Args:
        backend: "auto" for FlashInfer's own choice (FA3 on Hopper, which neither splits KV nor packs a group's heads
            into a tile); "fa2" for the backend of its decode wrapper on all levels. The wrapper has no argument for
            that, so the provider sets it on the wrapper's levels.
    """

    def __init__(self, backend: str = "auto") -> None:
        self.name = "flashinfer-cascade" if backend == "auto" else f"flashinfer-cascade-{backend}"
        self._backend = backend

    def prepare(self, case: Case) -> TimedCall:
        """See Provider. The call returns a new tensor of FlashInfer, or its own output where rows are reordered."""
        _check(case)
        shape, tree = case.shape, case.tree
        levels = _paged(level_tables, case)
        flashinfer = flashinfer_package()
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(levels), _workspace(case), "NHD")
        if self._backend != "auto":
            for level in wrapper._batch_prefill_wrappers:
                level._backend = self._backend
        wrapper.plan(
            [_tensor(level.qo_indptr) for level in levels],
            [_tensor(level.table.indptr) for level in levels],
            [_tensor(level.table.indices) for level in levels],
            [_tensor(level.table.last_page_len) for level in levels],
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            sm_scale=shape.head_dim**-0.5,
            q_data_type=case.q.dtype,
            kv_data_type=case.k_cache.dtype,
        )
        caches = _caches(case)

        def attend(q: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = wrapper.run(q, caches)
            return out

        call = _in_rank_order(attend, case.q, tree)
        call()  # loads what run() loads lazily, outside of any capture
        return call


class FlashInferPrefill:
    """BatchPrefillWithPagedKVCacheWrapper with a custom mask, which engines use for speculative tokens.

    Every root with all below it is a request, and its rows are the queries.
    """

    name = "flashinfer-prefill"

    def prepare(self, case: Case) -> TimedCall:
        """See Provider. The call returns a new tensor of FlashInfer, or its own output where rows are reordered."""
        _check(case)
        shape = case.shape
        if shape.page_size > 1:
            raise UnavailableError("requests under masks need a page size of 1 here")
        requests = masked_requests(case.tree)
        wrapper = flashinfer_package().BatchPrefillWithPagedKVCacheWrapper(_workspace(case), "NHD", backend="fa2")
        wrapper.plan(
            _tensor(requests.qo_indptr),
            _tensor(requests.table.indptr),
            _tensor(requests.table.indices),
            _tensor(requests.table.last_page_len),
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            custom_mask=torch.from_numpy(requests.mask).to(case.q.device),
            sm_scale=shape.head_dim**-0.5,
            q_data_type=case.q.dtype,
            kv_data_type=case.k_cache.dtype,
        )
        caches = _caches(case)

        def attend(q: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = wrapper.run(q, caches)
            return out

        call = _in_rank_order(attend, case.q, case.tree)
        call()  # loads what run() loads lazily, outside of any capture
        return call


def _in_rank_order(attend: Callable[[torch.Tensor], torch.Tensor], q: torch.Tensor, tree: Tree) -> TimedCall:
    """Makes a call in the caller's order of rows from `attend`, which takes and returns rows in rank order."""
    row_of_rank = tree.topology.row_of_rank
    if np.array_equal(row_of_rank, np.arange(tree.num_rows)):
        return lambda: attend(q)
    gather = torch.tensor(row_of_rank, dtype=torch.int64, device=q.device)
    scatter = torch.argsort(gather)
    ranked, out = torch.empty_like(q), torch.empty_like(q)

    def call() -> torch.Tensor:
        torch.index_select(q, 0, gather, out=ranked)
        return torch.index_select(attend(ranked), 0, scatter, out=out)

    return call


def _check(case: Case) -> None:
    check_served(case.shape)
    if case.tree.num_rows == 0:
        raise UnavailableError("the tree has no rows")
    sees = case.tree.topology.prefix[case.tree.row_node] + case.tree.row_sees
    if (sees == 0).any():
        raise UnavailableError(f"row {int((sees == 0).argmax())} sees nothing")


def _paged(tables: Callable[[Tree, int], _Table], case: Case) -> _Table:
    try:
        return tables(case.tree, case.shape.page_size)
    except InputError as cause:
        raise UnavailableError(f"no page table for {cause.argument} = {cause.value}: {cause.reason}") from cause


def _workspace(case: Case) -> torch.Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=case.q.device)


def _tensor(array: Ints) -> torch.Tensor:
    """Copies an array to a tensor on the host, where the wrappers plan; they copy it to the device themselves."""
    return torch.tensor(array, dtype=torch.int32)


def _caches(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    if case.shape.page_size == 1:
        return case.k_cache.unsqueeze(1), case.v_cache.unsqueeze(1)
    return case.k_cache, case.v_cache
