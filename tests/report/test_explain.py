"""Explanations: stable texts, the documented JSON, one entry per pick, verified plans."""

import dataclasses
import json

import pytest

import treegen
from support.planted_faults import Wrong
from support.toy import TOY, rounded
from treegen import Shape, Tree, strategies
from treegen.cost.figures import byte_text, count_text
from treegen.ir.errors import BackendError, PlanError, StrategyError
from treegen.ir.verify import verify
from treegen.report.explain import explain
from treegen.strategies import strategy_names
from treegen.target.problem import Problem
from treegen.workloads.generate import few_shot, reasoning, speculative

ALL = (*strategy_names(), "auto")
TREES = {
    "few-shot": few_shot(),
    "reasoning": reasoning(),
    "speculative": speculative(),
    "rows-inside": Tree.from_parents([-1, 0, -1], [9, 0, 40], rows=[(0, 3), (0, 9), (1, 0), (2, 40), (2, 0)]),
    "nobody": Tree.from_parents([-1], [5], rows=[]),
}


def unwrapped(text: str) -> str:
    """The text on one line."""
    return " ".join(text.split())


@pytest.mark.parametrize("name", TREES)
def test_text(name: str, golden) -> None:
    golden(explain(TREES[name], ALL, target=TOY).text(most_groups=4))


def test_text_of_one_strategy(golden) -> None:
    shape = Shape(16, 1, 128, dtype="fp16", page_size=16)
    explanation = explain(Tree.from_levels([1, 4, 8, 64], [8, 256, 256, 32]), ["auto"], shape, TOY)
    golden(explanation.text(12, formulas=True))


def test_json(golden) -> None:
    explanation = explain(Tree.parse("6(2*2)"), ALL, target=TOY)
    value = json.loads(explanation.to_json())
    for entry in value["strategies"]:
        del entry["timeline"]["predicted"]["blocks"]
    golden(json.dumps(rounded(value), indent=1))


def test_json_has_exactly_the_documented_fields() -> None:
    explanation = explain(TREES["rows-inside"], ALL, Shape(4, 2, 64), "l40s")
    value = json.loads(explanation.to_json())
    assert list(value) == [
        "format", "tree", "shape", "target", "strategies", "best", "best_strategy", "best_reason", "left_out", "model",
        "shape_assumed", "device", "floor", "search", "drawing",
    ]  # fmt: skip
    assert value["format"] == 1
    assert list(value["tree"]) == ["text", "signature", "nodes", "rows", "unique_tokens", "path_tokens"]
    assert value["tree"]["text"] is None
    assert value["tree"]["signature"] == TREES["rows-inside"].signature()
    assert value["shape"]["num_qo_heads"] == 4
    assert value["target"] == "l40s"
    assert value["best"] in [entry["name"] for entry in value["strategies"]]
    for given, entry in zip(value["strategies"], explanation.entries, strict=True):
        assert list(given) == [
            "name", "options", "groups", "kernel_configs", "estimate", "reason", "summary", "rank", "rank_reason",
            "bound", "times", "counts", "merged_by", "marks", "reads", "shown_groups", "items", "timeline",
        ]  # fmt: skip
        assert given["estimate"] == {
            **dataclasses.asdict(entry.estimate),
            "padding_waste": entry.estimate.padding_waste,
        }
        for group, made in zip(given["groups"], entry.plan.groups, strict=True):
            assert group["rows"] == [list(interval) for interval in made.rows]
            assert group["mask"] == (entry.plan.mask if made.masked else "none")
            assert group["segments"] == [
                {"node": s.node, "start": s.start, "stop": s.stop, "seen": list(s.seen)} for s in made.segments
            ]


def test_assumed_shape_is_said() -> None:
    tree = Tree.parse("100(10*4)")
    assert "32:8 heads, head_dim 128, bf16 (assumed: no shape was given)" in explain(tree, ["query"]).text()
    assert "assumed" not in explain(tree, ["query"], Shape(32, 8, 128)).text()


