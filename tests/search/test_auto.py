"""`auto`: regret against an enumerated space, halves and chunks beside weighed policies, isolated plans, reasons."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.enumerated import optimum
from support.forests import ROW_STYLES, examples, forest, forests
from support.h200 import H200
from support.weighed_problems import SHAPES, problems
from treegen import Shape, Tree, strategies
from treegen.ir.errors import StrategyError
from treegen.ir.verify import verify, verify_isolated
from treegen.search.auto import by_estimate, time_of
from treegen.search.halves import PlannedStrategy
from treegen.search.weigh import candidates, weighed
from treegen.strategies.cohort import Cohort, nodes_below
from treegen.target.problem import Problem
from treegen.workloads.generate import few_shot, reasoning, speculative

SHAPE = Shape(32, 8, 128, dtype="fp16")


def kinds(number: int, seed: int) -> list[Problem]:
    """Problems for kernels by slot: random forests, trees of levels, drafts, few-shot and reasoning trees in turn."""
    rng = random.Random(seed)
    makers = (
        lambda: forest(nodes=rng.choice((8, 20, 40)), most_tokens=rng.choice((400, 3000)), seed=rng.randrange(10**6),
                       rows=rng.choice(ROW_STYLES[:-2])),
        lambda: Tree.from_levels([1, 4, 4 * rng.choice((4, 8, 16))], [rng.randint(16, 4000) for _ in range(3)]),
        lambda: speculative(rng.randrange(99), rng.choice((8, 16, 32)), rng.choice((200, 1000, 8000))),
        lambda: few_shot(rng.choice((500, 4000)), rng.choice((4, 20, 50)), rng.choice((20, 200, 1000))),
        lambda: reasoning(rng.randrange(99)),
    )  # fmt: skip
    trees = (makers[index % len(makers)]() for index in range(number))
    return [Problem(tree, rng.choice((*SHAPES, Shape(40, 8, 128))), H200) for tree in trees if tree.unique_tokens]


def regrets(chosen: list[Problem]) -> list[float]:
    """The accounts of what is chosen over those of the best of the space."""
    return [time_of(by_estimate(problem).strategy, problem) / optimum(problem)[1] for problem in chosen]


@pytest.mark.parametrize("chosen", [kinds(15, 1), problems(12, 4, (8, 32, 48))], ids=["by slot", "by request"])
def test_regret_is_small(chosen: list[Problem]) -> None:
    found = regrets(chosen)
    assert np.exp(np.log(found).mean()) <= 1.04
    assert max(found) <= 1.15


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 6))
def test_regret_is_small_on_many_trees(seed: int) -> None:
    found = regrets(kinds(50, seed)) + regrets(problems(36, seed, (8, 32, 64)))
    assert np.exp(np.log(found).mean()) <= 1.03
    assert max(found) <= 1.2


@given(forests(30, 500, salt=1209), st.sampled_from(SHAPES), st.booleans(), st.booleans())
@examples(60)
def test_every_choice_plans_its_tree(tree: Tree, shape: Shape, isolated: bool, for_any_tree: bool) -> None:
    problem = Problem(tree, shape, H200)
    strategy = by_estimate(problem, for_any_tree=for_any_tree, isolated=isolated).strategy
    plan = strategy.plan(problem)
    verify(plan, tree)
    if isolated:
        verify_isolated(plan)
    elif for_any_tree:
        assert strategy.serves_any_tree
        assert not strategy.merges_last


def test_halves_are_taken_where_one_launch_merges_them() -> None:
    """A tree of the table that FastTree is measured with, for which SMs have room."""
    problem = Problem(Tree.parse("1,4,8,256/8,256,256,32"), Shape(16, 1, 128, dtype="fp16"), H200)
    found, fixed = by_estimate(problem).strategy, by_estimate(problem, for_any_tree=True).strategy
    assert isinstance(found, Cohort)
    assert found.merge == "final"
    assert PlannedStrategy.of(found, problem).takes_one_launch
    assert time_of(found, problem) < 0.9 * time_of(fixed, problem)


def test_estimates_of_halves_are_their_accounts() -> None:
    """Where halves are chosen for trees of levels, whose paths are all alike."""
    seen = 0
    for text in ("1,4,8,256/8,256,256,32", "1,256/256,32", "1,4,256/8,256,32", "1,4,16,512/1024,256,128,32"):
        for heads in ((16, 1), (32, 8)):
            problem = Problem(Tree.parse(text), Shape(*heads, 128, dtype="fp16"), H200)
            choice = by_estimate(problem)
            if choice.strategy.merges_last:
                seen += 1
                said = float(choice.reason.split(", ")[1].split(" us")[0])
                assert said == pytest.approx(time_of(choice.strategy, problem), rel=0.06)
    assert seen >= 3


def test_a_small_tree_may_take_chunks_of_nodes() -> None:
    problem = Problem(reasoning(0), Shape(8, 1, 128), H200)
    chosen = by_estimate(problem).strategy
    assert chosen.name == "deft-node-chunk"
    assert time_of(chosen, problem) < time_of(weighed(problem).strategy, problem)


def test_rows_that_fill_a_tile_without_being_a_power_of_two() -> None:
    """Five heads a group: 12 rows of 64 head rows, where 8 would read 20,000 tokens half as often again."""
    problem = Problem(few_shot(20_000, 200, 200), Shape(40, 8, 64), H200)
    assert weighed(problem).strategy.options["head_rows"] == 60


def test_plain_decoding_where_nothing_is_shared() -> None:
    """Rows of one head each, alone on their context: no cohort can be better."""
    choice = strategies.auto().choose(Problem(Tree.parse("4000+9000"), Shape(16, 16, 128, dtype="fp16"), H200))
    assert choice.strategy.name == "query"
    assert choice.strategy.options
    assert choice.reason.startswith("sharing does not pay: plain per-row decoding")


@pytest.mark.parametrize("isolated", [False, True])
def test_nothing_to_do(isolated: bool) -> None:
    for tree in (Tree.from_parents([-1], [10], rows=[]), Tree.from_parents([-1, 0], [0, 0], rows=[(1, 0)])):
        choice = by_estimate(Problem(tree, SHAPE, H200), isolated=isolated)
        assert choice.reason == "nothing to do"
        assert not len(choice.strategy.plan(Problem(tree, SHAPE, H200)))


def test_auto_makes_the_plan_of_its_choice() -> None:
    problem = Problem(Tree.parse("1,4,16,64/512,256,64,32"), SHAPE, H200)
    choice = strategies.auto().choose(problem)
    assert str(strategies.auto().plan(problem)) == str(choice.strategy.plan(problem))
    assert strategies.auto().choose(problem) == choice


def test_candidates_fit_any_tree() -> None:
    """Rising estimates, each strategy once, none tied to the nodes of this tree."""
    problem, other = Problem(Tree.parse("1,4,16,64/512,256,64,32"), SHAPE, H200), Tree.parse("700(10*3)+9")
    found = candidates(problem, 20)
    times = [time_us for _, time_us in found]
    assert len(found) == len({str(strategy) for strategy, _ in found}) == 20
    assert times == sorted(times)
    assert found[0][0] == weighed(problem).strategy
    for strategy, _ in found:
        verify(strategy.plan(Problem(other, SHAPE, H200)), other)
    assert found == candidates(problem)[:20]
    assert candidates(Problem(Tree.from_parents([-1], [10], rows=[]), SHAPE, H200)) == []


def test_cuts_at_a_threshold() -> None:
    tree = Tree.parse("100(50(10*3)*2,20)")
    # Rows: 7 at the root, 3 at each middle node, 1 elsewhere.
    assert nodes_below(tree, 7).tolist() == [1, 5, 9]
    assert nodes_below(tree, 3).tolist() == [2, 3, 4, 6, 7, 8, 9]
    assert nodes_below(tree, 1).tolist() == nodes_below(tree, 8).tolist() == []
    plan = strategies.cohort(split_shared_rows=7).plan(Problem(tree, SHAPE, H200))
    assert [group.rows for group in plan.groups] == [((0, 7),), ((0, 3),), ((3, 6),), ((6, 7),)]


@pytest.mark.parametrize(
    "options",
    [{"apart": 0}, {"apart": 2, "cut": (1,)}, {"tile": (64,)}, {"tile": (48, 64)}, {"tile": 64}, {"cut": (0,)},
     {"cut": (99,)}, {"cut": (1, 1)}],
)  # fmt: skip
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(StrategyError):
        strategies.cohort(**options).plan(Problem(Tree.parse("100(10*3)"), SHAPE, H200))
