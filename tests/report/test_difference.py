"""Differences: groups and nodes against plain loops, stable texts, the documented JSON, the command line."""

import dataclasses
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.call_counts import calls
from support.forests import examples, forests, plan_by_row_classes
from support.planted_faults import Wrong
from support.toy import TOY, rounded
from treegen import Shape, Tree, cli, strategies
from treegen.cost.account import Account
from treegen.ir.errors import BackendError, PlanError, ShapeError, StrategyError
from treegen.ir.groups import Group, Segment
from treegen.ir.plan import Plan
from treegen.ir.verify import verify
from treegen.report.explain import explain
from treegen.report.plan_diff import Comparison, compare
from treegen.report.plan_diff_text import reading_lines
from treegen.report.strategy_diff import amount_text, difference
from treegen.strategies import strategy_names
from treegen.workloads.generate import few_shot, reasoning, speculative

LEVELS = Tree.from_levels([1, 4, 16, 512], [1024, 256, 128, 32])
TREES = {
    "few-shot": few_shot(),
    "reasoning": reasoning(),
    "speculative": speculative(),
    "levels": LEVELS,
    "rows-inside": Tree.from_parents([-1, 0, -1], [9, 0, 40], rows=[(0, 3), (0, 9), (1, 0), (2, 40), (2, 0)]),
}
PAIRS = [("deft-node", "fasttree"), ("query", "deft-node"), ("deft-node-chunk", "deft-flatten")]
Key = tuple[object, ...]


def group_key(group: Group) -> Key:
    """Rows and segments, whose order does not count; all segments that nobody sees are unseen alike."""
    pieces = [(s.node, s.start, s.stop, *(s.seen if s.seen[1] > s.seen[0] else (0, 0))) for s in group.segments]
    return group.rows, tuple(sorted(pieces))


def piece_key(group: Group, node: int) -> Key:
    """Rows, and what they read and see of one node."""
    pieces = []
    for s in group.segments:
        seen: object = "unseen" if s.seen[0] == s.seen[1] else "all" if s.seen == (0, group.num_rows) else s.seen
        if s.node == node:
            pieces.append((s.start, s.stop, str(seen)))
    return group.rows, tuple(sorted(pieces))


def check(compared: Comparison, first: Plan, second: Plan, tree: Tree) -> None:
    """Holds a comparison against plain loops over the groups."""
    plans = first, second
    for side, plan in enumerate(plans):
        numbers = [*compared.same[:, side].tolist(), *compared.only[side].tolist()]
        assert sorted(numbers) == list(range(len(plan)))
    for one, two in compared.same.tolist():
        assert group_key(first.groups[one]) == group_key(second.groups[two])
    counts = [Counter(map(group_key, plan.groups)) for plan in plans]
    for side, plan in enumerate(plans):
        only = Counter(group_key(plan.groups[number]) for number in compared.only[side].tolist())
        assert only == counts[side] - counts[1 - side]

    differing = []
    for node in range(len(tree.tokens)):
        readers = [[g for g in plan.groups if any(s.node == node for s in g.segments)] for plan in plans]
        keys = [Counter(map(group_key, groups)) for groups in readers]
        if keys[0] != keys[1]:
            own = [[g for g in groups if group_key(g) not in keys[1 - i]] for i, groups in enumerate(readers)]
            pieces = [Counter(piece_key(group, node) for group in groups) for groups in own]
            differing.append((node, pieces[0] == pieces[1]))
    assert sorted(zip(compared.nodes.tolist(), compared.same_rows.tolist(), strict=True)) == differing
    assert (tree.topology.preorder[compared.nodes][1:] > tree.topology.preorder[compared.nodes][:-1]).all()


def nodes_told(lines: list[str]) -> int:
    """How many nodes the lines speak of."""
    left = re.fullmatch(r"\.\.\. (\d+) more nodes?", lines[-1]) if lines else None
    told = lines[:-1] if left else lines
    others = [re.search(r"; the same for (\d+) more nodes? of depth", line) for line in told]
    return len(told) + sum(int(found[1]) for found in others if found) + (int(left[1]) if left else 0)


names = st.sampled_from(strategy_names())


