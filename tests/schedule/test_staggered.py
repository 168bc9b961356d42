"""Staggered walks: which schedules they are for, and that they change the order of full tiles alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from support.h200 import H200
from treegen import Shape, Tree
from treegen.backends import oracle
from treegen.backends.triton_program import TritonProgram
from treegen.ir.schedule import Schedule
from treegen.ir.verify import verify
from treegen.schedule.lower import lower
from treegen.schedule.passes.stagger import staggered
from treegen.strategies import Strategy, batch_invariant, cohort, query
from treegen.target.problem import Problem

SHAPE = Shape(16, 1, 128, dtype="fp16")
OWN = "1,64/640,320"
"""On a device of 15 SMs, 16 cohorts of 4 rows with 640 tokens in common and 320 of every row: 0.69 of them distinct."""

SMALL = replace(H200, name="15 SMs", sms=15)


def scheduled(text: str, strategy: Strategy | None = None, sms: int = 15) -> Schedule:
    tree = Tree.parse(text)
    target = replace(H200, name=f"{sms} SMs", sms=sms)
    plan = (strategy or cohort()).plan(Problem(tree, SHAPE, target))
    verify(plan, tree)
    return staggered(lower(plan, Problem(tree, SHAPE, target)), Problem(tree, SHAPE, target))


def walks(schedule: Schedule) -> list[list[int]]:
    """The slots with which every item's full tiles begin."""
    return [schedule.tiles[item.tile0 : item.tile0 + item.tiles, 0].tolist() for item in schedule.work_items]


def is_staggered(schedule: Schedule) -> bool:
    """Whether some item does not walk its full tiles from the root on; slots rise along paths here."""
    return any(walk != sorted(walk) for walk in walks(schedule))


def test_every_other_item_begins_in_the_middle() -> None:
    schedule = scheduled(OWN)
    found = walks(schedule)
    assert len(found) == 16
    for number, walk in enumerate(found):
        along = sorted(walk)
        half = len(walk) // 2 if number % 2 else 0
        assert walk == along[half:] + along[:half]
    assert not schedule.tiles.flags.writeable


@pytest.mark.parametrize(
    ("text", "strategy", "sms"),
    [
        ("1,64/384,200", cohort(), 15),  # 18 full tiles of 64 tokens
        ("1,64/2000,320", cohort(), 15),  # 0.43 of the tokens are distinct
        ("1,64/64,320", cohort(), 15),  # 0.96
        (OWN, cohort(), 16),  # an SM for every block
        (OWN, cohort(split=1024), 15),  # parts of paths
        (OWN, cohort(split_shared_rows=64), 15),
        (OWN, query(), 15),  # 0.34
        (OWN, batch_invariant(), 15),  # its order is that of paths
    ],
)
def test_others_are_walked_along_their_paths(text: str, strategy: Strategy, sms: int) -> None:
    assert not is_staggered(scheduled(text, strategy, sms))


def test_runs_and_their_rows_are_the_same() -> None:
    one_each, found = scheduled(OWN, sms=16), scheduled(OWN)
    assert is_staggered(found)
    assert [sorted(walk) for walk in walks(found)] == walks(one_each)
    for item in found.work_items:
        own = slice(item.tile0, item.tile0 + item.tiles)
        order = np.argsort(found.tiles[own, 0])
        assert np.array_equal(found.tiles[own][order], one_each.tiles[own])
    for name in ("items", "rows", "packed_runs", "merge_partials", "config_indptr"):
        assert np.array_equal(getattr(found, name), getattr(one_each, name))


def test_results_are_right() -> None:
    tree, schedule = Tree.parse(OWN), scheduled(OWN)
    assert is_staggered(schedule)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tree.num_rows, 16, 128, generator=generator).half()
    k, v = torch.randn(2, tree.kv.last_slot + 1, 1, 128, generator=generator).half()
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    TritonProgram(schedule, SHAPE, torch.device("cpu"))(q, k, v, out, lse, 128**-0.5, 1.0)
    rows = np.arange(0, 64, 9, dtype=np.int32)
    expected_out, expected_lse = oracle.reference(tree, q, k, v, rows=rows)
    assert oracle.error(out[rows], expected_out) <= oracle.TOLERANCE["fp16"]
    assert oracle.error(lse[rows], expected_lse) <= oracle.TOLERANCE["fp16"]
