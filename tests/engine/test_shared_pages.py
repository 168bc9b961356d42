"""What branches have in common, against plain comparisons; and prompts that a step has no room for cost it no time."""

from __future__ import annotations

from unittest import mock

import hypothesis.strategies as st
import torch
from hypothesis import given

from treegen.engine import DraftTree, KVPool, SequenceTree
from treegen.engine.branch import Branch
from treegen.engine.scheduling import schedule
from treegen.engine.shared_pages import common_pages, common_tokens, known_pages
from treegen.ir.shape import Shape

TEXTS = st.builds(  # most begin alike, by some pages
    lambda begin, tail: [7] * begin + tail, st.integers(0, 24), st.lists(st.integers(0, 1), max_size=9)
).filter(bool)


def in_common(first: list[int], second: list[int]) -> int:
    """The number of first tokens that are equal."""
    places = (place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
    return next(places, min(len(first), len(second)))


@given(
    text=TEXTS, others=st.lists(st.tuples(TEXTS, st.integers(0, 40)), max_size=6), size=st.sampled_from([1, 4]),
    known=st.integers(0, 6),
)  # fmt: skip
def test_the_first_branch_with_most_tokens_in_common_is_found(
    text: list[int], others: list[tuple[list[int], int]], size: int, known: int
) -> None:
    branch = Branch(9, (0,), len(text), text)
    running = []
    for number, (tokens, stored) in enumerate(others):
        most = min(stored, len(tokens))
        pages = list(range(100 * number, 100 * number + -(-most // size)))
        running.append(Branch(number, (0,), len(tokens), tokens, most, pages))
    expected = [min(in_common(text[:-1], each.tokens), each.stored) // size * size for each in running]
    pages, owner, tokens = known_pages(branch, running, None, size)
    assert tokens == max(expected, default=0)
    if tokens:
        assert owner is running[expected.index(tokens)]
    assert pages == (owner.pages[: tokens // size] if tokens else [])
    for each, most in zip(running, expected, strict=True):
        assert common_tokens(branch, each, each.stored, size, known * size) == (most if most > known * size else 0)


@given(known=st.integers(0, 5), own=st.integers(0, 5), others=st.integers(0, 5), partial=st.integers(0, 3))
def test_full_pages_in_common(known: int, own: int, others: int, partial: int) -> None:
    pages = [*range(known), *range(10, 10 + own), 90], [*range(known), *range(20, 20 + others), 91]
    made = [Branch(0, (0,), 1, [], 4 * (len(each) - 1) + partial, each) for each in pages]
    assert common_pages(*made, 4) == known


def test_prompts_beyond_the_room_of_a_step_are_not_looked_at() -> None:
    """Steps of 20 rows, and prompts of 15 tokens: the step looks for pages of two of them, however many wait."""
    tree = SequenceTree(KVPool(Shape(2, 1, 8, page_size=4), 1, 200), 40)
    for number in range(40):
        tree.add([number] * 15, (number,))
    with mock.patch.object(tree, "adopt", wraps=tree.adopt) as adopt:
        counts, _ = schedule(tree, 20, together=False)
    assert counts == {0: 15, 1: 5}
    assert [call.args[0] for call in adopt.call_args_list] == [0, 1]


def test_pages_with_drafts_are_not_taken_over() -> None:
    """Drafts may be removed, and other tokens are written over them."""
    pool = KVPool(Shape(4, 2, 16, dtype="fp32", page_size=1), 1, 40, torch.device("cpu"))
    tree = SequenceTree(pool, 4)
    first = tree.add([1, 2, 3, 4, 5])
    tree.propose(first.number, DraftTree([6, 7], [-1, 0]))
    tree.reserve({first.number: 7})
    tree.store({first.number: 7})
    tree.live.set_tokens(first.seat, 7)
    second = tree.add([1, 2, 3, 4, 5, 6, 7, 8])
    assert tree.adopt(second.number) == 5
