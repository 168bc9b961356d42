"""Trees by request, and the live batch that they are made of, against requests that are plain lists of tokens."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples
from treegen import LiveBatch, Shape, Tree
from treegen.ir.arrays import frozen
from treegen.ir.errors import TreeError
from treegen.ir.tree.less_sharing import shallow, without_small_shares
from treegen.ir.tree.request_kv import RequestKV
from treegen.ir.tree.requests import claimed_sharing, of_requests
from treegen.ir.tree.topology import derive
from treegen.ir.verify import verify
from treegen.strategies import cohort
from treegen.target.problem import Problem
from treegen.target.targets import target_from

SHAPE, TARGET = Shape(8, 2, 128), target_from(None)

Tokens = dict[int, list[int]]
"""The tokens of every running request, by seat."""
Pairs = dict[tuple[int, int], int]
"""How many tokens every two requests share, by their seats."""


def by_request(tree: Tree) -> RequestKV:
    assert tree.requests is not None
    return tree.requests


def common(first: list[int], second: list[int]) -> int:
    """How many tokens two requests begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(first), len(second)))


def nodes_of(tree: Tree, row: int) -> list[int]:
    """The nodes that a row sees, root first."""
    nodes = [int(tree.row_node[row])]
    while (node := int(tree.parent[nodes[0]])) >= 0:
        nodes.insert(0, node)
    return nodes


def pairs_of(tree: Tree) -> Pairs:
    """What every two requests share according to the tree."""
    seats = by_request(tree).seat.tolist()
    paths = [nodes_of(tree, row) for row in range(len(seats))]
    return {
        (seats[i], seats[j]): sum(int(tree.tokens[node]) for node in paths[i][: common(paths[i], paths[j])])
        for i, j in itertools.permutations(range(len(seats)), 2)
    }


