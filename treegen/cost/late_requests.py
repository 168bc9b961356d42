"""The cost that a late plan adds to a step: requests that it does not know are served alone."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import Bools, Ints, Longs, largest, offsets
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.live_batch import LiveBatch
from treegen.ir.request_schedule import NO_EPOCH, RequestSchedule
from treegen.ir.request_tables import RequestRoom
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.target.cost_terms import ITEMS, facts_of
from treegen.target.targets import Target
from treegen.target.tile_config import tile_work

_OTHERS = 64
"""The most requests in others' seats that are looked at; with more of them a new plan is due."""
_ABOVE = 4
"""How many requests that share with one another are looked at, from one to the owner of what they share."""


class LateCost(NamedTuple):
    """Microseconds per layer. late_us: those that a late plan adds. layer_us: those that the layer takes at least.

    shares_less: whether requests are served alone, or read by themselves what they share since the plan.
    """

    late_us: float
    layer_us: float
    shares_less: bool


class _Newcomer(NamedTuple):
    """Another request in a seat that a plan knows.

    at: its epoch, and what it shares with whom. tokens: its tokens when it was first looked at. owners: the seats that
    the plan has it share with; None if it does not share that.
    """

    at: tuple[int, int, int]
    tokens: int
    owners: list[int] | None


class Served(NamedTuple):
    """Which requests of a later batch a plan serves. planned: all of these, by seat. others: the seats of those of them
    that came in place of a request that the plan knew.
    """

    planned: Bools
    others: list[int]


class TokenRates(NamedTuple):
    """Microseconds per token of a kernel for running batches.

    token_us: to read its keys and values, where all SMs read. lone_token_us: of a thread block that is alone on its SM.
    """

    token_us: float
    lone_token_us: float

    @classmethod
    def of(cls, tile: KernelConfig, shape: Shape, target: Target) -> TokenRates:
        """Returns the rates of launches in one kernel config."""
        facts, (flops, _) = facts_of(target), tile_work(tile, shape)
        lone_tile_us = float(ITEMS.terms["lone_tile"](SimpleNamespace(tile_flops=flops, **facts)))
        return cls(shape.kv_token_bytes / facts["memory_bytes_per_us"], lone_tile_us / tile.tokens)


class PlannedRequests:
    """The requests that a plan serves together.

    epochs: by seat, those that the plan was made for; NO_EPOCH where it knows no request.

    Args:
        made: The plan's schedule.
    """

    def __init__(self, made: RequestSchedule) -> None:
        self._made, self.epochs = made, made.epoch
        self._claimed, self._known = made.claims[:, 0], made.epoch != NO_EPOCH
        self._newcomers: dict[int, _Newcomer] = {}  # by seat

    def served(self, batch: LiveBatch) -> Served:
        """Tells which requests of a later batch the plan serves.

        It serves those that it was made for, except those that share with one that is gone. It also serves a request
        that came into a seat it knows, if the request has as many query rows, fits into the room of the plan's items
        and shares what the plan assumes of the seat. All others are walked alone.
        """
        runs: Bools = batch.row >= 0
        both = min(len(runs), len(self.epochs))
        planned = np.zeros(max(len(runs), len(self.epochs)), bool)
        np.equal(batch.epoch[:both], self.epochs[:both], out=planned[:both])
        planned[: len(runs)] &= runs
        changed = np.greater(runs[:both] & self._known[:both], planned[:both]).nonzero()[0]
        gone = ~planned.take(self._claimed)
        others: list[int] = []
        if len(changed) and len(changed) <= _OTHERS:
            others = [seat for seat in changed.tolist() if self._takes(batch, seat, planned)]
        if np.count_nonzero(gone):
            planned[self._claiming_one_of(gone)] = False
        planned[others] = True
        queries = self._made.queries
        if queries is not None or largest(batch.rows) > 1:
            rows = np.ones(len(planned), np.int32)
            if queries is not None:
                rows[: len(queries.rows)] = queries.rows
            planned[: len(runs)] &= batch.rows == rows[: len(runs)]
            others = [seat for seat in others if planned[seat]]
        return Served(planned[: len(runs)], others)

    def _takes(self, batch: LiveBatch, seat: int, same: Bools) -> bool:
        """Says whether the plan serves another request in a seat that it knows. same: the seats with its requests."""
        at = batch.epoch.item(seat), batch.shared_with.item(seat), batch.shared_tokens.item(seat)
        tokens, known, queries = batch.tokens.item(seat), self._newcomers.get(seat), self._made.queries
        if known is None or known.at != at:
            claims = self._made.claims_of(seat).tolist()
            shares = all(_shares(batch, seat, owner, end * batch.page_size) for owner, _, end in claims)
            begun = known.tokens if known is not None and known.at[0] == at[0] else tokens
            self._newcomers[seat] = known = _Newcomer(at, begun, [claim[0] for claim in claims] if shares else None)
        if known.owners is None or not all(same.item(owner) for owner in known.owners):
            return False
        least = 0 if queries is None else queries.least.item(seat)
        return bool(least <= tokens <= self._made.most.item(seat))

    def begun(self, seat: int) -> int:
        """Returns the tokens that another request in this seat had when it was first looked at."""
        return self._newcomers[seat].tokens

    def _claiming_one_of(self, claims: Bools) -> Longs:
        """Returns the seats that have one of these claims."""
        owner, _, _, further, end = self._made.seats[4:]
        claiming = (owner >= 0).nonzero()[0]
        of_seats = offsets(claims)
        has: Bools = of_seats.take(end.take(claiming)) > of_seats.take(further.take(claiming) - 1)
        seats: Longs = claiming[has]
        return seats

    def walked_alone(self, batch: LiveBatch) -> Bools:
        """Tells for each seat of a later batch whether its request is served alone."""
        alone: Bools = (batch.row >= 0) & ~self.served(batch).planned
        return alone


