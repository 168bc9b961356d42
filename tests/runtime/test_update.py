"""Updates: another tree in the same kernel, with the choice of `auto` kept for as long as it may be."""

from __future__ import annotations

import pytest
import torch

import treegen
from treegen import Shape, Tree
from treegen.backends import oracle
from treegen.search import auto as choosing
from treegen.strategies import Choice, cohort, strategy_from
from treegen.target.problem import Problem
from treegen.target.targets import target_from

SHAPE = Shape(4, 2, 16, dtype="fp32")


@pytest.fixture
def chosen_for(monkeypatch: pytest.MonkeyPatch) -> list[Tree]:
    """The trees that `auto` chose for, in order."""
    found: list[Tree] = []
    choose = choosing.by_estimate

    def counted(problem: Problem, **options: bool) -> Choice:
        found.append(problem.tree)
        return choose(problem, **options)

    monkeypatch.setattr(choosing, "by_estimate", counted)
    return found


def check(kernel: treegen.Kernel) -> None:
    """The kernel's attention over its tree is the oracle's."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(kernel.tree.num_rows, 4, 16, generator=generator)
    k, v = torch.randn(2, kernel.tree.kv.last_slot + 1, 2, 16, generator=generator)
    out, lse = kernel(q, k, v, return_lse=True)
    expected_out, expected_lse = oracle.reference(kernel.tree, q, k, v)
    assert oracle.error(out, expected_out) < 1e-5
    assert oracle.error(lse, expected_lse) < 1e-5


def test_a_growing_tree_is_chosen_for_once_a_bucket(chosen_for: list[Tree]) -> None:
    tree = Tree.parse("1,16/600,40")
    kernel = treegen.compile(tree, shape=SHAPE)
    chosen = kernel.choice
    for length in range(41, 45):
        kernel.update(Tree.parse(f"1,16/600,{length}"))
        assert kernel.choice.strategy == chosen.strategy
        assert kernel.choice.reason == f"kept from an earlier tree of the same bucket: {chosen.reason}"
        check(kernel)
    assert chosen_for == [tree]
    assert "kept from an earlier tree" in kernel.explain()
    other = Tree.parse("1,16/600,400")
    kernel.update(other)
    check(kernel)
    assert chosen_for == [tree, other]
    assert not kernel.choice.reason.startswith("kept")
    fresh = treegen.compile(other, shape=SHAPE)
    assert kernel.choice == fresh.choice
    assert str(kernel.plan) == str(fresh.plan)


def test_cuts_at_single_nodes_are_of_one_tree(chosen_for: list[Tree], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "by_estimate", lambda problem, **options: Choice(cohort(cut_nodes=(1,)), "told so"))
    kernel = treegen.compile(Tree.parse("1,2,4/300,200,40"), shape=SHAPE)
    monkeypatch.setattr(choosing, "by_estimate", lambda problem, **options: Choice(cohort(cut_nodes=(2,)), "told so"))
    kernel.update(Tree.parse("1,2,4/300,200,41"))
    assert kernel.choice == Choice(cohort(cut_nodes=(2,)), "told so")
    check(kernel)


def test_a_named_strategy_stays(chosen_for: list[Tree]) -> None:
    kernel = treegen.compile(Tree.parse("1,4/30,5"), strategy="deft-node", shape=SHAPE)
    reason = kernel.choice.reason
    kernel.update(Tree.parse("1,4/30,6"))
    assert kernel.choice == strategy_from("deft-node").choose(Problem(kernel.tree, SHAPE, target_from("h200")))
    assert kernel.choice.reason == reason
    check(kernel)
    assert chosen_for == []


def test_another_shape_is_chosen_for_anew(chosen_for: list[Tree]) -> None:
    tree = Tree.parse("1,16/600,40")
    kernel = treegen.compile(tree)
    q, (k, v) = torch.randn(16, 4, 16), torch.randn(2, tree.kv.last_slot + 1, 2, 16)
    kernel(q, k, v)
    assert len(chosen_for) == 2
    kernel.update(tree)
    assert len(chosen_for) == 2
    check(kernel)
