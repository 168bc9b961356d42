"""Where rows' results go: final rows, partial slots and merge lists, and schedules whose lists are wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from support.lowered_trees import schedule_of
from support.planted_faults import with_slot
from treegen import Tree, strategies
from treegen.ir.errors import PlanError
from treegen.ir.schedule import Schedule
from treegen.ir.verify import verify_schedule


def test_rows_with_a_single_item_are_final() -> None:
    schedule = schedule_of("100(20,30)", strategies.query())
    assert [item.partial0 for item in schedule.work_items] == [-1, -1]
    assert (schedule.num_partials, len(schedule.merge_rows), schedule.launches) == (0, 0, 1)


def test_rows_with_several_items_are_merged() -> None:
    schedule = schedule_of("100(20,30)+7")
    assert [(item.group, item.rows, item.partial0) for item in schedule.work_items] == [
        (0, 2, 0),
        (2, 1, 2),
        (1, 1, 3),
        (3, 1, -1),
    ]
    assert schedule.merge_rows.tolist() == [0, 1]
    assert schedule.merge_indptr.tolist() == [0, 2, 4]
    assert schedule.merge_partials.tolist() == [0, 3, 1, 2]
    assert (schedule.num_partials, schedule.launches) == (4, 2)


def test_final_rows_of_a_shared_item_are_partial_too() -> None:
    """An item writes final output only when none of its rows is merged."""
    tree = Tree.from_parents([-1, 0], [64, 64], rows=[(0, 64), (1, 64)])
    schedule = schedule_of(tree)
    assert all(item.partial0 >= 0 for item in schedule.work_items)
    assert np.diff(schedule.merge_indptr).tolist() == [1, 2]
    verify_schedule(schedule, 2)


def test_rows_that_see_nothing_have_an_empty_merge_list() -> None:
    tree = Tree.from_parents([-1, 0], [0, 5], rows=[(0, 0), (1, 5), (1, 0)])
    schedule = schedule_of(tree)
    assert schedule.merge_rows.tolist() == [0, 2]
    assert schedule.merge_indptr.tolist() == [0, 0, 0]


def test_a_tree_without_rows_launches_nothing() -> None:
    schedule = schedule_of(Tree.from_parents([-1], [5], rows=[]))
    assert (len(schedule.items), schedule.launches, schedule.num_partials) == (0, 0, 0)
    assert schedule.pack().array[:1].tolist() == [0]


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (lambda s: {"items": with_slot(s, 0, int(s.items[1, 6]))}, "partial0"),
        (lambda s: {"items": with_slot(s, 0, -1)}, "row 0"),
        (lambda s: {"items": with_slot(s, 0, 1000)}, "partial0"),
        (lambda s: {"merge_partials": s.merge_partials[::-1]}, "merge_partials"),
        (lambda s: {"merge_rows": s.merge_rows[[1, 0, 2]]}, "merge_partials"),
        (lambda s: {"merge_rows": s.merge_rows[[1, 1, 2]]}, "row 0"),
        (lambda s: {"rows": s.rows[[1, 0, 2, *range(3, len(s.rows))]]}, "merge_partials"),
    ],
)
def test_broken_schedules_are_rejected(change: Callable[[Schedule], dict[str, object]], argument: str) -> None:
    """Two items on one slot, rows written twice or never, lists that name other rows' slots."""
    schedule = schedule_of("100(20,30,40)")
    verify_schedule(schedule, 3)
    with pytest.raises(PlanError) as caught:
        verify_schedule(dataclasses.replace(schedule, **change(schedule)), 3)
    assert str(caught.value).startswith(f"{argument} = ")
    assert "\n" not in str(caught.value)


def test_a_schedule_for_more_rows_is_rejected() -> None:
    with pytest.raises(PlanError, match="row 3 = 0 writes"):
        verify_schedule(schedule_of("100(20,30,40)"), 4)