@given(forests(40, 300, kv=("default",), salt=71), names, names)
@examples(80)
def test_strategies_against_plain_loops(tree: Tree, first: str, second: str) -> None:
    found = difference(tree, first, second)
    one, two = (entry.plan for entry in found.entries)
    check(found.comparison, one, two, tree)
    assert (len(found.comparison.nodes) == 0) == (not any(map(len, found.comparison.only)))
    again = difference(tree, first, second)
    assert (again.text(), again.to_json()) == (found.text(), found.to_json())


@given(forests(12, 20, kv=("default",), salt=72), st.integers(0, 99), st.integers(1, 3), st.integers(1, 3), names)
@examples(150)
def test_plans_of_any_rows_against_plain_loops(tree: Tree, seed: int, one: int, two: int, name: str) -> None:
    first, second = (plan_by_row_classes(tree, seed + configs, configs, unseen=True) for configs in (one, two))
    named = explain(tree, [name]).entries[0].plan
    for other in (second, named):
        verify(other, tree)
        compared = compare(first, other, tree)
        check(compared, first, other, tree)
        for most in (0, 1, 100):
            lines = reading_lines((first, other), ("A", "B"), compared, tree, most)
            assert len(lines) <= most + 1
            assert nodes_told(lines) == len(compared.nodes)


@given(forests(40, 300, kv=("default",), salt=73), names)
@examples(60)
def test_a_strategy_does_what_it_does(tree: Tree, name: str) -> None:
    found = difference(tree, name, name)
    assert found.none
    assert len(found.comparison.same) == len(found.entries[0].plan)
    assert [len(only) for only in found.comparison.only] == [0, 0]
    assert "the plans are the same" in found.text()
    assert "estimate" not in found.text()


@given(forests(30, 200, kv=("default",), salt=74), names, names)
@examples(60)
def test_a_comparison_turns_round(tree: Tree, first: str, second: str) -> None:
    there, back = difference(tree, first, second).comparison, difference(tree, second, first).comparison
    assert sorted(there.same[:, ::-1].tolist()) == sorted(back.same.tolist())
    assert [only.tolist() for only in there.only] == [only.tolist() for only in reversed(back.only)]
    assert (there.nodes.tolist(), there.same_rows.tolist()) == (back.nodes.tolist(), back.same_rows.tolist())


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("name", TREES)
def test_text(name: str, pair: tuple[str, str], golden) -> None:
    golden(difference(TREES[name], *pair, target=TOY).text(most_groups=5))


def test_json(golden) -> None:
    compared = difference(Tree.parse("6(2*2,0)"), "deft-node", "query", target=TOY)
    golden(json.dumps(rounded(json.loads(compared.to_json())), indent=1))


def readings(first: list[Group], second: list[Group], tree: Tree) -> list[str]:
    plans = Plan.from_groups("A", first), Plan.from_groups("B", second)
    for plan in plans:
        verify(plan, tree)
    return reading_lines(plans, ("A", "B"), compare(*plans, tree), tree, 12)


def group(rows: tuple[int, int], *segments: tuple[int, int, int]) -> Group:
    return Group((rows,), tuple(Segment(*s, (0, rows[1] - rows[0])) for s in segments))


def test_order_inside_a_group_does_not_count() -> None:
    tree = Tree.parse("10(5)")
    assert readings([group((0, 1), (0, 0, 10), (1, 0, 5))], [group((0, 1), (1, 0, 5), (0, 0, 10))], tree) == []