def check_topology(tree: Tree) -> None:
    """Nodes are in depth-first order, and what follows from them is what follows from those of any order."""
    found, expected = tree.topology, derive(tree.parent, tree.tokens, tree.row_node, tree.row_sees)
    for name in ("preorder", "row_of_rank", "rank_lo", "rank_own", "rank_hi"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    np.testing.assert_array_equal(found.spans.table, expected.spans.table)
    np.testing.assert_array_equal(found.preorder, np.arange(len(tree.parent)))
    tree.kv.check_fits(tree.tokens)


def check(tree: Tree, tokens: Tokens) -> None:
    """The tree says of each of these requests what its tokens are, and shares only what is the same."""
    where = by_request(tree)
    seats = where.seat.tolist()
    assert sorted(seats) == sorted(tokens)
    assert where.length.tolist() == [len(tokens[seat]) for seat in seats]
    assert not (where.first % where.page_size).any()
    assert where.open.sum() == len(seats)
    for row, seat in enumerate(seats):
        assert tree.row_sees[row] == tree.tokens[tree.row_node[row]]
        nodes = nodes_of(tree, row)
        assert [bool(where.open[node]) for node in nodes] == [False] * (len(nodes) - 1) + [True]
        assert where.owner[nodes[-1]] == seat
        path: list[int] = []
        for node in nodes:
            own, first, count = tokens[int(where.owner[node])], int(where.first[node]), int(tree.tokens[node])
            assert first == len(path)
            if where.open[node]:
                assert count == max(1, len(own) - first)
                path += own[first:]
            else:
                assert 0 < count == len(own[first : first + count])
                path += own[first : first + count]
        assert path == tokens[seat]
        shared, other = int(where.shared_tokens[row]), int(where.shared_with[row])
        assert shared % where.page_size == 0
        assert (shared > 0) == (other >= 0)
        if shared:
            assert shared <= common(tokens[seat], tokens[other])
            assert where.shared_tokens[seats.index(other)] < shared
    check_claims(where, tokens)
    check_topology(tree)
    verify(cohort(64).plan(Problem(tree, SHAPE, TARGET)), tree)


def check_claims(where: RequestKV, tokens: Tokens) -> None:
    """Claims divide the shared pages of each row among owners whose own they are, with the same tokens."""
    indptr, owner, first, end = (array.tolist() for array in where.claims())
    begin = dict(zip(where.seat.tolist(), where.shared_tokens.tolist(), strict=True))
    assert len(indptr) == len(where.seat) + 1
    assert indptr[0] == 0
    assert indptr[-1] == len(owner) == len(first) == len(end)
    for row, seat in enumerate(where.seat.tolist()):
        page = 0
        for claim in range(indptr[row], indptr[row + 1]):
            assert first[claim] == page < end[claim]
            assert begin[owner[claim]] <= page * where.page_size
            part = slice(page * where.page_size, end[claim] * where.page_size)
            assert tokens[seat][part] == tokens[owner[claim]][part]
            page = end[claim]
        assert page * where.page_size == where.shared_tokens[row]


class Model:
    """A live batch beside what it stands for: requests that are lists of tokens, no two of which are the same unless
    they were copied.
    """

    def __init__(self, seed: int, page_size: int) -> None:
        self.source = random.Random(seed)
        self.page_size = page_size
        self.batch = LiveBatch(page_size, max_seats=2)
        self.tokens: Tokens = {}
        self.rows: dict[int, int] = {}
        self.epochs: dict[int, int] = {}
        self.numbers = itertools.count()
        self.shared: Pairs = {}

    def new(self, count: int) -> list[int]:
        return list(itertools.islice(self.numbers, count))

    def whole(self, tokens: int) -> int:
        return tokens - tokens % self.page_size

    def size(self) -> int:
        return self.source.choice((0, 1, self.page_size, self.source.randint(0, 6 * self.page_size)))

    def seat(self) -> int:
        return self.source.choice(sorted(self.tokens))

    def some(self) -> list[int]:
        seats = sorted(self.tokens)
        return self.source.sample(seats, self.source.randint(0, min(4, len(seats))))

    def place(self) -> int | None:
        return None if self.source.random() < 0.7 else max(self.rows.values(), default=0) + self.source.randint(1, 3)

    def started(self, seat: int, tokens: list[int], row: int | None, shared: Pairs) -> None:
        assert seat == min(set(range(len(self.tokens) + 1)) - set(self.tokens))
        free = min(set(range(len(self.rows) + 1)) - set(self.rows.values()))
        self.rows[seat] = free if row is None else row
        self.epochs[seat] = self.epochs.get(seat, 0) + 1
        for other in self.tokens:
            self.shared[seat, other] = self.shared[other, seat] = shared.get((seat, other), 0)
        self.tokens[seat] = tokens

    def copied(self, seat: int, parent: int, shared: int) -> Pairs:
        """What a new request shares that begins with so many tokens of another."""
        others = {(seat, other): min(shared, self.shared[parent, other]) for other in self.tokens if other != parent}
        return others | {(seat, parent): shared}

    def add(self) -> None:
        row = self.place()
        if not self.tokens or self.source.random() < 0.5:
            tokens = self.new(self.size())
            self.started(self.batch.add(len(tokens), row=row), tokens, row, {})
            return
        parent = self.seat()
        shared = self.source.randint(0, len(self.tokens[parent]))
        tokens = self.tokens[parent][:shared] + self.new(self.size())
        seat = self.batch.add(len(tokens), parent, shared, row)
        self.started(seat, tokens, row, self.copied(seat, parent, self.whole(shared)))

    def fork(self) -> None:
        row, parent = self.place(), self.seat()
        tokens = list(self.tokens[parent])
        shared = None if self.source.random() < 0.5 else self.source.randint(0, len(tokens))
        seat = self.batch.fork(parent, shared, row)
        claimed = self.whole(len(tokens) if shared is None else shared)
        self.started(seat, tokens, row, self.copied(seat, parent, claimed))

    def finish(self) -> None:
        seat = self.seat()
        self.batch.finish(seat)
        del self.tokens[seat], self.rows[seat]
        self.shared = {pair: shared for pair, shared in self.shared.items() if seat not in pair}

    def moved(self) -> None:
        seats = self.some()
        self.batch.moved(seats[0] if len(seats) == 1 else seats)
        for seat in seats:
            self.epochs[seat] += 1
        self.shared = {pair: 0 if {*pair} & {*seats} else shared for pair, shared in self.shared.items()}

    def share(self) -> None:
        seat, other = self.seat(), self.seat()
        shared = common(self.tokens[seat], self.tokens[other])
        shared = self.source.choice((shared, self.source.randint(0, shared)))
        up = other
        while up >= 0 and up != seat:
            up = int(self.batch.shared_with[up])
        if up == seat:
            with pytest.raises(TreeError, match="itself"):
                self.batch.share(seat, other, shared)
            return
        before = self.shared
        below = {third for third in self.tokens if self.is_below(third, seat)}
        self.batch.share(seat, other, shared)
        self.shared = pairs_of(self.batch.tree())
        for pair, count in before.items():  # what shares with the seat goes on to do so, and all others as before
            assert len({*pair} & below) == 1 or self.shared[pair] == count
        assert self.shared[seat, other] == self.whole(shared)

    def is_below(self, seat: int, other: int) -> bool:
        while seat >= 0 and seat != other:
            seat = int(self.batch.shared_with[seat])
        return seat == other

    def grow(self) -> None:
        if self.source.random() < 0.5:
            counts = dict.fromkeys(self.tokens, 1)
            self.batch.grow()
        else:
            counts = {seat: self.size() for seat in self.some()}
            self.batch.grow(list(counts.values()), list(counts))
        for seat, count in counts.items():
            self.tokens[seat] += self.new(count)

    def set_tokens(self) -> None:
        after = {seat: self.source.randint(0, len(self.tokens[seat]) + self.page_size) for seat in self.some()}
        self.batch.set_tokens(list(after), list(after.values()))
        for seat, count in after.items():
            self.tokens[seat] = self.tokens[seat][:count]
            self.tokens[seat] += self.new(count - len(self.tokens[seat]))
        for one, other in self.shared:
            most = min(self.whole(after.get(seat, self.shared[one, other] + self.page_size)) for seat in (one, other))
            self.shared[one, other] = min(self.shared[one, other], most)

    def reorder(self) -> None:
        places = [*self.rows.values(), max(self.rows.values()) + 1]
        self.source.shuffle(places)
        self.rows = dict(zip(self.rows, places, strict=False))
        if self.source.random() < 0.5:
            self.batch.reorder(self.rows)
        else:
            self.batch.reorder([self.rows.get(seat, -1) for seat in range(len(self.batch.row))])

    def check(self) -> None:
        batch = self.batch
        assert len(batch) == len(self.tokens)
        assert batch.seats.tolist() == sorted(self.tokens)
        assert {seat: int(batch.row[seat]) for seat in batch.seats.tolist()} == self.rows
        assert {seat: int(batch.epoch[seat]) for seat in self.epochs} == self.epochs
        free = np.setdiff1d(np.arange(len(batch.row)), batch.seats)
        for name, value in (("row", -1), ("tokens", 0), ("shared_with", -1), ("shared_tokens", 0)):
            array = getattr(batch, name)
            assert array.dtype == np.int32
            assert (array[free] == value).all()
        tree = batch.tree()
        check(tree, self.tokens)
        where = by_request(tree)
        assert where.seat.tolist() == batch.seats.tolist()
        assert where.epoch.tolist() == batch.epoch[batch.seats].tolist()
        assert pairs_of(tree) == self.shared


EVENTS: list[Callable[[Model], None]] = [
    *(Model.add, Model.fork, Model.fork, Model.finish, Model.moved),
    *(Model.share, Model.grow, Model.set_tokens, Model.reorder),
]


@given(st.integers(0, 2**32), st.sampled_from((1, 1, 4, 16)), st.sampled_from(range(1, 40)))
@examples(120)
def test_histories(seed: int, page_size: int, events: int) -> None:
    """After every event the tree says what requests are, and shares what they shared before."""
    model = Model(seed, page_size)
    model.check()
    for _ in range(events):
        event = model.source.choice(EVENTS) if 0 < len(model.tokens) < 12 else None
        (event or (Model.finish if model.tokens else Model.add))(model)
        model.check()


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


def test_a_copy_of_a_batch_goes_its_own_way() -> None:
    batch = LiveBatch(page_size=16, max_seats=2)
    first = batch.add(100)
    batch.fork(first, 64)
    for again in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert (len(again), again.changes, again.moves) == (2, 2, 2)
        again.grow(5)
        again.add(7)
        np.testing.assert_array_equal(by_request(again.tree()).length, [105, 105, 7])
        np.testing.assert_array_equal(by_request(again.tree()).shared_tokens, [0, 64, 0])
    np.testing.assert_array_equal(by_request(batch.tree()).length, [100, 100])


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


def test_reuse_of_seats_and_rows() -> None:
    batch = LiveBatch(max_seats=1)
    assert [batch.add(5, row=7), batch.add(5), batch.add(5)] == [0, 1, 2]
    assert batch.row.tolist() == [7, 0, 1, -1]
    batch.finish(1)
    assert batch.fork(0) == 1
    assert batch.row.tolist() == [7, 0, 1, -1]
    assert batch.epoch.tolist() == [1, 2, 1, 0]
    batch.grow(2)
    batch.grow(1, np.int64(2))
    batch.set_tokens(0, 3)
    assert batch.tokens.tolist() == [3, 7, 8, 0]
    batch.moved(batch.seats[1])
    assert batch.epoch.tolist() == [1, 3, 1, 0]
    assert repr(batch) == "<treegen.LiveBatch: 3 requests, page_size 1>"


Call = Callable[[LiveBatch], object]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda batch: batch.add(-1), "tokens = -1: is outside"),
        (lambda batch: batch.add(1.5), "tokens = 1.5: is not an integer"),
        (lambda batch: batch.add(True), "tokens = True: is not an integer"),
        (lambda batch: batch.add(2**31), "tokens = 2147483648: is outside"),
        (lambda batch: batch.add(8, shared_tokens=4), "shared_tokens = 4: are shared with no seat"),
        (lambda batch: batch.add(8, 1, 4), "shared_with = 1: is the seat of no running request"),
        (lambda batch: batch.add(8, 0, 9), "is more than the 8 tokens that the request has"),
        (lambda batch: batch.add(80, 0, 41), "is more than the 40 tokens that seat 0 has"),
        (lambda batch: batch.add(8, row=2), "row = 2: is taken by seat 2"),
        (lambda batch: batch.add(8, row=-2), "row = -2: is outside"),
        (lambda batch: batch.fork(1), "seat = 1: is the seat of no running request"),
        (lambda batch: batch.fork(99), "seat = 99: is the seat of no running request"),
        (lambda batch: batch.fork(0, 41), "shared_tokens = 41: is more than the 40"),
        (lambda batch: batch.finish(1), "seat = 1: is the seat of no running request"),
        (lambda batch: batch.finish(-1), "seat = -1: is outside"),
        (lambda batch: batch.moved([0, 1]), r"seats\[1\] = 1: is the seat of no running request"),
        (lambda batch: batch.moved([0, 0]), "names seat 0 twice"),
        (lambda batch: batch.share(0, 0, 4), "shared_with = 0: is the seat itself"),
        (lambda batch: batch.share(0, 3, 4), "shared_with = 3: shares with seat 0 itself"),
        (lambda batch: batch.share(0, 2, 31), "is more than the 30 tokens that seat 2"),
        (lambda batch: batch.share(0, None, 4), "shared_tokens = 4: are shared with no seat"),
        (lambda batch: batch.grow(-1), "tokens = -1: is outside"),
        (lambda batch: batch.grow([1, 1]), "tokens = 2 entries: does not match 3 seats"),
        (lambda batch: batch.grow(1, [1]), r"seats\[0\] = 1: is the seat of no running request"),
        (lambda batch: batch.grow(2**31 - 1), r"is more than 2\^31 - 1 for seat 0"),
        (lambda batch: batch.set_tokens([0], [-1]), r"tokens\[0\] = -1: is outside"),
        (lambda batch: batch.set_tokens([7], [1]), r"seats\[0\] = 7: is the seat of no running request"),
        (lambda batch: batch.add(8, rows=0), "rows = 0: is outside 1"),
        (lambda batch: batch.add(8, rows=1.0), "rows = 1.0: is not an integer"),
        (lambda batch: batch.set_rows(0, 0), "rows = 0: is outside 1"),
        (lambda batch: batch.set_rows([0, 2], [1, 0]), r"rows\[1\] = 0: is outside 1"),
        (lambda batch: batch.set_rows([0, 2], [1]), "rows = 1 entries: does not match 2 seats"),
        (lambda batch: batch.set_rows(1, 3), r"seats\[0\] = 1: is the seat of no running request"),
        (lambda batch: batch.reorder({0: 2}), "gives row 2 to two requests"),
        (lambda batch: batch.reorder({1: 5}), r"seats\[0\] = 1: is the seat of no running request"),
        (lambda batch: batch.reorder({0: -5}), r"rows\[0\] = -5"),
        (lambda batch: batch.reorder([0, 0, 1]), "rows = 3 entries: has no row for seat 3"),
        (lambda batch: batch.reorder([0, 0, -1, 2]), r"rows\[2\] = -1: is outside"),
    ],
)
def test_errors_of_live_batches(call: Call, match: str) -> None:
    """Of batches of the seats 0, 2 and 3, the last of which shares 32 tokens with the first; they change nothing."""
    batch = LiveBatch(16, max_seats=4)
    for tokens in (40, 20, 30):
        batch.add(tokens)
    batch.finish(1)
    batch.add(1, row=9)
    batch.fork(0)
    batch.finish(1)
    assert batch.seats.tolist() == [0, 2, 3]
    names = ("row", "rows", "epoch", "tokens", "shared_with", "shared_tokens", "changes", "moves")
    before = [np.array(getattr(batch, name)).tolist() for name in names]
    with pytest.raises(TreeError, match=match):
        call(batch)
    assert [np.array(getattr(batch, name)).tolist() for name in names] == before
    assert len(batch) == 3


