"""Recorded trees under every strategy: all reasoning trees at five decoding steps each, and speculative token trees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.forests import obeys_law, path
from support.h200 import H200
from treegen import Shape, Tree
from treegen.backends import oracle
from treegen.backends.torch_program import TorchProgram
from treegen.ir.verify import verify, verify_schedule
from treegen.schedule.lower import lower
from treegen.strategies import deft_flatten, deft_node, query, strategy_from, strategy_names
from treegen.target.problem import Problem
from treegen.workloads.recorded_decodings import Template, load_templates

TINY = Shape(2, 1, 16, dtype="fp32")
LLAMA = Shape(32, 8, 128, dtype="bf16")
TREES = {"reasoning_sorting128": 100, "reasoning_docmerge": 50, "reasoning_keyword": 98}
PARTS = [(name, part) for name in TREES for part in range(4)]
"""Every fourth tree of a file is a test of its own, so that workers share them."""
DRAFTS = (32, 64, 128, 256)


def templates(data_dir: Path, name: str, part: int) -> list[Template]:
    found = load_templates(data_dir / "deft" / f"{name}.json")
    assert len(found) == TREES[name]
    return found[part::4]


def five_steps(template: Template) -> list[int]:
    """The first and the last step, and three between them, moved to the next one at which a row is alive."""
    steps = np.linspace(template.steps[0], template.steps[-1], 5).round().astype(int).tolist()
    alive = [int(template.start[(template.end >= step) & (template.end >= template.start)].min()) for step in steps]
    return [max(step, first) for step, first in zip(steps, alive, strict=True)]


def draft(data_dir: Path, size: int) -> list[list[int]]:
    paths: list[list[int]] = json.loads((data_dir / "deft" / f"speculative_{size}.json").read_text())["paths"]
    assert len(paths) == size - 1
    return paths


def assert_lawful(tree: Tree, *, searched: bool = True) -> None:
    """Every strategy's plan obeys the law, and its schedule writes every result once; with `searched`, auto's too."""
    for name in (*strategy_names(), *(["auto"] if searched else [])):
        plan = strategy_from(name).plan(Problem(tree, LLAMA, H200))
        verify(plan, tree)
        verify_schedule(lower(plan, Problem(tree, LLAMA, H200)), tree.num_rows)


def assert_computes_attention(tree: Tree) -> None:
    generator = torch.Generator().manual_seed(tree.num_rows)
    q = torch.randn(tree.num_rows, 2, 16, generator=generator)
    keys, values = (torch.randn(tree.kv.last_slot + 1, 1, 16, generator=generator) for _ in range(2))
    expected = oracle.reference(tree, q, keys, values)
    for name in strategy_names():
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        schedule = lower(strategy_from(name).plan(Problem(tree, TINY, H200)), Problem(tree, TINY, H200))
        TorchProgram(schedule, TINY, q.device)(q, keys, values, out, lse, 0.25, 1.0)
        assert max(oracle.error(out, expected[0]), oracle.error(lse, expected[1])) <= 1e-5, name


@pytest.mark.parametrize("name", TREES)
def test_templates_give_the_trees_of_the_recording(data_dir: Path, name: str) -> None:
    """Rows that are alive at a step see their own tokens so far and their ancestors' whole runs, by plain loops."""
    recorded: list[dict[str, Any]] = json.loads((data_dir / "deft" / f"{name}.json").read_text())
    for entry, template in list(zip(recorded, load_templates(data_dir / "deft" / f"{name}.json"), strict=True))[::5]:
        for step in five_steps(template):
            expected = []
            for node, (start, end) in enumerate(zip(entry["start"], entry["end"], strict=True)):
                if start <= step <= end:
                    runs = [(node, step - start + 1)]
                    while (above := entry["parent"][runs[-1][0]]) >= 0:
                        runs.append((above, entry["tokens"][above]))
                    expected.append(runs)
            tree, nodes = template.at(step), template.nodes_at(step).tolist()
            found = [[(nodes[node], sees) for node, sees in path(tree, row)] for row in range(tree.num_rows)]
            assert found == expected
            assert nodes == sorted({node for runs in expected for node, _ in runs})
            assert tree.tokens.sum() == tree.unique_tokens


@pytest.mark.parametrize(
    ("name", "part"), [pytest.param(*each, marks=[pytest.mark.full] if each[1] % 2 else []) for each in PARTS]
)
def test_reasoning_trees_obey_the_law(data_dir: Path, name: str, part: int) -> None:
    """Every tree at two of its five steps, every other one also as searched; the full sweep takes all of them."""
    for index, template in enumerate(templates(data_dir, name, part)):
        steps = five_steps(template)
        assert_lawful(template.at(steps[index % 5]), searched=index % 2 == 0)
        assert_lawful(template.at(steps[(index + 2) % 5]), searched=False)


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_reasoning_trees_are_computed_right(data_dir: Path, name: str, part: int) -> None:
    """Every tree at one of its five steps; the full sweep takes all of them."""
    for index, template in enumerate(templates(data_dir, name, part)):
        assert_computes_attention(template.at(five_steps(template)[index % 5]))


@pytest.mark.full
@pytest.mark.parametrize(("name", "part"), PARTS)
def test_reasoning_trees_are_right_at_every_step(data_dir: Path, name: str, part: int) -> None:
    for template in templates(data_dir, name, part):
        for step in five_steps(template):
            assert_lawful(template.at(step), searched=True)
            assert_computes_attention(template.at(step))


@pytest.mark.parametrize("size", DRAFTS)
@pytest.mark.parametrize("prefix", [0, 1000])
def test_speculative_trees(data_dir: Path, size: int, prefix: int) -> None:
    tree = Tree.from_token_tree(draft(data_dir, size), prefix)
    assert (tree.num_rows, tree.unique_tokens) == (size, prefix + size)
    assert tree.positions().tolist() == [prefix, *(prefix + len(ranks) for ranks in draft(data_dir, size))]
    assert_lawful(tree)
    for strategy in (query(), deft_node(), deft_flatten()):
        assert obeys_law(strategy.plan(Problem(tree, TINY, H200)), tree)
    assert_computes_attention(tree)


@pytest.mark.parametrize("size", DRAFTS)
def test_speculative_trees_share_their_context(data_dir: Path, size: int) -> None:
    """Kept apart by rows, a draft over 1,000 tokens reads them once per row; in blocks, all rows read them once."""
    tree = Tree.from_token_tree(draft(data_dir, size), 1000)
    assert tree.path_tokens == query().plan(Problem(tree, LLAMA, H200)).read_tokens.sum() >= 1000 * size
    assert deft_flatten().plan(Problem(tree, LLAMA, H200)).read_tokens.sum() == 1000 + size
