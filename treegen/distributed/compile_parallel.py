"""compile() and compile_batch() for several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from treegen.backends.devices import default_device
from treegen.backends.page_table import PageTable
from treegen.distributed.local_options import LocalOptions
from treegen.distributed.parallel import Parallel
from treegen.distributed.parallel_kernels import Merge, ParallelBatchKernel, ParallelKernel, check_equal
from treegen.ir.errors import InputError
from treegen.ir.scalars import plain_number
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree, check_is_tree


def compile(
    tree: Tree,
    parallel: Parallel,
    *,
    shape: Shape,
    merge: Merge | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> ParallelKernel:
    """Makes a rank's part of an attention kernel for a tree; all ranks call it with the same arguments.

    The rank's caches have its KV heads (`Parallel.kv_heads`) of its tokens (`Tree.shard`, `Tree.shard_slots`). Its q
    has its query heads (`Parallel.query_heads`). With `TREEGEN_CHECK=1` ranks compare their trees, shapes and plans.

    Args:
        tree: The whole tree.
        parallel: How attention is divided.
        shape: The shape of the whole attention.
        merge: How states are merged, where ranks hold different tokens.
        device: The rank's device; by default the current CUDA device, without one the CPU.
        options: Further arguments of `treegen.compile`. Tensors with an entry for each head, and the `h` of functions,
            are those of the whole attention; so are positions and windows.

    Returns:
        A kernel, which is called with the rank's q and caches.

    Raises:
        TreegenError: An argument cannot be served, on this rank.
        RankError: Ranks were given different arguments, with `TREEGEN_CHECK=1`.
    """
    check_is_tree("tree", tree)
    place = default_device() if device is None else torch.device(device)
    how = merge or Merge()
    check_equal(parallel, {"merge": how})
    return ParallelKernel(tree, LocalOptions(shape, parallel, options, place), how)


def compile_batch(
    shape: Shape,
    pages: PageTable,
    parallel: Parallel,
    *,
    max_tokens: int,
    positions: torch.Tensor | None = None,
    merge: Merge | None = None,
    **options: Any,
) -> ParallelBatchKernel:
    """Makes a rank's part of an attention kernel for running batches; all ranks call it with the same arguments.

    Args:
        shape: The shape of the whole attention; its page_size is that of the rank's pages.
        pages: The rank's page table, and the numbers of tokens that the rank holds (`Parallel.tokens`).
        parallel: How attention is divided.
        max_tokens: The most tokens of a request, on all ranks together.
        positions: Integers `[rows]` on the device, where windows or functions of scores need them and ranks hold
            different tokens: the position of each query row in its request. Read in every call.
        merge: How states are merged, where ranks hold different tokens.
        options: Further arguments of `treegen.compile_batch`, as in `compile`.

    Returns:
        A kernel, whose calls take the rank's q and caches.

    Raises:
        TreegenError: An argument cannot be served. Requests with several query rows are refused where ranks hold
            different tokens.
        RankError: As of `compile`.
    """
    if not isinstance(pages, PageTable):
        fix = "give treegen.PageTable(table, seq_lens, num_pages)"
        raise InputError("pages", type(pages).__name__, "is not a PageTable", fix)
    _check_positions(positions, pages)
    max_tokens = plain_number(max_tokens)
    local = LocalOptions(shape, parallel, options, pages.table.device)
    how = merge or Merge()
    check_equal(parallel, {"shape": shape, "interleave": parallel.interleave, "max_tokens": max_tokens, "merge": how})
    most = max_tokens
    if parallel.shard.size > 1:
        if pages.qo_indptr is not None:
            reason = "places rows that end at different tokens of a rank"
            raise InputError("qo_indptr", "a tensor", reason, "make each query row a request of its own")
        if type(max_tokens) is int and max_tokens > 0:
            most = replace(parallel.shard, rank=0).count(max_tokens)
    return ParallelBatchKernel(local.compile_batch(pages, most, positions), parallel, how)


def _check_positions(positions: object, pages: PageTable) -> None:
    """Raises InputError unless these are None, or integers on the page table's device."""
    if positions is None:
        return
    if not isinstance(positions, torch.Tensor):
        raise InputError("positions", type(positions).__name__, "is not a tensor", "give integers [rows]")
    kind = positions.dtype in (torch.int32, torch.int64) and positions.ndim == 1
    if not kind or positions.device != pages.table.device:
        found = f"{positions.dtype} of shape {tuple(positions.shape)} on {positions.device}"
        reason = f"are no integers in one dimension on {pages.table.device}"
        raise InputError("positions", found, reason, "give int32 or int64 [rows]")
