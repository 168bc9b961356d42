"""Query trees: draft tokens below the rows of any tree, and causal queries inside of what rows see."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.forests import examples, forests, path, token_slots, visible_slots
from treegen import Tree
from treegen.backends import oracle
from treegen.ir.errors import TreeError

# The first choices of Medusa's mc_sim_7b_63, shortened.
CHOICES = [(0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0), (3,), (0, 2), (0, 0, 1), (0, 0, 0, 0), (1, 0, 0)]


def drafts(source: random.Random, most: int, chain: float, *, ordered: bool) -> list[int]:
    """Parents of a random draft forest; `chain`: how often a token extends the one before it."""
    count = source.randint(0, most)
    parents = [
        place - 1 if source.random() < chain else source.choice([-1, *range(place)]) if place else -1
        for place in range(count)
    ]
    if ordered:
        return parents
    number = list(range(count))
    source.shuffle(number)
    shuffled = [-1] * count
    for place, parent in enumerate(parents):
        shuffled[number[place]] = -1 if parent < 0 else number[parent]
    return shuffled


def ancestors(parents: list[int], token: int) -> list[int]:
    """The token and those above it, from the top."""
    above = []
    while token >= 0:
        above.append(token)
        token = parents[token]
    return above[::-1]


@examples(200)
@given(
    tree=forests(max_nodes=30, max_tokens=12, salt=81),
    seed=st.integers(0, 2**32 - 1),
    most=st.sampled_from((5, 0, 1, 20)),
    chain=st.sampled_from((0.5, 0.0, 0.9, 1.0)),
    ordered=st.sampled_from((True, False)),
    given_slots=st.sampled_from((True, False)),
    same=st.sampled_from((False, True)),
)
def test_drafts(tree: Tree, seed: int, most: int, chain: float, ordered: bool, given_slots: bool, same: bool) -> None:
    source = random.Random(seed)
    one = drafts(source, most, chain, ordered=ordered)
    parents = [one if same else drafts(source, most, chain, ordered=ordered) for _ in range(tree.num_rows)]
    total = sum(map(len, parents))
    slots = list(range(tree.kv.last_slot + 1, tree.kv.last_slot + 1 + total))
    if given_slots:
        slots = [slot + 3 for slot in source.sample(slots, total)]
    made = tree.with_drafts(one if same else parents, slots if given_slots else None)
    assert made.num_rows == total
    row, begin = 0, 0
    for request, own in enumerate(parents):
        seen = visible_slots(tree, request)
        for token in range(len(own)):
            above = ancestors(own, token)
            assert visible_slots(made, row) == seen + [slots[begin + place] for place in above]
            assert made.positions()[row] == len(seen) + len(above) - 1
            row += 1
        begin += len(own)
    has_rows = {node for row in range(made.num_rows) for node, _ in path(made, row)}
    assert len(made.tokens) == max(1, len(has_rows))  # nothing that nobody is below is kept


@examples(200)
@given(
    tree=forests(max_nodes=30, max_tokens=12, salt=83),
    seed=st.integers(0, 2**32 - 1),
    chain=st.sampled_from((0.5, 0.0, 1.0)),
)
def test_drafts_that_are_stored(tree: Tree, seed: int, chain: float) -> None:
    source = random.Random(seed)
    seen = [visible_slots(tree, row) for row in range(tree.num_rows)]
    parents = [drafts(source, min(9, len(slots)), chain, ordered=False) for slots in seen]
    made = tree.with_drafts(parents, stored=True)
    expected = []
    for own, slots in zip(parents, seen, strict=True):
        prefix, last = slots[: len(slots) - len(own)], slots[len(slots) - len(own) :]
        expected += [prefix + [last[place] for place in ancestors(own, token)] for token in range(len(own))]
    assert [visible_slots(made, row) for row in range(made.num_rows)] == expected


@examples(200)
@given(
    tree=forests(max_nodes=30, max_tokens=12, salt=82),
    seed=st.integers(0, 2**32 - 1),
    same=st.sampled_from((False, True)),
)
def test_causal_queries(tree: Tree, seed: int, same: bool) -> None:
    source = random.Random(seed)
    seen = [visible_slots(tree, row) for row in range(tree.num_rows)]
    counts = [source.randint(0, len(slots)) for slots in seen]
    if same:
        counts = [min(counts, default=0)] * tree.num_rows
    made = tree.with_causal_queries(counts[0] if same and counts else counts)
    expected = [
        slots[: len(slots) - count + query + 1]
        for slots, count in zip(seen, counts, strict=True)
        for query in range(count)
    ]
    assert [visible_slots(made, row) for row in range(made.num_rows)] == expected


def test_a_chain_is_one_node() -> None:
    tree = Tree.from_levels([1, 2], [100, 10]).with_drafts([-1, 0, 1, 2])
    assert tree.parent.tolist() == [-1, 0, 0, 1, 2]
    assert tree.tokens.tolist() == [100, 10, 10, 4, 4]
    assert list(zip(tree.row_node.tolist(), tree.row_sees.tolist(), strict=True)) == [
        (node, sees) for node in (3, 4) for sees in (1, 2, 3, 4)
    ]
    assert token_slots(tree)[3:] == [[120, 121, 122, 123], [124, 125, 126, 127]]


def test_medusas_choices_are_the_token_tree() -> None:
    parents = treegen.token_tree_parents(CHOICES)
    assert parents[:4] == [-1, 0, 0, 1]
    one = Tree.from_parents([-1], [1000]).with_drafts(parents)
    other = Tree.from_token_tree(CHOICES, 1000)
    assert [visible_slots(one, row) for row in range(one.num_rows)] == [
        visible_slots(other, row) for row in range(other.num_rows)
    ]


@pytest.mark.parametrize("form", [np.array, torch.tensor, lambda parents: [torch.tensor(own) for own in parents]])
def test_parents_as_arrays(form: Callable[[list[list[int]]], object]) -> None:
    tree = Tree.from_levels([1, 2], [9, 4])
    parents = [[-1, 0, 0], [-1, 0, 1]]
    assert tree.with_drafts(form(parents)).to_json() == tree.with_drafts(parents).to_json()


def test_many_draft_tokens() -> None:
    source = random.Random(3)
    parents = [[source.randrange(-1, place) for place in range(600)], list(range(-1, 599)), [-1] * 600, []]
    tree = Tree.from_levels([1, 4], [60, 5]).with_drafts(parents)
    assert tree.num_rows == 1800
    q = torch.randn(tree.num_rows, 2, 16)
    k, v = torch.randn(2, tree.kv.last_slot + 1, 1, 16)
    for strategy in ("auto", "query"):
        verified = treegen.compile(tree, strategy=strategy, backend="torch").verify(q, k, v)
        assert verified.passed, (strategy, verified)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_verification_on_shared_prefixes(backend: str) -> None:
    parents = treegen.token_tree_parents(CHOICES)
    tree = Tree.from_levels([1, 2, 4], [70, 20, 9]).with_drafts([parents, [-1, -1, 0], [], [-1, 0, 1]])
    q = torch.randn(tree.num_rows, 4, 16)
    k, v = torch.randn(2, tree.kv.last_slot + 1, 2, 16)
    verified = treegen.compile(tree, backend=backend).verify(q, k, v)
    assert verified.passed, verified


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_chunk_of_a_prefill_is_causal_attention(backend: str) -> None:
    lengths, counts = [50, 37, 44], [8, 20, 1]
    pages = np.arange(9) + 3
    tree = Tree.from_page_table([0, 4, 7, 10], [*pages[:4], *pages[4:7], *pages[:2], 90], [2, 5, 12], 16)
    assert [len(tree.slots(row)) for row in range(3)] == lengths
    queries = tree.with_causal_queries(counts)
    q = torch.randn(queries.num_rows, 4, 16)
    k, v = torch.randn(2, queries.kv.last_slot + 1, 2, 16)
    out = treegen.compile(queries, backend=backend)(q, k, v)
    begin = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        slots = torch.from_numpy(tree.slots(row).copy())
        keys, values = (cache[slots].repeat_interleave(2, 1).transpose(0, 1) for cache in (k, v))
        mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[begin : begin + count].transpose(0, 1), keys, values, attn_mask=mask
        )
        assert oracle.error(out[begin : begin + count], expected.transpose(0, 1)) < oracle.TOLERANCE["fp32"]
        begin += count


def test_parallel_samples_see_the_same() -> None:
    tree = Tree.from_levels([1, 2], [9, 4]).with_drafts([-1]).branched(1, 3)
    assert [visible_slots(tree, row) for row in range(4)][1:] == [visible_slots(tree, 1)] * 3


TREE = Tree.from_levels([1, 2], [9, 4])
BAD = {
    "no list": (lambda: TREE.with_drafts(3), ["parents = 3", "not a list"]),
    "lists of too few rows": (lambda: TREE.with_drafts([[-1]]), ["parents = 1 lists", "2 rows"]),
    "one is no list": (lambda: TREE.with_drafts([[-1], 0]), ["parents[1] = 0", "not a list"]),
    "outside": (lambda: TREE.with_drafts([[-1], [-1, 2]]), ["parents[1][1] = 2", "outside -1..1"]),
    "a cycle": (lambda: TREE.with_drafts([[-1], [-1, 2, 1]]), ["parents[1][1] = 2", "cycle"]),
    "itself": (lambda: TREE.with_drafts([-1, 1]), ["parents[0][1] = 1", "cycle"]),
    "slots": (lambda: TREE.with_drafts([-1, 0], [20, 21, 22]), ["slots = 3 slots", "4 draft tokens"]),
    "slots twice": (
        lambda: TREE.with_drafts([-1, 0], [40, 41, 42, 41]),
        ["names slot 41 twice", "give every"],
    ),
    "slots taken": (lambda: TREE.with_drafts([-1, 0], [40, 3, 42, 41]), ["slot 3 holds another token"]),
    "negative slots": (lambda: TREE.with_drafts([-1], [20, -1]), ["slots[1] = -1", "outside"]),
    "slots of stored ones": (lambda: TREE.with_drafts([-1], [20, 21], stored=True), ["slots", "contradicts stored"]),
    "fewer stored": (lambda: TREE.with_drafts([-1] * 14, stored=True), ["parents = 14 of row 0", "13 tokens"]),
    "choices": (lambda: treegen.token_tree_parents([(0, 1)]), ["paths[0]", "parent (0,) is missing"]),
    "too many queries": (
        lambda: TREE.with_causal_queries([1, 14]),
        ["counts = 14 of row 1", "13 tokens that row 1 sees"],
    ),
    "counts of too few": (lambda: TREE.with_causal_queries([1]), ["counts = 1 entries", "2 rows"]),
    "negative counts": (lambda: TREE.with_causal_queries(-1), ["counts[0] = -1", "outside"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_queries_are_refused(name: str) -> None:
    make, pieces = BAD[name]
    with pytest.raises(TreeError) as caught:
        make()
    assert all(piece in str(caught.value) for piece in pieces), str(caught.value)