def test_pieces_copies_and_groups_in_both() -> None:
    tree = Tree.from_levels([1, 4], [10, 0])
    whole, halves = [group((0, 4), (0, 0, 10))], [group((0, 4), (0, 0, 6)), group((0, 4), (0, 6, 10))]
    twice = [group((0, 1), (0, 0, 10)), group((1, 4), (0, 0, 10))]
    uneven = [group((0, 4), (0, 0, 6)), group((0, 2), (0, 6, 10)), group((2, 4), (0, 6, 10))]
    once = "n0[0:10]: A reads it once with rows 0-3; "
    assert readings(whole, halves, tree) == [f"{once}B in 2 pieces [0:6] [6:10] with rows 0-3"]
    assert readings(whole, twice, tree) == [f"{once}B twice with rows 0-0 / 1-3"]
    parts = "once as [0:6] with rows 0-3 and twice as [6:10] with rows 0-1 / 2-3"
    assert readings(whole, uneven, tree) == [f"{once}B {parts}"]
    assert readings(halves, uneven, tree) == [
        "n0[0:10]: apart from 1 group in both, A reads it once as [6:10] with rows 0-3; "
        "B twice as [6:10] with rows 0-1 / 2-3"
    ]
    # One group that reads two runs of a node is one piece; rows may be several intervals, and see a part.
    crossed = [
        Group(((0, 1), (2, 4)), (Segment(0, 0, 6, (0, 3)), Segment(0, 6, 10, (1, 3)))),
        Group(((0, 2),), (Segment(0, 0, 6, (1, 2)), Segment(0, 6, 10, (0, 2)))),
    ]
    parts = "once as [0:6] + [6:10] seen 1-2 with rows 0-0,2-3 and once as [0:6] seen 1-1 + [6:10] with rows 0-1"
    assert readings(whole, crossed, tree) == [f"{once}B {parts}"]


def test_a_run_that_nobody_needs() -> None:
    tree = Tree.parse("10(5*2)")
    node = [group((0, 2), (0, 0, 10)), group((0, 1), (1, 0, 5)), group((1, 2), (2, 0, 5))]
    useless = Group(((1, 2),), (Segment(1, 0, 5, (0, 0)),))
    reads = "n1[0:5]: apart from 1 group in both, A {}; B {}"
    unseen = "once as [0:5] unseen with rows 1-1"
    assert readings([*node, useless], node, tree) == [reads.format(f"reads it {unseen}", "does not read it")]
    assert readings(node, [*node, useless, useless], tree) == [
        reads.format("does not read it", "in 2 pieces [0:5] unseen [0:5] unseen with rows 1-1")
    ]


def test_equal_groups_are_matched_as_often_as_both_have_them() -> None:
    tree = Tree.parse("10(5)")
    node = [group((0, 1), (0, 0, 10), (1, 0, 5))]
    here, there = (Group(((0, 1),), (Segment(1, 0, 5, (rank, rank)),)) for rank in (0, 1))  # nobody sees it in either
    assert readings([*node, here], [there, *node], tree) == []
    once, thrice = Plan.from_groups("A", [*node, here]), Plan.from_groups("B", [here, *node, there, here])
    compared = compare(once, thrice, tree)
    assert compared.same.tolist() == [[0, 1], [1, 0]]
    assert [only.tolist() for only in compared.only] == [[], [2, 3]]
    twice = Plan.from_groups("A", [*node, here, there])
    assert compare(thrice, twice, tree).same.tolist() == [[0, 1], [1, 0], [2, 2]]
    assert (compared.nodes.tolist(), compared.same_rows.tolist()) == ([1], [False])


def unwrapped(text: str) -> str:
    """The text on one line."""
    return " ".join(text.split())


def test_what_is_read_beside_a_node() -> None:
    tree = Tree.from_levels([1, 2, 12], [10, 5, 3])
    found = difference(tree, "query", "deft-node")
    lines = reading_lines(tuple(e.plan for e in found.entries), found.names, found.comparison, tree, 12)
    assert [re.sub(r" with rows [-0-9/. more]+", "", line) for line in lines] == [
        "n0[0:10]: query reads it 12 times, together with 14 nodes below it; deft-node once, alone",
        "n1[0:5]: query reads it 6 times, together with 7 nodes; deft-node once, alone; "
        "the same for 1 more node of depth 1",
        "n3[0:3]: both read it once; query together with n0, n1, deft-node alone; "
        "the same for 11 more nodes of depth 2",
    ]
    with_chunks = difference(Tree.parse("200(3)"), "deft-flatten", "deft-node")
    assert "deft-flatten in" not in str(with_chunks)
    assert "in 2 pieces [0:128] [128:200] with rows 0-0, partly together with n1; deft-node once" in unwrapped(
        str(with_chunks)
    )


