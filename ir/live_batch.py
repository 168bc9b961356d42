"""LiveBatch: the running requests, their lengths, and the tokens that they share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import treegen.ir.seat_checks as seat_checks
from treegen.ir.arrays import INT32_MAX, Ints, IntsLike, Longs, int32_array, largest, positive_int
from treegen.ir.errors import TreeError
from treegen.ir.free_seats import FreeSeats, no_requests
from treegen.ir.seat_sharing import check_shares_not, leave, owner_of, settle, too_short
from treegen.ir.tree import Tree
from treegen.ir.tree.live_trees import tree_of_seats
from treegen.ir.tree.requests import claimed_sharing


class LiveBatch:
    """The running requests of an engine, and the tokens that they share; `tree` makes trees by request of it.

    Each request has a seat, a number that it keeps while it runs, and a row, its place in the engine's batch. Requests
    share whole pages only, from their first token on. The sharing is a claim of the caller's: kernels compare the
    entries of the page table before they rely on it.

    The arrays by seat are int32, have an entry for each seat, and must not be written to. More seats replace them.

    - `row`: the request's row, -1 where the seat is free.
    - `epoch`: raised when the seat gets a new request, and when its pages move.
    - `tokens`: the request's tokens, 0 where the seat is free.
    - `rows`: the request's query rows in a step, those of its last tokens; 1 in decoding, and where the seat is free.
    - `shared_with`, `shared_tokens`: the seat that the request shares its first tokens with, and their number; -1 and 0
      for none. The other seat shares fewer tokens itself, so it owns the last of them.

    Two numbers count events. `changes` goes up when a request comes or moves, when what requests share changes, and
    when requests get another number of query rows: the next plan may then be another one. The end of a request counts
    only where others share its tokens. `moves` goes up when requests come, end, get other rows or pages, or get another
    number of query rows: the kernel then has to take the seats. Growth changes neither number.

    Methods raise TreeError before anything changes, also for seats without a request and for arrays that do not match.

    Args:
        page_size: Tokens of a page.
        max_seats: The seats to make room for at first, no limit. The number doubles when all seats are taken.
    """

    __slots__ = (
        "_free", "_most", "_seats", "changes", "epoch", "moves", "page_size", "row", "rows",
        "shared_tokens", "shared_with", "tokens",
    )  # fmt: skip
    row: Ints
    epoch: Ints
    tokens: Ints
    shared_with: Ints
    shared_tokens: Ints
    rows: Ints

    def __init__(self, page_size: int = 1, max_seats: int = 64) -> None:
        self.page_size = positive_int("page_size", page_size, TreeError)
        seats = positive_int("max_seats", max_seats, TreeError)
        self.changes = self.moves = 0
        self._take_seats(no_requests(seats))

    def __copy__(self) -> LiveBatch:
        made = object.__new__(type(self))
        made.page_size, made.changes, made.moves = self.__getstate__()[:-1]
        made._take_seats(self._seats.copy())
        return made

    def __getstate__(self) -> tuple[int, int, int, Ints]:
        return self.page_size, self.changes, self.moves, self._seats

    def __setstate__(self, state: tuple[int, int, int, Ints]) -> None:
        self.page_size, self.changes, self.moves, seats = state
        self._take_seats(seats)

    def _take_seats(self, seats: Ints) -> None:
        """Sets the arrays by seat: the lines of one table, so that they can be gathered in one operation."""
        free, self._most = FreeSeats(seats[0]), INT32_MAX  # no request has more tokens than _most
        self._seats = seats
        self.row, self.epoch, self.shared_with, self.shared_tokens, self.tokens, self.rows = seats
        self._free = free

    def __len__(self) -> int:
        return self._free.requests

    def __repr__(self) -> str:
        return f"<treegen.LiveBatch: {len(self)} requests, page_size {self.page_size}>"

    @property
    def seats(self) -> Longs:
        """The seats of running requests, ascending."""
        return (self.row >= 0).nonzero()[0]

    @property
    def table(self) -> Ints:
        """A table `[6, seats]`: the arrays `row`, `epoch`, `shared_with`, `shared_tokens`, `tokens` and `rows`."""
        return self._seats

    def tree(self, *, shared: bool = True) -> Tree:
        """Makes the tree by request of the running requests, with their rows in the order of the seats.

        Args:
            shared: Whether requests share the tokens that they are known to share, or none.
        """
        return tree_of_seats(self._seats, self.page_size, shared=shared)

    def add(
        self, tokens: int, shared_with: int | None = None, shared_tokens: int = 0, row: int | None = None, rows: int = 1
    ) -> int:
        """Starts a request in the lowest free seat, and returns the seat.

        Args:
            tokens: The request's tokens.
            shared_with: The seat of a request whose first tokens it begins with.
            shared_tokens: The number of these tokens; it is rounded down to whole pages.
            row: Its row of the batch; by default the lowest free one.
            rows: Its query rows in a step, as in `set_rows`.

        Raises:
            TreeError: The row is taken, no request is in the other seat, or one of both requests has fewer tokens.
        """
        tokens, rows = seat_checks.checked_count("tokens", tokens), seat_checks.checked_count("rows", rows, 1)
        above, shared = self._claim(shared_with, shared_tokens, tokens, None)
        if type(row) is not int or self._free.is_taken(row):
            row = seat_checks.free_row(row, self.row, len(self))
        place = seat_checks.checked_count("row", row)
        if len(self) == len(self.row):
            self._take_seats(np.concatenate([self._seats, no_requests(len(self.row))], axis=1))
        free, self._free = self._free, FreeSeats(self.row)  # which counts anew if somebody stops this
        seat = free.take(place)
        self._most = max(self._most, tokens)
        self.changes += 1
        self.moves += 1
        self.epoch[seat] += 1
        self.tokens[seat], self.rows[seat] = tokens, rows
        self.shared_with[seat], self.shared_tokens[seat] = above, shared
        self.row[seat] = place  # from here on it runs
        self._free = free
        return seat

    def fork(self, seat: int, shared_tokens: int | None = None, row: int | None = None, rows: int = 1) -> int:
        """Starts a request with the tokens of another one, and returns its seat.

        Args:
            seat: The seat of the other request.
            shared_tokens: The number of first tokens that both share; by default all full pages.
            row: Its row of the batch; by default the lowest free one.
            rows: Its query rows in a step, as in `set_rows`.
        """
        tokens = int(self.tokens[seat_checks.running_seat("seat", seat, self.row)])
        return self.add(tokens, seat, tokens if shared_tokens is None else shared_tokens, row, rows)

    def finish(self, seat: int) -> None:
        """Ends the request in this seat, and frees the seat and the row.

        Other requests still share the same tokens with one another. Of those that share with the ended request, the one
        that shares most (of several the lowest seat) takes its place, and the others share with that one.
        """
        seat = seat_checks.running_seat("seat", seat, self.row)
        free, self._free = self._free, FreeSeats(self.row)
        free.give_back(seat, self.row.item(seat))
        self.changes += leave(self.shared_with, self.shared_tokens, seat)
        self.moves += 1
        self.row[seat], self.tokens[seat], self.rows[seat] = -1, 0, 1
        self._free = free

    def moved(self, seats: int | IntsLike) -> None:
        """Records that these requests have other pages than before, for instance because they were preempted or copied.

        Afterwards they share nothing, not even with one another; call `share` for what they share now. Other requests
        still share the same tokens with one another, as in `finish`. Plans that were made earlier are not used for the
        moved requests, unless these share all that a plan assumes.
        """
        for seat in seat_checks.running_seats(seats, self.row).tolist():
            self.changes += 1 + leave(self.shared_with, self.shared_tokens, seat)
            self.epoch[seat] += 1
            self.moves += 1

    def share(self, seat: int, shared_with: int | None, shared_tokens: int) -> None:
        """Sets the tokens that a request shares with another one, in place of those that it shared before.

        Requests that share with it go on to do so.

        Args:
            seat: The seat of the request.
            shared_with: The seat of the other request; None for no sharing.
            shared_tokens: The number of first tokens that both share; it is rounded down to whole pages.

        Raises:
            TreeError: The other request shares with this one already, directly or through others, or one of both has
                fewer tokens.
        """
        seat = seat_checks.running_seat("seat", seat, self.row)
        above, shared = self._claim(shared_with, shared_tokens, int(self.tokens[seat]), seat)
        self.shared_with[seat], self.shared_tokens[seat] = above, shared
        settle(self.shared_with, self.shared_tokens, seat)
        self.changes += 1

    def found(
        self, seats: IntsLike, epochs: IntsLike, tokens: IntsLike, shared_with: IntsLike, shared_tokens: IntsLike
    ) -> None:
        """Sets tokens and sharing to what a page table showed, in place of what was known of them.

        Requests that ended or moved since the table was read leave as in `finish`. Requests that came since share
        nothing.

        Args:
            seats: The seats that had requests when the table was read. The other arrays have an entry for each of them.
            epochs: Their epochs at that time.
            tokens: Their tokens.
            shared_with: The entry of the request that each shares its first tokens with; -1 for none.
            shared_tokens: The number of these tokens.
        """
        seat, epoch = seat_checks.found_seats(seats, epochs, len(self.row))
        seat_checks.check_lengths(len(seat), tokens=tokens, shared_with=shared_with, shared_tokens=shared_tokens)
        length = int32_array("tokens", tokens, low=0)
        above, shared = claimed_sharing(length, shared_with, shared_tokens, self.page_size)
        self.shared_with[:], self.shared_tokens[:] = -1, 0
        self.shared_with[seat], self.shared_tokens[seat] = np.where(above >= 0, seat.take(above), -1), shared
        here = (self.row.take(seat) >= 0) & (self.epoch.take(seat) == epoch)
        for gone in seat[~here].tolist():
            self.changes += leave(self.shared_with, self.shared_tokens, gone)
        self._most = INT32_MAX
        self.tokens[seat[here]] = length[here]
        self.changes += 1

    def reorder(self, rows: Mapping[int, int] | IntsLike) -> None:
        """Gives requests other rows of the batch.

        Args:
            rows: A mapping {seat: row}; seats that it leaves out keep their rows. Or an array with a row for every
                seat; its entries for free seats are ignored.
        """
        after = seat_checks.reordered_rows(rows, self.row, self.seats)
        self._free = FreeSeats(self.row)
        self.moves += 1  # first, so that kernels look at the rows if this is stopped
        self.row[:] = after

    def grow(self, tokens: int | IntsLike = 1, seats: int | IntsLike | None = None) -> None:
        """Adds tokens to requests.

        Args:
            tokens: The number of new tokens: one for all, or one for each seat.
            seats: The seats of the requests; by default all running requests.
        """
        runs = self.row >= 0
        if seats is None and type(tokens) is int and tokens >= 0:
            if tokens > INT32_MAX - self._most:
                self._most = largest(self.tokens)
            if tokens <= INT32_MAX - self._most:
                self._most += tokens
                np.add(self.tokens, runs if tokens == 1 else runs * np.int32(tokens), out=self.tokens)
                return
        self._most = INT32_MAX
        chosen = runs.nonzero()[0] if seats is None else seat_checks.running_seats(seats, self.row)
        more = seat_checks.one_for_each("tokens", tokens, len(chosen))
        self.tokens[chosen] = seat_checks.longer(self.tokens.take(chosen), more, chosen)

    def set_tokens(self, seats: int | IntsLike, tokens: int | IntsLike) -> None:
        """Sets the length of requests, for instance after a rollback.

        Where a request becomes shorter than the tokens that it shares, or that others share with it, the whole pages
        that remain stay shared. Other requests still share the same tokens with one another.

        Args:
            seats: A seat, or several.
            tokens: The length: one for all, or one for each seat.
        """
        chosen = seat_checks.running_seats(seats, self.row)
        after = self.tokens.copy()
        after[chosen] = seat_checks.one_for_each("tokens", tokens, len(chosen))
        for seat in too_short(self.shared_with, self.shared_tokens, after):
            kept = int(after[seat]) // self.page_size * self.page_size
            self.changes += 1
            self.changes += leave(self.shared_with, self.shared_tokens, seat, kept)
        self._most = INT32_MAX
        self.tokens[:] = after

    def set_rows(self, seats: int | IntsLike, rows: int | IntsLike) -> None:
        """Sets the query rows of requests in a step, those of their last tokens: drafts, or a chunk of a prompt.

        Args:
            seats: A seat, or several.
            rows: The number of query rows, at least 1: one for all, or one for each seat.
        """
        chosen = seat_checks.running_seats(seats, self.row)
        numbers = seat_checks.one_for_each("rows", rows, len(chosen), 1)
        if np.count_nonzero(numbers != self.rows.take(chosen)):
            self.changes, self.moves = self.changes + 1, self.moves + 1  # first, as in reorder
            self.rows[chosen] = numbers

    def _claim(self, shared_with: int | None, shared_tokens: int, tokens: int, seat: int | None) -> tuple[int, int]:
        """Returns the owner and the number of a request's shared tokens, in whole pages; checks them."""
        above, shared = seat_checks.checked_claim(shared_with, shared_tokens, tokens, self.row, self.tokens)
        if above < 0:
            return -1, 0
        if seat is not None:
            check_shares_not(self.shared_with, above, seat)
        return owner_of(self.shared_with, self.shared_tokens, above, shared - shared % self.page_size)
