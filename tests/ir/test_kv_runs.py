"""Where tokens live: runs of slots, made of slots, pages or runs, and moved."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples
from support.same_trees import assert_same
from treegen import KVRuns, Tree
from treegen.ir.errors import TreeError


def test_contiguous_runs() -> None:
    runs = KVRuns.contiguous(np.array([3, 0, 2]))
    assert (runs.indptr.tolist(), runs.start.tolist(), runs.length.tolist()) == ([0, 1, 1, 2], [0, 3], [3, 2])
    assert runs.last_slot == 4
    assert [runs.slots(node).tolist() for node in range(3)] == [[0, 1, 2], [], [3, 4]]
    assert KVRuns.contiguous(np.array([0, 0])).last_slot == -1


def test_runs_from_slots() -> None:
    runs = KVRuns.from_slots(np.array([5, 0, 2]), [[4, 5, 6, 3, 2], [], [3, 4]])
    assert (runs.start.tolist(), runs.length.tolist()) == ([4, 3, 2, 3], [3, 1, 1, 2])
    assert runs.indptr.tolist() == [0, 3, 3, 4]
    assert runs.last_slot == 6


def test_runs_from_pages() -> None:
    """Token t is in page t // 16 of its node; the last page may be partly filled, neighbouring pages are one run."""
    runs = KVRuns.from_pages(np.array([40, 16, 0, 5]), [[2, 3, 0], [1], [], [4]], 16)
    assert (runs.start.tolist(), runs.length.tolist()) == ([32, 0, 16, 64], [32, 8, 16, 5])
    assert runs.indptr.tolist() == [0, 2, 3, 3, 4]
    assert runs.last_slot == 68


def test_runs_from_runs() -> None:
    runs = KVRuns.from_runs(np.array([6, 0, 4]), [[(0, 2), (2, 3), (9, 1)], [], [(10, 4)]])
    assert (runs.indptr.tolist(), runs.start.tolist(), runs.length.tolist()) == ([0, 2, 2, 3], [0, 9, 10], [5, 1, 4])


@given(
    tokens=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    page_size=st.integers(1, 16),
    seed=st.integers(0, 10**6),
)
@examples(100)
def test_pages_slots_and_runs_agree(tokens: list[int], page_size: int, seed: int) -> None:
    counts = [-(-count // page_size) for count in tokens]
    free = iter(random.Random(seed).sample(range(sum(counts) + 2), sum(counts)))
    pages = [[next(free) for _ in range(count)] for count in counts]
    slots = [
        [node_pages[t // page_size] * page_size + t % page_size for t in range(count)]
        for node_pages, count in zip(pages, tokens, strict=True)
    ]
    array = np.array(tokens)
    single = [[(slot, 1) for slot in node_slots] for node_slots in slots]
    made = [
        KVRuns.from_pages(array, pages, page_size),
        KVRuns.from_slots(array, slots),
        KVRuns.from_runs(array, single),
    ]
    for runs in made:
        assert [runs.slots(node).tolist() for node in range(len(tokens))] == slots
        assert runs.last_slot == max((slot for node_slots in slots for slot in node_slots), default=-1)
        for node in range(len(tokens)):  # runs are never empty, and never continue the one before
            own = range(runs.indptr[node], runs.indptr[node + 1])
            assert all(runs.length[run] > 0 for run in own)
            assert all(runs.start[run] != runs.start[run - 1] + runs.length[run - 1] for run in own[1:])


def test_kv_moves_without_the_topology() -> None:
    tree = Tree.parse("3(2,1)")
    moved = tree.with_kv([[9, 8, 7], [0, 1], [5]])
    assert moved.slots(0).tolist() == [9, 8, 7, 0, 1]
    assert moved.slots(1).tolist() == [9, 8, 7, 5]
    assert tree.slots(0).tolist() == [0, 1, 2, 3, 4]
    assert moved.signature() == tree.signature()
    assert moved.kv.last_slot == 9
    same = Tree.from_parents([-1, 0, 0], [3, 2, 1], kv=KVRuns.from_slots(tree.tokens, [[9, 8, 7], [0, 1], [5]]))
    assert_same(same, moved)


@pytest.mark.parametrize("give", ["from_parents", "with_kv"])
def test_kv_of_another_tree_is_rejected(give: str) -> None:
    runs = KVRuns.contiguous(np.array([2, 3]))
    give_kv = partial(Tree.from_parents, [-1, 0], [3, 3]) if give == "from_parents" else Tree.parse("3(3)").with_kv
    with pytest.raises(TreeError, match="kv"):
        give_kv(kv=runs)