def test_many_kinds_are_told_without_depths() -> None:
    chain = Tree.from_parents(list(range(-1, 29)), [200] * 30)
    text = difference(chain, "deft-node", "deft-node-chunk").text()
    assert "  n0[0:200]: " in text
    assert "; the same for 29 more nodes of depths 1-29\n" in text


@pytest.mark.full
def test_a_tree_of_a_thousand_leaves_gives_a_short_text() -> None:
    tree = Tree.parse("1,4,16,64,256,1024/256,8,256,64,32,256")
    names = [name for name in strategy_names() if name != "specinfer"]  # whose plan is too large
    for first, second in zip(names, (*names[1:], names[0]), strict=True):
        lines = difference(tree, first, second).text().splitlines()
        assert max(map(len, lines)) <= 80
        assert len(lines) < 150  # 10,000 characters or less


def test_work_grows_with_nodes_at_most() -> None:
    trees = Tree.parse("1,4,16,64/256,8,256,64"), Tree.parse("1,4,16,64,256,1024/256,8,256,64,32,256")
    few, many = (calls(lambda: difference(tree, "query", "fasttree").text()) for tree in trees)  # noqa: B023
    assert many < 16 * few  # of 85 and 1,365 nodes


def test_a_tree_without_rows() -> None:
    found = difference(Tree.from_parents([-1], [5], rows=[]), "query", "deft-flatten")
    assert found.none
    assert json.loads(found.to_json())["nodes"] == []


def test_the_same_groups_in_other_tiles() -> None:
    found = difference(few_shot(), "deft-node-chunk", "fasttree")
    assert not found.none
    assert "all 72 groups are in both, with the same rows and segments; their tiles differ\n" in found.text()
    assert "nodes read differently" not in found.text()
    assert "padding_waste" in found.text()


def test_options_tell_strategies_of_one_name_apart() -> None:
    text = unwrapped(difference(few_shot(), strategies.deft_flatten(64), strategies.deft_flatten(256)).text())
    assert "groups only in deft-flatten(block=64): " in text
    assert "; deft-flatten(block=256) in 16 pieces " in text


def test_auto_stands_for_its_pick() -> None:
    tree = few_shot()
    pick = explain(tree, ["query"]).best
    assert difference(tree, "auto", pick).none
    assert difference(tree, pick, "auto").none
    there, back = difference(tree, "auto", "query"), difference(tree, "query", "auto")
    assert there.entries[0].reason.startswith("chosen by auto: ")
    assert [str(entry.strategy) for entry in there.entries] == [str(pick), "query"]
    assert [str(entry.strategy) for entry in back.entries] == ["query", str(pick)]


def test_estimates_side_by_side() -> None:
    found = difference(few_shot(), "deft-node", "query")
    one, two = (entry.estimate for entry in found.entries)
    rows = [re.split(r"  +", line) for line in found.text().partition("\nestimate ")[2].splitlines()]
    assert rows[0][-3:] == ["deft-node", "query", "second/first"]
    assert [row[0] for row in rows[1:]] == [*(field.name for field in dataclasses.fields(Account)), "padding_waste"]
    for name, first, second, ratio in rows[1:]:
        amounts = getattr(one, name), getattr(two, name)
        assert (first, second) == (amount_text(name, amounts[0]), amount_text(name, amounts[1]))
        equal = amounts[0] == amounts[1]
        assert ratio == ("=" if equal else f"{amounts[1] / amounts[0]:.2f}")
    back = difference(few_shot(), "query", "deft-node").text()
    assert re.search(r"^partial_bytes +0 B +1\.3 MiB +-$", back, re.MULTILINE)


def test_units_follow_the_names_of_fields() -> None:
    assert amount_text("kv_bytes", 1536) == "1.5 KiB"
    assert amount_text("useful_flops", 2500) == "2.5 kFLOP"
    assert amount_text("time_us", 12.34) == "12.3 us"
    assert amount_text("padding_waste", 0.125) == "12.5 %"
    assert (amount_text("items", 12), amount_text("waves", 1.234)) == ("12", "1.23")