def test_query_rows() -> None:
    """They belong to a request; other numbers of them make plans out of date."""
    batch = LiveBatch(16, max_seats=1)
    batch.add(100, rows=4)
    batch.fork(0, rows=2)
    batch.add(3)
    assert batch.rows.tolist()[:3] == [4, 2, 1]
    before = batch.changes, batch.moves
    batch.set_rows([1, 2], [2, 1])
    assert (batch.changes, batch.moves) == before
    batch.set_rows([0, 2], 5)
    assert (batch.changes, batch.moves) == (before[0] + 1, before[1] + 1)
    assert batch.rows.tolist() == [5, 2, 5, 1]
    batch.finish(0)
    assert batch.add(9) == 0
    assert batch.rows[0] == 1


def test_trees_of_several_query_rows() -> None:
    """A request's rows see its last tokens one by one. What it shares ends before them, also for others."""
    batch = LiveBatch(16)
    batch.add(66, rows=5)
    for shared in (48, 64, 64):
        batch.add(70, 0, shared)
    batch.share(3, 1, 64)
    batch.set_rows(1, 30)
    tree = batch.tree()
    rows = [(0, 62 + number) for number in range(5)] + [(1, 41 + number) for number in range(30)] + [(2, 70), (3, 70)]
    sees = tree.topology.prefix[tree.row_node] + tree.row_sees
    requests = by_request(tree)
    assert requests.queries is not None
    assert list(zip(requests.seat.repeat(requests.queries).tolist(), sees.tolist(), strict=True)) == rows
    verify(cohort(64).plan(Problem(tree, SHAPE, TARGET)), tree)
    # Seat 0 has 61 tokens before its rows, and seat 1 has 40.
    assert by_request(tree).shared_with.tolist() == [-1, 0, 0, 0]
    assert by_request(tree).shared_tokens.tolist() == [0, 32, 48, 32]
    again = by_request(pickle.loads(pickle.dumps(tree)))
    assert again.queries is not None
    assert again.queries.tolist() == [5, 30, 1, 1]


