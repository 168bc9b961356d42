"""The search behind `auto`: counts against real plans, the optimum of the space, named strategies, bounds, traces."""

import itertools
from dataclasses import replace
from typing import get_args
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forests import examples, forests
from treegen import Shape, Tree, strategies
from treegen.cost.estimate import account
from treegen.ir.arrays import INT32_MAX
from treegen.ir.errors import StrategyError
from treegen.ir.plan import Merge
from treegen.ir.verify import verify
from treegen.schedule.lower import lower
from treegen.search import search as searching
from treegen.search.bounds import Bounds
from treegen.search.halves import Lowered
from treegen.search.policy_costs import PolicyCosts
from treegen.search.search import as_named, candidates, search, time_of
from treegen.search.space import MOST_EDGES, SPLITS, policies_of
from treegen.strategies import strategy_from, strategy_names
from treegen.strategies.cohort import Cohort, nodes_below
from treegen.strategies.registry import spec_of
from treegen.strategies.strategy import Move
from treegen.target.problem import Problem
from treegen.target.targets import Target, target_from

SHAPES = (
    Shape(32, 8, 128, dtype="fp16"),
    Shape(4, 4, 64, dtype="bf16"),
    Shape(80, 1, 128, dtype="fp16"),
    Shape(16, 1, 128, dtype="fp16"),
)
H200 = target_from("h200")
MERGES = get_args(Merge)
FEW_EDGES = forests(7, 3000, salt=1210)


def edges(tree: Tree) -> list[int]:
    return np.flatnonzero(tree.parent >= 0).tolist()


@given(forests(25, 400, salt=1205), st.sampled_from(SHAPES), st.data())
@examples(120)
def test_counts_are_those_of_real_plans(tree: Tree, shape: Shape, data: st.DataObject) -> None:
    """The array model against the account of the plan, for policies with and without cuts."""
    costs = PolicyCosts(Problem(tree, shape, H200))
    for _ in range(3):
        policy = data.draw(st.sampled_from(policies_of(shape, H200)[0]))
        policy = replace(policy, split=data.draw(st.sampled_from((None, 16, 50, 128, 512))))
        if data.draw(st.booleans()):
            policy = replace(policy, apart=data.draw(st.sampled_from((1, 2, 5))))
        elif edges(tree):
            policy = replace(policy, cut=tuple(data.draw(st.sets(st.sampled_from(edges(tree)), max_size=6))))
        # Whole paths that are split and merge last are not in the space.
        if policy.apart is not None or policy.cut or policy.split is None:
            policy = replace(policy, merge=data.draw(st.sampled_from(MERGES)))
        plan = policy.plan(Problem(tree, shape, H200))
        verify(plan, tree)
        expected = account(
            plan, lower(plan, Problem(tree, shape, H200)), Problem(tree, shape, H200), fixed=True
        ).time_us
        assert costs.time_us(policy) == pytest.approx(expected, rel=1e-9)
        walks = costs.walks(policy)
        lines = costs.lines_of([policy], walks)
        if policy.merge == "final":
            assert_bound_of_final(costs, policy, expected)
        else:
            bounds, least = Bounds(costs), expected * (1 + 1e-9)
            assert bounds.of_splits(walks, lines)[0] <= least
            if policy.split is None or (walks.tokens > policy.split).any():
                assert bounds.of_walks(walks, lines)[0] <= least


def assert_bound_of_final(costs: PolicyCosts, policy: Cohort, time_us: float) -> None:
    """Bounds hold, or everything is in one stage: then the plan is one of "reduce" merge, which takes as long."""
    walks = costs.walks(policy)
    lines, bounds = costs.lines_of([policy], walks), Bounds(costs)
    if np.isfinite(bounds.of_splits(walks, lines)[0]):
        assert bounds.of_splits(walks, lines)[0] <= time_us * (1 + 1e-9)
        reduced = costs.walks(replace(policy, merge="reduce"))
        assert bounds.of_two_launches(reduced, lines)[0] <= time_us * (1 + 1e-9)
    else:
        split = None if (walks.line > 0).any() else policy.split
        assert time_us == pytest.approx(costs.time_us(replace(policy, split=split, merge="reduce")), rel=1e-9)