def _shares(batch: LiveBatch, seat: int, owner: int, tokens: int) -> bool:
    """Says whether a request shares this many tokens with the one in the seat `owner`, or with one that shares them."""
    for _ in range(_ABOVE):
        if batch.shared_tokens.item(seat) < tokens:
            return False
        seat = batch.shared_with.item(seat)
        if seat == owner:
            return True
    return False


class LatePlan:
    """A plan that still serves a batch some steps after it was made.

    requests: those that it serves.

    Args:
        made: The plan's schedule.
        tree: The plan's tree, by request.
        shared: By seat, the tokens that requests were known to share at the plan, whether it uses that or not.
        room: The sizes of the kernel's tables.
        rates: The time that tokens take.
    """

    def __init__(self, made: RequestSchedule, tree: Tree, shared: Ints, room: RequestRoom, rates: TokenRates) -> None:
        self.requests, self._room, self._rates = PlannedRequests(made), room, rates
        self._layer_us = tree.unique_tokens * rates.token_us
        self._tokens, self._shared = np.zeros(len(made.epoch), np.int64), shared
        if tree.requests is not None:
            self._tokens[tree.requests.seat] = tree.requests.length

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
        unused = (batch.shared_tokens[:both] - self._shared[:both]) * planned[:both]
        again, longer_us = int(np.maximum(unused, 0).sum()), 0.0
        if others:
            longer = max(batch.tokens.item(seat) - self._tokens.item(seat) for seat in others)
            longer_us = max(longer, 0) * self._rates.lone_token_us
        alone = ((batch.row >= 0) & ~planned).nonzero()[0]
        if not len(alone):
            return LateCost(again * self._rates.token_us + longer_us, self._layer_us, again > 0)
        tokens, rows = batch.tokens.take(alone), batch.rows.take(alone)
        again += int(np.add.reduce(batch.shared_tokens.take(alone), dtype=np.int64))
        queries = len(rows)
        if largest(rows) > 1:
            again += int(np.dot(rows - np.int64(1), tokens))
            queries = int(np.add.reduce(rows, dtype=np.int64))
        share = queries / self._room.lone_items  # of a query row for each lone item
        part = math.ceil(share) if share > 0.5 else max(share, 1 / self._room.lone_parts)
        longest_us = largest(tokens) * part * self._rates.lone_token_us
        late_us = again * self._rates.token_us + longer_us + max(longest_us - self._layer_us, 0.0)
        return LateCost(late_us, self._layer_us, True)