def test_more_query_rows_than_tokens() -> None:
    """The first rows see nothing, and have a place in plans for when they do."""
    batch = LiveBatch(16)
    batch.add(3, rows=5)
    tree = batch.tree()
    assert tree.row_sees.tolist() == [1, 2, 3, 4, 5]
    assert by_request(tree).length.tolist() == [5]


@pytest.mark.parametrize("argument", ["page_size", "max_seats"])
def test_sizes_of_live_batches(argument: str) -> None:
    with pytest.raises(TreeError, match=f"{argument} = 0: is not a positive integer"):
        LiveBatch(**{argument: 0})


def test_the_heir_is_the_one_that_shares_most() -> None:
    batch = LiveBatch()
    batch.add(100)
    batch.fork(0, 40)
    for shared in (60, 80, 80, 70):
        batch.fork(1, shared)
    assert batch.shared_with.tolist()[:6] == [-1, 0, 1, 1, 1, 1]
    batch.finish(1)
    assert batch.shared_with.tolist()[:6] == [-1, -1, 3, 0, 3, 3]
    assert batch.shared_tokens.tolist()[:6] == [0, 0, 60, 40, 80, 70]


def test_what_shares_less_goes_up_to_the_owner() -> None:
    """A claim of more tokens than others share with the seat: these share with the one that owns them."""
    batch = LiveBatch()
    for _ in range(3):
        batch.add(100)
    for shared in (10, 20, 30):
        batch.fork(2, shared)
    batch.share(1, 0, 15)
    batch.share(2, 1, 20)
    assert batch.shared_with.tolist()[:6] == [-1, 0, 1, 0, 1, 2]
    assert batch.shared_tokens.tolist()[:6] == [0, 15, 20, 10, 20, 30]
    batch.share(2, 1, 0)
    assert batch.shared_with.tolist()[:6] == [-1, 0, -1, 0, 1, 2]