@given(forests(12, 400, salt=1206), st.sampled_from(SHAPES), st.data())
@examples(40)
def test_many_cuts_at_once(tree: Tree, shape: Shape, data: st.DataObject) -> None:
    """Lines of many assignments give the times of each alone."""
    nodes = np.array(edges(tree)[:4], np.int32)
    cuts = np.array(list(itertools.product((False, True), repeat=len(nodes))))[1:]
    if not len(nodes):
        return
    costs = PolicyCosts(Problem(tree, shape, H200))
    policy = replace(data.draw(st.sampled_from(policies_of(shape, H200)[0])), split=data.draw(st.sampled_from(SPLITS)))
    walks = costs.cut_walks(costs.rows_of(policy), nodes, cuts)
    lines = costs.lines_of([policy] * len(cuts), walks)
    for merge, ways in (("reduce", walks), ("final", costs.staged(walks, nodes, cuts))):
        alone = [costs.time_us(replace(policy, cut=tuple(nodes[line].tolist()), merge=merge)) for line in cuts]
        assert costs.times_us(ways, lines) == pytest.approx(np.array(alone), rel=1e-12)
        few = np.arange(len(cuts))[::-2]
        picked = costs.times_us(ways.taken(few), lines.taken(few))
        assert picked == pytest.approx(np.array(alone)[few], rel=1e-12)


def optimum(tree: Tree, shape: Shape, target: Target) -> float:
    """The least time of the stated space, by enumeration."""
    costs, nodes = PolicyCosts(Problem(tree, shape, target)), edges(tree)
    best, every = np.inf, np.zeros(len(SPLITS), np.int64)
    splits = np.array([split or INT32_MAX for split in SPLITS])
    for length in range(len(nodes) + 1):
        for cut in itertools.combinations(nodes, length):
            for policy, merge in itertools.product(policies_of(shape, target)[0], MERGES if cut else ["reduce"]):
                chosen = replace(policy, cut=cut, merge=merge)
                walks = costs.walks(chosen)
                lines = costs.lines_of([chosen], walks).taken(every)._replace(split=splits)
                best = min(best, float(costs.times_us(walks.taken(every), lines).min()))
    return min(best, *(time_of(strategy_from(name), Problem(tree, shape, target)) for name in strategy_names()))


def check_optimum(tree: Tree, shape: Shape, target: str) -> None:
    """Of the space, with its stages as launches of their own; and nothing that the search takes instead is slower."""
    on = target_from(target)
    with patch.object(searching, "_merge_in_one_launch", lambda costs, state: None):
        best = search(Problem(tree, shape, on))
    assert best.time_us == pytest.approx(optimum(tree, shape, on), rel=1e-9)
    found = search(Problem(tree, shape, on))
    assert found.time_us == pytest.approx(time_of(found.strategy, Problem(tree, shape, on)), rel=1e-9)
    assert found.time_us <= time_of(best.strategy, Problem(tree, shape, on)) * (1 + 1e-9)
    if not Lowered.of(best.strategy, Problem(tree, shape, on)).takes_one_launch:
        assert best.time_us == pytest.approx(time_of(best.strategy, Problem(tree, shape, on)), rel=1e-9)
    verify(found.strategy.plan(Problem(tree, shape, on)), tree)


@given(forests(5, 3000, salt=1207), st.sampled_from(SHAPES), st.sampled_from(("h200", "a100")))
@examples(15)
def test_the_optimum_of_few_edges(tree: Tree, shape: Shape, target: str) -> None:
    check_optimum(tree, shape, target)


@pytest.mark.full
@given(FEW_EDGES, st.sampled_from(SHAPES), st.sampled_from(("h200", "a100")))
@examples(200)
def test_the_optimum_of_six_edges(tree: Tree, shape: Shape, target: str) -> None:
    assert len(edges(tree)) <= 6
    check_optimum(tree, shape, target)


