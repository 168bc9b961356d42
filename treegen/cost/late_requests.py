"""The cost that a late plan adds to a step: requests that it does not know are served alone."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Bools, Ints, Longs, largest, ragged_ranges
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.live_batch import LiveBatch
from treegen.ir.request_schedule import NO_EPOCH, RequestSchedule
from treegen.ir.request_tables import RequestRoom
from treegen.ir.seat_sharing import share
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.target.cost_terms import ITEMS, facts_of
from treegen.target.targets import Target
from treegen.target.tile_config import tile_work

_OTHERS = 64
"""The most requests in others' seats that are looked at; with more of them a new plan is due."""
ALONE_US = 4.0
"""Microseconds that a layer takes longer while a request is walked alone.

On an H200 one of 500 to 40,000 tokens adds 0 to 5 us to layers of 24 to 89 us (8:1 heads). With 1, steps of 128
requests of a recorded server take 1.03 times as long, because plans are in use for longer.
"""


class LateCost(NamedTuple):
    """Microseconds per layer. late_us: those that a late plan adds. layer_us: those that the layer takes at least.

    alone: whether requests are walked alone.
    """

    late_us: float
    layer_us: float
    alone: bool


class _Newcomer(NamedTuple):
    """Another request in a seat that a plan knows.

    at: its epoch, and what it shares with whom. tokens: its tokens when it was first looked at. fits: whether it is not
    faster alone, and shares what the plan assumes of it and of requests that are still there.
    """

    at: tuple[int, int, int]
    tokens: int
    fits: bool


class Served(NamedTuple):
    """Which requests of a later batch a plan serves. planned: all of these, by seat. others: the seats of those of them
    that came in place of a request that the plan knew.
    """

    planned: Bools
    others: list[int]


class TokenRates(NamedTuple):
    """Microseconds per token that a kernel for running batches reads.

    token_us: to read its keys and values, where all SMs read. lone_token_us: of a thread block that is alone on its SM.
    window_left: the tokens before its own that a row reads, -1 for all.
    """

    token_us: float
    lone_token_us: float
    window_left: int = -1

    def read(self, tokens: Ints | Longs, shared: Ints | Longs) -> tuple[Ints | Longs, Ints | Longs]:
        """Returns how many of its tokens, and of those that it shares, each request reads: those in its window."""
        if self.window_left < 0:
            return tokens, shared
        before = np.maximum(tokens - (1 + self.window_left), 0)
        return tokens - before, np.maximum(shared - before, 0)

    @classmethod
    def of(cls, tile: KernelConfig, shape: Shape, target: Target, window_left: int = -1) -> TokenRates:
        """Returns the rates of launches in one kernel config."""
        facts, (flops, _) = facts_of(target), tile_work(tile, shape)
        lone_tile_us = float(ITEMS.terms["lone_tile"](SimpleNamespace(tile_flops=flops, **facts)))
        return cls(shape.kv_token_bytes / facts["memory_bytes_per_us"], lone_tile_us / tile.tokens, window_left)


