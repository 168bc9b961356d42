"""Trees, plans and schedules made in C against those made in NumPy."""

from __future__ import annotations

import pickle
import random
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.compilers import needs_compiler
from support.differences import check
from support.forests import examples
from support.random_batches import random_batch, with_rows
from treegen import Shape
from treegen.compiled import c_library
from treegen.compiled.batch_tables import CompiledTables, LoweredPlan, tables_of
from treegen.compiled.batch_tree import BatchTree
from treegen.compiled.table_words import TableWords
from treegen.ir.arrays import Ints
from treegen.ir.errors import TreeError
from treegen.ir.live_batch import LiveBatch
from treegen.ir.plan import Plan
from treegen.ir.positions import windowed_requests
from treegen.ir.request_schedule import RequestSchedule
from treegen.ir.tree import Tree
from treegen.runtime.batch_room import RESERVE, batch_config, room_of
from treegen.schedule.by_request import ItemRoom
from treegen.schedule.query_runs import lower_requests
from treegen.strategies import Strategy, cohort, deft_node, query
from treegen.strategies.groupings import by_row, by_row_whole_tree
from treegen.strategies.strategy import Pipeline
from treegen.target.problem import Problem
from treegen.target.targets import target_from
from treegen.target.tile_config import rows_per_tile

TARGET = target_from("h200")


def random_strategy(source: random.Random) -> Strategy:
    rows, split = source.choice([1, 4, 16, 64, 512]), source.choice([50, 64, 100, 448, 3000])
    shared_rows = source.choice([None, 1, 2, 3, 8, 100])
    return source.choice(
        [
            query(),
            query(split),
            cohort(rows, split_shared_rows=shared_rows),
            cohort(rows, split, split_shared_rows=shared_rows),
            cohort(rows, shares=source.choice([0.5, 1, 3, 5, 8.25, 12, 20, 40, 264]), split_shared_rows=shared_rows),
            cohort(rows, tile=(64, 32)),
        ]
    )


def check_tables(strategy: Strategy, tree: BatchTree, shape: Shape, *, in_c: bool = True, causal: bool = False) -> None:
    """Plan and schedule are those that NumPy makes."""
    config = batch_config(shape, TARGET)
    problem, room = Problem(tree.tree, shape, TARGET), ItemRoom(config, shape.page_size, RESERVE, causal)
    made, plan = tables_of(strategy, tree, shape, TARGET, room), strategy.plan(problem)
    known = lower_requests(plan, problem, room)
    check(made.plan, plan)
    check(made.schedule, known)
    assert made.seated[:2] == (known.seats.shape[1], len(known.claims))
    assert made.widest == max(plan.group_rows, default=0)
    assert made.tokens == plan.group_tokens.sum()
    in_c &= not tree.has_queries or made.widest <= rows_per_tile(config.rows, shape.group)
    assert isinstance(made, CompiledTables) == in_c
    if isinstance(made, CompiledTables):
        assert made.sizes == known.sizes
        for queries in {True, tree.has_queries}:
            check(words_of(made, shape, queries=queries), words_of(known, shape, queries=queries))


@pytest.mark.parametrize("strategy", [cohort(64), deft_node()], ids=str)
def test_copies_are_made_anew(strategy: Strategy) -> None:
    """They hold no addresses of what they were copied from."""
    batch, shape = LiveBatch(page_size=16), Shape(8, 1, 64, page_size=16)
    first = batch.add(3000)
    for _ in range(20):
        batch.add(2000, first, 1600)
    room, tree = ItemRoom(batch_config(shape, TARGET), 16, RESERVE), BatchTree.of_batch(batch)
    made = tables_of(strategy, tree, shape, TARGET, room)
    for copied, tree_copied in ((deepcopy(made), deepcopy(tree)), pickle.loads(pickle.dumps((made, tree)))):
        assert str(copied.plan) == str(made.plan)
        assert copied.schedule.entries.tolist() == made.schedule.entries.tolist()
        assert str(tree_copied.tree) == str(tree.tree)
        assert isinstance(copied, LoweredPlan)
        assert copied.seated[2] != made.seated[2]
        assert tables_of(strategy, tree_copied, shape, TARGET, room).seated[:2] == made.seated[:2]


def words_of(made: CompiledTables | RequestSchedule, shape: Shape, *, queries: bool) -> Ints:
    """The words that a kernel copies to the device, in memory that was used before."""
    sizes, config = made.sizes, batch_config(shape, TARGET)
    room = room_of(shape, config, sizes.seats + 3, 100, max(sizes.items, 8))
    wide = {name: max(size, getattr(room, name)) for name, size in sizes._asdict().items()}
    table_words = TableWords(replace(room, queries=queries, **wide))
    words = np.arange(table_words.places.copied, dtype=np.int32)
    table_words.write(made, words)
    return words


