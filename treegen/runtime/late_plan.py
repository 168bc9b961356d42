"""The cost that a late plan adds to a step: requests that it does not know are served alone."""

from __future__ import annotations

import math
from typing import NamedTuple

from treegen.compiled.batch_tables import BatchTables
from treegen.compiled.batch_tree import BatchTree
from treegen.cost.token_rates import TokenRates
from treegen.ir.live_batch import LiveBatch
from treegen.ir.request_tables import RequestRoom
from treegen.runtime.compiled_requests import requests_of
from treegen.runtime.lateness import AloneTime
from treegen.runtime.planned_requests import Served


class LateCost(NamedTuple):
    """Microseconds per layer. late_us: those that a late plan adds. layer_us: those that the layer takes at least.

    alone_tokens: tokens that requests read alone, by all of their query rows.
    """

    late_us: float
    layer_us: float
    alone_tokens: int


class LatePlan:
    """A plan, and what it costs a step that it still serves the batch after requests have come, grown or ended.

    Args:
        made: The plan and its schedule.
        tree: The plan's tree.
        then: The batch as the plan was made for, which stays as it is.
        room: The sizes of the kernel's tables.
        rates: The time that tokens take.
    """

    def __init__(
        self, made: BatchTables, tree: BatchTree, then: LiveBatch, room: RequestRoom, rates: TokenRates
    ) -> None:
        layer_us = tree.counts.unique_tokens * rates.token_us
        if made.queries is not None:  # chunks of prompts, each of whose tokens many items compute
            layer_us = max(layer_us, made.tokens * rates.item_token_us)
        self._alone = AloneTime(layer_us, room.lone_items, room.lone_parts, rates.lone_token_us)
        self.requests, self._rates = requests_of(made, then, rates, self._alone), rates
        self._has_queries = room.queries

    def most_late_us(self, batch: LiveBatch, served: Served) -> float:
        """Returns an upper bound of `cost` in microseconds, faster than `cost` does; infinity where there is none."""
        return math.inf if self._has_queries else self.requests.most_late_us(batch, served)

    def cost(self, batch: LiveBatch, served: Served | None = None) -> LateCost:
        """Estimates the cost for a layer while the plan serves `batch`. See LateRequests.late_facts.

        The longest of the requests that are served alone may also take longer than the rest of the layer; that depends
        on how many there are for each lone item.
        """
        facts = self.requests.late_facts(batch, served or self.requests.served(batch))
        late_us = facts.again * self._rates.token_us + facts.longer * self._rates.lone_token_us
        if facts.queries:
            late_us += self._alone.longest_us(facts.longest, facts.queries)
        return LateCost(late_us, self._alone.layer_us, facts.alone_tokens)
