"""Planted faults of merge lists: each is caught, and nothing that passes is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.final_merges import SHAPE, assert_attention, cut, scheduled
from support.forests import examples
from support.planted_faults import with_slot
from treegen import Tree
from treegen.backends.torch_program import TorchProgram
from treegen.ir.errors import PlanError
from treegen.ir.schedule import Schedule
from treegen.ir.verify import verify_schedule


def faultless() -> tuple[Schedule, Tree]:
    """Rows 0 and 1 merge two slots each in one item, row 2 one in its own; row 3 ends above the cut with two."""
    tree = Tree.from_parents([-1, 0, 1, 1, 0, 4], [40, 20, 5, 6, 0, 7], rows=[(2, 5), (3, 6), (5, 7), (1, 20)])
    schedule = scheduled(cut(tree, 2, 3, trim=True), tree)
    verify_schedule(schedule, 4)
    return schedule, tree


def relisted(schedule: Schedule, lists: list[list[int]]) -> dict[str, np.ndarray]:
    return {
        "epilogue_indptr": np.cumsum([0, *map(len, lists)]),
        "epilogue_partials": np.array([slot for slots in lists for slot in slots]),
    }


def listed(schedule: Schedule) -> list[list[int]]:
    bounds = schedule.epilogue_indptr.tolist()
    return [schedule.epilogue_partials[a:b].tolist() for a, b in pairwise(bounds)]


def with_lists(change: Callable[[list[list[int]]], None]) -> Callable[[Schedule], dict[str, object]]:
    def made(schedule: Schedule) -> dict[str, object]:
        lists = listed(schedule)
        change(lists)
        return relisted(schedule, lists)

    return made


def _exchange(lists: list[list[int]]) -> None:
    full = [i for i, slots in enumerate(lists) if slots]
    lists[full[0]], lists[full[1]] = lists[full[1]], lists[full[0]]


def _first(lists: list[list[int]]) -> list[int]:
    return next(slots for slots in lists if slots)


FAULTS: dict[str, Callable[[Schedule], dict[str, object]]] = {
    "another row's slots": with_lists(_exchange),
    "read twice": with_lists(lambda lists: _first(lists).append(_first(lists)[0])),
    "lost": with_lists(lambda lists: _first(lists).pop()),
    "read by nobody": with_lists(lambda lists: next(slots for slots in lists if not slots).append(_first(lists).pop())),
    "beyond the last slot": with_lists(lambda lists: _first(lists).append(1000)),
    "before the first slot": with_lists(lambda lists: _first(lists).append(-1)),
    "also merged by a kernel": lambda s: {
        "merge_partials": np.append(s.merge_partials, _first(listed(s))[0]),
        "merge_indptr": np.append(s.merge_indptr[:-1], s.merge_indptr[-1] + 1),
    },
    "a kernel's slot": with_lists(lambda lists: _first(lists).append(0)),
    "not merging": lambda s: {"configs": tuple(dataclasses.replace(tile, epilogue_merge=False) for tile in s.configs)},
    "merging in an earlier round": lambda s: {
        "configs": tuple(dataclasses.replace(tile, epilogue_merge=True) for tile in s.configs)
    },
    "written in the same round": lambda s: {
        "round_indptr": np.array([0, len(s.configs)]),
        "merge_round_indptr": np.array([0, len(s.merge_rows)]),
    },
    "written too late": lambda s: {"round_indptr": np.array([0, 0, len(s.configs)])},
    "final output of a partial item": lambda s: {"items": with_slot(s, 0, -1)},
    "partial output of a merging item": lambda s: {"items": with_slot(s, len(s.items) - 1, s.num_partials)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str) -> None:
    schedule, tree = faultless()
    with pytest.raises(PlanError) as caught:
        verify_schedule(dataclasses.replace(schedule, **FAULTS[fault](schedule)), tree.num_rows)
    assert "\n" not in str(caught.value)


@examples(200)
@given(data=st.data())
def test_what_passes_reads_the_rows_own_slots(data: st.DataObject) -> None:
    """Entries of sound lists changed at random: only another order of a row's own slots is not caught."""
    schedule, tree = faultless()
    lists = listed(schedule)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.integers(0, len(lists) - 1))
        kind = data.draw(st.sampled_from(("drop", "add", "replace", "swap", "reverse")))
        at = data.draw(st.integers(0, max(len(lists[place]) - 1, 0)))
        if kind == "add":
            lists[place].insert(at, data.draw(st.integers(0, schedule.num_partials)))
        elif kind == "swap":
            other = data.draw(st.integers(0, len(lists) - 1))
            lists[place], lists[other] = lists[other], lists[place]
        elif kind == "reverse":
            lists[place].reverse()
        elif lists[place] and kind == "drop":
            del lists[place][at]
        elif lists[place]:
            lists[place][at] = data.draw(st.integers(0, schedule.num_partials))
    mutant = dataclasses.replace(schedule, **relisted(schedule, lists))
    same = [sorted(slots) for slots in lists] == [sorted(slots) for slots in listed(schedule)]
    try:
        verify_schedule(mutant, tree.num_rows)
    except PlanError:
        assert not same
        return
    assert same
    assert_attention(mutant, tree, SHAPE, TorchProgram)
