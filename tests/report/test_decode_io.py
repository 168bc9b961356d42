"""IO over whole decodings: equal to planning every step where it claims to be, and the figures of DeFT's table 12."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.h200 import H200
from treegen import Shape, Tree, cli
from treegen.cost.account import account
from treegen.ir.errors import PlanError, TreegenError
from treegen.ir.plan import Plan
from treegen.report.decode_io import decimal_bytes, decode_io, policy_of_decode, score_elements
from treegen.schedule.lower import lower
from treegen.strategies import Pipeline, Strategy, Traffic, deft_flatten, deft_node, fasttree, query, strategy_from
from treegen.strategies.groupings import by_node, by_row, whole_tree
from treegen.strategies.registry import strategy_names
from treegen.target.problem import Problem
from treegen.workloads.generate import reasoning_template
from treegen.workloads.recorded_decodings import Draft
from treegen.workloads.traces import Decode, Workload, few_shot, replay, verification, workload_from

PAPER = Shape(32, 32, 128, dtype="fp16")
SHAPES = [PAPER, Shape(32, 8, 64), Shape(16, 1, 128, dtype="fp32")]
ALL = (*strategy_names(), "auto")
SMALL = Workload(
    "small",
    (
        few_shot(prompt=300, width=5, steps=40),
        replay(reasoning_template(1, depth=2, width=4, prompt=150, thought=40)),
        verification(Draft(((0,), (1,), (0, 0), (0, 1), (1, 0)), (3, 1, 0, 2, 5, 0)), prompt=120),
    ),
)
MEDUSA = Pipeline(
    "as-medusa", whole_tree, proven=True, pipeline_traffic=Traffic("tree", "none", "element per row", scores=True)
)
SPECINFER = Pipeline(
    "as-specinfer", by_row, proven=True, pipeline_traffic=Traffic("tree per row", "none", "bit per row")
)
WORDS = Pipeline("words", by_node, proven=True, pipeline_traffic=Traffic("tree", "nodes", "word per token"))


def trees(workload: Workload) -> Iterator[Tree]:
    """The tree at every step of every decoding."""
    for decode in workload.decodes:
        yield from steps_of(decode)


def steps_of(decode: Decode) -> Iterator[Tree]:
    """The tree at every step of a decoding."""
    for segment in decode.segments():
        for step in range(segment.first, segment.last + 1):
            yield segment.at(step)


def planned(strategy: Strategy, shape: Shape, every: list[Tree]) -> tuple[int, int, int, int]:
    """What a strategy moves per layer when every step is planned, lowered and accounted for."""
    total = np.zeros(4, np.int64)
    for tree in every:
        plan = strategy.plan(Problem(tree, shape, H200))
        found = account(plan, lower(plan, Problem(tree, shape, H200)), Problem(tree, shape, H200))
        scores = getattr(found, "score_bytes", 0)
        total += np.array([found.kv_hbm_bytes, scores, found.mask_bytes, found.partial_bytes])
    return tuple(total.tolist())


@pytest.fixture(scope="module")
def every() -> list[Tree]:
    return list(trees(SMALL))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_step_planned_is_brute_force(name: str, shape: Shape, every: list[Tree]) -> None:
    (found,) = decode_io(SMALL, [name], shape, layers=3, stride=1).strategies
    if name == "auto":  # one policy for each decoding
        parts = [
            (policy_of_decode(list(decode.segments()), shape, H200), list(steps_of(decode))) for decode in SMALL.decodes
        ]
        expected = tuple(3 * sum(column) for column in zip(*(planned(s, shape, t) for s, t in parts), strict=True))
    else:
        expected = tuple(3 * amount for amount in planned(strategy_from(name), shape, every))
    assert (found.kv_hbm_bytes, found.score_bytes, found.partial_bytes) == (expected[0], *expected[1::2])
    traffic = strategy_from(name).traffic
    if name != "auto" and (traffic is None or traffic.mask == "intervals"):  # auto may take one with another mask
        assert found.mask_bytes == expected[2]


@pytest.mark.parametrize(
    "strategy",
    [query(split=32), deft_flatten(block=24), fasttree(min_blocks=((1, 1), (1, 1)), split=(64, 16))],
    ids=str,
)
def test_other_options_are_brute_force(strategy: Strategy, every: list[Tree]) -> None:
    (found,) = decode_io(SMALL, [strategy], PAPER, layers=1, stride=1).strategies
    assert dataclasses.astuple(found)[1:] == planned(strategy, PAPER, every)


@pytest.mark.parametrize("stride", [7, 64, 10**6])
def test_what_is_linear_does_not_depend_on_the_stride(stride: int) -> None:
    exact = decode_io(SMALL, ALL, PAPER, stride=1)
    found = decode_io(SMALL, ALL, PAPER, stride=stride)
    assert (found.steps, found.path_kv_bytes) == (exact.steps, exact.path_kv_bytes)
    for entry, expected in zip(found.strategies, exact.strategies, strict=True):
        traffic = strategy_from(entry.name).traffic
        if traffic and traffic.kv != "plan":
            assert entry.kv_hbm_bytes == expected.kv_hbm_bytes
        if traffic and traffic.partials != "lengths":
            assert (entry.score_bytes, entry.partial_bytes) == (expected.score_bytes, expected.partial_bytes)
            # Cohorts are masked: how many runs a mask has depends on lengths.
            assert entry.mask_bytes == expected.mask_bytes or traffic.kv == "plan"
    node_chunk = [e.partial_bytes for io in (found, exact) for e in io.strategies if e.name == "deft-node-chunk"]
    assert node_chunk[0] == pytest.approx(node_chunk[1], rel=0.2)


def test_formulas(every: list[Tree]) -> None:
    rows, tokens = (np.array([getattr(tree, name) for tree in every]) for name in ("num_rows", "unique_tokens"))
    medusa, specinfer, words = decode_io(SMALL, [MEDUSA, SPECINFER, WORDS], PAPER, layers=2, stride=50).strategies
    assert medusa.kv_hbm_bytes == words.kv_hbm_bytes == 2 * 16384 * tokens.sum()
    assert medusa.score_bytes == 2 * 8 * 32 * 2 * (rows * tokens).sum()
    assert medusa.score_bytes == 2 * 32 * 2 * score_elements(rows, tokens).sum()
    assert medusa.mask_bytes == 2 * 2 * (rows * tokens).sum()
    assert medusa.partial_bytes == specinfer.partial_bytes == specinfer.score_bytes == 0
    assert specinfer.kv_hbm_bytes == 2 * 16384 * (rows * tokens).sum()
    assert specinfer.mask_bytes == pytest.approx(2 * (rows * tokens).sum() / 8, abs=2 * len(SMALL.decodes))
    assert words.mask_bytes == 2 * 8 * tokens.sum()
    assert words.partial_bytes > 0


class Own(Strategy):
    """A user's strategy: deft-node, or something wrong."""

    name = "own"

    def __init__(self, lost: int) -> None:
        self.lost = lost

    def plan(self, problem: Problem, on_pass: object = None) -> Plan:
        tree, shape = problem.tree, problem.shape
        plan = deft_node().plan(Problem(tree, shape, H200))
        return dataclasses.replace(plan, stop=plan.stop - self.lost)


