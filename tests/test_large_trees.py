"""Large irregular trees: `auto` searches once, weighs what is linear in the tree, and says what it leaves out."""

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

from forests import examples, forests
from treegen import Shape, Tree, cli, progress, strategies
from treegen.ir.errors import StrategyError
from treegen.ir.shape import DEFAULT_SHAPE
from treegen.report.explain import explain
from treegen.search import auto as automatic
from treegen.search import search as searching
from treegen.search.search import search, time_of
from treegen.search.size import is_too_large
from treegen.strategies import strategy_from, strategy_names
from treegen.target.problem import Problem
from treegen.target.targets import target_from
from treegen.workloads.generate import few_shot

ROOT = Path(__file__).parent.parent
H200 = target_from("h200")
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


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Tree]:
    """The trees that were searched, one entry for every search."""
    searched: list[Tree] = []

    def counted(tree: Tree, *arguments: object, **options: object) -> object:
        searched.append(tree)
        return search(tree, *arguments, **options)

    monkeypatch.setattr(automatic, "search", counted)
    return searched


@pytest.mark.parametrize("names", [("auto",), ("query",), ALL])
def test_explain_searches_once(searches: list[Tree], names: tuple[str, ...]) -> None:
    explain(few_shot(), names)
    assert len(searches) == 1


def test_a_trace_takes_no_further_search(searches: list[Tree], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "1,4,16/1000,50,7", "--trace"]) == 0
    assert len(searches) == 1
    assert "\nsearch on h200:\n  " in capsys.readouterr().out


def test_work_is_linear_in_a_large_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the plans that are made nor the memory grow as all paths do."""
    made: list[str] = []
    monkeypatch.setattr(searching, "time_of", lambda strategy, *rest: made.append(str(strategy)) or np.inf)
    for leaves in (20_000, 40_000):
        tree = random_tree(leaves, 5000)
        made.clear()
        tracemalloc.start()
        try:
            found = search(Problem(tree, DEFAULT_SHAPE, H200))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2000 * len(tree.parent)
        assert found.counted < 40
        assert not {"fasttree", "deft-node-chunk(chunk=128)", "specinfer"} & set(made)
        assert "cuts at single nodes" in found.left_out
        assert len(str(found.strategy)) < 200  # no list of thousands of nodes


def test_what_is_left_out_is_said() -> None:
    tree = random_tree(20_000, 5000)
    choice = strategies.auto().choose(Problem(tree, DEFAULT_SHAPE, H200))
    assert "; the tree is too large to weigh cuts at single nodes, fasttree" in choice.reason
    assert "plain per-row decoding takes" in choice.reason
    small = strategies.auto().choose(Problem(random_tree(200), DEFAULT_SHAPE, H200))
    assert "too large" not in small.reason


def test_a_deep_tree_is_planned_by_what_is_linear() -> None:
    """All paths of 6,000 rows together have 18,000,000 segments."""
    tree = deep_tree(6_000)
    found = search(Problem(tree, DEFAULT_SHAPE, H200))
    assert "plain per-row decoding" in found.left_out
    assert found.query_us is None
    assert found.strategy.plan_size(tree, DEFAULT_SHAPE) < 2 * MEGABYTE


@pytest.mark.parametrize("tree", [random_tree(20_000), deep_tree(9_000), Tree.parse("1,40000/5000,30")])
def test_no_strategy_that_was_weighed_is_better(tree: Tree) -> None:
    found = search(Problem(tree, DEFAULT_SHAPE, H200))
    for name in strategy_names():
        if name not in found.left_out and not is_too_large(strategy_from(name), tree, DEFAULT_SHAPE):
            assert found.time_us <= time_of(strategy_from(name), Problem(tree, DEFAULT_SHAPE, H200)) * (1 + 1e-9), name


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
    others = [strategies.cohort(apart=2), strategies.cohort(16, split=64), strategies.query(split=100)]
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
    assert any(doing.startswith("weighing ") for doing in told)
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
    assert "the tree is too large to weigh" in " ".join(done.stdout.split())
    assert json.loads(peak.read_text()) < megabytes * 1024