@given(st.integers(0, 2**32), st.sampled_from((1, 4)), st.sampled_from(range(1, 30)))
@examples(60)
def test_what_was_found_some_events_ago(seed: int, page_size: int, events: int) -> None:
    """Requests that are still there share what they shared then, others nothing, and seats are who they are now."""
    model = Model(seed, page_size)
    for _ in range(events):
        event = model.source.choice(EVENTS) if 0 < len(model.tokens) < 12 else None
        (event or (Model.finish if model.tokens else Model.add))(model)
    batch, shared = model.batch, dict(model.shared)
    seats, epochs = batch.seats, batch.epoch[batch.seats]
    number = {int(other): index for index, other in enumerate(seats)}
    above = [number.get(int(other), -1) for other in batch.shared_with[seats]]
    parts, tokens = batch.shared_tokens[seats], batch.tokens[seats]
    for _ in range(model.source.randint(0, 6)):
        later = (Model.add, Model.finish, Model.moved, Model.reorder)
        (model.source.choice(later) if 0 < len(model.tokens) < 12 else Model.add)(model)
    same = {int(seat) for seat, epoch in zip(seats, epochs, strict=True) if model.epochs[int(seat)] == epoch}
    batch.found(seats, epochs, tokens, above, parts)
    model.shared = {pair: shared[pair] if {*pair} <= same else 0 for pair in model.shared}
    model.check()