def test_strategies_of_users() -> None:
    workload = Workload("w", (few_shot(40, 3, 9),))
    own, known = decode_io(workload, [Own(0), "deft-node"], PAPER, stride=4).strategies
    assert dataclasses.astuple(own)[1:] == dataclasses.astuple(known)[1:]
    with pytest.raises(PlanError):
        decode_io(workload, [Own(1)], PAPER)


def test_long_courses_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = decode_io(SMALL, ALL, PAPER, stride=5)
    monkeypatch.setattr("treegen.report.decode_batches.LARGEST_BATCH", 3)
    assert decode_io(SMALL, ALL, PAPER, stride=5).strategies == whole.strategies
    monkeypatch.setattr("treegen.report.decode_batches.MOST_TOKENS", 700)
    assert decode_io(SMALL, ALL, PAPER, stride=5).strategies == whole.strategies


def test_a_workload_without_tokens_moves_nothing() -> None:
    empty = decode_io(Workload("empty", (Decode("nothing", lambda: iter(())),)), ["query"], PAPER)
    assert dataclasses.astuple(empty.strategies[0]) == ("query", 0, 0, 0, 0)
    assert empty.kv_reduction(empty.strategies[0]) == 0


@pytest.mark.parametrize("arguments", [{"layers": 0}, {"stride": 0}, {"stride": 1.5}, {"target": "h2000"}])
def test_bad_arguments(arguments: dict[str, object]) -> None:
    with pytest.raises(TreegenError):
        decode_io(SMALL, ["query"], PAPER, **arguments)


def reductions(workload: str, names: tuple[str, ...]) -> dict[str, float]:
    """Percent of query's KV bytes that strategies do not read."""
    found = decode_io(workload_from(workload), names, PAPER)
    return {entry.name: 100 * found.kv_reduction(entry) for entry in found.strategies}


