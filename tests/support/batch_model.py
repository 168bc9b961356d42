"""A live batch that random events change, beside plain lists of tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest

from support.request_checks import Pairs, Tokens, by_request, check, common, pairs_of
from treegen import LiveBatch
from treegen.ir.errors import TreeError


class Model:
    """A live batch, and a model of it in which requests are lists of tokens. Tokens are equal only where one request
    has copied them from another.
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
        """Returns what a new request shares with each other one. It begins with `shared` tokens of `parent`."""
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
