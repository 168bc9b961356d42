"""Benchmarks: a wrong output is never timed, what is unavailable or fails is told, and results survive their file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from support.forests import forest
from treegen import Shape, Tree, cli
from treegen.backends import oracle
from treegen.bench import bench_runs, result_tables
from treegen.bench.bench_runs import RunSettings, Timers
from treegen.bench.peers import PEERS, providers_from
from treegen.bench.providers import TimedCall, Treegen, UnavailableError
from treegen.bench.results import ProviderOutcome, Result
from treegen.bench.tables import FASTTREE_HEADS, named
from treegen.bench.torch_peers import Flex, Sdpa
from treegen.ir.errors import FormatError
from treegen.target.targets import target_from
from treegen.tuning.kernel_meter import Case
from treegen.workloads.generate import in_shuffled_pages
from treegen.workloads.tree_batches import FASTTREE_TREES

CPU = torch.device("cpu")
SHAPE = Shape(4, 2, 16, dtype="fp32")
TREES = [("few shot", Tree.parse("1,4/100,10")), ("two roots", Tree.parse("30(5*2)+7*3"))]


@dataclass(frozen=True)
class Told:
    """A provider that does as it is told with the right result."""

    name: str
    deed: Callable[[torch.Tensor], torch.Tensor]

    def prepare(self, case: Case) -> TimedCall:
        out, _ = oracle.reference(case.tree, case.q, case.k_cache, case.v_cache)
        return lambda: self.deed(out.to(case.q.dtype).clone())


def unavailable(out: torch.Tensor) -> torch.Tensor:
    raise UnavailableError("not on Saturdays")


def failing(out: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("broken")


PROVIDERS = [
    Treegen("query"),
    Told("right", lambda out: out),
    Told("off", lambda out: out * 1.01),
    Told("unwritten", lambda out: out.index_fill(0, torch.tensor([1]), math.nan)),
    Told("shut", unavailable),
    Told("broken", failing),
]


def measured(timed: list[Callable[[], object]] | None = None) -> list[Result]:
    """The results of all providers; a time is 10 us for every call timed so far."""
    timed = [] if timed is None else timed

    def timer(call: Callable[[], object], repeats: int) -> float:
        assert repeats == 3
        timed.append(call)
        return 10.0 * len(timed)

    made = bench_runs.run(
        TREES, [SHAPE], PROVIDERS, target_from("h200"), RunSettings(3, 64, 4000.0, Timers(timer, None))
    )
    return list(made)


def test_only_right_outputs_are_timed() -> None:
    timed: list[Callable[[], object]] = []
    results = measured(timed)
    statuses = ["right", "right", "wrong", "wrong", "unavailable", "failed"]
    for result, (name, tree) in zip(results, TREES, strict=True):
        assert (result.tree, result.rows, result.unique_tokens) == (name, tree.num_rows, tree.unique_tokens)
        assert [outcome.status for outcome in result.outcomes] == statuses
        assert [outcome.best_us is not None for outcome in result.outcomes] == [True, True, *[False] * 4]
        assert result.outcomes[3].error == math.inf
        assert [outcome.detail for outcome in result.outcomes[4:]] == ["not on Saturdays", "RuntimeError: broken"]
        assert all(outcome.repeatable for outcome in result.outcomes[:2])
    assert len(timed) == 4


def test_a_result_that_moves_is_not_repeatable() -> None:
    source = torch.Generator().manual_seed(0)
    moving = Told("moving", lambda out: out + 1e-7 * torch.rand(out.shape, generator=source))
    (result,) = bench_runs.run(
        TREES[:1], [SHAPE], [moving], target_from("h200"), RunSettings(1, 8, 1.0, Timers(None, None))
    )
    assert result.outcomes[0].status == "right"
    assert result.outcomes[0].repeatable is False
    assert result.outcomes[0].best_us is None


def test_the_floor_is_what_must_be_moved_or_computed() -> None:
    shape, h200 = Shape(32, 8, 128, dtype="fp16"), target_from("h200")
    tree = Tree.parse("1,1024/2048,32")
    moved = (2048 + 1024 * 32) * 8 * 128 * 2 * 2 + 2 * 1024 * 32 * 128 * 2
    flops = 1024 * 2080 * 32 * 4 * 128
    assert bench_runs.floor_us(tree, shape, h200, 1000.0) == pytest.approx(moved / 1e6)
    assert bench_runs.floor_us(tree, shape, h200, 1e9) == pytest.approx(flops / (h200.tensor_tflops * 1e6))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("peer", [Sdpa(), Flex()])
@pytest.mark.parametrize("layout", ["in order", "pages", "leaves shuffled"])
def test_pytorch_peers_are_right(peer: Sdpa | Flex, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    shape = SHAPE if layout == "in order" else replace(SHAPE, page_size=4)
    tree = Tree.parse("1,3,6/20,9,5")
    if layout == "pages":
        tree = in_shuffled_pages(tree, 4)
    elif layout == "leaves shuffled":
        tree = forest(nodes=12, most_tokens=20, seed=3, rows="inside", shuffled=True, kv="runs")
    case = Case.of(tree, shape, CPU)
    assert case.error_of(peer.prepare(case)()) < 1e-5


def test_shuffled_pages_hold_the_same_tokens() -> None:
    tree = Tree.parse("1,4,8/100,37,16")
    moved = in_shuffled_pages(tree, 16, seed=1)
    assert moved.text == tree.text
    slots = [moved.kv.slots(node) for node in range(len(tree.nodes))]
    assert all((part[::16] % 16 == 0).all() for part in slots)
    pages = {slot // 16 for part in slots for slot in part.tolist()}
    assert len(pages) == sum(-(-int(tokens) // 16) for tokens in tree.tokens)
    assert [part.tolist() for part in slots] != [tree.kv.slots(node).tolist() for node in range(len(tree.nodes))]
    assert named("", tree, 16)[1].kv.start.tolist() == in_shuffled_pages(tree, 16).kv.start.tolist()
    assert named("no", tree, None) == (tree.text, tree)


def test_results_survive_their_file(tmp_path: Path) -> None:
    results, machine = measured(), {"device": "none", "copy_gbps": 4000}
    result_tables.save(tmp_path / "r.json", machine, results)
    assert result_tables.load(tmp_path / "r.json") == (machine, results)
    value = json.loads((tmp_path / "r.json").read_text())
    for wrong in ({}, {**value, "format": "other"}, {**value, "results": [{"tree": "1"}]}):
        (tmp_path / "w.json").write_text(json.dumps(wrong))
        with pytest.raises(FormatError):
            result_tables.load(tmp_path / "w.json")


def outcome(provider: str, eager: float | None, graph: float | None = None, status: str = "right") -> ProviderOutcome:
    return ProviderOutcome(provider, status, 1e-4, eager, graph, True)


def result(tree: str, floor: float, *outcomes: ProviderOutcome) -> Result:
    return Result(tree, "32/8", 128, "fp16", 1, 10, 100, floor, outcomes)


RESULTS = [
    result("small", 5.0, outcome("a", 10.0, 8.0), outcome("b", 32.0), outcome("c", None, None, "wrong")),
    result("large", 50.0, outcome("a", 100.0), outcome("b", 100.0, 120.0), outcome("c", 50.0)),
]


def test_the_table_and_its_means() -> None:
    assert result_tables.table(RESULTS)[1:] == [
        ["small", "32/8", "5.0", "8.0", "32.0", "wrong"],
        ["large", "32/8", "50.0", "100.0", "100.0", "50.0"],
    ]
    rows = {row[0]: row[1:] for row in result_tables.summary(RESULTS)[1:]}
    assert rows["a"] == ["2", "0", "1.00x", "1.00x", "0.50 (1)"]
    assert rows["b"] == ["2", "0", "2.00x", "1.00x", "0.50 (1)"]
    assert rows["c"] == ["1", "1", "0.50x", "0.50x", "1.00 (1)"]


def test_problems_are_told_once() -> None:
    told = result_tables.problems(measured())
    assert any(line.startswith("shut unavailable: not on Saturdays: few shot 4/2, two roots 4/2") for line in told)
    assert len(told) == 4


def test_results_are_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "r.json", tmp_path / "r.svg"
    result_tables.save(path, {"device": "a GPU"}, RESULTS)
    assert cli.main(["bench", "--from", str(path), "--plot", str(picture)]) == 1  # an output was wrong
    printed = capsys.readouterr()
    assert "device a GPU" in printed.out
    assert "2.00x" in printed.out
    assert picture.read_text().startswith("<?xml")
    assert cli.main(["bench", "--from", str(path), "--providers", "b, a"]) == 0
    printed = capsys.readouterr().out
    assert "b is faster" in printed
    assert "c" not in printed.splitlines()[0].split()
    assert cli.main(["bench", "--from", str(path), "--providers", "a,d"]) == 2
    assert "use some of a, b, c" in capsys.readouterr().err


def test_bad_arguments_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, problem in (
        (["--providers", "nobody"], "nobody"),
        (["--providers", "fasttree-artifact"], "--fasttree"),
        (["1,2/3"], "levels"),
        (["1,2/3,4"], "cpu"),
        (["--from", "nowhere.json"], "nowhere.json"),
    ):
        assert cli.main(["bench", *arguments]) == 2
        error = capsys.readouterr().err
        assert problem in error
        assert error.count("\n") == 1


def test_help_names_all_peers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    printed = "".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"withcommas:{','.join(PEERS)}." in printed
    assert [provider.name for provider in providers_from(f"{','.join(PEERS)},query", Path())] == [*PEERS, "query"]


def test_the_default_table_is_fasttrees(data_dir: Path) -> None:
    table = json.loads((data_dir / "fasttree_kernel_bench.json").read_text())
    trees = [Tree.from_levels(entry["nodes_per_level"], entry["tokens_per_node"]) for entry in table["trees"]]
    assert [Tree.parse(text).signature() for text in FASTTREE_TREES] == [tree.signature() for tree in trees]
    assert [tuple(map(int, heads.split(":"))) for heads in FASTTREE_HEADS] == [tuple(pair) for pair in table["heads"]]
