"""Ranks that write into each other's memory: processes that Triton interprets kernels in, and that share memory."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from treegen.backends.merge_state import merge_states
from treegen.backends.oracle import error
from treegen.cost.communication import merge_cost
from treegen.cost.known_links import link_named
from treegen.distributed.direct_states import BufferForm, Buffers
from treegen.ir.shape import Shape

LIMIT_NS = 10**10
CPU = torch.device("cpu")
SENTINEL = 0x5A


def in_ranks(form: BufferForm, function: Callable[[Buffers, torch.Tensor, Any], None]) -> None:
    """Forks a process for each rank, which calls the function with its buffers, its memory and a barrier."""
    memories = [torch.zeros(form.bytes, dtype=torch.uint8).share_memory_() for _ in range(form.ranks)]
    addresses = [memory.data_ptr() for memory in memories]
    meet = multiprocessing.get_context("fork").Barrier(form.ranks, timeout=60)
    children = []
    for rank in range(form.ranks):
        child = os.fork()
        if not child:
            code = 1
            try:
                function(Buffers(form, rank, addresses, CPU, LIMIT_NS), memories[rank], meet)
                code = 0
            except BaseException:
                print(f"rank {rank}:", traceback.format_exc(), file=sys.stderr, flush=True)
                meet.abort()
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), codes


def states_of(form: BufferForm, rows: int, heads: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of all ranks: out `[ranks, rows, heads, dim]` and lse `[ranks, rows, heads]`.

    Some saw nothing, with NaN in their out; nobody saw anything of the first row.
    """
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(form.ranks, rows, heads, form.dim, generator=generator).to(form.dtype)
    lses = 20 * torch.randn(form.ranks, rows, heads, generator=generator)
    empty = torch.rand(form.ranks, rows, heads, generator=generator) < 0.3
    empty[:, 0] = True
    return outs.masked_fill(empty[..., None], torch.nan), lses.masked_fill(empty, -torch.inf)


def merges(ranks: int, dim: int, calls: int = 8) -> None:
    """Merges states of several sizes one after another, and compares with merges on one device."""
    form = BufferForm.for_states(ranks, 70, dim, torch.float32)

    def merge(buffers: Buffers, memory: torch.Tensor, meet: Any) -> None:
        for call in range(calls):
            rows, own = 1 + call * 5 % 9, call % 3 == 1
            heads, scale = 2 * form.ranks, (1.0, 1 / 0.6931471805599453)[call % 2]
            outs, lses = states_of(form, rows, heads, call)
            out, lse = buffers.merge(outs[buffers.rank], lses[buffers.rank] * scale, own, scale)
            expected, sums = merge_states(outs.transpose(0, 1), lses.transpose(0, 1))
            part = heads // form.ranks
            mine = slice(part * buffers.rank, part * (buffers.rank + 1)) if own else slice(None)
            assert out.shape == expected[:, mine].shape
            assert error(out, expected[:, mine]) < 1e-6, (call, buffers.rank)
            assert error(lse, sums[:, mine] * scale) < 1e-6, (call, buffers.rank)
            assert not bool(out[0].any())

    in_ranks(form, merge)


def bytes_written(ranks: int) -> None:
    """Counts the bytes that ranks write into a rank's memory in a call, flags apart, and compares with the account."""
    form = BufferForm.for_states(ranks, 40, 16, torch.float16)

    def merge(buffers: Buffers, memory: torch.Tensor, meet: Any) -> None:
        states = memory[: form.parts[2]]
        states.fill_(SENTINEL)
        meet.wait()
        rows, heads = 3, 2 * ranks
        shape = Shape(heads, heads, form.dim, dtype="fp16")
        lse = torch.full((rows, heads), 3.25e-5)
        for own in (False, True):
            out = torch.full((rows, heads, form.dim), 1 / 3, dtype=form.dtype)
            buffers.merge(out, lse, own, 1.0)
            meet.wait()
            account = merge_cost("direct", "own" if own else "all", rows, shape, ranks, link_named("nvlink"), 4000.0)
            received = int((states != SENTINEL).sum())  # its own among them
            assert received * (ranks - 1) == account.sent * ranks
            states.fill_(SENTINEL)
            meet.wait()

    in_ranks(form, merge)


def late_ranks(ranks: int) -> None:
    """Lets the others wait for one rank in each call, and lets numbers of calls go round in 32 bits."""
    form = BufferForm.for_states(ranks, 16, 8, torch.float32)

    def merge(buffers: Buffers, memory: torch.Tensor, meet: Any) -> None:
        flags = memory[form.parts[2] :].view(torch.int32)
        before = 2**31 - 3
        flags.fill_(before)
        buffers.calls.fill_(before)
        meet.wait()
        for call in range(6):
            if buffers.rank == call % form.ranks:
                time.sleep(0.02)
            outs, lses = states_of(form, 2, 3, call)
            out, _ = buffers.merge(outs[buffers.rank], lses[buffers.rank], False, 1.0)
            expected, _ = merge_states(outs.transpose(0, 1), lses.transpose(0, 1))
            assert error(out, expected) < 1e-6, (call, buffers.rank)

    in_ranks(form, merge)


def rank_ahead() -> None:
    """Merges with a rank that has written the states of this call, and is in the next one by now."""
    form = BufferForm.for_states(2, 16, 8, torch.float32)
    memories = [torch.zeros(form.bytes, dtype=torch.uint8) for _ in range(2)]
    buffers = Buffers(form, 0, [memory.data_ptr() for memory in memories], CPU, LIMIT_NS)
    outs, lses = states_of(form, 2, 3, 0)
    _, to_lse, to_flags = form.parts
    place = 2 + 1  # of rank 1 in the second half, which is that of the first call
    size = form.capacity * form.dim * 4
    memories[0][place * size :].view(torch.float32)[: outs[1].numel()] = outs[1].flatten()
    memories[0][to_lse + place * form.capacity * 4 :].view(torch.float32)[: lses[1].numel()] = lses[1].flatten()
    memories[0][to_flags:].view(torch.int32)[form.blocks] = 2
    out, _ = buffers.merge(outs[0], lses[0], False, 1.0)
    expected, _ = merge_states(outs.transpose(0, 1), lses.transpose(0, 1))
    assert error(out, expected) < 1e-6
    assert int(memories[1][to_flags:].view(torch.int32)[0]) == 1