class PlannedRequests:
    """The requests that a plan serves together.

    epochs: by seat, those that the plan was made for; NO_EPOCH where it knows no request.

    Args:
        made: The plan's schedule.
        tokens: By seat, the tokens of the requests that it was made for.
        rates: The time that tokens take, by which a request is too long for a seat; without them, only room counts.
    """

    def __init__(self, made: RequestSchedule, tokens: Longs | None = None, rates: TokenRates | None = None) -> None:
        self._made, self.epochs = made, made.epoch
        self._tokens, self._rates = tokens, rates
        self._owners, self._known = made.claims[:, 0], made.epoch != NO_EPOCH
        self._newcomers: dict[int, _Newcomer] = {}  # by seat
        self._of_claims = _table_of_claims(made)

    def served(self, batch: LiveBatch) -> Served:
        """Tells which requests of a later batch the plan serves.

        It serves a request that it was made for. It also serves another one that took its seat, if that has the same
        number of query rows and is not so much longer that it is faster alone. Both must share with other seats what
        the plan assumes. The rest are walked alone.
        """
        runs: Bools = batch.row >= 0
        both = min(len(runs), len(self.epochs))
        same = np.zeros(max(len(runs), len(self.epochs)), bool)
        np.equal(batch.epoch[:both], self.epochs[:both], out=same[:both])
        same[: len(runs)] &= runs
        changed = np.greater(runs[:both] & self._known[:both], same[:both]).nonzero()[0]
        kept = same.take(self._owners)  # for each claim
        others = self._others(batch, changed.tolist(), kept) if 0 < len(changed) <= _OTHERS else []
        planned = same
        if others:
            planned = same.copy()
            planned[others] = True
        if np.count_nonzero(kept) < len(kept):
            claims = (~kept).nonzero()[0]
            planned[self._failing(batch, claims)] = False
        queries = self._made.queries
        if queries is not None or largest(batch.rows) > 1:
            rows = np.ones(len(planned), np.int32)
            if queries is not None:
                rows[: len(queries.rows)] = queries.rows
            planned[: len(runs)] &= batch.rows == rows[: len(runs)]
        return Served(planned[: len(runs)], [seat for seat in others if planned[seat]])

    def _others(self, batch: LiveBatch, seats: list[int], kept: Bools) -> list[int]:
        """Returns those of these seats, with other requests than planned, that fit, and for which the plan has room.

        kept: for each claim, whether its owner is still there.
        """
        made, claims = self._made, []
        for seat in seats:
            at = batch.epoch.item(seat), batch.shared_with.item(seat), batch.shared_tokens.item(seat)
            known = self._newcomers.get(seat)
            if known is None or known.at != at:
                begun = known.tokens if known is not None and known.at[0] == at[0] else batch.tokens.item(seat)
                self._newcomers[seat] = _Newcomer(at, begun, fits := not self._is_faster_alone(seat, begun, at[2]))
                if fits:
                    claims += [claim for claim in made.claim_numbers(seat) if kept.item(claim)]
        if claims:
            for seat in self._failing(batch, np.array(claims)).tolist():
                self._newcomers[seat] = self._newcomers[seat]._replace(fits=False)
        most, least = made.most, made.least
        return [
            seat
            for seat in seats
            if self._newcomers[seat].fits
            and (tokens := batch.tokens.item(seat)) <= most.item(seat)
            and tokens >= least.item(seat)
        ]

    def _is_faster_alone(self, seat: int, tokens: int, shared: int) -> bool:
        """Says whether a request is faster alone than in the place of a shorter one.

        Alone it reads again what it shares. In the place of a shorter one it makes an item longer.
        """
        if self._tokens is None or self._rates is None:
            return False
        then = self._tokens.item(seat)
        read, again = self._rates.read(np.array([tokens, then]), np.array([shared, 0]))
        longer_us = (read.item(0) - read.item(1)) * self._rates.lone_token_us
        return longer_us > ALONE_US + again.item(0) * self._rates.token_us

    def begun(self, seat: int) -> int:
        """Returns the tokens that another request in this seat had when it was first looked at."""
        return self._newcomers[seat].tokens

    def _failing(self, batch: LiveBatch, claims: Longs) -> Longs:
        """Returns the seats of those of these claims that do not hold for the requests that are now in the seats."""
        table = self._of_claims.take(claims, 1)
        pairs, tokens = table[:2], table[2] * batch.page_size
        holds = share(batch.shared_with, batch.shared_tokens, pairs, tokens)
        holds &= (batch.tokens.take(pairs) >= tokens).all(0)
        failing: Longs = pairs[0].compress(~holds)
        return failing

    def walked_alone(self, batch: LiveBatch) -> Bools:
        """Tells for each seat of a later batch whether its request is served alone."""
        alone: Bools = (batch.row >= 0) & ~self.served(batch).planned
        return alone


