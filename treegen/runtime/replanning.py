"""Replanning: decides when a running batch gets another plan.

    step      prepare ──▶ step ──▶ layers ──▶ refresh          the host plans while the device works
    prepare   plans only where the step cannot wait for refresh
    refresh   plans where a plan saves more time than it takes, or the present one is out of date

Until then the present plan serves the batch. Requests that it does not know are served alone, which is right, and takes
longer.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from treegen.compiled.batch_tree import BatchTree
from treegen.cost.token_rates import TokenRates
from treegen.ir.arrays import Ints
from treegen.ir.live_batch import LiveBatch
from treegen.ir.request_tables import RequestRoom
from treegen.runtime.batch_plans import BatchPlan
from treegen.runtime.coming_chunks import ComingChunks
from treegen.runtime.late_plan import LateCost, LatePlan
from treegen.runtime.planned_batch import PlannedBatch
from treegen.runtime.planned_requests import ALONE_US, Served, running_requests
from treegen.runtime.steady_sharing import SteadySharing

_BEFORE_STEP_US = 4000.0
"""Microseconds that a step has to lose by requests that are served alone before `prepare` makes a plan for it.

Beside an H200 a plan takes 0.25 to 0.5 ms. With 800 in its place no measured batch became faster (a recorded server,
templates, beams, drafts, chunks of prompts). Plans before a step would also hide plans that do not hold.
"""
_FIXED_LAYER_US = 12.0
"""Microseconds that a layer takes beside the time to read its KV."""
_LONG_STEP_US = 550.0
"""A step is long if its layers take this many microseconds: by then the host has made a plan."""
_LOST_US, _LOST_IN_LONG_US = 300.0, 75.0
"""Microseconds that steps lose before the next plan is made: short steps, and long ones.