@needs_compiler
@given(st.integers(0, 2**32))
@examples(300)
def test_c_makes_what_numpy_makes(seed: int) -> None:
    assert c_library.library() is not None
    source = random.Random(seed)
    batch, is_one_row = random_batch(source), source.random() < 0.5
    if not is_one_row:
        with_rows(source, batch)
    shared = source.random() < 0.9
    tree, known = BatchTree.of_batch(batch, shared=shared), batch.tree(shared=shared)
    check(tree.tree, known)
    topology = known.topology
    numbers = topology.unique_tokens, topology.levels, topology.path_tokens, topology.private_tokens
    assert tree.counts == (known.num_rows, *numbers)
    alone = batch.tree(shared=False)
    for each in (tree, BatchTree.of_tree(known)):
        assert each.counts == tree.counts
        assert each.has_rows_inside == topology.has_rows_inside
        assert each.has_queries == (known.requests.queries is not None)  # type: ignore[union-attr]
        if not is_one_row:
            continue
        without = each.alone()
        assert (without is None) == (not known.requests.shared_tokens.any())  # type: ignore[union-attr]
        if without is not None:
            check(without.tree, alone)

    heads, dim = source.choice([(4, 2), (8, 1), (32, 8), (80, 1)]), source.choice([64, 256])
    shape, config = Shape(*heads, dim, page_size=batch.page_size), batch_config(Shape(*heads, dim), TARGET)
    tree = source.choice([tree, BatchTree.of_tree(known)])
    if len(batch) and source.random() < 0.3:
        tree = tree.within_windows(source.choice([0, 100, 1000]), max(config.tokens, batch.page_size))
    check_tables(random_strategy(source), tree, shape, in_c=len(batch) > 0, causal=source.random() < 0.5)


@needs_compiler
@given(st.integers(0, 2**32))
@examples(300)
def test_trees_within_windows(seed: int) -> None:
    """Columns, counts and the tree are those that NumPy makes, also of a tree that windows have cut before."""
    source = random.Random(seed)
    batch = random_batch(source)
    if source.random() < 0.5:
        with_rows(source, batch)
    tree = source.choice([BatchTree.of_batch(batch), BatchTree.of_tree(batch.tree())])
    known = tree.tree
    for window_left in (source.choice([300, 3000]), source.choice([0, 1, 100])):
        unit = batch.page_size * source.choice([1, 2, 8])
        seen, expected = tree.within_windows(window_left, unit), windowed_requests(known, window_left, unit)
        assert (seen is tree) == (expected is known)
        check(seen.tree, expected)
        again = BatchTree.of_tree(expected)
        assert seen.counts == again.counts
        assert (seen.columns is None) == (again.columns is None)
        if seen.columns is not None and again.columns is not None:
            sizes, words = again.columns.sizes, again.columns.words
            assert seen.columns.sizes == sizes
            assert (seen.columns.words[: len(words)] == words).all()
            check(seen.columns.least, again.columns.least)
        tree, known = seen, expected


@needs_compiler
@given(st.integers(0, 2**32))
@examples(200)
def test_less_sharing(seed: int) -> None:
    source = random.Random(seed)
    batch = random_batch(source)
    table = batch.table.copy()
    in_c, known = BatchTree.of_batch(batch), BatchTree.of_tree(batch.tree())
    for most in (0, source.randint(0, 50), source.randint(0, 5000), 2**40):
        found, expected = in_c.sharing_less(most), known.sharing_less(most)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            check(found[0].tree, expected[0].tree)
            assert found[0].counts == expected[0].counts
            assert 0 < found[1] == expected[1] <= most
    assert (batch.table == table).all()


@needs_compiler
@given(st.integers(0, 2**32))
@examples(100)
def test_parts_that_would_end_late(seed: int) -> None:
    """There are more parts than thread blocks, and the last ones are cut further."""
    source = random.Random(seed)
    batch, count = LiveBatch(max_seats=64), source.randint(2, 60)
    for _ in range(count):
        batch.add(source.randint(64, source.choice([200, 700, 3000])))
    strategy = cohort(source.choice([8, 16]), shares=max(count * source.uniform(0.2, 1.0), 0.5))
    check_tables(strategy, BatchTree.of_batch(batch), Shape(8, 1, 64))


def test_too_many_tokens_are_refused() -> None:
    batch = LiveBatch()
    for _ in range(3):
        batch.add(2**30)
    with pytest.raises(TreeError, match="2\\^31"):
        BatchTree.of_batch(batch)


@dataclass
class Unhashable:
    """A caller's pass."""

    name: str = "unhashable"

    def apply(self, plan: Plan, tree: Tree) -> Plan:
        return plan


@needs_compiler
@pytest.mark.parametrize(("strategy", "in_c"), [
    (cohort(shares=1e10), True), (cohort(shares=1e300), False), (query(1), True),
    (Pipeline("query", by_row, (Unhashable(),)), False), (Pipeline("mine", by_row_whole_tree), False),
    (deft_node(), False), (cohort(shares=33.0), True), (cohort(shares=33), True),
], ids=str)  # fmt: skip
def test_what_c_does_not_plan_numpy_does(strategy: Strategy, in_c: bool) -> None:
    batch = LiveBatch(page_size=16)
    first = batch.add(3000)
    for _ in range(20):
        batch.add(2000, first, 1600)
    check_tables(strategy, BatchTree.of_batch(batch), Shape(8, 1, 64, page_size=16), in_c=in_c)


@pytest.mark.parametrize("shares", [1e-18, 1e-310])
def test_shares_that_are_too_small_are_refused(shares: float) -> None:
    batch, shape = LiveBatch(), Shape(8, 1, 64)
    batch.add(3000)
    room = ItemRoom(batch_config(shape, TARGET), 1, RESERVE)
    with pytest.raises(OverflowError):
        cohort(shares=shares).plan(Problem(batch.tree(), shape, TARGET))
    with pytest.raises(OverflowError):
        tables_of(cohort(shares=shares), BatchTree.of_batch(batch), shape, TARGET, room)