def _table_of_claims(made: RequestSchedule) -> Longs:
    """Lists a plan's claims, `[3, claims]`: the seat, the owner's seat, and the number of pages of each."""
    table = np.empty((3, len(made.claims)), np.int64)
    if len(made.claims):
        owner, _, _, further, end = made.seats[5:]
        seats = (owner >= 0).nonzero()[0]
        count = end.take(seats) - further.take(seats) + 1
        table[0, ragged_ranges(further.take(seats) - 1, count)] = seats.repeat(count)
        table[1], table[2] = made.claims[:, 0], made.claims[:, 2]
    return table


class LatePlan:
    """A plan that still serves a batch some steps after it was made.

    requests: those that it serves. least: by seat, the tokens that a request has to have for it.

    Args:
        made: The plan's schedule.
        tree: The plan's tree, by request.
        shared: By seat, the tokens that requests were known to share at the plan, as owners or with them, whether the
            plan uses that or not.
        room: The sizes of the kernel's tables.
        rates: The time that tokens take.
    """

    def __init__(self, made: RequestSchedule, tree: Tree, shared: Ints, room: RequestRoom, rates: TokenRates) -> None:
        self._layer_us, self.least = tree.unique_tokens * rates.token_us, made.least
        self._tokens, self._shared = np.zeros(len(made.epoch), np.int64), shared
        if tree.requests is not None:
            self._tokens[tree.requests.seat] = tree.requests.length
        self.requests, self._room, self._rates = PlannedRequests(made, self._tokens, rates), room, rates

    def epochs(self, batch: LiveBatch, served: Served) -> Ints:
        """Returns the epochs by seat of a later batch, with those of the plan where it serves other requests."""
        epochs: Ints = batch.epoch.copy()
        epochs[served.others] = self.requests.epochs.take(served.others)
        return epochs

    def cost(self, batch: LiveBatch, served: Served | None = None) -> LateCost:
        """Estimates the cost for a layer while the plan serves `batch`.

        Requests that are served alone read again the tokens that they share with others, and each of their query rows
        reads all of its tokens by itself. The longest of them may also take longer than the rest of the layer; that
        depends on how many there are for each lone item. Requests that the plan serves read by themselves what they
        share since it was made, and one that is served in the place of a shorter one makes one item longer.
        """
        planned, others = served or self.requests.served(batch)
        both = min(len(planned), len(self._shared))
        read, shared = self._rates.read(batch.tokens, batch.shared_tokens)
        _, used = self._rates.read(batch.tokens[:both], self._shared[:both])
        unused = (shared[:both] - used) * planned[:both]
        again, longer_us = int(np.maximum(unused, 0).sum()), 0.0
        if others:
            then, _ = self._rates.read(self._tokens.take(others), self._shared.take(others))
            longer_us = max(largest(read.take(others) - then), 0) * self._rates.lone_token_us
        alone = ((batch.row >= 0) & ~planned).nonzero()[0]
        if not len(alone):
            return LateCost(again * self._rates.token_us + longer_us, self._layer_us, False)
        tokens, rows = read.take(alone), batch.rows.take(alone)
        again += int(np.add.reduce(shared.take(alone), dtype=np.int64))
        queries = len(rows)
        if largest(rows) > 1:
            again += int(np.dot(rows - np.int64(1), tokens))
            queries = int(np.add.reduce(rows, dtype=np.int64))
        share = queries / self._room.lone_items  # of a query row for each lone item
        part = math.ceil(share) if share > 0.5 else max(share, 1 / self._room.lone_parts)
        longest_us = largest(tokens) * part * self._rates.lone_token_us
        late_us = again * self._rates.token_us + longer_us + max(longest_us - self._layer_us, 0.0)
        return LateCost(late_us, self._layer_us, True)
