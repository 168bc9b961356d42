"""Pages of large trees: how soon a browser draws them, and how soon they answer, on a machine of two cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support.browsers import Visits
from treegen import Tree
from treegen.report.explain import explain
from treegen.strategies import strategy_names

ANSWERS = """async () => {
  const canvas = document.querySelector("#tree canvas");
  canvas.focus();
  const times = [];
  for (const key of ["ArrowRight", "ArrowRight", "Enter", "ArrowRight", "Enter", "Escape", "Escape"]) {
    const start = performance.now();
    canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    await new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn, 0)));
    times.push(performance.now() - start);
  }
  return times;
}"""
DRAWN = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"


def random_tree(nodes: int) -> Tree:
    """A tree of which a third of the nodes extend any earlier node, and the others one of the last 2,000."""
    source = np.random.default_rng(0)
    number = np.arange(1, nodes)
    least = np.where(number % 3 == 0, 0, np.maximum(number - 2000, 0))
    parents = least + (source.random(nodes - 1) * (number - least)).astype(int)
    return Tree.from_parents(np.append(-1, parents), source.integers(1, 100, nodes))


def level_tree(nodes: int) -> Tree:
    """A tree of three levels."""
    return Tree.from_levels([1, nodes // 1000, nodes - 1 - nodes // 1000], [1000, 50, 5])


def answers(tab: Any) -> float:
    """The median of the milliseconds from a key to the end of its frame."""
    return float(np.median(tab.evaluate(ANSWERS)))


def chain(nodes: int) -> Tree:
    """A chain, with rows at its end, in its middle and near its root."""
    parents, rows = list(range(-1, nodes - 1)), [(nodes - 1, 3), (nodes // 2, 1), (10, 0)]
    return Tree.from_parents(parents, [3] * nodes, rows=rows)


@pytest.mark.full
@pytest.mark.parametrize("make", [random_tree, level_tree, chain])
def test_ten_thousand_nodes_are_fluid(visit: Visits, make: Callable[[int], Tree]) -> None:
    page = explain(make(10_000), (*strategy_names(), "auto")).to_html()
    assert len(page) < 5_000_000
    tab = visit(page)
    assert tab.evaluate(DRAWN) < 2_000
    assert answers(tab) < 100
    tab.select_option("#tree .widths", "even")
    assert answers(tab) < 100


@pytest.mark.full
@pytest.mark.parametrize("make", [random_tree, level_tree])
def test_a_million_nodes_open(visit: Visits, make: Callable[[int], Tree]) -> None:
    page = explain(make(1_000_000), ("cohort", "medusa")).to_html()
    assert len(page) < 5_000_000
    tab = visit(page)
    assert tab.evaluate(DRAWN) < 10_000
    assert "folded into" in tab.inner_text("#tree")
    assert answers(tab) < 100
