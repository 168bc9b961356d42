"""Trees by request, from lists of lengths and of what requests share."""

from __future__ import annotations

import itertools
import pickle
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples
from support.request_checks import Pairs, Tokens, by_request, check, pairs_of
from treegen import LiveBatch, Tree
from treegen.ir.arrays import frozen
from treegen.ir.errors import TreeError
from treegen.ir.tree.less_sharing import shallow, without_small_shares
from treegen.ir.tree.requests import claimed_sharing, of_requests


def rounded(shared_with: list[int], shared: list[int], page_size: int) -> list[tuple[int, int]]:
    """(owner, pages) of every request."""
    return [
        (other, count // page_size) if other >= 0 and count >= page_size else (-1, 0)
        for other, count in zip(shared_with, shared, strict=True)
    ]


def in_cycle(links: list[tuple[int, int]]) -> bool:
    """Whether some chain of owners never ends."""
    for request in range(len(links)):
        seen = 0
        while request >= 0 and seen <= len(links):
            request, seen = links[request][0], seen + 1
        if request >= 0:
            return True
    return False


def shared_pages(links: list[tuple[int, int]], most: int) -> Pairs:
    """How many pages every two requests share: page by page, those that lead to the same request do."""
    result = dict.fromkeys(itertools.permutations(range(len(links)), 2), 0)
    for page in range(most):
        top = list(range(len(links)))
        for request in range(len(links)):
            while links[top[request]][1] > page:
                top[request] = links[top[request]][0]
        for one, other in result:
            result[one, other] += top[one] == top[other]
    return result


def check_request_lists(lengths: list[int], shared_with: list[int], shared: list[int], page_size: int) -> None:
    links = rounded(shared_with, shared, page_size)
    too_long = any(
        count > min(lengths[request], lengths[other])
        for request, (other, count) in enumerate(zip(shared_with, shared, strict=True))
        if other >= 0
    )
    if too_long or in_cycle(links):
        match = "is more than" if too_long else "leads into a cycle"
        with pytest.raises(TreeError, match=match):
            Tree.from_requests(lengths, shared_with, shared, page_size=page_size)
        return
    tree = Tree.from_requests(lengths, shared_with, shared, page_size=page_size)
    where = by_request(tree)
    most = max(lengths, default=0) // page_size
    pages = shared_pages(links, most)
    assert pairs_of(tree) == {pair: count * page_size for pair, count in pages.items()}
    assert where.seat.tolist() == list(range(len(lengths)))
    assert where.length.tolist() == lengths
    # Tokens that are equal where requests share them, and nowhere else.
    tokens: Tokens = {}
    for request, length in enumerate(lengths):
        tokens[request] = []
        for token in range(length):
            owner = request
            while links[owner][1] * page_size > token:
                owner = links[owner][0]
            tokens[request].append(owner * 1000 + token)
    check(tree, tokens)
    for claims in (1, 2):
        parts, topology, requests = shallow(where, claims)
        shallower = Tree(*parts, topology, requests)
        check(shallower, tokens)
        before, after = (np.diff(each.claims().indptr) for each in (where, requests))
        assert after.tolist() == np.minimum(before, claims).tolist()
    for most in (0, 5, 40, 10_000):
        made = without_small_shares(tree.row_node, tree.topology, where, most)
        if made is None:
            continue
        parts, topology, requests = made
        less = Tree(*parts, topology, requests)
        check(less, tokens)
        assert 0 < int(where.shared_tokens.sum() - requests.shared_tokens.sum()) <= most
        assert all(count <= pages.get(pair, 0) * page_size for pair, count in pairs_of(less).items())
        assert most < 10_000 or not any(pairs_of(less).values())


@pytest.mark.parametrize("lengths", [(2, 2, 2), (0, 1, 2)])
def test_all_small_batches(lengths: tuple[int, ...]) -> None:
    for shared_with in itertools.product((-1, 0, 1, 2), repeat=3):
        for shared in itertools.product(range(3), repeat=3):
            check_request_lists(list(lengths), list(shared_with), list(shared), 1)


@given(st.integers(0, 2**32), st.sampled_from(range(1, 24)), st.sampled_from((1, 2, 16)), st.booleans())
@examples(150)
def test_lists_of_requests(seed: int, requests: int, page_size: int, shuffled: bool) -> None:
    source = random.Random(seed)
    lengths = [source.randint(0, 8 * page_size) for _ in range(requests)]
    number = list(range(requests))
    if shuffled:
        source.shuffle(number)
    shared_with, shared = [-1] * requests, [0] * requests
    for request in range(1, requests):
        if source.random() < 0.8:
            other = source.randrange(request)
            shared_with[number[request]] = number[other]
            shared[number[request]] = source.randint(0, min(lengths[number[request]], lengths[number[other]]))
    if source.random() < 0.1:
        shared_with[source.randrange(requests)] = source.randrange(requests)
    check_request_lists(lengths, shared_with, shared, page_size)


def test_worked_example() -> None:
    """Requests 1 and 2 leave request 0 behind 48 and 32 tokens, and request 3 shares 32 tokens of request 1's."""
    tree = Tree.from_requests([50, 49, 40, 32], [-1, 0, 0, 1], [0, 48, 33, 32], page_size=16)
    assert tree.parent.tolist() == [-1, 0, 1, 1, 0, 0]
    assert tree.tokens.tolist() == [32, 16, 2, 1, 8, 1]
    assert tree.row_node.tolist() == [2, 3, 4, 5]
    where = by_request(tree)
    assert where.owner.tolist() == [0, 0, 0, 1, 2, 3]
    assert where.first.tolist() == [0, 32, 48, 48, 32, 32]
    assert where.open.tolist() == [False, False, True, True, True, True]
    assert where.shared_with.tolist() == [-1, 0, 0, 0]
    assert where.shared_tokens.tolist() == [0, 48, 32, 32]


def test_a_long_chain() -> None:
    """Every request is a copy of the one before: all share with the first, or with the one before if it shares less."""
    requests = 1000
    before = np.arange(-1, requests - 1)
    alike = Tree.from_requests([32] * requests, before, np.where(before >= 0, 16, 0), page_size=16)
    assert by_request(alike).shared_with.tolist() == [-1, *[0] * (requests - 1)]
    longer = Tree.from_requests(np.arange(requests) + 1, before, np.arange(requests))
    assert by_request(longer).shared_with.tolist() == before.tolist()
    indptr, owner, first, end = by_request(longer).claims()
    last = slice(indptr[-2], indptr[-1])
    assert owner[last].tolist() == first[last].tolist() == list(range(requests - 1))
    assert end[last].tolist() == list(range(1, requests))
    falling = Tree.from_requests([requests] * requests, before, np.where(before >= 0, requests - before - 1, 0))
    assert set(by_request(falling).shared_with.tolist()) == {-1, 0}


def test_no_requests() -> None:
    for tree in (Tree.from_requests([]), LiveBatch().tree(), Tree.from_requests([], [], [])):
        assert (tree.num_rows, tree.tokens.tolist(), by_request(tree).owner.tolist()) == (0, [0], [-1])
        assert [array.tolist() for array in by_request(tree).claims()] == [[0], [], [], []]


def test_seats_and_epochs_of_an_engine() -> None:
    length, seats, epochs = (frozen(np.array(numbers)) for numbers in ([8, 9, 7], [5, 9, 0], [3, 1, 2]))
    sharing = claimed_sharing(length, [1, -1, 1], [4, 0, 4], 4)
    parts, _, where = of_requests(length, *sharing, seats, epochs, 4)
    assert len(parts.parent) == 4
    assert where.seat.tolist() == [5, 9, 0]
    assert where.epoch.tolist() == [3, 1, 2]
    assert where.shared_with.tolist() == [9, -1, 9]
    assert where.owner.tolist() == [9, 9, 5, 0]
    assert [array.tolist() for array in where.claims()] == [[0, 1, 1, 2], [9, 9], [0, 0], [1, 1]]


def test_pickling_keeps_requests() -> None:
    tree = Tree.from_requests([20, 20], [-1, 0], [0, 16], page_size=16)
    again = pickle.loads(pickle.dumps(tree))
    before, after = by_request(tree), by_request(again)
    assert after.page_size == 16
    for name in ("owner", "first", "open", "seat", "epoch", "shared_with", "shared_tokens", "length"):
        array = getattr(after, name)
        np.testing.assert_array_equal(array, getattr(before, name))
        assert array.dtype == getattr(before, name).dtype
        assert not array.flags.writeable
        assert not getattr(before, name).flags.writeable
    assert again.tokens.tolist() == tree.tokens.tolist()


def test_changed_trees_are_not_by_request() -> None:
    tree = Tree.from_requests([20, 20], [-1, 0], [0, 16], page_size=16)
    changed = (
        tree.appended(slots=[100, 101]),
        tree.branched(0, 2),
        tree.pruned([0]),
        tree.with_kv(tree.kv),
        tree.lengthened(tree.tokens),
        tree.with_causal_queries(1),
        tree.with_drafts([-1]),
        Tree.joined([tree]),
        Tree.from_json(tree.to_json()),
    )
    assert all(other.requests is None for other in changed)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([-1],), r"seq_lens\[0\] = -1"),
        (([4], [-1]), "shared_tokens = None: is missing"),
        (([4], None, [0]), "shared_with = None: is missing"),
        (([4, 4], [-1], [0, 4]), "shared_with = 1 entries: does not match 2 requests"),
        (([4, 4], [-1, 0], [0]), "shared_tokens = 1 entries: does not match 2 requests"),
        (([4, 4], [-1, 2], [0, 4]), r"shared_with\[1\] = 2: is outside -1..1"),
        (([4, 4], [-1, 0], [0, -1]), r"shared_tokens\[1\] = -1"),
        (([4, 3], [-1, 0], [0, 4]), r"shared_tokens\[1\] = 4: is more than the 3 tokens of request 1"),
        (([3, 4], [-1, 0], [0, 4]), r"shared_tokens\[1\] = 4: is more than the 3 tokens of request 0"),
        (([4, 4], [1, 0], [4, 4]), r"shared_with\[0\] = 1: leads into a cycle"),
        (([4], [0], [4]), r"shared_with\[0\] = 0: leads into a cycle"),
        (([2**31 - 1, 1],), "total exceeds"),
    ],
)
def test_errors_of_lists(arguments: tuple[list[int], ...], match: str) -> None:
    with pytest.raises(TreeError, match=match):
        Tree.from_requests(*arguments)


def test_errors_of_pages() -> None:
    with pytest.raises(TreeError, match="page_size = 0"):
        Tree.from_requests([1], page_size=0)