def test_json_names_all_groups_and_nodes() -> None:
    found = difference(reasoning(), "deft-node", "fasttree", Shape(4, 2, 64), "l40s")
    value = json.loads(found.to_json())
    assert list(value) == [
        "format", "tree", "shape", "target", "strategies", "same_groups", "only", "nodes", "only_groups",
        "different_nodes", "differs", "words", "drawing",
    ]  # fmt: skip
    explained = json.loads(explain(reasoning(), ["deft-node", "fasttree"], Shape(4, 2, 64), "l40s").to_json())
    groups = [strategy.pop("groups") for strategy in explained["strategies"]]
    for strategy in explained["strategies"]:
        del strategy["timeline"]
        kept = [number in strategy["shown_groups"] for number in strategy["items"]["group"]]
        strategy["items"] = {name: list(itertools.compress(column, kept)) for name, column in strategy["items"].items()}
    for field in ("format", "tree", "shape", "target", "strategies"):
        assert value[field] == explained[field]
    assert value["same_groups"] == len(found.comparison.same)
    assert value["only"] == [[g for g in of if g not in other] for of, other in (groups, groups[::-1])]
    assert [entry["node"] for entry in value["nodes"]] == found.comparison.nodes.tolist()
    for entry in value["nodes"]:
        node = entry["node"]
        assert list(entry) == ["node", "depth", "tokens", "same_rows", "groups"]
        assert (entry["depth"], entry["tokens"]) == (reasoning().topology.depth[node], reasoning().tokens[node])
        for positions, only in zip(entry["groups"], value["only"], strict=True):
            reading = [i for i, group in enumerate(only) if any(s["node"] == node for s in group["segments"])]
            assert positions == reading


def test_assumed_shape_is_said() -> None:
    assert "(assumed: no shape was given)" in difference(few_shot(), "query", "deft-node").text()
    paged = difference(few_shot(), "query", "deft-node", Shape(32, 8, 128, page_size=16)).text()
    assert "assumed" not in paged
    assert "page_size 16" in paged


def test_bad_arguments() -> None:
    tree = Tree.parse("10(5*2)")
    for pair in (("deft", "query"), ("query", "all"), (3, "query")):
        with pytest.raises(StrategyError, match="is not registered"):
            difference(tree, *pair)
    with pytest.raises(BackendError):
        difference(tree, "query", "deft-node", target="h2000")
    for pair in ((Wrong(), "query"), ("query", Wrong())):
        with pytest.raises(PlanError):
            difference(tree, *pair)
    for pair in (("specinfer", "query"), ("query", "specinfer")):
        with pytest.raises(StrategyError, match="has a plan of 1,397,760 segments and rows"):
            difference(Tree.parse("1,4,16,64,256,1024/256,8,256,64,32,256"), *pair)
    with pytest.raises(ShapeError, match="shared memory"):
        difference(Tree.parse("100(10*4)"), "fasttree", "query", Shape(32, 1, 512, dtype="fp32"))


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = difference(Tree.parse("1,4/100,10"), "deft-node", "auto")
    assert cli.main(["explain", "1,4/100,10", "--diff", "deft-node", "auto"]) == 0
    assert capsys.readouterr().out == f"{found}\n"
    options = ["--heads", "16:2", "--target", "a100", "--groups", "1"]
    found = difference(Tree.parse("1,4/100,10"), "query", "deft-flatten", Shape(16, 2, 128), "a100")
    assert cli.main(["explain", "1,4/100,10", "--diff", "query", "deft-flatten", *options]) == 0
    assert capsys.readouterr().out == f"{found.text(1)}\n"
    assert cli.main(["explain", "1,4/100,10", "--diff", "query", "deft-flatten", *options, "--json"]) == 0
    assert capsys.readouterr().out == f"{found.to_json()}\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--diff", "query", "auto", "--strategy", "auto"], "strategy = auto: excludes --diff"),
        (["--diff", "query"], "'--diff' requires 2 arguments"),
        (["--diff", "query", "all"], "strategy = all: is not registered"),
    ],
)
def test_errors_of_the_command(capsys: pytest.CaptureFixture[str], options: list[str], expected: str) -> None:
    assert cli.main(["explain", "1,4/100,10", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert expected in printed.err
