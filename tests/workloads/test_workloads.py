"""Workloads: their segments give the same trees as the step by step replay, and a bad text is one line."""

import json
from pathlib import Path

import numpy as np
import pytest

from treegen import Tree
from treegen.ir.errors import FormatError, TreeError
from treegen.workloads.recorded_decodings import Draft, Template, load_templates
from treegen.workloads.traces import Decode, few_shot, generate, replay, verification, workload_from

TEMPLATE = {
    "parent": [-1, 0, 0, 0, 2, 2],
    "tokens": [5, 3, 4, 0, 2, 6],
    "start": [-4, 1, 1, 1, 6, 6],
    "end": [0, 3, 4, 0, 7, 11],
}
DRAFT = {"paths": [[0], [1], [0, 0]], "accepted": [[2, 1, 3], [2, 1, 3]]}


def course(decode: Decode) -> dict[int, Tree]:
    """The tree at every step."""
    return {step: s.at(step) for s in decode.segments() for step in range(s.first, s.last + 1)}


def assert_same(tree: Tree, expected: Tree) -> None:
    assert tree.to_json() == expected.to_json()
    for name in ("depth", "preorder", "subtree", "prefix", "row_of_rank", "rank_lo", "rank_own", "rank_hi"):
        assert np.array_equal(getattr(tree.topology, name), getattr(expected.topology, name)), name
    for name in ("node", "start", "stop", "lo", "hi"):
        assert np.array_equal(getattr(tree.topology.spans, name), getattr(expected.topology.spans, name)), name


def assert_replays(template: Template) -> None:
    trees = course(replay(template))
    alive = [(template.start <= step) & (step <= template.end) for step in template.steps]
    assert list(trees) == [step for step, rows in zip(template.steps, alive, strict=True) if rows.any()]
    for step, tree in trees.items():
        assert_same(tree, template.at(step))


def test_few_shot() -> None:
    trees = course(few_shot(prompt=7, width=3, steps=5))
    assert list(trees) == [1, 2, 3, 4, 5]
    for step, tree in trees.items():
        assert_same(tree, generate.few_shot(7, 3, step))


def test_templates_are_replayed() -> None:
    template = Template(TEMPLATE["parent"], TEMPLATE["start"], TEMPLATE["end"])
    assert [(s.first, s.last) for s in replay(template).segments()] == [(1, 3), (4, 4), (6, 7), (8, 11)]
    assert_replays(template)
    for seed in range(3):
        assert_replays(generate.reasoning_template(seed, depth=3, width=4, prompt=20, thought=12))


def test_a_prompt_alone_is_one_step() -> None:
    assert list(course(replay(Template([-1], [-3], [0])))) == [0]


@pytest.mark.parametrize("name", ["reasoning_sorting128", "reasoning_docmerge", "reasoning_keyword"])
def test_recorded_templates_are_replayed(data_dir: Path, name: str) -> None:
    """At the borders of every segment of a few templates."""
    for template in load_templates(data_dir / "deft" / f"{name}.json")[::25]:
        steps = 0
        for segment in replay(template).segments():
            steps += len(segment.grown)
            for step in {segment.first, segment.last}:
                assert_same(segment.at(step), template.at(step))
        assert steps == len(np.unique(np.concatenate([np.arange(a, b + 1) for a, b in _alive(template)])))


def _alive(template: Template) -> list[tuple[int, int]]:
    bounds = zip(np.maximum(template.start, template.steps[0]).tolist(), template.end.tolist(), strict=True)
    return [(start, end) for start, end in bounds if start <= end]


def test_speculative_past_grows_by_what_was_accepted() -> None:
    trees = course(verification(Draft(((0,), (1,), (0, 0)), (2, 1, 3)), prompt=10))
    assert list(trees) == [1, 2, 3]
    for tree, prefix in zip(trees.values(), (10, 12, 13), strict=True):
        assert_same(tree, Tree.from_token_tree([(0,), (1,), (0, 0)], prefix))


