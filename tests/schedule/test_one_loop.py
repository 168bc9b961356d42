"""Short work in one loop: the same runs for the same items, told as blocks; and right kernels either way."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.forests import examples, forests
from support.h200 import H200
from treegen import Shape, Tree
from treegen.backends import oracle
from treegen.ir.schedule import Schedule
from treegen.schedule.lower import lower
from treegen.schedule.passes import single_loop
from treegen.strategies import cohort, strategy_from
from treegen.target.problem import Problem

SHAPE = Shape(4, 2, 16, dtype="fp16")


def read(schedule: Schedule, item: int) -> Counter[tuple[int, int, int]]:
    """How often an item reads every (slot, lo, hi), over its full and packed tiles."""
    (c,) = [c for c, end in enumerate(schedule.config_indptr[1:]) if schedule.config_indptr[c] <= item < end]
    work, per_tile = schedule.work_items[item], schedule.configs[c].runs_per_tile
    runs = [
        *schedule.tiles[work.tile0 : work.tile0 + work.tiles].tolist(),
        *schedule.packed_runs[work.run0 : work.run0 + work.packed_tiles * per_tile].tolist(),
    ]
    return Counter((slot + t, lo, hi) for slot, length, lo, hi in runs for t in range(length))


@examples(80)
@given(
    tree=forests(40, salt=9),
    strategy=st.sampled_from(
        [cohort(head_rows=16), cohort(head_rows=64, split_shared_rows=3, merge="final"), strategy_from("deft-flatten")]
    ),
    longer=st.integers(1, 60),
)
def test_items_read_the_same_in_one_loop(tree: Tree, strategy: treegen.Strategy, longer: int) -> None:
    tree = Tree.from_parents(tree.parent, tree.tokens * longer)
    schedule = lower(strategy.plan(Problem(tree, SHAPE, H200)), Problem(tree, SHAPE, H200))
    before = schedule.items.copy()
    found = single_loop.in_single_loop(schedule)
    assert np.array_equal(schedule.items, before)
    tiles = schedule.column("tiles") + schedule.column("packed_tiles")
    for c, tile in enumerate(schedule.configs):
        of_config = slice(int(schedule.config_indptr[c]), int(schedule.config_indptr[c + 1]))
        short = bool(tiles[of_config].max(initial=0) <= single_loop.MOST_TILES) and single_loop.can_be_single_loop(tile)
        assert found.configs[c] == replace(tile, has_full_tiles=not short)
        assert not (short and found.column("tiles")[of_config].any())
    assert np.array_equal(found.column("tiles") + found.column("packed_tiles"), tiles)
    for item in range(len(schedule.items)):
        assert read(found, item) == read(schedule, item)
    for name in ("row0", "rows", "partial0", "group"):
        assert np.array_equal(found.column(name), schedule.column(name))


def test_long_or_dealt_work_keeps_its_loops() -> None:
    long, dealt = Tree.parse("1000(5,6)"), Tree.parse("64(16,20)")
    for tree, strategy in ((long, cohort()), (dealt, strategy_from("flashforge"))):
        schedule = lower(strategy.plan(Problem(tree, SHAPE, H200)), Problem(tree, SHAPE, H200))
        assert single_loop.in_single_loop(schedule).configs == schedule.configs


@pytest.mark.parametrize("most", [0, 6])
@pytest.mark.parametrize("strategy", [cohort(head_rows=16), cohort(split_shared_rows=2, merge="final")], ids=str)
def test_kernels_are_right_with_one_loop_and_with_two(
    strategy: treegen.Strategy, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_loop, "MOST_TILES", most)
    tree = Tree.parse("64(32,48(16))")
    kernel = treegen.compile(tree, strategy=strategy, shape=SHAPE, backend="triton")
    assert ("Full tiles" in kernel.source) == (most == 0)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tree.num_rows, 4, 16, generator=generator).half()
    k, v = torch.randn(2, tree.kv.last_slot + 1, 2, 16, generator=generator).half()
    out, lse = kernel(q, k, v, return_lse=True)
    expected_out, expected_lse = oracle.reference(tree, q, k, v)
    assert oracle.error(out, expected_out) < oracle.TOLERANCE["fp16"]
    assert oracle.error(lse, expected_lse) < oracle.TOLERANCE["fp16"]
