"""Generated trees: as described, equal for equal seeds, and checked arguments."""

import numpy as np
import pytest

from treegen.ir.errors import TreeError
from treegen.ir.tree.tree_drawing import draw
from treegen.workloads.generate import few_shot, reasoning, reasoning_template, speculative


def test_few_shot() -> None:
    tree = few_shot(prompt=4000, width=20, step=200)
    assert tree.text == "1,20/4000,200"
    assert tree.unique_tokens == 4000 + 20 * 200
    assert tree.path_tokens == 20 * 4200


@pytest.mark.parametrize("make", [reasoning, speculative])
def test_equal_seeds_give_equal_trees(make) -> None:
    assert make(seed=5).to_json() == make(seed=5).to_json()
    assert len({make(seed=seed).signature() for seed in range(8)}) == 8


@pytest.mark.parametrize(("make", "name"), [(reasoning, "reasoning"), (speculative, "speculative")])
def test_seed_0_stays_what_it_is(make, name: str, golden) -> None:
    golden(f"{name}\n{draw(make(seed=0))}")


@pytest.mark.parametrize("seed", range(20))
def test_reasoning_rounds(seed: int) -> None:
    template = reasoning_template(seed, depth=6, width=10, prompt=500, thought=100)
    assert len(template.parent) == 1 + 6 * 10
    assert (template.start[0], template.end[0]) == (-499, 0)
    children = template.start[1:]
    assert (children == template.end[template.parent[1:]] + 1).all()
    lengths = (template.end - template.start + 1)[1:]
    assert (lengths >= 1).all()
    assert lengths.max() >= 2 * lengths.min()
    survivors = len(np.unique(template.parent[11:]))
    assert 5 <= survivors <= 15


def test_reasoning_prunes_and_grows() -> None:
    template = reasoning_template(3)
    steps = np.linspace(template.steps[0], template.steps[-1], 40).astype(int).tolist()
    trees = [template.at(step) for step in steps]
    assert max(tree.num_rows for tree in trees) <= 3 * 10
    assert all(int(tree.tokens[0]) == 1000 for tree in trees)
    assert all(len(tree.parent) < len(template.parent) for tree in trees)
    assert reasoning(seed=3, step=steps[7]).to_json() == trees[7].to_json()


def test_narrow_and_shallow_reasoning() -> None:
    tree = reasoning(seed=0, depth=1, width=1, prompt=1, thought=1)
    assert len(tree.parent) == 2
    assert tree.num_rows == 1


@pytest.mark.parametrize("tokens", [1, 2, 32, 300])
def test_speculative(tokens: int) -> None:
    tree = speculative(seed=1, tokens=tokens, prefix=77)
    assert tree.num_rows == tokens
    assert tree.tokens.tolist() == [77] + [1] * tokens
    assert tree.row_node.tolist() == list(range(1, tokens + 1))
    depth = tree.topology.depth[1:] - 1
    assert depth.max() <= 4
    assert (np.diff(depth) >= 0).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda: few_shot(width=0),
        lambda: few_shot(prompt=-1),
        lambda: few_shot(step=2.5),
        lambda: reasoning(depth=0),
        lambda: reasoning(depth=1000, width=1001),
        lambda: reasoning(step=0),
        lambda: reasoning(step=10**6),
        lambda: reasoning(seed=None),
        lambda: speculative(tokens=0),
        lambda: speculative(prefix=True),
        lambda: speculative(tokens=10**9),
    ],
)
def test_bad_arguments(call) -> None:
    with pytest.raises(TreeError) as caught:
        call()
    assert "\n" not in str(caught.value)
