"""Checks of the tensors and batches that kernels for running batches get, before any work on a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from treegen.backends import check_inputs
from treegen.backends.batch_form import BatchForm
from treegen.codegen.kernel_signature import in_same_place
from treegen.ir.arrays import largest
from treegen.ir.errors import InputError, StrategyError
from treegen.ir.live_batch import LiveBatch
from treegen.strategies import Strategy, strategy_from


def check_tensors(
    form: BatchForm,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor | None,
    read: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Raises InputError unless the tensors of a call fit the kernel's shape, its page table and one another.

    read: further tensors that launches read, by their names.
    """
    shape, pages = form.shape, form.pages
    found = check_inputs.shape_of(q, k_cache, v_cache, shape.kv_layout)
    if shape.shared_kv and not in_same_place(k_cache, v_cache):
        fix = f"give k_cache[..., :{shape.head_dim_v}], or a shape without shared_kv"
        raise InputError("v_cache", str(found), "is not the beginning of k_cache, as shared_kv says", fix)
    # Tensors do not show these two fields.
    found = replace(found, partial_dtype=shape.partial_dtype, shared_kv=shape.shared_kv)
    check_inputs.check_shape(shape, found)
    if q.device != pages.table.device:
        raise InputError("q", q.device, f"is not on the page table's device {pages.table.device}", "move it there")
    if len(q) > form.room.rows:
        reason, fix = f"the page table has {form.room.rows} lengths", "give at most a row for each"
        if pages.qo_indptr is not None:
            reason, fix = f"is more than max_rows, {form.room.rows}", "give fewer, or a larger max_rows"
        raise InputError("q", f"{len(q)} rows", reason, fix)
    if len(k_cache) < pages.num_pages:
        reason = f"the page table says {pages.num_pages}"
        raise InputError("k_cache", f"{len(k_cache)} pages", reason, "give the whole cache, or a smaller num_pages")
    if form.scoring is not None:
        form.scoring.check(found, q.device)
    if out is not None:
        check_inputs.check_output(out, q, found.head_dim_v)
    named = (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out), *read)
    check_inputs.refuse_gradients(check_inputs.needing_gradients(named))
    check_inputs.check_strides(form.config.tokens, k_cache, v_cache, shape.kv_layout)


def check_batch(form: BatchForm, batch: LiveBatch) -> int:
    """Checks a batch; returns the number of rows that calls for it compute.

    Raises:
        InputError: It is no LiveBatch, has pages of another size than the shape, or more requests or query rows than
            there is room for, or a request has several query rows and the page table no qo_indptr.
    """
    if not isinstance(batch, LiveBatch):
        raise InputError("batch", type(batch).__name__, "is not a LiveBatch", "give treegen.LiveBatch")
    if batch.page_size != form.shape.page_size:
        reason = f"differs from the shape's {form.shape.page_size}"
        raise InputError("batch.page_size", batch.page_size, reason, "give both the same")
    most, seats = largest(batch.row), form.room.seats
    if most >= seats or (len(batch.row) > seats and largest(batch.row[seats:]) >= 0):
        found = f"{len(batch)} requests, row {most}, seat {largest(batch.seats)}"
        reason = f"the page table has {seats} lengths, so the kernel has {seats} seats"
        fix = "finish requests before others come in their place, or make a kernel for more"
        raise InputError("batch", found, reason, fix)
    if form.pages.qo_indptr is None:
        if (rows := largest(batch.rows)) > 1:
            seat = int(batch.rows.argmax())
            fix = "give PageTable a qo_indptr, or each request one row"
            raise InputError(f"batch.rows[{seat}]", rows, "needs to know where the request's rows are in q", fix)
        return most + 1
    total = int(batch.rows.dot((batch.row >= 0).astype(np.int64)))
    if total > form.room.rows:
        reason = f"have more than max_rows, {form.room.rows}, query rows: {total}"
        raise InputError("batch", f"{len(batch)} requests", reason, "make a kernel for more")
    return total


def chosen_strategy(strategy: str | Strategy, form: BatchForm) -> Strategy:
    """Returns the strategy that a caller names for one plan.

    Raises StrategyError where bits of rows would change: the kernel is batch-invariant, or the strategy is.
    """
    wanted = strategy_from(strategy)
    if wanted.batch_invariant or form.room.chunk:
        reason, fix = "would change what rows' bits follow from", "leave it out, or make another kernel"
        raise StrategyError("strategy", str(strategy), reason, fix)
    return wanted