With 300 in place of 75, on an H200, steps of 128 requests of a recorded server (8:1 heads) take 1.03 times as long, and
with 120 steps of 96 requests on templates 1.02. Steps of 32 beams, whose layers take 430 us, take 1.03 times as long
with 140 in place of 300.
"""
_MOST_FREE = 0.2
"""The most of the thread blocks that a plan leaves free for requests that are served alone."""
_USUAL_LAYERS, _MOST_LAYERS = 32, 256
"""Layers of a step until calls have been counted, and the most layers that calls without a further step count as."""


@dataclass(slots=True)
class _AloneShare:
    """The share of the tokens of steps that requests read alone, at most _MOST_FREE in each, summed over steps."""

    shares: float = 0.0
    steps: int = 0

    def add(self, share: float) -> None:
        """Adds a step."""
        self.shares, self.steps = self.shares + share, self.steps + 1

    @property
    def mean(self) -> float:
        """The mean of a step; 0 if there was none."""
        return self.shares / self.steps if self.steps else 0.0


class Replanning:
    """Compares a batch with its last plan, and decides when a new plan pays.

    room: the room of the kernel's tables; its `chunk` is not 0 in batch-invariant mode, and its `queries` is true where
    requests may have several query rows (`qo_indptr`). rates: the time that tokens take. most_tokens: the kernel's
    `max_tokens`. plans: plans so far. calls: calls since the last step began.
    """

    def __init__(self, room: RequestRoom, rates: TokenRates, most_tokens: int) -> None:
        self._room, self._rates = room, rates
        self._coming = ComingChunks(most_tokens)
        self._ahead: LiveBatch | None = None  # the batch of the next step, where chunks of prompts come
        self._seen: PlannedBatch | None = None
        self._seated: tuple[LiveBatch, int] | None = None  # whose seats the kernel took, and the batch's counter then
        self._late_plan: LatePlan | None = None
        self._served: tuple[tuple[int, int], Served] | None = None  # by the plan, with counters of the batch
        self._cost: LateCost | None = None  # of that
        self.plans, self.calls = 0, 0
        self._last_calls = _USUAL_LAYERS  # of the last step with calls
        self._late_us = 0.0  # how much longer one layer has taken since the last plan, summed over steps
        self._steps = 0  # these steps
        self._lives = _AloneShare(), _AloneShare()  # under the plan before, and the present one
        self._free_share = 0.0  # of the present plan, see BatchPlan
        self._sharing = SteadySharing()

    def note_plan(self, batch: LiveBatch, then: LiveBatch, planned: BatchPlan) -> None:
        """Notes a new plan of a batch. then: a copy of the batch, which stays as the plan was made for."""
        self.plans, self._late_us, self._steps = self.plans + 1, 0.0, 0
        before = self._lives[1] if self._seen is not None and self._seen.batch is batch else _AloneShare()
        self._lives, self._free_share = (before, _AloneShare()), planned.free_share
        self._late_plan = LatePlan(planned.tables, planned.tree, then, self._room, self._rates)
        self._served, self._seen = None, PlannedBatch.of(batch, then)

    def forget_plan(self) -> None:
        """Forgets the plan that was noted last, so that the next `prepare` or `refresh` makes another."""
        self._seen = None

    def note_seats(self, batch: LiveBatch) -> None:
        """Notes that the kernel knows the present seats of the batch."""
        self._seated = batch, batch.moves

    def note_step(self) -> None:
        """Notes the beginning of a step."""
        self._last_calls, self.calls = self.calls or self._last_calls, 0
        self._coming.note_step()

    @property
    def layers(self) -> int:
        """The layers of a step: the calls of the last one, or since its beginning, if these are more. Replays of graphs
        count no calls, so what was called when a graph was captured counts from then on. More calls than any model has
        layers are not those of a step.
        """
        return max(self._last_calls, self.calls if self.calls <= _MOST_LAYERS else 0)

    def is_new(self, batch: LiveBatch) -> bool:
        """Says whether there is no plan for this batch."""
        return self._seen is None or self._seen.batch is not batch

    def has_moved(self, batch: LiveBatch) -> bool:
        """Says whether requests came, ended or changed rows since the kernel took the seats of this batch."""
        return self._seated is None or self._seated[0] is not batch or self._seated[1] != batch.moves

    def note_prepared(self, batch: LiveBatch) -> None:
        """Notes the batch of the step that is prepared."""
        if self._seen is not None:
            self._seen.before = None
        if self._room.queries and not self._room.chunk:
            self._coming.note_prepared(batch)

    def ahead(self, batch: LiveBatch) -> LiveBatch:
        """Returns a copy of the batch, as far as is known as the next step will find it."""
        return copy(batch if self._ahead is None else self._ahead)

    def cannot_wait(self, batch: LiveBatch) -> bool:
        """Says whether this step would lose so much by requests that are served alone that it is to wait for a plan.

        That is _BEFORE_STEP_US, or _LOST_US where chunks of prompts that the plan was made for did not come.
        """
        lacks_chunks = self._seen is not None and self._seen.lacks_chunks(batch)
        most_us = (_LOST_US if lacks_chunks else _BEFORE_STEP_US) / self.layers
        if self._late_plan is not None:
            self._look_at_lengths()
            served = self._served_by_plan(batch)
            if not self._room.queries and (not served.worse or self._late_plan.most_late_us(batch, served) <= most_us):
                return False
        return self._late_cost(batch).late_us > most_us

    def note_lateness(self, batch: LiveBatch) -> None:
        """Notes what this step loses because the present plan is late, and which chunks the next step brings."""
        self._ahead = None
        if self._seen is not None and self._seen.waits(batch):
            return
        self._look_at_lengths()
        late_us = share = 0.0
        if self._seen is not None and self._seen.knows(batch) and self._may_lose(batch):
            cost = self._late_cost(batch)
            late_us = cost.late_us
            if cost.alone_tokens:
                late_us += ALONE_US
                alone_us = cost.alone_tokens * self._rates.token_us
                share = min(alone_us / (alone_us + cost.layer_us), _MOST_FREE)
            else:
                late_us += cost.layer_us * self._free_share  # nobody uses the blocks that the plan leaves free
        self._lives[1].add(share)
        self._steps, self._late_us = self._steps + 1, self._late_us + late_us
        ahead = self._coming.ahead(batch)
        self._ahead = None if ahead is batch else ahead

    def pays(self, batch: LiveBatch) -> bool:
        """Says whether to plan now, while the device works. See BatchKernel.refresh for the conditions."""
        seen = self._seen
        if seen is None or not seen.knows(batch):
            return True
        return not seen.waits(batch) and (
            8 * len(batch) < 7 * seen.requests
            or self._outgrows(batch)
            or (self._may_lose(batch) and self._saves_time(batch))
        )

    def _may_lose(self, batch: LiveBatch) -> bool:
        """Says whether a new plan could save time: the batch has changed, chunks of prompts may have grown, or the
        present plan leaves blocks free.
        """
        if self._seen is None:
            return False
        return self._seen.changes != batch.changes or self._free_share > 0 or self._room.queries > 0

    def _step_us(self, batch: LiveBatch) -> float:
        """Estimates the microseconds that the layers of a step take."""
        cost = self._late_cost(batch)
        return (_FIXED_LAYER_US + cost.layer_us + cost.late_us) * self.layers

    def free_share(self, batch: LiveBatch) -> float:
        """Returns the share of the thread blocks that the next plan is to leave free for requests that are alone.

        They get as large a share as they have had of the tokens of steps, under this plan and the one before; none
        where one of the two had no such requests, as after a single burst.
        """
        if self._seen is None or self._seen.batch is not batch or self._room.chunk:
            return 0.0
        before, present = (life.mean for life in self._lives)
        return (before + present) / 2 if before and present else 0.0

    def steady(self, batch: LiveBatch, made: BatchTree) -> BatchTree:
        """Makes the tree to plan for: the batch's own, or one that shares less where plans have not held."""
        seen, most = self._seen, 0
        if self._steps and seen is not None and seen.batch is batch and not self._room.chunk:
            steps, plan_us = self._steps, self._worth_us(batch) / self.layers
            most = int(self._sharing.allowance(self._late_us / steps, steps, plan_us) / self._rates.token_us)
        self._sharing.spared_us = 0.0
        if not most or not made.shares_tokens or made.has_queries:
            return made
        less = made.sharing_less(most)
        if less is None:
            return made
        tree, again = less
        self._sharing.spared_us = again * self._rates.token_us
        return tree

    def _outgrows(self, batch: LiveBatch) -> bool:
        """Says whether requests are too long or too short for the plan. Those of batch-invariant mode stay good."""
        if self._room.chunk:
            return False
        assert self._late_plan is not None
        return self._late_plan.requests.growth(batch, self._served_by_plan(batch)).outgrows(len(batch))

    def _saves_time(self, batch: LiveBatch) -> bool:
        """Says whether a new plan takes less time than the present one has lost, or will have after the next step."""
        late_us = self._late_us
        if self._ahead is not None:
            assert self._late_plan is not None
            late_us += self._late_plan.cost(self._ahead).late_us
        return late_us * self.layers > self._worth_us(batch)

    def _worth_us(self, batch: LiveBatch) -> float:
        """Returns the microseconds that steps lose before the next plan is made."""
        return _LOST_IN_LONG_US if self._step_us(batch) >= _LONG_STEP_US else _LOST_US

    def running(self, batch: LiveBatch) -> Ints:
        """Returns the running requests as the kernel is to see them, `[RUNNING_FIELDS, seats]`."""
        if self._late_plan is None or self.is_new(batch):
            return running_requests(batch)
        return self._late_plan.requests.running(batch, self._served_by_plan(batch))

    def _served_by_plan(self, batch: LiveBatch) -> Served:
        """Returns which requests the present plan serves, after heirs have taken over from those that have ended."""
        assert self._late_plan is not None
        at = batch.changes, batch.moves
        if self._served is None or self._served[0] != at:
            self._served, self._cost = (at, self._late_plan.requests.inherit(batch)), None
        return self._served[1]

    def _look_at_lengths(self) -> None:
        """Forgets whom the plan serves, where requests may have several rows: they grow fast, without an event."""
        if self._room.queries:
            self._served = None

    def _late_cost(self, batch: LiveBatch) -> LateCost:
        """Estimates the cost of serving the batch with the present plan."""
        served = self._served_by_plan(batch)
        if self._cost is None:
            assert self._late_plan is not None
            self._cost = self._late_plan.cost(batch, served)
        return self._cost
