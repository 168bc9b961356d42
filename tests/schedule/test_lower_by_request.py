"""Lowering by request against the general lowering of the same plan, which takes a tree's tokens to be in KV slots."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples, plan_by_row_classes
from treegen import Shape
from treegen.ir.plan import Plan
from treegen.ir.tree import Tree
from treegen.ir.work_items import ITEM_FIELDS
from treegen.runtime.batch_room import RESERVE, batch_config
from treegen.schedule.arrangement import Frame, arrange
from treegen.schedule.by_request import ItemRoom, lower_by_request, run_tokens_of
from treegen.schedule.lower import lower
from treegen.strategies import Strategy, cohort, deft_node, deft_node_chunk, query
from treegen.target.problem import Problem
from treegen.target.targets import target_from

TARGET = target_from("h200")
STRATEGIES: tuple[Strategy, ...] = (
    cohort(64), cohort(16), cohort(512), cohort(64, split=64), cohort(64, split=100, split_shared_rows=2),
    cohort(512, split=50),
    query(), query(split=128), deft_node(), deft_node_chunk(100),
)  # fmt: skip


def case(seed: int) -> tuple[Problem, Plan]:
    """Random requests that share with one another, some of them through others, and a plan, some with groups of more
    rows than a tile has, or of rows that are not neighbours.
    """
    source = random.Random(seed)
    page_size, count = source.choice([1, 16, 128]), source.choice([0, 1, 5, 40, 90])
    lengths, above, shared = [], [], []
    for request in range(count):
        other = source.randrange(request) if request and source.random() < 0.8 else -1
        begin = source.choice([lengths[other], source.randint(0, lengths[other])]) if other >= 0 else 0
        above.append(other)
        shared.append(begin)
        lengths.append(begin + source.choice([0, 1, page_size, source.randint(0, 400)]))
    tree = Tree.from_requests(lengths, above, shared, page_size=page_size)
    problem = Problem(tree, Shape(*source.choice([(4, 2), (8, 1), (80, 1)]), 64, page_size=page_size), TARGET)
    if count and source.random() < 0.2:
        return problem, plan_by_row_classes(tree, seed, source.randint(1, 4), unseen=False)
    return problem, source.choice(STRATEGIES).plan(problem)


@given(st.integers(0, 2**32))
@examples(300)
def test_items_and_merges_are_those_of_the_general_lowering(seed: int) -> None:
    problem, plan = case(seed)
    tile = batch_config(problem.shape, TARGET)
    made = lower_by_request(plan, problem, ItemRoom(tile, problem.shape.page_size, RESERVE)).schedule
    general = lower(plan, problem, Frame((tile,), 1))
    rooms = [ITEM_FIELDS.index(name) for name in ("tile0", "tiles", "run0", "packed_tiles")]
    np.testing.assert_array_equal(np.delete(made.items, rooms, 1), np.delete(general.items, rooms, 1))
    for name in (
        "configs",
        "config_indptr",
        "rows",
        "merge_rows",
        "merge_indptr",
        "merge_partials",
        "merge_round_indptr",
    ):
        np.testing.assert_array_equal(getattr(made, name), getattr(general, name), name)


@given(st.integers(0, 2**32))
@examples(300)
def test_entries_are_the_runs_of_the_general_lowering(seed: int) -> None:
    """Cut at tiles, and with room for as many tokens as their requests may gain."""
    problem, plan = case(seed)
    tree, page_size = problem.tree, problem.shape.page_size
    tile = batch_config(problem.shape, TARGET)
    made = lower_by_request(plan, problem, ItemRoom(tile, page_size, RESERVE))
    runs = arrange(plan, problem, Frame((tile,), 1)).runs
    np.testing.assert_array_equal(made.entry_indptr, runs.indptr)
    assert tree.requests is not None
    unit, most = max(tile.tokens, page_size), []
    for (slot, length, *seen), entry in zip(runs.table.tolist(), made.entries.tolist(), strict=True):
        node = int(np.searchsorted(tree.kv.start, slot, "right")) - 1
        base, begin = int(tree.requests.first[node]), slot - int(tree.kv.start[node])
        is_last, begin, end = begin + length == tree.tokens[node], begin - begin % unit, begin + length
        end = end if is_last else end - end % unit
        grows = is_last and bool(tree.requests.open[node])
        most.append(end - begin + RESERVE * grows)
        first, last = (base + begin, 0 if grows else base + end) if most[-1] else (unit, unit)
        assert entry == [tree.requests.owner[node], first, last, *seen]

    packed, tiles, blocks = tile.tokens // run_tokens_of(page_size), 0, 0
    for (_, _, tile0, _, run0, *_), begin, end in zip(
        made.schedule.items.tolist(), runs.indptr.tolist(), runs.indptr[1:].tolist(), strict=False
    ):
        assert (tile0, run0) == (tiles, blocks)
        tiles += sum(tokens // tile.tokens for tokens in most[begin:end])
        own = sum(-(-min(tokens, tile.tokens - 1) // run_tokens_of(page_size)) for tokens in most[begin:end])
        blocks += -(-own // packed) * packed
    assert (made.tile_room, made.run_room) == (tiles, blocks)


def test_the_cases_have_every_form_of_group() -> None:
    """More rows than a tile, rows that are not neighbours, several items of a row, and shared tokens of shared ones."""
    forms = set()
    for problem, plan in map(case, range(200)):
        tile = batch_config(problem.shape, TARGET)
        made = lower_by_request(plan, problem, ItemRoom(tile, problem.shape.page_size, RESERVE))
        forms.update(
            name
            for name, found in {
                "tall": plan.group_rows.max(initial=0) > max(1, tile.rows // problem.shape.group),
                "listed": len(plan.row_lo) > len(plan),
                "merged": len(made.schedule.merge_rows),
                "final beside partial": len(set((made.schedule.column("partial0") >= 0).tolist())) == 2,
                "deep": len(made.claims) > (made.seats[4] >= 0).sum(),
                "empty": not len(plan),
            }.items()
            if found
        )
    assert forms == {"tall", "listed", "merged", "final beside partial", "deep", "empty"}
