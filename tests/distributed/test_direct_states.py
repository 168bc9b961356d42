"""Direct merges: ranks that write into each other's memory get what one device merges from all of their states."""

import itertools
import os
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from support.processes import run_function
from support.ranks import run_ranks
from treegen.codegen.aot import device_of
from treegen.codegen.compile_counter import expected_compiles
from treegen.codegen.kernel_usage import usage
from treegen.distributed.direct_states import BufferForm
from treegen.distributed.packed_states import tile_of


@pytest.mark.parametrize(("ranks", "dim"), [(2, 128), (3, 24)])
def test_ranks_merge_in_memory_that_they_share(ranks, dim):
    run_function(f"support.direct_ranks:merges({ranks}, {dim})")


def test_bytes_are_those_of_the_account():
    run_function("support.direct_ranks:bytes_written(2)")
    run_function("support.direct_ranks:bytes_written(3)")


def test_ranks_wait_for_a_late_one_and_numbers_of_calls_go_round():
    run_function("support.direct_ranks:late_ranks(3)")


def test_a_rank_may_be_a_call_ahead():
    run_function("support.direct_ranks:rank_ahead()", seconds=30)


@pytest.mark.parametrize("program", ["votes", "sights"])
def test_ranks_go_on_alike(program):
    code, printed = run_ranks(f"support.rank_memory:{program}", 3)
    assert code == 0, printed


@pytest.mark.parametrize("ranks", [2, 5, 8])
@pytest.mark.parametrize("states", [1, 16, 17, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_of_a_buffer_do_not_overlap(ranks, states, dtype):
    form = BufferForm.for_states(ranks, states, 80, dtype)
    out, lse, flags = form.parts
    assert states <= form.capacity < max(2 * states, 17)
    assert form.blocks * 16 == form.capacity
    assert out == 0
    assert lse >= 2 * ranks * form.capacity * 80 * dtype.itemsize
    assert flags - lse >= 2 * ranks * form.capacity * 4
    assert form.bytes - flags >= ranks * form.blocks * 4
    assert all(part % 128 == 0 for part in form.parts)


def test_the_kernel_compiles(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(compiled).result()
    assert len(found) == 6
    for registers, stack, accesses in found:
        assert stack == 0
        assert registers <= 128
        assert "st.global.v4.b32" in accesses
        assert "ld.global.cg.v4.b32" in accesses
        assert not any(access.endswith("b16") for access in accesses), "elements go one by one"


def compiled() -> list[tuple[int, int, set[str]]]:
    """Registers, stack and accesses of the kernel by architecture and head dim; Triton does not interpret."""
    from treegen.backends import direct_kernels

    assert "TRITON_INTERPRET" not in os.environ
    found = []
    for architecture, dim in itertools.product((80, 90, 100), (128, 512)):
        out, lse = torch.zeros(4, 8, dim, dtype=torch.bfloat16), torch.zeros(4, 8)
        places, calls = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(64, dtype=torch.int32)
        with device_of(architecture), expected_compiles():
            made = direct_kernels.merge_directly.warmup(
                out, lse, out, lse, places, calls, 32, 8, 8, 0, 64, 1024, 1, 1.0, 10**11, 2, *tile_of(dim), False,
                grid=(2,), num_warps=8,
            )  # fmt: skip
        accesses = set(re.findall(r"\b(?:ld|st)\.global[.\w]*", made.asm["ptx"]))
        found.append((*usage(made.asm["cubin"]), accesses))
    return found
