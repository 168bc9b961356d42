"""Final merge of any forest: whose partials are merged where, the law, and what is counted, cut at any level."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support.final_merges import MASKS, SHAPE, assert_attention, cut, entries, scheduled
from support.forests import examples, forests, obeys_law
from support.h200 import H200
from treegen import Tree
from treegen.backends.torch_program import TorchProgram
from treegen.backends.triton_program import TritonProgram
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.verify import verify, verify_schedule
from treegen.schedule.forest_counts import count
from treegen.strategies.forest import Forest


def drawn(data: st.DataObject, tree: Tree) -> Plan:
    """A tree cut at any level, in any widths and forms."""
    return cut(
        tree,
        data.draw(st.sampled_from((1, 2, 3, 9))),
        data.draw(st.sampled_from((1, 3, 16, 200))),
        steps=data.draw(st.booleans()),
        trim=data.draw(st.booleans()),
        mask=data.draw(st.sampled_from(MASKS)),
    )


@examples(150)
@given(data=st.data())
def test_cut_forests(data: st.DataObject) -> None:
    tree = data.draw(forests(40, 60, salt=800))
    plan = drawn(data, tree)
    verify(plan, tree)
    schedule = scheduled(plan, tree)
    verify_schedule(schedule, tree.num_rows)
    assert_attention(schedule, tree, SHAPE, TorchProgram)

    found = entries(schedule)
    finished, worked_on, row_slots = set(), set(), {row: [] for row in range(tree.num_rows)}
    last = int(plan.round.max(initial=0))
    for item in schedule.work_items:
        rows = schedule.rows[item.row0 : item.row0 + item.rows].tolist()
        worked_on |= set(rows)
        if item.partial0 >= 0:
            for place, row in enumerate(rows):
                row_slots[row].append(item.partial0 + place)
        elif plan.round[item.group] == last:
            finished |= set(rows)
        assert item.partial0 < 0 or plan.round[item.group] < last or not plan.round.any()
    if plan.round.any() and schedule.num_rounds > 1:
        unmerged = {row: slots for row, slots in row_slots.items() if row in finished and slots}
        assert {row: slots for row, slots in found.items() if slots} == unmerged
        merged = {
            row for row in range(tree.num_rows) if row not in finished and (row_slots[row] or row not in worked_on)
        }
        assert set(schedule.merge_rows.tolist()) == merged
        assert (np.diff(schedule.merge_round_indptr)[:-1] == 0).all()
    if tree.num_rows:
        counted = count(plan, tree, np.array([0, tree.num_rows]), SHAPE, H200)
        assert counted.partial_rows.tolist() == [schedule.num_partials]
    assert Schedule.from_json(schedule.to_json()).to_json() == schedule.to_json()
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


@examples(30)
@given(data=st.data())
def test_small_cuts_obey_the_law(data: st.DataObject) -> None:
    tree = data.draw(forests(12, 20, salt=801))
    assert obeys_law(drawn(data, tree), tree)


@examples(25)
@given(data=st.data())
def test_trees_counted_together(data: st.DataObject) -> None:
    """Every tree has a last round of its own, whatever rounds others of the forest have."""
    trees = [tree for tree in data.draw(st.lists(forests(20, 40, salt=802), min_size=1, max_size=3)) if tree.num_rows]
    if not trees:
        return
    options = {"steps": data.draw(st.booleans()), "trim": True}
    plans = [cut(tree, level, 16, **options) for tree, level in zip(trees, (2, 1, 3), strict=False)]
    forest = Forest.of(trees)
    found = count(forest.join(plans), forest.joined, forest.first_row, SHAPE, H200)
    expected = [scheduled(plan, tree).num_partials for plan, tree in zip(plans, trees, strict=True)]
    assert found.partial_rows.tolist() == expected


@examples(12)
@given(data=st.data())
def test_cut_forests_in_the_kernels(data: st.DataObject) -> None:
    tree = data.draw(forests(10, 40, salt=803))
    if tree.num_rows:
        assert_attention(scheduled(drawn(data, tree), tree), tree, SHAPE, TritonProgram)
