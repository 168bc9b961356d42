"""Factories of own strategies that make none: the error names the strategy."""

from collections.abc import Callable

import pytest

import treegen
from support.rejections import rejected
from treegen import Tree, strategies
from treegen.ir.errors import StrategyError, TreeError
from treegen.strategies import registry, strategy_from


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SPECS", dict(registry.SPECS))


def refused() -> strategies.Strategy:
    raise TreeError("split", 0, "is none", "give one")


FACTORIES: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "returns nothing": (lambda: None, ("strategy = mine", "makes a NoneType", "return a Strategy")),
    "returns a class": (lambda: strategies.Strategy, ("strategy = mine", "makes a ", "return a Strategy")),
    "fails": (lambda: {}["a"], ("strategy = mine", "raises KeyError: 'a'", "correct the factory")),
    "needs arguments": (lambda split: split, ("strategy = mine", "raises TypeError", "split", "correct the factory")),
    "refuses an option": (refused, ("strategy = mine", "raises TreeError: split = 0: is none")),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_that_make_no_strategy(name: str) -> None:
    factory, words = FACTORIES[name]
    treegen.register_strategy("mine", factory)  # type: ignore[arg-type]
    rejected(lambda: treegen.compile(Tree.parse("4(2)"), strategy="mine"), StrategyError, *words)
    rejected(lambda: strategy_from("mine"), StrategyError, *words)


def test_what_a_factory_raised_is_the_cause() -> None:
    treegen.register_strategy("mine", lambda: {}["a"])
    with pytest.raises(StrategyError) as caught:
        strategy_from("mine")
    assert isinstance(caught.value.__cause__, KeyError)
