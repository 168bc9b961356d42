"""Kernels that pack, combine and rescale states do what operations of PyTorch do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples
from treegen.backends.merge_state import merge_states
from treegen.backends.oracle import error
from treegen.distributed.packed_states import StateForm, combine, pack, rescale


def _states(ranks: int, rows: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """States of ranks, some of them empty, with NaN in their out."""
    generator = torch.Generator().manual_seed(rows)
    outs = torch.randn(ranks, rows, heads, dim, generator=generator).to(dtype)
    lses = 20 * torch.randn(ranks, rows, heads, generator=generator)
    empty = torch.rand(ranks, rows, heads, generator=generator) < 0.3
    empty[:, 0] = True
    return outs.masked_fill(empty[..., None], torch.nan), lses.masked_fill(empty, -torch.inf)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [8, 24, 35, 128])
def test_packed_states_keep_their_bits(parts, dtype, dim):
    outs, lses = _states(1, 5, 8, dim, dtype)
    chunks = pack(outs[0], lses[0], parts)
    form = StateForm(5, 8 // parts, dim, dtype)
    assert chunks.shape == (parts, form.chunk)
    out, lse = form.views(chunks)
    assert torch.equal(out.transpose(0, 1).reshape(5, 8, dim).nan_to_num(7), outs[0].nan_to_num(7))
    assert torch.equal(lse.transpose(0, 1).reshape(5, 8), lses[0])


@pytest.mark.parametrize("scale", [1.0, 1 / 0.6931471805599453])
@pytest.mark.parametrize(("rows", "heads", "dim"), [(3, 2, 24), (9, 4, 128), (1, 1, 8)])
def test_ranks_states_combine(scale, rows, heads, dim):
    outs, lses = _states(3, rows, heads, dim, torch.float32)
    chunks = torch.cat([pack(out, lse * scale, 1) for out, lse in zip(outs, lses, strict=True)])
    out, lse = combine(chunks, StateForm(rows, heads, dim, torch.float32), scale)
    expected, sums = merge_states(outs.transpose(0, 1), lses.transpose(0, 1))
    assert error(out, expected) < 1e-6
    assert error(lse, sums * scale) < 1e-6
    assert not bool(out[0].any())


@pytest.mark.parametrize("parts", [1, 2])
def test_rescaled_states_add_up(parts):
    outs, lses = _states(3, 7, 4, 24, torch.float32)
    rescaled = [rescale(out, lses, rank, parts, 1.0) for rank, out in enumerate(outs)]
    total = sum(each for each, _ in rescaled).transpose(0, 1).reshape(7, 4, 24)
    expected, sums = merge_states(outs.transpose(0, 1), lses.transpose(0, 1))
    assert error(total, expected) < 1e-6
    assert all(error(lse, sums) < 1e-6 for _, lse in rescaled)


def test_a_broken_state_breaks_its_row_and_head_alone():
    outs, lses = _states(2, 4, 2, 8, torch.float32)
    lses[1, 2, 1] = torch.nan
    chunks = torch.cat([pack(out, lse, 1) for out, lse in zip(outs, lses, strict=True)])
    out, lse = combine(chunks, StateForm(4, 2, 8, torch.float32), 1.0)
    assert bool(out[2, 1].isnan().all())
    assert bool(lse[2, 1].isnan())
    assert not bool(out[:, 0].isnan().any())


@examples(60)
@given(data=st.data())
def test_merging_is_of_all_ranks_in_any_grouping(data):
    ranks, rows, heads, dim = (data.draw(st.integers(1, most)) for most in (5, 3, 3, 2))
    dim *= 8
    seen = st.one_of(st.just(-torch.inf), st.floats(-60, 60, width=32))
    lses = torch.tensor(data.draw(st.lists(seen, min_size=ranks * rows * heads, max_size=ranks * rows * heads)))
    lses = lses.view(ranks, rows, heads)
    outs = torch.randn(ranks, rows, heads, dim, generator=torch.Generator().manual_seed(ranks))
    outs = outs.masked_fill((lses == -torch.inf)[..., None], torch.nan)
    form = StateForm(rows, heads, dim, torch.float32)

    def merged(of_outs, of_lses):
        return combine(torch.cat([pack(out, lse, 1) for out, lse in zip(of_outs, of_lses, strict=True)]), form, 1.0)

    out, lse = merged(outs, lses)
    expected, sums = merge_states(outs.transpose(0, 1), lses.transpose(0, 1))
    assert error(out, expected) < 1e-5
    torch.testing.assert_close(lse, sums, rtol=1e-5, atol=1e-6)  # a sum may lie next to 0
    first = data.draw(st.integers(0, ranks - 1))
    if first:
        one, other = merged(outs[:first], lses[:first]), merged(outs[first:], lses[first:])
        again = merged(*(torch.stack(pair) for pair in zip(one, other, strict=True)))
        assert error(again[0], expected) < 1e-5
        torch.testing.assert_close(again[1], sums, rtol=1e-5, atol=1e-6)
