"""The registry: names of strategies, options that policies may have, and strategies of others."""

from __future__ import annotations

import inspect

import pytest

import treegen
from support.h200 import H200
from support.strategy_results import SMALL, TOLERANCE, tensors, tree_of_two_roots
from treegen import Tree, strategies
from treegen.backends import oracle
from treegen.ir.errors import PlanError, StrategyError
from treegen.ir.groups import Group, Segment
from treegen.ir.plan import Plan
from treegen.strategies import Strategy, groupings, strategy_from, strategy_names
from treegen.strategies.registry import policy_specs
from treegen.strategies.strategy import OnPass
from treegen.target.problem import Problem


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
