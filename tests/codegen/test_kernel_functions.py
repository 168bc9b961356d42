"""The functions that emitted kernels share, each alone in Triton's interpreter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from treegen.ir.arena import SURPLUS_MERGE
from treegen.templates.kernel_functions import (
    LN_2,
    LOG2_E,
    READY,
    SURPLUS,
    dot,
    e4m3_from_bits,
    e4m3_planes_from_bits,
    e5m2_planes,
    finite_part,
    guarded_softmax_step,
    softmax_step,
    softmax_step_in_planes,
)
from treegen.templates.ptx_functions import flag_at, part_at, put_part

M, N, D = 16, 32, 64
SCALE = 0.25


def random(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


@triton.jit
def places(rows: tl.constexpr, columns: tl.constexpr) -> Any:
    return tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]


@triton.jit
def run_dot(a: Any, b: Any, out: Any) -> None:
    tl.store(out + places(16, 32), dot(tl.load(a + places(16, 64)), tl.load(b + places(64, 32)), True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dot_multiplies_numbers_and_no_bit_patterns(dtype: torch.dtype) -> None:
    a, b, out = random(M, D).to(dtype), random(D, N, seed=1).to(dtype), torch.empty(M, N)
    run_dot[(1,)](a, b, out)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@triton.jit
def run_from_bits(codes: Any, out: Any) -> None:
    place = tl.arange(0, 256)
    tl.store(out + place, e4m3_from_bits(tl.load(codes + place)))


def test_bytes_of_e4m3_become_the_numbers_they_stand_for() -> None:
    codes, out = torch.arange(256, dtype=torch.uint8), torch.empty(256, dtype=torch.float16)
    run_from_bits[(1,)](codes, out)
    torch.testing.assert_close(out, codes.view(torch.float8_e4m3fn).half(), rtol=0, atol=0, equal_nan=True)


@triton.jit
def run_planes(words: Any, out: Any, planes: tl.constexpr) -> None:
    word = tl.arange(0, 64)
    plane_0, plane_1, plane_2, plane_3 = planes(tl.load(words + word))
    tl.store(out + 4 * word, plane_0)
    tl.store(out + 4 * word + 1, plane_1)
    tl.store(out + 4 * word + 2, plane_2)
    tl.store(out + 4 * word + 3, plane_3)


@pytest.mark.parametrize(
    ("planes", "dtype"), [(e4m3_planes_from_bits, torch.float8_e4m3fn), (e5m2_planes, torch.float8_e5m2)]
)
def test_plane_j_has_the_elements_j_of_words(planes: Any, dtype: torch.dtype) -> None:
    codes, out = torch.arange(256, dtype=torch.uint8), torch.empty(256, dtype=torch.float16)
    run_planes[(1,)](codes.view(torch.int32), out, planes)
    torch.testing.assert_close(out, codes.view(dtype).half(), rtol=0, atol=0, equal_nan=True)


@triton.jit
def run_finite_part(values: Any, out: Any, spoils: Any) -> None:
    finite, found = finite_part(tl.load(values + places(32, 64)))
    tl.store(out + places(32, 64), finite)
    tl.store(spoils + tl.arange(0, 32), found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_values_that_are_not_finite_are_left_out(dtype: torch.dtype) -> None:
    values = random(N, D).to(dtype)
    values[3, 5], values[7, 0], values[7, 63], values[31, 1] = math.nan, math.inf, 2.0, -math.inf
    out, spoils = torch.empty_like(values), torch.empty(N, dtype=torch.int32)
    run_finite_part[(1,)](values, out, spoils)
    assert spoils.nonzero().flatten().tolist() == [3, 7, 31]
    torch.testing.assert_close(out, torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0), rtol=0, atol=0)


class Sums:
    """Running sums of M rows over D dims, before a step and after it, and a step's scores and values."""

    def __init__(self) -> None:
        self.m_i, self.l_i, self.acc = random(M, seed=2), random(M, seed=3).abs() + 1, random(M, D, seed=4)
        self.qk, self.values = 3 * random(M, N, seed=5), random(N, D, seed=6)
        self.qk[2] -= 10  # a row whose maximum stays
        self.out = [torch.empty(M, D), torch.empty(M), torch.empty(M)]

    def expected(self) -> list[torch.Tensor]:
        """The sums after the step, in float64; scores count times SCALE, as powers of two."""
        m_i, l_i, acc, qk, values = (x.double() for x in (self.m_i, self.l_i, self.acc, self.qk, self.values))
        m_new = torch.maximum(m_i, qk.amax(1))
        weights, alpha = torch.exp2(SCALE * (qk - m_new[:, None])), torch.exp2(SCALE * (m_i - m_new))
        sums = [acc * alpha[:, None] + weights @ values, m_new, l_i * alpha + weights.sum(1)]
        return [each.float() for each in sums]

    def check(self) -> None:
        for found, expected in zip(self.out, self.expected(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@triton.jit
def run_step(acc: Any, m_i: Any, l_i: Any, qk: Any, values: Any, new_acc: Any, new_m: Any, new_l: Any) -> None:
    m = tl.arange(0, 16)
    scores, maximum = tl.load(qk + places(16, 32)), tl.load(m_i + m)
    m_new = tl.maximum(maximum, tl.max(scores, 1))
    sums, m_new, total = softmax_step(
        tl.load(acc + places(16, 64)), maximum, tl.load(l_i + m), scores, 0.25, m_new * 0.25, m_new,
        tl.load(values + places(32, 64)), True,
    )  # fmt: skip
    tl.store(new_acc + places(16, 64), sums)
    tl.store(new_m + m, m_new)
    tl.store(new_l + m, total)


def test_a_step_of_the_softmax() -> None:
    sums = Sums()
    run_step[(1,)](sums.acc, sums.m_i, sums.l_i, sums.qk, sums.values, *sums.out)
    sums.check()


@triton.jit
def run_guarded_step(
    acc: Any, m_i: Any, l_i: Any, qk: Any, values: Any, spoils: Any, new_acc: Any, new_m: Any, new_l: Any, spoiled: Any
) -> None:
    m = tl.arange(0, 16)
    scores, maximum = tl.load(qk + places(16, 32)), tl.load(m_i + m)
    m_new = tl.maximum(maximum, tl.max(scores, 1))
    sums, m_new, total, rows = guarded_softmax_step(
        tl.load(acc + places(16, 64)), maximum, tl.load(l_i + m), tl.load(spoiled + m), scores, 0.25, m_new * 0.25,
        m_new, tl.load(values + places(32, 64)), tl.load(spoils + tl.arange(0, 32)), True,
    )  # fmt: skip
    tl.store(new_acc + places(16, 64), sums)
    tl.store(new_m + m, m_new)
    tl.store(new_l + m, total)
    tl.store(spoiled + m, rows)


def test_rows_that_weigh_tokens_which_spoil_are_spoiled() -> None:
    sums = Sums()
    sums.qk[:8, 4] = -1e25
    sums.qk[9, 4] = -1e25
    spoils, spoiled = torch.zeros(N, dtype=torch.int32), torch.zeros(M, dtype=torch.int32)
    spoils[4], spoiled[9] = 1, 1  # row 9 was spoiled before, and stays so
    run_guarded_step[(1,)](sums.acc, sums.m_i, sums.l_i, sums.qk, sums.values, spoils, *sums.out, spoiled)
    sums.check()
    assert spoiled.tolist() == [0] * 8 + [1] * 8


@triton.jit
def run_step_in_planes(
    acc: Any, m_i: Any, l_i: Any, qk: Any, words: Any, new_acc: Any, new_m: Any, new_l: Any, planes: tl.constexpr
) -> None:
    m, plane = tl.arange(0, 16), tl.arange(0, 16)[:, None] * 64 + 4 * tl.arange(0, 16)[None, :]
    scores, maximum = tl.load(qk + places(16, 32)), tl.load(m_i + m)
    m_new = tl.maximum(maximum, tl.max(scores, 1))
    acc_0, acc_1, acc_2, acc_3, m_new, total = softmax_step_in_planes(
        tl.load(acc + plane), tl.load(acc + plane + 1), tl.load(acc + plane + 2), tl.load(acc + plane + 3),
        maximum, tl.load(l_i + m), scores, 0.25, m_new * 0.25, m_new, tl.load(words + places(32, 16)), tl.float32,
        planes, True,
    )  # fmt: skip
    tl.store(new_acc + plane, acc_0)
    tl.store(new_acc + plane + 1, acc_1)
    tl.store(new_acc + plane + 2, acc_2)
    tl.store(new_acc + plane + 3, acc_3)
    tl.store(new_m + m, m_new)
    tl.store(new_l + m, total)


def test_a_step_in_planes() -> None:
    sums = Sums()
    codes = sums.values.to(torch.float8_e4m3fn)
    sums.values = codes.float()
    words = codes.view(torch.int32)
    run_step_in_planes[(1,)](sums.acc, sums.m_i, sums.l_i, sums.qk, words, *sums.out, e4m3_planes_from_bits)
    sums.check()


@triton.jit
def run_parts(parts: Any, live: Any, flag: Any, copy: Any, found: Any) -> None:
    kept = tl.load(live + tl.arange(0, 16))[:, None] > 0
    part = part_at(parts + places(16, 64), kept, 0.0, False)
    tl.store(copy + places(16, 64), part)
    put_part(parts + places(16, 64), part + 1.0, kept, False)
    tl.store(found, flag_at(flag, True))


def test_parts_are_read_and_written_where_they_are_live() -> None:
    parts, live = random(M, D), (torch.arange(M) % 3 != 0).int()
    before, copy, found = parts.clone(), torch.empty(M, D), torch.zeros(1, dtype=torch.int64)
    run_parts[(1,)](parts, live, torch.tensor([READY.value]), copy, found)
    assert torch.equal(copy, before * live[:, None])
    assert torch.equal(parts, before + live[:, None])
    assert found.item() == READY.value


def test_constants() -> None:
    assert SURPLUS.value == SURPLUS_MERGE
    assert LN_2.value == math.log(2)
    assert LOG2_E.value == 1 / math.log(2)
    assert 0 < READY.value < 2**63