FIXED = (
    "4000(400*10)", "4000(400,30,5000*2)", "100(100(100(100(100))))", "8(256*8)", "20000(5000(3000*2),100*6)",
    "64(64(64*2)*2)+64(64*2)", "3000(10(2000*3)*2)", "1(1(1*4)*2)", "0(500(300*2)*3)", "0(17,4000(3*3)*2)",
    "5000*3+200(10*5)", "1000(0(1000*2)*3)", "30000(10*9)", "512(512(512(512*2)*2))", "2000(128*4)+2000(128*4)",
    "65(65(65(65*2,65)),65*3)", "10000(9000(8000(7000(6000*2))))", "16(16*5)+16(16*4)", "40000(2*3,4000*3)",
    "700(100(50*2),300(20*3))",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("text", FIXED)
def test_the_optimum_of_fixed_trees(text: str) -> None:
    tree = Tree.parse(text)
    assert len(edges(tree)) <= MOST_EDGES
    check_optimum(tree, SHAPES[0], "h200")


@given(forests(40, 600, salt=1208), st.sampled_from(SHAPES), st.sampled_from(("h200", "a100")))
@examples(25)
def test_no_named_strategy_is_better(tree: Tree, shape: Shape, target: str) -> None:
    found = search(Problem(tree, shape, target_from(target)))
    for name in strategy_names():
        assert found.time_us <= time_of(strategy_from(name), Problem(tree, shape, target_from(target))) * (1 + 1e-9), (
            name
        )
    assert found.time_us == pytest.approx(time_of(found.strategy, Problem(tree, shape, target_from(target))), rel=1e-9)


@given(forests(30, 500, salt=1209), st.sampled_from(SHAPES))
@examples(60)
def test_bounds_are_below_named_strategies(tree: Tree, shape: Shape) -> None:
    bounds = Bounds(PolicyCosts(Problem(tree, shape, H200)))
    for name in strategy_names():
        time_us = time_of(strategy_from(name), Problem(tree, shape, H200)) * (1 + 1e-9)
        for enough in (np.inf, 0.0):
            assert bounds.of_groups(spec_of(name).groups, enough) <= time_us, name


@given(forests(30, 500, salt=1211), st.sampled_from(SHAPES))
@examples(40)
def test_bounds_are_below_thresholds(tree: Tree, shape: Shape) -> None:
    costs = PolicyCosts(Problem(tree, shape, H200))
    bounds, thresholds = Bounds(costs), [1, 2, 3, 8]
    policies = policies_of(shape, H200)[0]
    for merge in MERGES:
        least = bounds.of_thresholds(policies, bounds.merged_at(thresholds), merge)
        for policy, of_policy in zip(policies, least.tolist(), strict=True):
            for apart, bound in zip(thresholds, of_policy, strict=True):
                assert bound <= costs.time_us(replace(policy, apart=apart, merge=merge)) * (1 + 1e-9)


@given(forests(30, 2000, salt=1212), st.sampled_from(SHAPES))
@examples(40)
def test_bounds_are_below_splits(tree: Tree, shape: Shape) -> None:
    """Walks of several heights at once are those of each, and no split that cuts some is faster than the bound."""
    costs, policies = PolicyCosts(Problem(tree, shape, H200)), policies_of(shape, H200)[0]
    walks = costs.whole_walks([costs.rows_of(policy) for policy in policies])
    lines = costs.lines_of(policies, walks)
    assert costs.times_us(walks, lines).tolist() == [costs.time_us(policy) for policy in policies]
    least = Bounds(costs).of_two_launches(walks, lines, merged=2)
    for index, (policy, bound) in enumerate(zip(policies, least.tolist(), strict=True)):
        for split in (16, 50, 128, 512):
            if (walks.tokens[walks.line == index] > split).any():
                assert bound <= costs.time_us(replace(policy, split=split)) * (1 + 1e-9)


@pytest.mark.parametrize("text", ["1,3/3000,90", "1,2,4/9000,5000,40", "1,16/1000,900", "1,4,16/2000,1000,400"])
def test_merging_in_the_last_launch_where_it_pays(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose launches of merges are slow, small and large trees are cut, and items merge. Halves that one
    launch merges would take less.
    """
    monkeypatch.setattr(searching, "large_cohorts", lambda shape: [])
    constants = replace(H200.constants, merge_fraction=0.0002, merge_step_us=0.05, next_launch_us=8.0)
    slow = replace(H200, constants=constants)
    tree = Tree.parse(text)
    found = search(Problem(tree, SHAPES[0], slow))
    assert isinstance(found.strategy, Cohort)
    assert found.strategy.merge == "final"
    assert found.strategy.apart or found.strategy.cut
    assert found.time_us == pytest.approx(time_of(found.strategy, Problem(tree, SHAPES[0], slow)), rel=1e-9)
    assert "merge reduce -> final" in {str(move) for step in found.trace for move in step.moves}
    verify(found.strategy.plan(Problem(tree, SHAPES[0], slow)), tree)
    if len(edges(tree)) <= 6:
        assert found.time_us == pytest.approx(optimum(tree, SHAPES[0], slow), rel=1e-9)
    proposed = [strategy for strategy, _ in candidates(Problem(tree, SHAPES[0], slow), 10)]
    assert any(isinstance(strategy, Cohort) and strategy.merge == "final" for strategy in proposed)


def test_the_same_tree_gives_the_same_policy() -> None:
    tree = Tree.parse("1,4,16,64/512,256,64,32")
    first, again = (search(Problem(Tree.parse(tree.text or ""), SHAPES[0], H200)) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("text", ["1,256/256,32", "1,4,16,64/512,256,64,32", "256*4096", "8000(100*3)"])
def test_the_trace_leads_to_the_choice(text: str) -> None:
    """Every step improves, moves tell what changed, and the last step is what was found."""
    found = search(Problem(Tree.parse(text), SHAPES[0], H200))
    times = [step.time_us for step in found.trace]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == len(times)
    assert as_named(found.trace[-1].strategy, Tree.parse(text)) == found.strategy
    assert times[-1] == found.time_us
    options: dict[str, object] = {}
    for step in found.trace:
        for move in step.moves:
            if move.field == "strategy":
                options = dict(step.strategy.options)
            else:
                options[move.field] = move.after
        if isinstance(step.strategy, Cohort):
            assert {
                name: value for name, value in options.items() if value not in (None, (), "reduce")
            } == step.strategy.options
    assert str(Move("split", None, 512)) == "split None -> 512"


def test_plain_decoding_where_nothing_is_shared() -> None:
    """Rows of one head each, alone on their context: no cohort can be better."""
    shape = Shape(16, 16, 128, dtype="fp16")
    choice = strategies.auto().choose(Problem(Tree.parse("4000+9000"), shape, H200))
    assert choice.strategy.name == "query"
    assert choice.strategy.options
    assert choice.reason.startswith("sharing does not pay: plain per-row decoding")


def test_nothing_to_do() -> None:
    for tree in (Tree.from_parents([-1], [10], rows=[]), Tree.from_parents([-1, 0], [0, 0], rows=[(1, 0)])):
        choice = strategies.auto().choose(Problem(tree, SHAPES[0], H200))
        plan = choice.strategy.plan(Problem(tree, SHAPES[0], H200))
        assert not len(plan)


def test_auto_makes_the_plan_of_its_choice() -> None:
    tree = Tree.parse("1,4,16,64/512,256,64,32")
    choice = strategies.auto().choose(Problem(tree, SHAPES[0], H200))
    assert str(strategies.auto().plan(Problem(tree, SHAPES[0], H200))) == str(
        choice.strategy.plan(Problem(tree, SHAPES[0], H200))
    )
    assert choice.trace


def test_candidates_fit_any_tree() -> None:
    """Rising estimates, each once, none tied to the nodes of this tree; the best of them is the search's at best."""
    tree = Tree.parse("1,4,16,64/512,256,64,32")
    found = candidates(Problem(tree, SHAPES[0], H200), 32)
    times = [time for _, time in found]
    assert len(found) == len({str(strategy) for strategy, _ in found}) == 32
    assert times == sorted(times)
    assert not any(isinstance(strategy, Cohort) and strategy.cut for strategy, _ in found)
    assert search(Problem(tree, SHAPES[0], H200)).time_us <= times[0]
    other = Tree.parse("700(10*3)+9")
    for strategy, _ in found:
        verify(strategy.plan(Problem(other, SHAPES[0], H200)), other)
    assert len(candidates(Problem(tree, SHAPES[0], H200), 10_000)) < 10_000


def test_cuts_at_a_threshold() -> None:
    tree = Tree.parse("100(50(10*3)*2,20)")
    # Rows: 7 at the root, 3 at each middle node, 1 elsewhere.
    assert nodes_below(tree, 7).tolist() == [1, 5, 9]
    assert nodes_below(tree, 3).tolist() == [2, 3, 4, 6, 7, 8, 9]
    assert nodes_below(tree, 1).tolist() == nodes_below(tree, 8).tolist() == []
    plan = strategies.cohort(apart=7).plan(Problem(tree, SHAPES[0], H200))
    assert [group.rows for group in plan.groups] == [((0, 7),), ((0, 3),), ((3, 6),), ((6, 7),)]


@pytest.mark.parametrize(
    "options",
    [{"apart": 0}, {"apart": 2, "cut": (1,)}, {"tile": (64,)}, {"tile": (48, 64)}, {"tile": 64}, {"cut": (0,)},
     {"cut": (99,)}, {"cut": (1, 1)}],
)  # fmt: skip
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(StrategyError):
        strategies.cohort(**options).plan(Problem(Tree.parse("100(10*3)"), SHAPES[0], H200))
