"""The cost that a late plan adds to a step: requests that it does not know are served alone."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from treegen.ir.arrays import INT32_MAX, Bools, Ints, Longs, largest, ragged_ranges
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.live_batch import LiveBatch
from treegen.ir.request_schedule import NO_EPOCH, RequestSchedule
from treegen.ir.request_tables import RequestRoom
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.target.cost_terms import ITEMS, facts_of
from treegen.target.targets import Target
from treegen.target.tile_config import tile_work


class LateCost(NamedTuple):
    """Microseconds per layer. late_us: those that a late plan adds. layer_us: those that the layer takes at least.

    alone: the requests that are served alone.
    """

    late_us: float
    layer_us: float
    alone: int


class Served(NamedTuple):
    """Which requests of a later batch a plan serves. planned: all of these, by seat. others: the seats of those of them
    that came in place of a request that the plan knew.
    """

    planned: Bools
    others: Longs


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
        self._owner, _, self._end_page = made.claims.T
        owner, _, _, further, end = made.seats[4:]
        claiming = (owner >= 0).nonzero()[0]
        counts = end.take(claiming) - further.take(claiming) + 1
        self._claimant = np.empty(len(made.claims), np.int64)
        self._claimant[ragged_ranges(further.take(claiming) - 1, counts)] = claiming.repeat(counts)
        self._claimed = np.zeros(len(self.epochs), np.int64)  # by seat: pages from the first on
        np.maximum.at(self._claimed, self._claimant, self._end_page)

    def served(self, batch: LiveBatch) -> Served:
        """Tells which requests of a later batch the plan serves.

        That are those which it was made for, and others in the seats of such requests: they have as many query rows,
        few enough tokens for the room of the plan's items, and share what it assumes of the seat. The others are served
        alone, and so are those that share with one which is gone.
        """
        runs: Bools = batch.row >= 0
        both = min(len(runs), len(self.epochs))
        planned = np.zeros(max(len(runs), len(self.epochs)), bool)
        np.equal(batch.epoch[:both], self.epochs[:both], out=planned[:both])
        planned[: len(runs)] &= runs
        others = (runs[:both] & (self.epochs[:both] != NO_EPOCH) & ~planned[:both]).nonzero()[0]
        queries = self._made.queries
        if len(others):
            tokens = batch.tokens.take(others)
            fits = tokens <= self._made.most.take(others)
            others = others[fits if queries is None else fits & (tokens >= queries.least.take(others))]
            planned[others] = True
        if queries is not None or largest(batch.rows) > 1:
            rows = np.ones(len(planned), np.int32)
            if queries is not None:
                rows[: len(queries.rows)] = queries.rows
            planned[: len(runs)] &= batch.rows == rows[: len(runs)]
        fails = ~planned.take(self._owner)
        if len(others):
            is_other = np.zeros(len(planned), bool)
            is_other[others] = True
            of_others = (is_other.take(self._owner) | is_other.take(self._claimant)).nonzero()[0]
            fails[of_others] |= ~self._hold(batch, of_others)
        if np.count_nonzero(fails):
            planned[self._claimant[fails]] = False
        return Served(planned[: len(runs)], others[planned.take(others)] if len(others) else others)

    def _hold(self, batch: LiveBatch, claims: Longs) -> Bools:
        """Says which of these claims hold: the request shares their pages with the owner, or with one that does."""
        above, owner = self._claimant.take(claims), self._owner.take(claims)
        tokens = self._end_page.take(claims) * batch.page_size
        least, holds = np.full(len(claims), INT32_MAX), np.zeros(len(claims), bool)
        while np.count_nonzero(least >= tokens):
            np.minimum(least, batch.shared_tokens.take(above), out=least)
            above = batch.shared_with.take(above).astype(np.int64)
            holds |= (above == owner) & (least >= tokens)
            least[holds | (above < 0)] = 0
        return holds

    def missed_tokens(self, batch: LiveBatch, seats: Longs) -> int:
        """Counts the tokens that these requests share with others, and that the plan has them read by themselves."""
        missed = batch.shared_tokens.take(seats) - self._claimed.take(seats) * batch.page_size
        return int(np.maximum(missed, 0).sum())

    def walked_alone(self, batch: LiveBatch) -> Bools:
        """Tells for each seat of a later batch whether its request is served alone."""
        alone: Bools = (batch.row >= 0) & ~self.served(batch).planned
        return alone


class LatePlan:
    """A plan that still serves a batch some steps after it was made.

    requests: those that it serves.

    Args:
        made: The plan's schedule.
        tree: The plan's tree, by request.
        room: The sizes of the kernel's tables.
        rates: The time that tokens take.
    """

    def __init__(self, made: RequestSchedule, tree: Tree, room: RequestRoom, rates: TokenRates) -> None:
        self.requests, self._room, self._rates = PlannedRequests(made), room, rates
        self._layer_us = tree.unique_tokens * rates.token_us
        self._tokens = np.zeros(len(made.epoch), np.int64)
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
        depends on how many there are for each lone item. A request that is served in the place of a shorter one adds
        what it is longer to one item.
        """
        planned, others = served or self.requests.served(batch)
        again, longer_us = 0, 0.0
        if len(others):
            again = self.requests.missed_tokens(batch, others)
            longer = int((batch.tokens.take(others) - self._tokens.take(others)).max())
            longer_us = max(longer, 0) * self._rates.lone_token_us
        alone = ((batch.row >= 0) & ~planned).nonzero()[0]
        if not len(alone):
            return LateCost(again * self._rates.token_us + longer_us, self._layer_us, 0)
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
        return LateCost(late_us, self._layer_us, len(alone))