def test_what_was_found_has_an_entry_for_each_seat() -> None:
    batch = LiveBatch()
    batch.add(5)
    batch.add(5)
    for arguments, match in (
        (([0, 1], [1, 1], [5, 5], [-1, 0], [0]), "shared_tokens"),
        (([0, 1], [1, 1], [5, 5], [-1, 0], [0, 9]), "shared_tokens"),
        (([0, 1], [1], [5, 5], [-1, 0], [0, 3]), "epochs"),
        (([0, 1], [1, 1.5], [5, 5], [-1, 0], [0, 3]), r"epochs\[1\] = 1.5"),
        (([0, 64], [1, 1], [5, 5], [-1, 0], [0, 3]), "seats"),
        (([0, 0], [1, 1], [5, 5], [-1, 0], [0, 3]), "names seat 0 twice"),
        (([0, 1], [1, 1], 5, [-1, 0], [0, 3]), "tokens = 5: has to be one-dimensional"),
        (([0, 1], [1, 1], [5, 5], [-1, 0], np.array(3)), "shared_tokens = .*: has to be one-dimensional"),
        ((np.ma.array([0, 1], mask=[0, 1]), [1, 1], [5, 5], [-1, 0], [0, 3]), "seats = a masked array"),
    ):
        with pytest.raises(TreeError, match=match):
            batch.found(*arguments)
    batch.found([0, 1], [1, 1], [7, 5], [-1, 0], [0, 3])
    assert (batch.tokens[:2].tolist(), batch.shared_tokens[:2].tolist()) == ([7, 5], [0, 3])


def test_copies_have_requests_of_their_own() -> None:
    batch = LiveBatch(page_size=16)
    batch.add(10)
    made = copy.copy(batch)
    made.add(20)
    batch.add(30)
    batch.add(5)
    assert (len(made), made.tokens[:2].tolist()) == (2, [10, 20])
    assert (len(batch), batch.tokens[:3].tolist()) == (3, [10, 30, 5])
