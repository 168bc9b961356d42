"""The one kernel config of a kernel for running batches, and the thread blocks of its launches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegen import Shape
from treegen.runtime.batch_room import batch_config, held_at_once, items_at_once
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
    config = batch_config(Shape(*heads, 128, dtype="bf16", kv_dtype=kv_dtype, page_size=16), H200)
    assert (config.rows, config.tokens, config.num_warps) == expected


@pytest.mark.parametrize(
    ("heads", "head_dim", "window_left", "expected"),
    [
        ((16, 8), 256, 1023, (16, 64, 4, 3)),
        ((4, 1), 256, 511, (16, 64, 4, 3)),
        ((16, 8), 256, 1024, (16, 64, 4, 3)),
        ((16, 8), 256, 1025, (64, 32, 4, 2)),
        ((32, 1), 256, 1023, (64, 32, 4, 2)),
        ((64, 8), 64, 127, (64, 64, 4, 3)),
        ((64, 8), 64, -1, (64, 128, 4, 3)),
        ((32, 16), 128, 1023, (64, 64, 4, 3)),
    ],
)
def test_short_windows_have_tiles_of_their_own(
    heads: tuple[int, int], head_dim: int, window_left: int, expected: tuple[int, ...]
) -> None:
    config = batch_config(Shape(*heads, head_dim, dtype="bf16", page_size=16), H200, window_left)
    assert (config.rows, config.tokens, config.num_warps, config.num_stages) == expected


def test_gpus_with_less_shared_memory_keep_the_large_tile_in_windows() -> None:
    shape, a100 = Shape(16, 8, 256, dtype="bf16", page_size=16), target_from("a100")
    assert batch_config(shape, a100, 1023) == batch_config(shape, a100)


def test_thread_blocks_fill_what_the_device_holds() -> None:
    for heads, kv_dtype, per_sm in (((32, 8), "bf16", 2), ((32, 8), "e4m3", 7), ((8, 1), "e4m3", 4)):
        shape = Shape(*heads, 128, dtype="bf16", kv_dtype=kv_dtype, page_size=16)
        assert held_at_once(batch_config(shape, H200), shape, H200) == per_sm * H200.sms


@given(st.integers(1, 4096), st.integers(1, 256))
def test_no_thread_block_begins_after_two_rounds(held: int, lanes: int) -> None:
    """Blocks of one item begin together; where not even one item fits, it is taken all the same."""
    items = items_at_once(held, lanes)
    assert items == 1 or items * lanes <= 2 * held < (items + 1) * lanes
