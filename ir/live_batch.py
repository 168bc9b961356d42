"""LiveBatch: the requests that run at present, how long they are, and who shares how much with whom."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from treegen.ir.arrays import INT32_MAX, Bools, Ints, IntsLike, Longs, frozen, int32_array, positive_int, ramp
from treegen.ir.errors import TreeError
from treegen.ir.tree import Tree
from treegen.ir.tree.requests import claimed_sharing, of_queries, of_requests


class LiveBatch:
    """The running requests of an engine, and what they share: trees by request are made of it.

    Each request has a seat, a number that it keeps while it runs, and a row, its place in the engine's batch. Requests
    share whole pages only, from their first token on. That they do is a claim of the caller's: kernels compare the
    page tables' entries before they rely on it.

    Arrays by seat, int32, as long as there are seats, to be read only (they are replaced when seats are added):

    - `row`: place in the batch, -1 where the seat is free.
    - `epoch`: raised when the seat gets a new request, and when its pages move.
    - `tokens`: the request's tokens, 0 where the seat is free.
    - `rows`: query rows of the request in a step, those of its last tokens; 1 in decoding, and where the seat is free.
    - `shared_with`, `shared_tokens`: the seat that the request shares its first tokens with, and how many tokens these
      are. -1 and 0 if it shares none. The other seat shares fewer tokens itself, so it owns the last of them.

    Two numbers count what happened. `changes` goes up when requests come, share other tokens or get another number of
    query rows: a plan is then out of date. `moves` goes up when requests come, end, get other rows or other numbers of
    query rows. Growth changes neither number.

    Methods raise TreeError before anything changes.
    """

    __slots__ = (
        "_active", "_seats", "changes", "epoch", "moves", "page_size", "row", "rows", "shared_tokens", "shared_with",
        "tokens",
    )  # fmt: skip
    row: Ints
    epoch: Ints
    tokens: Ints
    shared_with: Ints
    shared_tokens: Ints
    rows: Ints

    def __init__(self, page_size: int = 1, max_seats: int = 64) -> None:
        """page_size: tokens of a page. max_seats: the number of seats at first. It doubles when all seats are taken."""
        self.page_size = positive_int("page_size", page_size, TreeError)
        seats = positive_int("max_seats", max_seats, TreeError)
        self._active = self.changes = self.moves = 0
        self._take_seats(_free_seats(seats))

    def __getstate__(self) -> tuple[int, int, int, int, Ints]:
        return self.page_size, self._active, self.changes, self.moves, self._seats

    def __setstate__(self, state: tuple[int, int, int, int, Ints]) -> None:
        self.page_size, self._active, self.changes, self.moves, seats = state
        self._take_seats(seats)

    def _take_seats(self, seats: Ints) -> None:
        """Arrays by seat are lines of one table, so that they can be gathered all at once."""
        self._seats = seats
        self.row, self.epoch, self.tokens, self.shared_with, self.shared_tokens, self.rows = seats

    def __len__(self) -> int:
        return self._active

    def __repr__(self) -> str:
        return f"<treegen.LiveBatch: {self._active} requests, page_size {self.page_size}>"

    @property
    def seats(self) -> Longs:
        """The seats of running requests, ascending."""
        return (self.row >= 0).nonzero()[0]

    @property
    def rows_and_epochs(self) -> Ints:
        """`row` and `epoch` [2, seats]."""
        return self._seats[:2]

    def tree(self, *, shared: bool = True) -> Tree:
        """The tree of the running requests, with the rows of each seat in ascending order. shared: whether they share
        what they are known to share, or nothing.
        """
        seats = self.seats
        _, epoch, tokens, above, sharing, rows = self._seats.take(seats, 1)
        if not shared:
            above, sharing = np.full(len(seats), -1, np.int32), np.zeros(len(seats), np.int32)
        elif len(seats) and seats.item(-1) >= len(seats):  # the seats have gaps
            number = np.empty(len(self.row) + 1, np.int32)
            number[seats], number[-1] = ramp(len(seats)), -1
            above = number.take(above)
        made = tokens, above, sharing, frozen(seats), epoch, self.page_size
        several = np.count_nonzero(rows > 1) > 0
        parts, topology, requests = of_queries(frozen(rows), *made) if several else of_requests(*made)
        return Tree(*parts, topology, requests)

    def add(
        self,
        tokens: int,
        shared_with: int | None = None,
        shared_tokens: int = 0,
        row: int | None = None,
        rows: int = 1,
    ) -> int:
        """Starts a request and returns its seat, the lowest free one.

        It begins with the first `shared_tokens` tokens, rounded down to whole pages, of seat `shared_with`. row: by
        default the lowest free place. rows: its query rows, see `set_rows`.
        """
        tokens, rows = _count("tokens", tokens), _count("rows", rows, 1)
        above, shared = self._claim(shared_with, shared_tokens, tokens, None)
        place = self._free_row(row)
        if self._active == len(self.row):
            self._add_seats()
        seat = int((self.row < 0).argmax())
        self.row[seat], self.tokens[seat], self.rows[seat] = place, tokens, rows
        self.shared_with[seat], self.shared_tokens[seat] = above, shared
        self.epoch[seat] += 1
        self._active += 1
        self.changes += 1
        self.moves += 1
        return seat

    def fork(self, seat: int, shared_tokens: int | None = None, row: int | None = None, rows: int = 1) -> int:
        """Starts a request with the tokens of another and returns its seat.

        It shares the first `shared_tokens` of them, by default all full pages. row, rows: as in `add`.
        """
        tokens = int(self.tokens[self._running("seat", seat)])
        return self.add(tokens, seat, tokens if shared_tokens is None else shared_tokens, row, rows)

    def finish(self, seat: int) -> None:
        """Ends a request and frees its seat and row.

        What others share with it and with one another does not change: of those that share with it, the one that
        shares most (of several the lowest seat) takes its place, and the others share with that one.
        """
        seat = self._running("seat", seat)
        self._leave(seat)
        self.row[seat], self.tokens[seat], self.rows[seat] = -1, 0, 1
        self._active -= 1
        self.moves += 1

    def moved(self, seats: int | IntsLike) -> None:
        """The pages of these requests are others than before: they were preempted and are back, or were copied.

        They share nothing any more, also with one another; `share` says what they share now. What others share among
        themselves does not change, as in `finish`. Plans made before are not used for them.
        """
        for seat in self._chosen(seats).tolist():
            self._leave(seat)
            self.epoch[seat] += 1
            self.changes += 1
            self.moves += 1

    def share(self, seat: int, shared_with: int | None, shared_tokens: int) -> None:
        """A request begins with the first `shared_tokens` tokens of another, rounded down to whole pages, in place of
        what it shared with others before; with 0 tokens it shares with none. What shares with it goes on to do so.

        Of two requests one shares with the other: it is an error where `shared_with` already shares with `seat`,
        through others or not.
        """
        seat = self._running("seat", seat)
        above, shared = self._claim(shared_with, shared_tokens, int(self.tokens[seat]), seat)
        self.shared_with[seat], self.shared_tokens[seat] = above, shared
        self._settle(seat)
        self.changes += 1

    def found(
        self, seats: IntsLike, epochs: IntsLike, tokens: IntsLike, shared_with: IntsLike, shared_tokens: IntsLike
    ) -> None:
        """Takes what a page table showed of the requests that were in these seats, at these epochs, in place of what
        was known of tokens and sharing.

        Arrays have one entry for each of `seats`; shared_with: -1, or the index of an entry. Requests that have gone
        since, or moved, leave as in `finish`, and those that came since share nothing.
        """
        seat = int32_array("seats", seats, low=0, high=len(self.row) - 1)
        parts = {"epochs": epochs, "tokens": tokens, "shared_with": shared_with, "shared_tokens": shared_tokens}
        for name, part in parts.items():
            if len(part) != len(seat):
                raise TreeError(name, f"{len(part)} entries", f"does not match {len(seat)} seats", "give one per seat")
        length = int32_array("tokens", tokens, low=0)
        above, shared = claimed_sharing(length, shared_with, shared_tokens, self.page_size)
        self.shared_with[:], self.shared_tokens[:] = -1, 0
        self.shared_with[seat], self.shared_tokens[seat] = np.where(above >= 0, seat.take(above), -1), shared
        here = (self.row.take(seat) >= 0) & (self.epoch.take(seat) == epochs)
        for gone in seat[~here].tolist():
            self._leave(gone)
        self.tokens[seat[here]] = length[here]
        self.changes += 1

    def reorder(self, rows: Mapping[int, int] | IntsLike) -> None:
        """Gives requests other rows of the batch.

        rows: a mapping {seat: row}, in which the seats that it leaves out keep their rows; or an array with a row for
        every seat, whose entries for free seats are ignored.
        """
        seats, row = self.seats, self.row.copy()
        if isinstance(rows, Mapping):
            named = self._chosen(list(rows))
            row[named] = int32_array("rows", list(rows.values()), low=0)
        else:
            given = int32_array("rows", rows, low=-(2**31))
            if len(seats) and len(given) <= seats[-1]:
                reason = f"has no row for seat {seats[-1]}"
                raise TreeError("rows", f"{len(given)} entries", reason, "give one row per seat")
            row[seats] = given[seats]
            if len(seats) and row[seats].min() < 0:
                seat = int(seats[row[seats].argmin()])
                raise TreeError(f"rows[{seat}]", int(row[seat]), "is outside 0..2147483647", "correct the value")
        used = np.sort(row[seats])
        if len(twice := (used[1:] == used[:-1]).nonzero()[0]):
            raise TreeError("rows", rows, f"gives row {used[twice[0]]} to two requests", "give every request its own")
        self.row[:] = row
        self.moves += 1

    def grow(self, tokens: int | IntsLike = 1, seats: int | IntsLike | None = None) -> None:
        """Adds tokens to requests.

        tokens: one number for all, or one for each of `seats`. seats: by default all running requests.
        """
        chosen = self.seats if seats is None else self._chosen(seats)
        longer = self.tokens.take(chosen) + self._numbers("tokens", tokens, len(chosen)).astype(np.int64)
        if longer.max(initial=0) > INT32_MAX:
            seat = int(chosen[longer.argmax()])
            raise TreeError("tokens", tokens, f"makes seat {seat} longer than 2^31 - 1 tokens", "give fewer")
        self.tokens[chosen] = longer

    def set_tokens(self, seats: int | IntsLike, tokens: int | IntsLike) -> None:
        """Sets the length of requests, for instance after a rollback. tokens: one number for all, or one for each of
        `seats`.

        A request that becomes shorter than what it shares, or others share with it, shares the whole pages that are
        left; what others share among themselves does not change.
        """
        chosen = self._chosen(seats)
        after = self.tokens.copy()
        after[chosen] = self._numbers("tokens", tokens, len(chosen))
        sharing = (self.shared_with >= 0).nonzero()[0]
        owner, shared = self.shared_with.take(sharing), self.shared_tokens.take(sharing)
        too_short = np.concatenate([sharing[shared > after.take(sharing)], owner[shared > after.take(owner)]])
        for seat in np.unique(too_short).tolist():
            self._leave(seat, int(after[seat]) // self.page_size * self.page_size)
            self.changes += 1
        self.tokens[:] = after

    def set_rows(self, seats: int | IntsLike, rows: int | IntsLike) -> None:
        """Says how many query rows requests have in a step: those of their last tokens, drafts or a chunk of a prompt
        among them. rows: one number for all, or one for each of `seats`, at least 1.
        """
        chosen = self._chosen(seats)
        numbers = self._numbers("rows", rows, len(chosen), 1)
        if np.count_nonzero(numbers != self.rows.take(chosen)):
            self.rows[chosen] = numbers
            self.changes += 1
            self.moves += 1

    def _leave(self, seat: int, kept: int = 0) -> None:
        """Limits what a seat shares with others to its first `kept` tokens. Of those that share more with it, the one
        that shares most takes its place behind these, and the others share with that one.
        """
        above, shared = int(self.shared_with[seat]), int(self.shared_tokens[seat])
        sharers = (self.shared_with == seat).nonzero()[0]
        sharers = sharers[self.shared_tokens[sharers] > kept]
        if len(sharers):
            self.changes += 1
            heir = sharers[self.shared_tokens[sharers].argmax()]
            self.shared_with[sharers] = heir
            # A seat that keeps only what it shares itself owns no tokens, so the heir shares with the seat above it.
            own = kept > shared
            self.shared_with[heir], self.shared_tokens[heir] = (seat, kept) if own else (above, shared)
        if shared > kept:
            above, shared = self._owner(above, kept)
            self.shared_with[seat], self.shared_tokens[seat] = above, shared

    def _owner(self, seat: int, tokens: int) -> tuple[int, int]:
        """The seat, this one or up the chain of those that it shares with, that owns the last of its first so many
        tokens, and their number; -1 and 0 for none.
        """
        if not tokens:
            return -1, 0
        while self.shared_tokens[seat] >= tokens:
            seat = int(self.shared_with[seat])
        return seat, tokens

    def _settle(self, seat: int) -> None:
        """Those that share with a seat no more than it shares itself now share with the owner of that."""
        sharers = (self.shared_with == seat).nonzero()[0]
        for sharer in sharers[self.shared_tokens[sharers] <= self.shared_tokens[seat]].tolist():
            self.shared_with[sharer] = self._owner(seat, int(self.shared_tokens[sharer]))[0]

    def _claim(self, shared_with: int | None, shared_tokens: int, tokens: int, seat: int | None) -> tuple[int, int]:
        """The owner and the number of shared tokens, checked and in whole pages, of a request of so many tokens."""
        shared = _count("shared_tokens", shared_tokens)
        if shared_with is None:
            if shared:
                raise TreeError("shared_tokens", shared, "are shared with no seat", "give shared_with, or 0")
            return -1, 0
        above = self._running("shared_with", shared_with)
        for whose, most in (("the request has", tokens), (f"seat {above} has", int(self.tokens[above]))):
            if shared > most:
                raise TreeError("shared_tokens", shared, f"is more than the {most} tokens that {whose}", "lower it")
        up = above
        while seat is not None and up >= 0:
            if up == seat:
                reason = f"shares with seat {seat} itself" if up != above else "is the seat itself"
                raise TreeError(
                    "shared_with", above, reason, f"let seat {above} share with seat {seat}, or name another"
                )
            up = int(self.shared_with[up])
        return self._owner(above, shared - shared % self.page_size)

    def _running(self, argument: str, seat: int) -> int:
        """`seat` if a request runs there; raises TreeError otherwise."""
        number = _count(argument, seat)
        if number >= len(self.row) or self.row[number] < 0:
            raise TreeError(argument, number, "is the seat of no running request", "name one of `seats`")
        return number

    def _chosen(self, seats: int | IntsLike) -> Longs:
        """Distinct seats of running requests."""
        given = [seats] if isinstance(seats, (int, np.integer)) else seats
        chosen = int32_array("seats", given, low=0).astype(np.int64)
        runs: Bools = chosen < len(self.row)
        runs[runs] = self.row[chosen[runs]] >= 0
        if not runs.all():
            index = int(runs.argmin())
            reason = "is the seat of no running request"
            raise TreeError(f"seats[{index}]", int(chosen[index]), reason, "name some of `seats`")
        if len(chosen) > 1 and (twice := np.bincount(chosen) > 1).any():
            raise TreeError("seats", chosen.tolist(), f"names seat {int(twice.argmax())} twice", "name every seat once")
        return chosen

    def _numbers(self, argument: str, values: int | IntsLike, seats: int, low: int = 0) -> Ints:
        """Returns one number for each of `seats` seats. Raises TreeError for any below `low`, or not one for each."""
        if isinstance(values, (int, np.integer)):
            return np.full(seats, _count(argument, values, low), np.int32)
        numbers = int32_array(argument, values, low=low)
        if len(numbers) != seats:
            raise TreeError(argument, f"{len(numbers)} entries", f"does not match {seats} seats", "give one per seat")
        return numbers

    def _free_row(self, row: int | None) -> int:
        """`row`, by default the lowest place of the batch that is free; raises TreeError for one that is taken."""
        if row is None:
            taken = np.zeros(self._active + 1, bool)
            taken[self.row[(self.row >= 0) & (self.row <= self._active)]] = True
            return int(taken.argmin())
        place = _count("row", row)
        if len(seats := (self.row == place).nonzero()[0]):
            raise TreeError("row", place, f"is taken by seat {seats[0]}", "give a free place, or finish that request")
        return place

    def _add_seats(self) -> None:
        """Makes as many seats again."""
        self._take_seats(np.concatenate([self._seats, _free_seats(len(self.row))], axis=1))


def _free_seats(seats: int) -> Ints:
    """So many seats without requests."""
    return np.array([[-1], [0], [0], [-1], [0], [1]], np.int32).repeat(seats, 1)


def _count(argument: str, value: int, low: int = 0) -> int:
    """`value` as an int of low..2^31 - 1; raises TreeError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TreeError(argument, value, "is not an integer", "give a whole number")
    if not low <= value <= INT32_MAX:
        raise TreeError(argument, int(value), f"is outside {low}..{INT32_MAX}", "correct the value")
    return int(value)
