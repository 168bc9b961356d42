"""Plan: construction, text and JSON forms, malformed plans, and `verify` against a brute-force check of the law."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples, forests, obeys_law, plan_by_row_classes, visible
from support.h200 import H200
from treegen import Shape, Tree, strategies
from treegen.ir.errors import FormatError, PlanError
from treegen.ir.groups import Group, Segment
from treegen.ir.plan import Plan
from treegen.ir.verify import verify
from treegen.strategies import strategy_from, strategy_names
from treegen.target.problem import Problem

SHAPE = Shape(4, 2, 16, dtype="fp32")

GROUPS = [
    Group(((0, 4),), (Segment(0, 0, 9, (0, 4)),)),
    Group(((0, 1), (2, 4)), (Segment(1, 0, 5, (0, 1)), Segment(2, 3, 8, (1, 3)), Segment(2, 8, 9, (0, 0)))),
]
"""Made by hand: the second group has two rank intervals, a mask, and a segment that is read but not seen."""

ARRAYS = {
    "row_indptr": [0, 1, 3],
    "row_lo": [0, 0, 2],
    "row_hi": [4, 1, 4],
    "segment_indptr": [0, 1, 4],
    "node": [0, 1, 2, 2],
    "start": [0, 0, 3, 8],
    "stop": [9, 5, 8, 9],
    "seen_lo": [0, 0, 1, 0],
    "seen_hi": [4, 1, 3, 0],
}
"""The arrays of GROUPS."""


def plan_of(name: str, tree: Tree) -> Plan:
    return strategy_from(name).plan(Problem(tree, SHAPE, H200))


def test_from_groups() -> None:
    plan = Plan.from_groups("by-hand", GROUPS)
    assert {name: getattr(plan, name).tolist() for name in ARRAYS} == ARRAYS
    assert len(plan) == len(plan.groups) == 2
    assert list(plan.groups) == GROUPS
    assert plan.groups[-1] == GROUPS[1]
    assert plan.groups[0:1] == GROUPS[:1]
    with pytest.raises(IndexError):
        plan.groups[2]


def test_derived_arrays() -> None:
    plan = Plan("by-hand", **{name: np.array(values) for name, values in ARRAYS.items()})
    assert plan.group_rows.tolist() == [4, 3]
    assert plan.row_interval_group.tolist() == [0, 1, 1]
    assert plan.segment_group.tolist() == [0, 1, 1, 1]
    assert plan.read_tokens.tolist() == [9, 5, 5, 1]
    assert plan.masked.tolist() == [False, True, True, True]
    assert [group.num_rows for group in plan.groups] == [4, 3]
    assert [group.masked for group in plan.groups] == [False, True]


def test_rank_intervals_of_group_rows() -> None:
    """Rows 0, 1, 2 of group 1 have the ranks 0, 2, 3: an interval of rows may reach over several intervals of ranks."""
    plan = Plan.from_groups("by-hand", GROUPS)
    lo, hi = np.array([0, 0, 1, 2, 1, 1]), np.array([4, 2, 3, 3, 1, 2])
    index, rank_lo, rank_hi = plan.rank_intervals(np.array([0, 1, 1, 1, 1, 1]), lo, hi)
    assert list(zip(index.tolist(), rank_lo.tolist(), rank_hi.tolist(), strict=True)) == [
        (0, 0, 4),
        (1, 0, 1),
        (1, 2, 3),
        (2, 2, 4),
        (3, 3, 4),
        (5, 2, 3),
    ]


def test_a_plan_cannot_be_changed() -> None:
    plan = Plan.from_groups("by-hand", GROUPS)
    with pytest.raises(ValueError, match="read-only"):
        plan.start[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.strategy = "another"


def test_text_of_a_plan_by_hand() -> None:
    plan = Plan.from_groups("by-hand", GROUPS)
    assert str(plan) == "\n".join(
        [
            "plan by-hand: 2 groups, 4 segments",
            "  group 0: rows 0-3 | n0[0:9]",
            "  group 1: rows 0-0,2-3 | n1[0:5] seen 0-0, n2[3:8] seen 1-2, n2[8:9] unseen",
        ]
    )
    assert plan.text(most_groups=1).splitlines()[1:] == ["  group 0: rows 0-3 | n0[0:9]", "  ... 1 more groups"]
    assert str(Plan.from_groups("empty", [])) == "plan empty: 0 groups, 0 segments"


def test_text_is_short() -> None:
    text = str(plan_of("query", Tree.parse("9(1*5000)")))
    assert len(text.splitlines()) == 34
    assert text.endswith("... 4968 more groups")


GOLDEN_TREES = {
    "few-shot": "1,4/300,20",
    "reasoning": "120(90(40,7(3*2)),200)+15",
    "shared-nothing": "9*3",
}


@pytest.mark.parametrize("name", ["query", "deft-node", "deft-node-chunk", "deft-flatten"])
@pytest.mark.parametrize("tree", GOLDEN_TREES)
def test_plan_text(tree: str, name: str, golden: Callable[[str], None]) -> None:
    golden(str(plan_of(name, Tree.parse(GOLDEN_TREES[tree]))))


@pytest.mark.parametrize("name", ["query", "deft-node", "deft-node-chunk", "deft-flatten"])
def test_plan_text_of_rows_inside(name: str, golden: Callable[[str], None]) -> None:
    """A prompt being prefilled beside a chat that is decoded, two parallel samples, and a row that sees nothing."""
    tree = Tree.from_parents(
        [-1, 0, 0, 2, -1],
        [64, 8, 0, 130, 5],
        rows=[(1, sees) for sees in range(1, 9)] + [(3, 130), (3, 130), (4, 0), (0, 64)],
    )
    golden(str(plan_of(name, tree)))


@examples(60)
@given(tree=forests(25), seed=st.integers(0, 2**20), unseen=st.booleans())
def test_json_round_trip(tree: Tree, seed: int, unseen: bool) -> None:
    plans = [plan_of(name, tree) for name in strategy_names()] + [plan_by_row_classes(tree, seed, 3, unseen=unseen)]
    for plan in plans:
        back = Plan.from_json(plan.to_json())
        assert back.text() == plan.text()
        assert back.to_json() == plan.to_json()
        assert list(back.groups) == list(plan.groups)


def test_json_form() -> None:
    form = json.loads(Plan.from_groups("by-hand", GROUPS).to_json())
    assert {"format": 1, "kind": "plan", "strategy": "by-hand", **ARRAYS}.items() <= form.items()
    assert list(Plan.from_json(json.dumps(form)).groups) == GROUPS


# Malformed plans


def replaced(group: int, segment: int | None = None, **changes: object) -> list[Group]:
    """GROUPS with some fields of one group, or of one of its segments, changed."""
    groups = list(GROUPS)
    if segment is None:
        groups[group] = dataclasses.replace(groups[group], **changes)
    else:
        segments = list(groups[group].segments)
        segments[segment] = dataclasses.replace(segments[segment], **changes)
        groups[group] = dataclasses.replace(groups[group], segments=tuple(segments))
    return groups


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        (replaced(1, rows=((2, 4), (0, 1))), "rows"),
        (replaced(1, rows=((0, 3), (2, 4))), "rows"),
        (replaced(1, rows=((0, 1), (2, 2), (2, 4))), "rows"),
        (replaced(1, rows=((0, 1), (4, 2))), "rows"),
        (replaced(1, rows=((-1, 1), (2, 4))), "rows"),
        (replaced(1, 0, start=-1), "segments"),
        (replaced(1, 0, start=5), "segments"),
        (replaced(1, 0, stop=0), "segments"),
        (replaced(1, 0, node=-1), "segments"),
        (replaced(1, 1, seen=(2, 1)), "seen intervals"),
        (replaced(1, 1, seen=(-1, 1)), "seen intervals"),
        (replaced(1, 1, seen=(1, 4)), "seen intervals"),
    ],
)
def test_malformed_groups_are_rejected(groups: list[Group], reason: str) -> None:
    with pytest.raises(PlanError, match=f"group 1 of by-hand.*{reason}") as caught:
        Plan.from_groups("by-hand", groups)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("row_indptr", [0, 1, 2]),
        ("row_indptr", [1, 1, 3]),
        ("row_indptr", [0, 4, 3]),
        ("row_indptr", [0, 3]),
        ("row_indptr", []),
        ("row_lo", [0, 0]),
        ("segment_indptr", [0, 1, 3]),
        ("segment_indptr", [0, 0, 1, 4]),
        ("node", [0, 1, 2]),
        ("stop", [9, 5, 8, 9, 9]),
        ("seen_hi", []),
    ],
)
def test_arrays_that_contradict_each_other_are_rejected(name: str, values: list[int]) -> None:
    arrays = {key: np.array(entries, np.int32) for key, entries in {**ARRAYS, name: values}.items()}
    with pytest.raises(PlanError) as caught:
        Plan("by-hand", **arrays)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"stop": [9, 5, 8]}, PlanError, ("stop", "3 entries")),
        ({"stop": 3}, PlanError, ("plan.stop = 3", "not a list")),
        ({"stop": [9, 5, 8, 2.5]}, PlanError, ("plan.stop[3] = 2.5", "not an integer")),
        ({"stop": [9, 5, 8, 2**31]}, PlanError, ("plan.stop[3]", "2147483648")),
        ({"stop": [[9, 5, 8, 9]]}, PlanError, ("plan.stop", "one-dimensional")),
        ({"extra": 1}, FormatError, ("plan.extra = 1", "unknown field")),
        ({"kind": "tree"}, FormatError, ("plan.kind", "another kind")),
        ({"format": 2}, FormatError, ("plan.format = 2", "newer", "upgrade")),
        ({"format": "1"}, FormatError, ("plan.format = 1", "not a format version")),
    ],
)
def test_bad_json_is_rejected(change: dict[str, object], error: type[Exception], words: tuple[str, ...]) -> None:
    form = json.loads(Plan.from_groups("by-hand", GROUPS).to_json())
    with pytest.raises(error) as caught:
        Plan.from_json(json.dumps({**form, **change}))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["strategy", *ARRAYS])
def test_missing_json_fields_are_named(name: str) -> None:
    form = json.loads(Plan.from_groups("by-hand", GROUPS).to_json())
    del form[name]
    with pytest.raises(FormatError, match=rf"plan\.{name} .*missing"):
        Plan.from_json(json.dumps(form))


# verify


def tree_for_verify() -> Tree:
    """100 over (10, 20 over (5, 5)), and 7."""
    return Tree.parse("100(10,20(5*2))+7")


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([], "node 0 token 0 = is seen in no group"),
        ([Group(((0, 3),), (Segment(0, 0, 100, (0, 3)),))], "node 1 token 0 = is seen in no group"),
    ],
)
def test_uncovered_tokens_are_named(groups: list[Group], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        verify(Plan.from_groups("by-hand", groups), tree_for_verify())
    for word in words.split(" = "):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("group", "changed", "reason"),
    [
        (0, Group(((0, 4),), (Segment(0, 0, 100, (0, 4)),)), "invisible"),
        (0, Group(((0, 2),), (Segment(0, 0, 100, (0, 2)),)), "leaves visible pairs"),
        (0, Group(((1, 3),), (Segment(0, 0, 100, (0, 2)),)), "leaves visible pairs"),
        (0, Group(((0, 3),), (Segment(0, 0, 100, (0, 3)), Segment(0, 99, 100, (1, 2)))), "seen elsewhere"),
        (0, Group(((0, 3),), (Segment(0, 0, 100, (0, 3)), Segment(5, 0, 1, (0, 1)))), "invisible"),
        (2, Group(((1, 3),), (Segment(2, 0, 21, (0, 2)),)), "beyond the end"),
        (2, Group(((1, 3),), (Segment(2, 0, 20, (0, 2)), Segment(2, 20, 21, (0, 0)))), "beyond the end"),
        (2, Group(((1, 3),), (Segment(6, 0, 20, (0, 2)),)), "node outside 0..5"),
        (5, Group(((3, 5),), (Segment(5, 0, 7, (0, 1)),)), "ranks beyond 3"),
        (1, Group(((1, 2),), (Segment(1, 0, 10, (0, 1)),)), "invisible"),
    ],
)
def test_the_offending_group_is_named(group: int, changed: Group, reason: str) -> None:
    tree = tree_for_verify()
    groups = list(plan_of("deft-node", tree).groups)
    verify(Plan.from_groups("by-hand", groups), tree)
    groups[group] = changed
    with pytest.raises(PlanError) as caught:
        verify(Plan.from_groups("by-hand", groups), tree)
    assert f"group {group} of plan by-hand" in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_plan_is_attached_as_a_note() -> None:
    tree = tree_for_verify()
    plan = Plan.from_groups(
        "by-hand", [*plan_of("deft-node", tree).groups, Group(((0, 1),), (Segment(0, 0, 1, (0, 1)),))]
    )
    with pytest.raises(PlanError) as caught:
        verify(plan, tree)
    if hasattr(caught.value, "__notes__"):  # from Python 3.11
        assert caught.value.__notes__ == [str(plan)]


def test_reading_without_seeing_is_lawful() -> None:
    """`medusa` and `specinfer` read what they do not see; the law is about what is seen."""
    tree = tree_for_verify()
    groups = [
        *plan_of("deft-node", tree).groups,
        Group(((0, 4),), (Segment(5, 0, 7, (0, 0)), Segment(0, 3, 9, (2, 2)))),
    ]
    verify(Plan.from_groups("by-hand", groups), tree)


def test_a_tree_without_rows_needs_no_groups() -> None:
    tree = Tree.from_parents([-1], [5], rows=[])
    verify(Plan.from_groups("nothing", []), tree)
    for name in strategy_names():
        assert len(plan_of(name, tree)) == 0


def test_verify_is_exact_on_large_trees() -> None:
    """One missing token among 64 million pairs is found, and quickly: no work per token."""
    tree = Tree.from_levels([1, 4, 16, 512], [1024, 256, 128, 32_000])
    plan = plan_of("deft-node", tree)
    verify(plan, tree)
    stop = plan.stop.copy()
    stop[300] -= 1
    with pytest.raises(PlanError, match="is seen in no group"):
        verify(dataclasses.replace(plan, stop=stop), tree)


def mutated(groups: list[Group], source: random.Random) -> list[Group]:
    """`groups` with one small change: to a bound, or an entry left out, doubled or moved to another node."""
    index = source.randrange(len(groups))
    group = groups[index]
    number = source.randrange(len(group.segments))
    segment = group.segments[number]
    step = source.choice((-1, 1))
    kind = source.choice(("start", "stop", "seen lo", "seen hi", "node", "rank lo", "rank hi", "segment", "group"))
    if kind == "group":
        return groups[:index] + [group] * source.choice((0, 2)) + groups[index + 1 :]
    if kind in ("rank lo", "rank hi"):
        place = source.randrange(len(group.rows))
        lo, hi = group.rows[place]
        interval = (lo + step, hi) if kind == "rank lo" else (lo, hi + step)
        changed = dataclasses.replace(group, rows=(*group.rows[:place], interval, *group.rows[place + 1 :]))
        return [*groups[:index], changed, *groups[index + 1 :]]
    lo, hi = segment.seen
    segments = {
        "start": [dataclasses.replace(segment, start=segment.start + step)],
        "stop": [dataclasses.replace(segment, stop=segment.stop + step)],
        "seen lo": [dataclasses.replace(segment, seen=(lo + step, hi))],
        "seen hi": [dataclasses.replace(segment, seen=(lo, hi + step))],
        "node": [dataclasses.replace(segment, node=segment.node + step)],
        "segment": [segment] * source.choice((0, 2)),
    }[kind]
    changed = dataclasses.replace(group, segments=(*group.segments[:number], *segments, *group.segments[number + 1 :]))
    return [*groups[:index], changed, *groups[index + 1 :]]


def malformed(groups: list[Group]) -> bool:
    """Whether a plan of these groups contradicts itself, whatever the tree."""
    for group in groups:
        bounds = [0, *(bound for interval in group.rows for bound in interval)]
        if bounds != sorted(bounds) or any(lo == hi for lo, hi in group.rows):
            return True
        for segment in group.segments:
            if segment.node < 0 or not 0 <= segment.start < segment.stop:
                return True
            if not 0 <= segment.seen[0] <= segment.seen[1] <= group.num_rows:
                return True
    return False


@pytest.mark.parametrize("make", ["query", "deft-node", "deft-node-chunk", "deft-flatten", "row-configs"])
@examples(150)
@given(tree=forests(12, 12, rows=("leaves", "ends", "inside", "mixed")), seed=st.integers(0, 2**20))
def test_verify_agrees_with_brute_force_on_mutated_plans(make: str, tree: Tree, seed: int) -> None:
    """A small change is rejected if and only if it breaks the law: some, as widening an unseen segment, do not."""
    source = random.Random(seed)
    strategy = {
        "query": strategies.query(split=source.choice((None, 3))),
        "deft-node": strategies.deft_node(),
        "deft-node-chunk": strategies.deft_node_chunk(chunk=source.choice((3, 128))),
        "deft-flatten": strategies.deft_flatten(block=source.choice((5, 128))),
    }.get(make)
    if strategy is None:
        plan = plan_by_row_classes(tree, seed, source.randint(1, 3), unseen=True)
    else:
        plan = strategy.plan(Problem(tree, SHAPE, H200))
    verify(plan, tree)
    if not visible(tree).any():
        return
    for _ in range(10):
        groups = mutated(list(plan.groups), source)
        if malformed(groups):
            with pytest.raises(PlanError):
                Plan.from_groups("mutated", groups)
            continue
        changed = Plan.from_groups("mutated", groups)
        if obeys_law(changed, tree):
            verify(changed, tree)
        else:
            with pytest.raises(PlanError):
                verify(changed, tree)


def test_some_mutations_are_lawful() -> None:
    """So that the test above cannot pass by rejecting everything."""
    tree = Tree.parse("9*4")
    source = random.Random(0)
    outcomes = set()
    for seed in range(60):
        plan = plan_by_row_classes(tree, seed, 3, unseen=True)
        groups = mutated(list(plan.groups), source)
        if not malformed(groups):
            outcomes.add(obeys_law(Plan.from_groups("mutated", groups), tree))
    assert outcomes == {True, False}
