"""Large irregular trees: `auto` chooses once, and takes plans linear in the tree; rankings say what they leave out."""

import json
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples, forests
from support.h200 import H200
from support.paths import ROOT
from treegen import Shape, Tree, progress, strategies
from treegen.ir.errors import StrategyError
from treegen.ir.shape import DEFAULT_SHAPE
from treegen.report.explain import explain
from treegen.search import auto as automatic
from treegen.search.auto import by_estimate, time_of
from treegen.search.size import is_too_large
from treegen.strategies import Choice, strategy_from, strategy_names
from treegen.target.problem import Problem
from treegen.workloads.generate import few_shot

ALL = (*strategy_names(), "auto")
MEGABYTE = 1 << 20


def random_tree(leaves: int, longest: int = 3000, seed: int = 1) -> Tree:
    """Every node hangs under any of those before it; about half of all nodes are leaves."""
    rng = np.random.default_rng(seed)
    count = 2 * leaves
    parents = np.append(-1, (rng.random(count - 1) * np.arange(1, count)).astype(np.int64))
    return Tree.from_parents(parents, rng.integers(100, longest, count))


def deep_tree(nodes: int) -> Tree:
    """A spine of nodes, each with a leaf beside it."""
    spine = np.arange(-1, nodes - 1)
    return Tree.from_parents(np.append(spine, np.arange(nodes)), np.full(2 * nodes, 40))


@pytest.mark.parametrize("names", [("auto",), ("query",), ALL])
def test_explain_chooses_once(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_for: list[Problem] = []

    def counted(problem: Problem, **options: bool) -> Choice:
        chosen_for.append(problem)
        return by_estimate(problem, **options)

    monkeypatch.setattr(automatic, "by_estimate", counted)
    explain(few_shot(), names)
    assert len(chosen_for) == 1


@pytest.mark.parametrize("isolated", [False, True])
def test_memory_is_linear_in_a_large_tree(isolated: bool) -> None:
    for leaves in (20_000, 40_000):
        problem = Problem(random_tree(leaves, 5000), DEFAULT_SHAPE, H200)
        tracemalloc.start()
        try:
            found = by_estimate(problem, isolated=isolated).strategy
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < max(2500 * len(problem.tree.parent), 600 * MEGABYTE * isolated)
        assert not is_too_large(found, problem.tree, DEFAULT_SHAPE)


@pytest.mark.parametrize("isolated", [False, True])
def test_a_deep_tree_is_planned_by_what_is_linear(isolated: bool) -> None:
    """All paths of 6,000 rows together have 18,000,000 segments."""
    tree = deep_tree(6_000)
    found = by_estimate(Problem(tree, DEFAULT_SHAPE, H200), isolated=isolated)
    assert found.strategy.plan_size(tree, DEFAULT_SHAPE) < 2 * MEGABYTE


@pytest.mark.parametrize("tree", [random_tree(20_000), deep_tree(9_000), Tree.parse("1,40000/5000,30")])
def test_named_strategies_are_hardly_better(tree: Tree) -> None:
    problem = Problem(tree, DEFAULT_SHAPE, H200)
    found = time_of(by_estimate(problem).strategy, problem)
    for name in strategy_names():
        if not is_too_large(strategy_from(name), tree, DEFAULT_SHAPE):
            assert found <= 1.05 * time_of(strategy_from(name), problem), name


def test_rankings_leave_out_what_is_too_large() -> None:
    tree = random_tree(20_000)
    explanation = explain(tree, ("specinfer", "fasttree", "auto"))
    assert [entry.name for entry in explanation.entries] == [explanation.best.name]
    said = r"plans have more than 1,048,576 segments and rows:\n  specinfer: [\d,]+\n  fasttree: [\d,]+\n"
    assert re.search(said, explanation.text())
    with pytest.raises(StrategyError, match=r"strategy = specinfer: has a plan of [\d,]+ segments and rows"):
        explain(tree, ["specinfer"])


@given(forests(30, 500, salt=1913), st.sampled_from((Shape(32, 8, 128), Shape(16, 1, 128), Shape(4, 4, 64))))
@examples(60)
def test_sizes_are_those_of_plans_about(tree: Tree, shape: Shape) -> None:
    """No plan has many more segments and rows than was counted without it."""
    others = [strategies.cohort(split_shared_rows=2), strategies.cohort(16, split=64), strategies.query(split=100)]
    for strategy in [*map(strategy_from, strategy_names()), *others]:
        plan = strategy.plan(Problem(tree, shape, H200))
        pieces = 600 if strategy.name == "flashforge" else 0  # what it divides nodes into follows from the target
        assert len(plan.node) + int(plan.group_rows.sum()) <= 2 * strategy.plan_size(tree, shape) + pieces, strategy


def test_listeners_are_told_what_is_done() -> None:
    told: list[str] = []
    with progress.told_to(told.append):
        explain(few_shot(), ["deft-node", "auto"])
    assert "planning deft-node" in told
    assert "verifying deft-node" in told
    count = len(told)
    explain(few_shot())
    assert len(told) == count


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peaks of memory are read there")
@pytest.mark.parametrize(("leaves", "seconds", "megabytes"), [(100_000, 60, 600), (1_000_000, 600, 4000)])
def test_explain_of_a_file(tmp_path: Path, leaves: int, seconds: int, megabytes: int) -> None:
    path, peak = tmp_path / "tree.json", tmp_path / "peak"
    random_tree(leaves, 1900).save(path)
    program = (
        "import re, sys\n"
        "from treegen.cli import main\n"
        f"code = main(['explain', {str(path)!r}])\n"
        # getrusage would also tell of the process that this one was forked from.
        "status = open('/proc/self/status').read()\n"
        f"open({str(peak)!r}, 'w').write(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1])\n"
        "sys.exit(code)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=True)
    assert "auto takes" in " ".join(done.stdout.split())
    assert json.loads(peak.read_text()) < megabytes * 1024