def test_groups_and_pieces_are_cut() -> None:
    text = unwrapped(explain(Tree.parse("10(1*40)"), ["deft-flatten", "deft-node"]).text(most_groups=2))
    assert " group 0: rows 0-39 | n0[0:10], n1[0:1] seen 0-0" in text
    assert "n7[0:1] seen 6-6, ... 33 more " in text
    assert " ... 39 more groups " in text
    assert "group 2" not in text


def test_auto_stands_for_its_pick() -> None:
    tree = few_shot()
    explanation = explain(tree, ALL)
    best = strategies.auto().choose(Problem(tree, explanation.shape, explanation.target))
    assert str(explanation.best) == str(best.strategy)
    picked = next(entry for entry in explanation.entries if str(entry.strategy) == str(best.strategy))
    assert picked.reason == f"chosen by auto: {best.reason}"
    assert explain(tree, ["query"]).best == explanation.best
    repeated = explain(tree, [best.strategy, "auto", best.strategy])
    assert [entry.reason for entry in repeated.entries] == [picked.reason]


def test_every_plan_is_verified() -> None:
    with pytest.raises(PlanError):
        explain(Tree.parse("10(5*2)"), [Wrong()])


def test_bad_arguments() -> None:
    tree = Tree.parse("10(5*2)")
    for wrong in (["deft"], [], [3]):
        with pytest.raises(StrategyError):
            explain(tree, wrong)
    with pytest.raises(BackendError):
        explain(tree, ["query"], target="h2000")


def test_kernels_explain_themselves() -> None:
    kernel = treegen.compile(few_shot(), strategy="deft-node", target="h200")
    verify(kernel.plan, kernel.tree)
    text = kernel.explain()
    assert "strategy deft-node: named by the caller" in text
    assert "(assumed: no shape was given)" in text
    assert explain(few_shot(), ["deft-node"]).text().splitlines()[:-1] == text.splitlines()[:-1]


def test_kernels_tell_groups_and_formulas_on_request() -> None:
    kernel = treegen.compile(Tree.parse("100(10*4)"), strategy="deft-node", target="h200")
    assert "group 0" not in kernel.explain()
    assert "lone_tile" not in kernel.explain()
    text = kernel.explain(groups=1, formulas=True)
    assert "    group 0: rows 0-3 | n0[0:100]\n    ... 4 more groups\n" in text
    assert "    lone_tile = " in text


def test_long_options_are_cut_short() -> None:
    cut = strategies.cohort(cut=tuple(range(1, 41)))
    text = explain(Tree.parse("10(1*40)"), [cut]).text()
    assert "strategy cohort(head_rows=64, cut_nodes=(1, 2, 3, 4, 5, 6, 7, 8, ... 32 more)):" in text
    assert str(cut).endswith("39, 40))")


def test_one_launch_in_place_of_two_is_said() -> None:
    tree, shape = Tree.parse("1,4,8,64/40,16,16,16"), Shape(4, 1, 32)
    line = "one launch: final items wait for partial items"
    final, apart = (strategies.cohort(head_rows=64, split_shared_rows=32, merge=merge) for merge in ("final", "reduce"))
    assert line in explain(tree, [final], shape).text()
    assert line not in explain(tree, [apart], shape).text()
    assert line in treegen.compile(tree, strategy=final, shape=shape, target="h200").explain()
    of_fixed_launches = treegen.compile(tree, strategy=final, shape=shape, target="h200", max_rows=64)
    assert line not in of_fixed_launches.explain()


def test_units() -> None:
    assert [byte_text(n) for n in (0, 1023, 1024, 1536, 5 << 40)] == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 TiB"]
    assert [count_text(n) for n in (0, 999, 1000, 2_500_000)] == ["0 ", "999 ", "1.0 k", "2.5 M"]
