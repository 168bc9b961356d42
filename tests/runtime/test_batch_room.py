"""The one kernel config of a kernel for running batches, and the thread blocks of its launches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegen import Shape
from treegen.runtime.batch_room import held_at_once, items_at_once, tile_of
from treegen.target.targets import target_from

H200 = target_from("h200")


@pytest.mark.parametrize(
    ("heads", "kv_dtype", "expected"),
    [
        ((32, 8), "bf16", (64, 64, 4)),
        ((32, 8), "e4m3", (16, 32, 1)),
        ((32, 32), "e5m2", (16, 32, 1)),
        ((8, 1), "e4m3", (16, 64, 2)),
        ((32, 1), "e4m3", (64, 64, 4)),
    ],
)
def test_caches_in_8_bits_have_a_small_tile_where_heads_fit(
    heads: tuple[int, int], kv_dtype: str, expected: tuple[int, int, int]
) -> None:
    tile = tile_of(Shape(*heads, 128, dtype="bf16", kv_dtype=kv_dtype, page_size=16), H200)
    assert (tile.rows, tile.tokens, tile.num_warps) == expected


def test_thread_blocks_fill_what_the_device_holds() -> None:
    for heads, kv_dtype, per_sm in (((32, 8), "bf16", 2), ((32, 8), "e4m3", 7), ((8, 1), "e4m3", 4)):
        shape = Shape(*heads, 128, dtype="bf16", kv_dtype=kv_dtype, page_size=16)
        assert held_at_once(tile_of(shape, H200), shape, H200) == per_sm * H200.sms


@given(st.integers(1, 4096), st.integers(1, 256))
def test_no_thread_block_begins_after_two_rounds(held: int, lanes: int) -> None:
    """Blocks of one item begin together; where not even one item fits, it is taken all the same."""
    items = items_at_once(held, lanes)
    assert items == 1 or items * lanes <= 2 * held < (items + 1) * lanes
