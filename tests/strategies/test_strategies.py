"""Strategies: every plan obeys the coverage law, every schedule writes what it should, the interpreter is right.

The property tests of this file draw 2,000 random forests for the law of every strategy and for the interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.forests import (
    ROW_STYLES,
    examples,
    forests,
    obeys_law,
    plan_by_row_classes,
    schedule_counts,
    visible,
    visible_slot_counts,
)
from support.h200 import H200
from support.strategy_results import SMALL, TOLERANCE, assert_computes_attention, masked_softmax, optioned, tensors
from treegen import LiveBatch, Shape, Tree, strategies
from treegen.backends import oracle
from treegen.ir.arrays import frozen
from treegen.ir.plan import Plan
from treegen.ir.verify import verify, verify_schedule
from treegen.schedule.lower import lower
from treegen.strategies import groupings
from treegen.strategies.cohort import nodes_below
from treegen.strategies.passes import SplitContext, TrimRows
from treegen.target.problem import Problem
from treegen.target.targets import target_from, targets

FORESTS_PER_FAMILY = 84
FAMILIES = {
    f"{place}-{number}-{part}": st.tuples(
        forests(kv=(place,), rows=rows, salt=6 * index + 3 * number + part),
        st.sampled_from((None, 5, 24, 64)),  # where strategies split, if they take such an option
        st.sampled_from((1, 16)),  # page size of the cache
        st.sampled_from(sorted(targets())),
    )
    for index, place in enumerate(("default", "slots", "pages", "runs"))
    for number, rows in enumerate((("leaves", "ends", "copies"), ("inside", "every", "mixed", "nothing", "nobody")))
    for part in range(3)
}
"""Kinds of cases, one test each, so that several workers share the work; two thirds of each are in the full sweep."""
PARTS = [pytest.param(name, marks=[] if name.endswith("-0") else [pytest.mark.full]) for name in FAMILIES]


@pytest.mark.parametrize("family", PARTS)
@examples(FORESTS_PER_FAMILY)
@given(data=st.data())
def test_every_strategy_obeys_the_law_and_computes_attention(family: str, data: st.DataObject) -> None:
    tree, option, page_size, target = data.draw(FAMILIES[family])
    shape = Shape(4, 2, 16, dtype="fp32", page_size=page_size)
    inputs = tensors(tree, page_size)
    expected_out, expected_lse = masked_softmax(tree, *inputs)
    for strategy in optioned(option):
        if strategy.name == "auto":  # it makes the plan of one of the others (tests/search/test_auto.py)
            if tree.num_rows % 4 == 0:
                verify(strategy.plan(Problem(tree, shape, target_from(target))), tree)
            continue
        kernel = treegen.compile(tree, strategy=strategy, shape=shape, target=target, backend="torch")
        verify(kernel.plan, tree)
        verify_schedule(kernel.schedule, tree.num_rows)
        out, lse = kernel(*inputs, return_lse=True)
        assert oracle.error(out, expected_out) <= TOLERANCE, strategy
        assert oracle.error(lse, expected_lse) <= TOLERANCE, strategy


@pytest.mark.parametrize("rows", ROW_STYLES)
@examples(30)
@given(data=st.data())
def test_law_by_brute_force(rows: str, data: st.DataObject) -> None:
    tree = data.draw(forests(25, 60, rows=(rows,), salt=100 + ROW_STYLES.index(rows)))
    option = data.draw(st.sampled_from((None, 1, 5, 24)))
    for strategy in optioned(option):
        assert obeys_law(strategy.plan(Problem(tree, SMALL, H200)), tree), strategy


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@examples(40)
@given(data=st.data())
def test_schedules_cover_every_visible_pair_once(group: int, data: st.DataObject) -> None:
    """For group sizes, head dims and types that give every kernel config; all tables are decoded by plain loops."""
    tree = data.draw(forests(20, 100, salt=200 + group))
    head_dim, dtype = data.draw(st.sampled_from(((64, "fp16"), (128, "bf16"), (80, "fp32"), (256, "bf16"))))
    strategy = data.draw(st.sampled_from(optioned(data.draw(st.sampled_from((None, 7, 100))))))
    shape = Shape(2 * group, 2, head_dim, dtype=dtype)
    plan = strategy.plan(Problem(tree, shape, H200))
    schedule = lower(plan, Problem(tree, shape, H200))
    verify_schedule(schedule, tree.num_rows)
    slots = tree.kv.last_slot + 1
    assert np.array_equal(schedule_counts(schedule, tree.num_rows, slots), visible_slot_counts(tree, slots)), (
        f"{strategy}, {schedule.configs}"
    )


@examples(100)
@given(tree=forests(salt=300), length=st.integers(1, 70))
def test_what_strategies_read(tree: Tree, length: int) -> None:
    """KV-guided strategies read every visible token once, `query` every row's path; cuts are where promised."""
    node, chunk, flatten, query, split = (
        strategy.plan(Problem(tree, SMALL, H200))
        for strategy in (
            strategies.deft_node(),
            strategies.deft_node_chunk(length),
            strategies.deft_flatten(length),
            strategies.query(),
            strategies.query(length),
        )
    )
    reads = [
        [sum(s.stop - s.start for s in group.segments) for group in plan.groups] for plan in (chunk, flatten, split)
    ]
    unique = int(visible(tree).any(0).sum())
    paths = visible(tree).sum(1)
    assert [int(plan.read_tokens.sum()) for plan in (node, chunk, flatten)] == [unique] * 3
    assert [int(plan.read_tokens.sum()) for plan in (query, split)] == [paths.sum()] * 2
    assert not any(group.masked for group in query.groups)
    assert [len(query), len(split)] == [int((paths > 0).sum()), int((-(-paths // length)).sum())]
    for plan in (node, chunk):
        assert all(len({segment.node for segment in group.segments}) == 1 for group in plan.groups)
    assert len(node) == len({segment.node for group in node.groups for segment in group.segments})
    assert all(0 < count <= length for counts in reads for count in counts)
    assert all(count == length for count in reads[1][:-1])  # flatten: every block but the last is full
    assert all(group.segments[0].start % length == 0 for group in chunk.groups)
    for plan in (node, chunk, flatten, query, split):
        for group in plan.groups:  # no group carries rows for nothing
            seen = [rows for segment in group.segments for rows in range(*segment.seen)]
            assert set(seen) == set(range(group.num_rows))


@examples(120)
@given(
    tree=forests(20, 60, salt=400),
    seed=st.integers(0, 2**20),
    configs=st.integers(1, 4),
    unseen=st.booleans(),
    length=st.integers(1, 70),
)
def test_passes_keep_the_law_on_groups_of_several_intervals(
    tree: Tree, seed: int, configs: int, unseen: bool, length: int
) -> None:
    plan = plan_by_row_classes(tree, seed, configs, unseen=unseen)
    verify(plan, tree)
    split = SplitContext(length).apply(plan, tree)
    trimmed = TrimRows().apply(split, tree)
    for result in (split, trimmed):
        verify(result, tree)
        assert obeys_law(result, tree)
        schedule = lower(result, Problem(tree, SMALL, H200))
        verify_schedule(schedule, tree.num_rows)
        assert_computes_attention(schedule, tree)
    assert int(split.read_tokens.sum()) == int(plan.read_tokens.sum())
    for group in trimmed.groups:
        assert {row for segment in group.segments for row in range(*segment.seen)} == set(range(group.num_rows))


@examples(300)
@given(tree=forests(20, 30, salt=451), rows=st.integers(1, 12), seed=st.integers(0, 2**16))
def test_a_span_belongs_to_the_nearest_cut_node_above_it(tree: Tree, rows: int, seed: int) -> None:
    """By the rows that see nodes, and by walking up from each node, where cut nodes lie below one another."""
    below = np.flatnonzero((tree.parent >= 0) & (np.random.default_rng(seed).random(len(tree.parent)) < 0.2))
    for cut in (nodes_below(tree, rows), frozen(below)):
        cut = cut[tree.topology.preorder[cut].argsort()]
        found = groupings.fragments_of_spans(tree, cut) if len(cut) else np.zeros(len(tree.topology.spans))
        for node, fragment in zip(tree.topology.spans.node.tolist(), found.tolist(), strict=True):
            while node >= 0 and node not in cut:
                node = int(tree.parent[node])
            assert fragment == (cut.tolist().index(node) + 1 if node >= 0 else 0)


@pytest.mark.parametrize("rows", [1, 3, 16, 100, 600])
def test_rows_of_a_chunk_read_what_all_of_them_see_as_one_segment(rows: int) -> None:
    """A request with 500 query rows, and one that shares a prompt with it; each row sees one token more than the row
    before.
    """
    batch = LiveBatch(page_size=16)
    chunk = batch.add(564, rows=500)
    batch.add(94, chunk, 64)
    tree = batch.tree()
    plan = groupings.by_cohort(tree, rows)
    verify(plan, tree)
    node = int(tree.row_node[0])
    for group in plan.groups:
        prompt, *segments = group.segments
        seen = [segment for segment in segments if segment.node == node]
        assert (prompt.node, prompt.start, prompt.stop) == (0, 0, 64)
        if not seen:
            continue
        first = group.rows[0][0]  # of the chunk, whose rows come first
        assert (seen[0].start, seen[0].stop) == (0, first + 1)
        assert [segment.stop - segment.start for segment in seen[1:]] == [1] * (len(seen) - 1)
        assert seen[-1].stop == min(group.rows[-1][1], 500)


@examples(120)
@given(
    tree=forests(20, 90, salt=450),
    head_rows=st.sampled_from([2, 8, 64]),
    most=st.sampled_from([1, 7, 16, 48, 64, 128, 400]),
)
def test_parts_in_whole_tiles(tree: Tree, head_rows: int, most: int) -> None:
    """Parts of whole tiles, one more at most in the last one, which merges; all begin with a block."""
    whole = strategies.cohort(head_rows=head_rows).plan(Problem(tree, SMALL, H200))
    plan = strategies.cohort(head_rows=head_rows, split=most, merge="final").plan(Problem(tree, SMALL, H200))
    verify(plan, tree)
    assert obeys_law(plan, tree)
    schedule = lower(plan, Problem(tree, SMALL, H200))
    verify_schedule(schedule, tree.num_rows)
    assert_computes_attention(schedule, tree)
    block, parts = 16 if most % 16 == 0 else 1, list(plan.groups)
    for group in whole.groups:
        room = sum(-(-(segment.stop - segment.start) // block) * block for segment in group.segments)
        own, parts = parts[: -(-room // most)], parts[-(-room // most) :]
        assert [part.round for part in own] == [0] * (len(own) - 1) + [1]
        assert all(part.rows == group.rows for part in own)
        sizes = [sum(-(-(s.stop - s.start) // block) * block for s in part.segments) for part in own]
        assert sum(sizes) == room
        assert all(size % min(64, most) == 0 for size in sizes[:-1])
        tiles = [-(-size // min(64, most)) for size in sizes]
        assert max(tiles) == tiles[-1] <= min(tiles) + 1
        for part in own:
            for segment in part.segments:
                (of,) = [s for s in group.segments if s.node == segment.node and s.start <= segment.start < s.stop]
                assert (segment.start - of.start) % block == 0
    assert not parts


@examples(60)
@given(tree=forests(salt=500))
def test_every_pass_of_a_pipeline_leaves_a_lawful_plan(tree: Tree) -> None:
    for strategy in optioned(9):
        seen: list[str] = []

        def watch(name: str, plan: Plan, seen: list[str] = seen) -> None:
            seen.append(name)
            verify(plan, tree)

        plan = strategy.plan(Problem(tree, SMALL, H200), watch)
        assert len(seen) >= 1
        assert str(plan) == str(strategy.plan(Problem(tree, SMALL, H200)))  # and it is a function of its arguments


@examples(150)
@given(tree=forests(30, 60, salt=600))
def test_oracle_is_softmax_over_the_visible_tokens(tree: Tree) -> None:
    """The project's oracle, which goes row by row, agrees with the one that the tests above use for its speed."""
    inputs = tensors(tree)
    for found, correct in zip(oracle.reference(tree, *inputs), masked_softmax(tree, *inputs), strict=True):
        torch.testing.assert_close(found, correct, rtol=1e-10, atol=1e-12)
