"""Scheduling: what branches have in common is computed once, also after they were preempted."""

from __future__ import annotations

from typing import Any

import pytest

from support.tiny_models import PROMPTS, tiny
from treegen.engine import Beam, Engine, KVPool, Sample, SequenceTree, Speculate
from treegen.engine.control import Controller
from treegen.engine.scheduling import schedule
from treegen.integrations import HFModel
from treegen.ir.errors import PoolError
from treegen.ir.shape import Shape


def sequences(pages: int) -> SequenceTree:
    return SequenceTree(KVPool(Shape(2, 1, 8, page_size=4), 1, pages), 4)


def step(tree: SequenceTree, rows: int) -> dict[int, int]:
    """Takes a step without a model; returns the tokens that each branch has stored in it."""
    counts, _ = schedule(tree, rows, together=False)
    tree.reserve(counts)
    tree.store(counts)
    for number in counts:
        tree.live.set_tokens(tree[number].seat, tree[number].stored)
    tree.check()
    return counts


def test_a_prompt_waits_for_all_pages_that_another_one_computes() -> None:
    """Chunks of 6 rows: the second prompt shares 12 tokens in full pages, and takes over nothing before these."""
    tree = sequences(20)
    tree.add([*range(13), 40, 41], (0,))
    tree.add([*range(13), 50], (1,))
    assert [step(tree, 6) for _ in range(3)] == [{0: 6}, {0: 6}, {0: 3, 1: 2}]
    assert tree[1].pages[:3] == tree[0].pages[:3]


def test_a_prompt_without_pages_holds_none_of_another_one() -> None:
    """There are pages for the first prompt alone; the second would add one to what they have in common."""
    tree = sequences(4)
    tree.add([*range(13), 40, 41], (0,))
    tree.add([*range(8), 60, 61, 62, 63], (1,))
    assert [step(tree, 20), tree[1].pages] == [{0: 15}, []]
    tree.extend(0, [42])
    assert [step(tree, 20), tree[1].pages] == [{0: 1}, []]
    tree.drop(0)
    assert step(tree, 20) == {1: 12}


def test_a_branch_takes_no_pages_that_are_too_few_for_it() -> None:
    """It needs four pages. Two are free, and a younger branch has one: each would take it from the other."""
    tree = sequences(6)
    tree.add([*range(12)], (0,))
    tree.add([40, 41, 42], (2,))
    assert step(tree, 20) == {0: 12, 1: 3}
    tree.add([*range(60, 75)], (1,))
    with pytest.raises(PoolError, match="num_pages = 6: is less than the 8 that"):
        schedule(tree, 20, together=False)
    assert len(tree[1].pages) == 1
    tree.drop(0)
    assert step(tree, 20) == {2: 15}


@pytest.mark.parametrize("pages", [22, 30, 31, 36])
def test_beams_need_the_pages_of_one_prompt_at_a_time(pages: int) -> None:
    """A pool of 22 pages has room for the longest prompt's beams; others then wait, or are preempted."""

    def beams(pages: int) -> tuple[list[list[list[int]]], int]:
        engine = Engine(HFModel(tiny()), Beam(6, 18), num_pages=pages, page_size=4, max_rows=18, max_branches=18)
        return [[found.tokens for found in own] for own in engine.run(PROMPTS)], engine.accounting.preempted

    (expected, none), (found, some) = beams(60), beams(pages)
    assert found == expected
    assert some > none == 0


@pytest.mark.parametrize(
    ("controller", "options"),
    [
        (Speculate(max_draft=40, max_new_tokens=3), {}),
        (Speculate(max_draft=8, max_new_tokens=3), {"deterministic": True}),
        (Sample(max_new_tokens=3), {"max_branches": 600, "deterministic": True}),
    ],
    ids=["drafts", "drafts-apart", "branches-apart"],
)
def test_by_default_steps_hold_all_branches_with_their_drafts(controller: Controller, options: dict[str, Any]) -> None:
    """More than the default tokens of a step, which the caller has not given."""
    ((made,),) = Engine(HFModel(tiny()), controller, num_pages=20, **options).run(PROMPTS[:1])
    assert len(made.tokens) == 3
