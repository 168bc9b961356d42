"""Forced: a tree is replayed node by node, with the same work in every run."""

from __future__ import annotations

import pytest

from support.tiny_models import VOCABULARY, tiny
from treegen import Tree
from treegen.engine import Engine, Forced
from treegen.integrations import HFModel
from treegen.ir.errors import TreeError


def test_branches_follow_the_tree() -> None:
    tree = Tree.parse("30(7(5*3),4,0(6*2))")
    forced = Forced(tree, VOCABULARY, seed=2)
    engine = Engine(HFModel(tiny()), forced, num_pages=60, page_size=4, max_branches=8)
    (results,) = engine.run(forced.prompts)
    leaves = [node for node in range(len(tree.parent)) if node not in tree.parent.tolist()]
    assert [result.label for result in results] == [(0, leaf) for leaf in leaves]
    assert sorted(len(result.tokens) for result in results) == [4, 6, 6, 12, 12, 12]
    assert (forced.width, forced.max_new_tokens, list(map(len, forced.prompts))) == (6, 12, [30])
    same = [result.tokens[:7] for result in results if len(result.tokens) == 12]
    assert same[0] == same[1] == same[2]
    assert len({tuple(result.tokens) for result in results}) == 6
    again = Forced(tree, VOCABULARY, seed=2)
    assert Engine(HFModel(tiny()), again, num_pages=60, page_size=16, max_branches=8).run(again.prompts) == [results]


def test_branches_that_fork_begin_with_different_tokens() -> None:
    """Also below nodes without tokens: all branches of a fork can be told apart."""
    forced = Forced(Tree.parse("5(3*40,0(2*20))"), VOCABULARY, seed=4)
    (results,) = Engine(HFModel(tiny()), forced, num_pages=90, page_size=4).run(forced.prompts)
    assert len({result.tokens[0] for result in results}) == 60


def test_the_account_of_a_run() -> None:
    """20 prompt tokens in 5 pages, 4 branches of 9 tokens, which need 3 pages each beside the prompt's 5."""
    forced = Forced(Tree.parse("20(9*4)"), VOCABULARY)
    engine = Engine(HFModel(tiny()), forced, num_pages=40, page_size=4, max_branches=8)
    engine.run(forced.prompts)
    known = engine.accounting
    assert (known.steps, known.rows) == (9, 20 + 4 * 8)
    assert (known.most_pages, known.most_unshared) == (5 + 4 * 2, 4 * 7)
    assert set(known.seconds) == {"attention", "model", "pages", "control"}
    assert all(seconds > 0 for seconds in known.seconds.values())


def test_roots_are_prompts() -> None:
    """Labels say which prompt and which node; branches of different prompts do not share."""
    tree = Tree.parse("20(5*2)+8(3)")
    forced = Forced(tree, VOCABULARY, seed=1)
    assert (forced.width, forced.max_new_tokens) == (2, 5)
    engine = Engine(HFModel(tiny()), forced, num_pages=40, page_size=4, max_branches=4)
    results = engine.run(forced.prompts)
    assert [[found.label for found in own] for own in results] == [[(0, 1), (0, 2)], [(1, 4)]]
    assert [[len(found.tokens) for found in own] for own in results] == [[5, 5], [3]]
    assert engine.accounting.rows == 20 + 8 + 2 * 4 + 2


def test_several_levels_of_prompts() -> None:
    """Three prompts share the root's 16 tokens, two of them 8 more; each token of a prompt is computed once."""
    tree = Tree.parse("16(8(4(5*2)*2),12(4(5*2)))")
    forced = Forced(tree, VOCABULARY, seed=1, prompt_levels=3)
    assert list(map(len, forced.prompts)) == [28, 28, 32]
    first, second, third = forced.prompts
    assert (first[:24], first[:16]) == (second[:24], third[:16])
    assert first[24] != second[24]
    assert first[16] != third[16]
    engine = Engine(HFModel(tiny()), forced, num_pages=60, page_size=4, max_branches=6)
    results = engine.run(forced.prompts)
    assert [[len(found.tokens) for found in own] for own in results] == [[5, 5]] * 3
    assert engine.accounting.rows == 16 + 8 + 12 + 3 * 4 + 6 * 4
    alone = Engine(HFModel(tiny()), forced, num_pages=60, page_size=4, max_branches=2)
    assert alone.run(forced.prompts) == results


@pytest.mark.parametrize(
    ("text", "levels"),
    [("5+6", 1), ("0(3*2)", 1), ("7", 1), ("7(0*2)", 1), ("7(2)+5", 1), ("7(2)+0(2)", 1), ("7(2(3),2)", 2),
     ("7(2)", 2), ("7(2)", 3)],
)  # fmt: skip
def test_prompts_without_tokens_or_branches_are_refused(text: str, levels: int) -> None:
    with pytest.raises(TreeError, match="has a prompt without tokens, or without tokens below it"):
        Forced(Tree.parse(text), VOCABULARY, prompt_levels=levels)
    with pytest.raises(TreeError, match="prompt_levels"):
        Forced(Tree.parse(text), VOCABULARY, prompt_levels=0)
