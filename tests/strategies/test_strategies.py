"""Strategies: every plan obeys the coverage law, every schedule writes what it should, the interpreter is right.

The property tests of this file draw 2,000 random forests for the law of every strategy and for the interpreter.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

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
from treegen import Shape, Tree, strategies
from treegen.backends import oracle
from treegen.backends.torch_program import TorchProgram
from treegen.ir.arrays import frozen
from treegen.ir.errors import PlanError, StrategyError
from treegen.ir.groups import Group, Segment
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.verify import verify, verify_schedule
from treegen.schedule.lower import lower
from treegen.strategies import Strategy, groupings, strategy_from, strategy_names
from treegen.strategies.cohort import nodes_below
from treegen.strategies.passes import SplitContext, TrimRows
from treegen.strategies.registry import policy_specs
from treegen.strategies.strategy import OnPass
from treegen.target.problem import Problem
from treegen.target.targets import target_from, targets

SMALL = Shape(4, 2, 16, dtype="fp32")
TOLERANCE = 1e-5

FORESTS_PER_FAMILY = 125
FAMILIES = {
    f"{place}-{number}-{half}": st.tuples(
        forests(kv=(place,), rows=rows, salt=4 * index + 2 * number + half),
        st.sampled_from((None, 5, 24, 64)),  # where strategies split, if they take such an option
        st.sampled_from((1, 16)),  # page size of the cache
        st.sampled_from(sorted(targets())),
    )
    for index, place in enumerate(("default", "slots", "pages", "runs"))
    for number, rows in enumerate((("leaves", "ends", "copies"), ("inside", "every", "mixed", "nothing", "nobody")))
    for half in range(2)
}
"""Kinds of cases, one test each, so that several workers share the work; one half of each is in the full sweep."""
HALVES = [pytest.param(name, marks=[pytest.mark.full] if name.endswith("-1") else []) for name in FAMILIES]

_generator = torch.Generator().manual_seed(0)
_KEYS, _VALUES = (torch.randn(24_576, 2, 16, generator=_generator) for _ in range(2))
_QUERIES = torch.randn(1_024, 4, 16, generator=_generator)


def optioned(option: int | None) -> list[Strategy]:
    """Every registered strategy; those that take a length to split at get this one, if any."""
    split: dict[str, Strategy] = {}
    if option is not None:
        split["cohort"] = strategies.cohort(
            head_rows=option, split=16 * option if option < 10 else None, shares=3.5 if option == 24 else None
        )
        split["query"] = strategies.query(split=option)
        split["deft-node-chunk"] = strategies.deft_node_chunk(chunk=option)
        split["deft-flatten"] = strategies.deft_flatten(block=option, mask="bits" if option == 24 else "interval")
    return [split.get(name) or strategy_from(name) for name in (*strategy_names(), "auto")]


def tensors(tree: Tree, page_size: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and caches of SMALL for a tree, from one pool of normal numbers."""
    pages = -(-(tree.kv.last_slot + 1) // page_size)
    assert pages * page_size <= len(_KEYS)
    assert tree.num_rows <= len(_QUERIES)
    keys, values = (pool[: pages * page_size] for pool in (_KEYS, _VALUES))
    if page_size > 1:
        keys, values = (cache.view(pages, page_size, 2, 16) for cache in (keys, values))
    return _QUERIES[: tree.num_rows], keys, values


def masked_softmax(
    tree: Tree, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all slots at once in float64, under the brute-force mask of who sees which slot: (out, lse)."""
    keys, values = (cache.reshape(-1, 2, 16).double().repeat_interleave(2, 1) for cache in (keys, values))
    unseen = torch.from_numpy(visible_slot_counts(tree, len(keys)) == 0)
    scores = torch.einsum("rhd,thd->rht", q.double(), keys) / 4
    scores = scores.masked_fill(unseen[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.nan_to_num(lse, neginf=0.0)[..., None])
    return torch.einsum("rht,thd->rhd", weights, values), lse


def run(schedule: Schedule, tree: Tree) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a schedule in the interpreter."""
    q, keys, values = tensors(tree)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan)
    TorchProgram(schedule, SMALL, q.device)(q, keys, values, out, lse, SMALL.head_dim**-0.5, 1.0)
    return out, lse


def assert_computes_attention(schedule: Schedule, tree: Tree) -> None:
    expected = masked_softmax(tree, *tensors(tree))
    for found, correct in zip(run(schedule, tree), expected, strict=True):
        assert oracle.error(found, correct) <= TOLERANCE


def node_tokens(plan: Plan, index: int) -> list[tuple[int, int, int]]:
    return [(segment.node, segment.start, segment.stop) for segment in plan.groups[index].segments]


@pytest.mark.parametrize("family", HALVES)
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


# Worked examples


def tree_of_two_roots() -> Tree:
    """100 over (10, 20 over (5, 5)), and 7: nodes 0 to 5 in this order, a row per leaf."""
    return Tree.parse("100(10,20(5*2))+7")


def test_deft_node_groups() -> None:
    plan = strategies.deft_node().plan(Problem(tree_of_two_roots(), SMALL, H200))
    assert [str(group) for group in plan.groups] == [
        "rows 0-2 | n0[0:100]",
        "rows 0-0 | n1[0:10]",
        "rows 1-2 | n2[0:20]",
        "rows 1-1 | n3[0:5]",
        "rows 2-2 | n4[0:5]",
        "rows 3-3 | n5[0:7]",
    ]


def test_deft_node_masks_rows_inside_a_node() -> None:
    """Causal append: rows after 3, 7 and 10 of 10 tokens, and one below; tokens that only later rows see are masked."""
    tree = Tree.from_parents([-1, 0], [10, 4], rows=[(0, 7), (1, 4), (0, 3), (0, 10)])
    plan = strategies.deft_node().plan(Problem(tree, SMALL, H200))
    assert [str(group) for group in plan.groups] == [
        "rows 0-3 | n0[0:3], n0[3:7] seen 1-3, n0[7:10] seen 2-3",
        "rows 3-3 | n1[0:4]",
    ]


def test_deft_node_leaves_out_what_nobody_sees() -> None:
    tree = Tree.from_parents([-1, 0, 0, -1], [10, 4, 6, 9], rows=[(1, 0), (0, 8)])
    plan = strategies.deft_node().plan(Problem(tree, SMALL, H200))
    assert [str(group) for group in plan.groups] == ["rows 0-1 | n0[0:8], n0[8:10] seen 1-1"]


def test_query_groups() -> None:
    plan = strategies.query().plan(Problem(tree_of_two_roots(), SMALL, H200))
    assert [str(group) for group in plan.groups] == [
        "rows 0-0 | n0[0:100], n1[0:10]",
        "rows 1-1 | n0[0:100], n2[0:20], n3[0:5]",
        "rows 2-2 | n0[0:100], n2[0:20], n4[0:5]",
        "rows 3-3 | n5[0:7]",
    ]
    split = strategies.query(split=60).plan(Problem(tree_of_two_roots(), SMALL, H200))
    assert [str(group) for group in split.groups][:4] == [
        "rows 0-0 | n0[0:60]",
        "rows 0-0 | n0[60:100], n1[0:10]",
        "rows 1-1 | n0[0:60]",
        "rows 1-1 | n0[60:100], n2[0:20]",
    ]


def test_flatten_block_boundaries() -> None:
    """147 tokens in depth-first order, cut every 64 regardless of nodes, with the rows that see any of a block."""
    plan = strategies.deft_flatten(block=64).plan(Problem(tree_of_two_roots(), SMALL, H200))
    assert [str(group) for group in plan.groups] == [
        "rows 0-2 | n0[0:64]",
        "rows 0-2 | n0[64:100], n1[0:10] seen 0-0, n2[0:18] seen 1-2",
        "rows 1-3 | n2[18:20] seen 0-1, n3[0:5] seen 0-0, n4[0:5] seen 1-1, n5[0:7] seen 2-2",
    ]


def test_chunks_of_a_long_node() -> None:
    plan = strategies.deft_node_chunk().plan(Problem(Tree.parse("300(128,129)"), SMALL, H200))
    assert [str(group) for group in plan.groups] == [
        "rows 0-1 | n0[0:128]",
        "rows 0-1 | n0[128:256]",
        "rows 0-1 | n0[256:300]",
        "rows 0-0 | n1[0:128]",
        "rows 1-1 | n2[0:128]",
        "rows 1-1 | n2[128:129]",
    ]


@pytest.mark.parametrize("option", [128, 1000])
@pytest.mark.parametrize("make", [strategies.query, strategies.deft_node_chunk, strategies.deft_flatten])
def test_uneven_suffixes_under_one_prefix(make: Callable[[int], Strategy], option: int) -> None:
    """Rows of one node whose suffixes are split differently never share a partial slot (a known bug elsewhere)."""
    tree = Tree.parse("256(64,4096)")
    schedule = lower(make(option).plan(Problem(tree, SMALL, H200)), Problem(tree, SMALL, H200))
    verify_schedule(schedule, tree.num_rows)
    partial = [item for item in schedule.work_items if item.partial0 >= 0]
    slots = [slot for item in partial for slot in range(item.partial0, item.partial0 + item.rows)]
    assert len(slots) == len(set(slots)) == schedule.num_partials
    items = np.bincount(
        [row for item in schedule.work_items for row in schedule.rows[item.row0 : item.row0 + item.rows]]
    )
    assert items[0] < items[1]  # the rows do have different numbers of partials
    assert_computes_attention(schedule, tree)


@pytest.mark.parametrize("strategy", sorted({*optioned(None), *optioned(32)}, key=str), ids=str)
def test_several_roots(strategy: Strategy) -> None:
    tree = Tree.parse("40(3*3)+0(5,6)+17*2+0")
    plan = strategy.plan(Problem(tree, SMALL, H200))
    assert obeys_law(plan, tree)
    assert {segment.node for group in plan.groups for segment in group.segments} == {0, 1, 2, 3, 5, 6, 7, 8}
    assert_computes_attention(lower(plan, Problem(tree, SMALL, H200)), tree)


@pytest.mark.parametrize("strategy", sorted({*optioned(None), *optioned(50)}, key=str), ids=str)
def test_more_rows_than_a_tile(strategy: Strategy) -> None:
    """Nodes seen by 300 rows are cut into row tiles, the last one not full; rows come from several nodes."""
    tree = Tree.parse("30(90(2*150),4*150)")
    plan = strategy.plan(Problem(tree, SMALL, H200))
    schedule = lower(plan, Problem(tree, SMALL, H200))
    verify_schedule(schedule, tree.num_rows)
    tallest = max(group.num_rows for group in plan.groups)
    assert max(item.rows for item in schedule.work_items) == min(tallest, schedule.configs[0].rows // SMALL.group)
    assert_computes_attention(schedule, tree)


def test_rows_without_any_token_give_zero() -> None:
    tree = Tree.from_parents([-1, 0, -1], [0, 5, 3], rows=[(0, 0), (1, 2), (2, 0), (2, 3)])
    for strategy in optioned(None):
        out, lse = run(lower(strategy.plan(Problem(tree, SMALL, H200)), Problem(tree, SMALL, H200)), tree)
        assert out[[0, 2]].eq(0).all()
        assert lse[[0, 2]].eq(-math.inf).all()
        assert lse[[1, 3]].isfinite().all()


def test_tree_without_rows_gives_empty_tensors() -> None:
    tree = Tree.from_parents([-1, 0], [5, 5], rows=[])
    for strategy in optioned(None):
        kernel = treegen.compile(tree, strategy=strategy, shape=SMALL, backend="torch")
        assert len(kernel.plan) == 0
        assert kernel.schedule.launches == 0
        assert kernel(*tensors(tree)).shape == (0, 4, 16)


# The registry


def test_registered_names() -> None:
    assert {"query", "deft-node", "deft-node-chunk", "deft-flatten"} <= set(strategy_names())
    for name in (*strategy_names(), "auto"):
        assert strategy_from(name).name == name
    made = strategies.deft_flatten(block=32)
    assert strategy_from(made) is made
    assert str(made) == "deft-flatten(block=32)"
    assert made.options == {"block": 32}
    assert made.plan(Problem(Tree.parse("4"), SMALL, H200)).strategy == "deft-flatten(block=32)"


def test_policies_may_name_all_shipped_strategies_with_options_that_these_have() -> None:
    for name, spec in policy_specs().items():
        assert name in strategy_names()
        assert spec.policy_options is not None
        assert spec.policy_options <= set(inspect.signature(spec.factory).parameters)


class FirstTokenOnly(Strategy):
    """Breaks the law: everything but the first token of the first node is left out."""

    name = "first-token-only"

    def plan(self, problem: Problem, on_pass: OnPass | None = None) -> Plan:
        tree = problem.tree
        return Plan.from_groups(self.name, [Group(((0, tree.num_rows),), (Segment(0, 0, 1, (0, tree.num_rows)),))])


class NodeByAnotherName(Strategy):
    name = "node-by-another-name"

    def plan(self, problem: Problem, on_pass: OnPass | None = None) -> Plan:
        tree = problem.tree
        return groupings.by_node(tree)


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    from treegen.strategies import registry

    monkeypatch.setattr(registry, "SPECS", dict(registry.SPECS))


@pytest.mark.usefixtures("_own_registry")
def test_own_strategies_are_served_by_name() -> None:
    treegen.register_strategy("node-by-another-name", NodeByAnotherName)
    assert "node-by-another-name" in strategy_names()
    tree = tree_of_two_roots()
    kernel = treegen.compile(tree, strategy="node-by-another-name", shape=SMALL, backend="torch")
    expected, _ = oracle.reference(tree, *tensors(tree))
    assert oracle.error(kernel(*tensors(tree)), expected) <= TOLERANCE


def test_strategies_of_installed_packages_are_served_and_held_to_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from treegen.strategies import registry

    points = [
        EntryPoint("installed-node", f"{__name__}:NodeByAnotherName", registry.ENTRY_POINTS),
        EntryPoint("installed-wrong", f"{__name__}:FirstTokenOnly", registry.ENTRY_POINTS),
        EntryPoint("query", f"{__name__}:FirstTokenOnly", registry.ENTRY_POINTS),
        EntryPoint("no-strategy", "builtins:dict", registry.ENTRY_POINTS),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.ENTRY_POINTS else [])
    registry.installed_strategies.cache_clear()
    try:
        assert strategy_names()[-3:] == ("installed-node", "installed-wrong", "no-strategy")
        assert strategy_from("query").name == "query"  # a shipped name is not taken over
        tree = tree_of_two_roots()
        kernel = treegen.compile(tree, strategy="installed-node", shape=SMALL, backend="torch")
        expected, _ = oracle.reference(tree, *tensors(tree))
        assert oracle.error(kernel(*tensors(tree)), expected) <= TOLERANCE
        with pytest.raises(PlanError, match="first-token-only"):
            treegen.compile(tree, strategy="installed-wrong", shape=SMALL, backend="torch")
        with pytest.raises(StrategyError, match="makes a dict"):
            strategy_from("no-strategy")
    finally:
        registry.installed_strategies.cache_clear()


@pytest.mark.usefixtures("_own_registry")
def test_own_strategies_are_held_to_the_law() -> None:
    treegen.register_strategy("first-token-only", FirstTokenOnly)
    for strategy in ("first-token-only", FirstTokenOnly()):
        with pytest.raises(PlanError, match="first-token-only"):
            treegen.compile(Tree.parse("4"), strategy=strategy, shape=SMALL, backend="torch")
        treegen.compile(
            Tree.parse("1"), strategy=strategy, shape=SMALL, backend="torch"
        )  # here it happens to be lawful