def test_texts(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps([TEMPLATE, {**TEMPLATE, "start": [-4, 1, 1, 1, 6, 6]}]))
    (tmp_path / "d.json").write_text(json.dumps(DRAFT))
    (tmp_path / "odd#1:a=2").write_text(json.dumps(DRAFT))

    def steps(text: str) -> list[int]:
        workload = workload_from(text)
        assert workload.name == text
        return [len(course(decode)) for decode in workload.decodes]

    assert steps("few-shot") == [400]
    assert steps("few-shot:steps=3,width=2") == [3]
    assert steps("speculative:tokens=4,steps=6,accepted=2") == [6]
    assert steps("reasoning:seed=2,depth=1,thought=9") == [
        len(course(replay(generate.reasoning_template(2, depth=1, thought=9))))
    ]
    assert steps(f"{tmp_path}/t.json") == [10, 10]
    assert steps(f"{tmp_path}/t.json#1") == [10]
    assert steps(f"{tmp_path}/d.json") == steps(f"{tmp_path}/odd#1:a=2") == [3]
    (decode,) = workload_from(f"{tmp_path}/d.json:prompt=9").decodes
    assert [int(tree.tokens[0]) for tree in course(decode).values()] == [9, 11, 12]
    (decode,) = workload_from("speculative:seed=1,tokens=5,prompt=9,steps=3,accepted=2").decodes
    for step, tree in course(decode).items():
        assert_same(tree, generate.speculative(1, 5, 7 + 2 * step))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is neither a kind"),
        ("few", "is neither a kind"),
        ("few-shots", "is neither a kind"),
        ("few-shot:", "has no option ''"),
        ("few-shot:seed=1", "has no option 'seed'; use prompt=4000, width=20, steps=400"),
        ("few-shot:width", "gives width a value that is not a whole number"),
        ("few-shot:width=-2", "gives width a value that is not a whole number"),
        ("few-shot:width=2,width=2", "gives width twice"),
        ("few-shot:steps=0", "steps = 0: is not a positive integer"),
        ("few-shot:prompt=9000000", "prompt = 9000000"),
        ("speculative:accepted=0", "accepted = 0"),
        ("reasoning:depth=100000,width=100", "exceeds 1000000 nodes"),
        ("absent.json", "is neither a kind"),
        ("absent.json#3", "is neither a kind"),
        ("{t}#2", "names a file of 2 templates"),
        ("{t}:prompt=3", "gives options to recorded templates"),
        ("{d}#0", "holds one decoding"),
        ("{d}:seed=3", "has no option 'seed'; use prompt=1000"),
        ("{d}:prompt=0", "prompt = 0"),
    ],
)
def test_bad_texts(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "t.json").write_text(json.dumps([TEMPLATE, TEMPLATE]))
    (tmp_path / "d.json").write_text(json.dumps(DRAFT))
    with pytest.raises((FormatError, TreeError)) as caught:
        workload_from(text.format(t=tmp_path / "t.json", d=tmp_path / "d.json"))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"accepted": []}, "has no steps"),
        ({"accepted": [[1], [2]]}, r"accepted[1] = a list: differs from the first"),
        ({"accepted": [1, -1]}, "accepted[1] = -1"),
        ({"accepted": 3}, "is missing or not a list"),
        ({"paths": [[0], ["x"]]}, "paths[1]"),
        ({"paths": [[0, 0]]}, "paths"),
        ({"more": []}, "more = a list: is an unknown field"),
    ],
)
def test_bad_drafts(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps({**DRAFT, **change}))
    with pytest.raises((FormatError, TreeError)) as caught:
        workload_from(str(path))
    assert reason in str(caught.value)


def test_lengthening_is_checked() -> None:
    tree = Tree.from_parents([-1, 0, 0], [3, 0, 2])
    assert_same(tree.lengthened([4, 0, 9]), Tree.from_parents([-1, 0, 0], [4, 0, 9]))
    for tokens in ([4, 0], [4, 1, 9], [0, 0, 2], [4, 0, -1]):
        with pytest.raises(TreeError):
            tree.lengthened(tokens)
    with pytest.raises(TreeError, match="ends inside its node"):
        Tree.from_parents([-1], [5], rows=[(0, 3)]).lengthened([6])


def test_joined_trees_stand_side_by_side() -> None:
    trees = [Tree.parse("5(2*3)"), Tree.from_parents([-1, -1], [2, 0], rows=[(1, 0), (0, 1), (0, 2)])]
    forest = Tree.joined(trees)
    expected = Tree.from_parents(
        [-1, 0, 0, 0, -1, -1], [5, 2, 2, 2, 2, 0], rows=[(1, 2), (2, 2), (3, 2), (5, 0), (4, 1), (4, 2)]
    )
    assert_same(forest, expected)
    with pytest.raises(TreeError):
        Tree.joined([])