DEFT = ("query", "deft-node", "deft-node-chunk", "deft-flatten")


@pytest.mark.parametrize(("width", "reduction"), [(20, 90.47), (30, 92.05), (50, 93.32)])
def test_few_shot_figures(width: int, reduction: float) -> None:
    found = reductions(f"few-shot:width={width}", DEFT)
    assert found == {"query": 0} | {name: pytest.approx(reduction, abs=0.05) for name in DEFT[1:]}


@pytest.mark.parametrize(
    ("width", "kv", "path_kv", "rest"), [(20, 1.68, 17.62, 1.05), (30, 2.10, 26.43, 1.98), (50, 2.94, 44.05, 4.61)]
)
def test_terabytes_of_table_12(width: int, kv: float, path_kv: float, rest: float) -> None:
    workload = workload_from(f"few-shot:width={width}")
    baseline, *others = decode_io(workload, ["query", "deft-flatten", MEDUSA], PAPER).strategies
    assert baseline.kv_hbm_bytes / 1e12 == pytest.approx(path_kv, rel=0.01)
    for entry in others:
        assert entry.kv_hbm_bytes / 1e12 == pytest.approx(kv, rel=0.01)
    assert (others[1].score_bytes + others[1].mask_bytes) / 1e12 == pytest.approx(rest, rel=0.01)


@pytest.mark.parametrize(("name", "part"), [("docmerge", 72.7), ("keyword", 87.6), ("sorting128", 76.2)])
def test_reasoning_figures(data_dir: Path, name: str, part: float) -> None:
    """Rows read their paths, and the tree is read once: no plan is needed."""
    once = Pipeline("once", by_node, proven=True, pipeline_traffic=Traffic("tree", "none"))
    found = decode_io(workload_from(f"{data_dir}/deft/reasoning_{name}.json"), [once], PAPER, stride=10**6)
    assert 100 * found.kv_reduction(found.strategies[0]) == pytest.approx(part, abs=0.1)


@pytest.mark.full
def test_sorting_under_all_strategies(data_dir: Path) -> None:
    """100 templates, 394,371 steps: `treegen io` takes under a minute of one core."""
    found = reductions(f"{data_dir}/deft/reasoning_sorting128.json", ALL)
    for name in DEFT[1:]:
        assert found[name] == pytest.approx(76.2, abs=0.1)
    assert found["fasttree"] == pytest.approx(76.05, abs=0.2)


@pytest.mark.parametrize(("size", "reduction"), [(32, 96.9), (64, 98.4), (128, 99.2), (256, 99.6)])
def test_speculative_figures(data_dir: Path, size: int, reduction: float) -> None:
    found = reductions(f"{data_dir}/deft/speculative_{size}.json", DEFT)
    for name in DEFT[1:]:
        assert found[name] == pytest.approx(reduction, abs=0.2)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--heads", "32:32", "--dtype", "fp16", "--layers", "2", "--stride", "9"]
    text = "few-shot:width=3,steps=20,prompt=200"
    expected = decode_io(workload_from(text), ALL, PAPER, layers=2, stride=9)
    assert cli.main(["io", text, *options]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (f"{expected}\n", "")
    lines = printed.out.splitlines()
    assert lines[:2] == [f"workload {text}: 20 steps", "shape 32:32 heads, head_dim 128, fp16, 2 layers"]
    assert [line.split()[0] for line in lines[2:]] == ["strategy", *ALL]

    assert cli.main(["io", text, *options, "--strategy", "deft-node", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert list(value) == ["format", "workload", "shape", "strategies"]
    assert (value["format"], value["workload"]) == (1, text)
    assert value["shape"] == {**dataclasses.asdict(PAPER), "layers": 2}
    (entry,) = (entry for entry in expected.strategies if entry.name == "deft-node")
    assert value["strategies"] == [dataclasses.asdict(entry)]
    assert list(value["strategies"][0]) == ["name", "kv_hbm_bytes", "score_bytes", "mask_bytes", "partial_bytes"]


@pytest.mark.parametrize("arguments", [["few"], ["few-shot", "--stride", "0"], ["few-shot", "--strategy", "deft"]])
def test_command_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["io", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_units() -> None:
    assert [decimal_bytes(n) for n in (0, 999, 1000, 1_684_000_000_000)] == ["0 B", "999 B", "1.00 kB", "1.68 TB"]
    assert decimal_bytes(5 * 10**18) == "5000.00 PB"
