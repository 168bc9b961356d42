"""Clocked controllers: the controllers of decodings, with a clock that begins when every prompt has begun."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from treegen.bench.decoding_cases import DecodingCase
from treegen.bench.kv_reads import KVReads
from treegen.engine.accounting import PARTS
from treegen.engine.branch import Branch
from treegen.engine.control import Drafting, Frontier, Growth, Selecting, SelectingForks
from treegen.engine.draft_trees import DraftTree
from treegen.engine.engine import Engine
from treegen.engine.led_controllers import agrees

OnProgress = Callable[[float], None]
"""Is called with the part of a decoding that is done since its last call."""
_TOLD_EVERY = 16
"""Decisions of the controller between two calls of it."""


class Clocked:
    """A controller that notes when it has first been asked about every prompt, and what the engine had done until then.

    began: the time. steps: the steps of the engine until then.
    """

    def __init__(self, case: DecodingCase, engine: Engine, reads: KVReads, on_progress: OnProgress | None) -> None:
        controller = case.controller
        self.width, self.max_new_tokens, self.together = (
            controller.width, controller.max_new_tokens, controller.together
        )  # fmt: skip
        self._controller, self._engine, self._reads, self._on_progress = controller, engine, reads, on_progress
        self._missing, self._most = set(range(len(case.prompts))), case.decisions
        self._decisions = self._told = 0
        self.began, self.steps = 0.0, 0

    def decide(self, frontier: Frontier) -> Growth:
        """See Controller."""
        if self._missing:
            self._missing -= {branch.label[0] for branch in frontier.branches}
            if not self._missing:
                self._begin()
        growth = self._controller.decide(frontier)
        self._count()
        return growth

    def end(self) -> None:
        """Tells that all is done."""
        self._tell(self._most)

    def _count(self) -> None:
        """Counts a decision."""
        self._decisions += 1
        if self._decisions % _TOLD_EVERY == 0:
            self._tell(self._decisions)

    def _begin(self) -> None:
        synchronize(self._engine)
        self.began, self.steps = time.perf_counter(), self._engine.accounting.steps
        self._engine.accounting.seconds.update(dict.fromkeys(PARTS, 0.0))
        self._reads.restart()

    def _tell(self, done: int) -> None:
        """Reports progress since the last report."""
        done = min(done, self._most)
        if self._on_progress is not None:
            self._on_progress((done - self._told) / self._most)
        self._told = done


class _ClockedAhead(Clocked):
    """The same for a controller that selects on the device."""

    def __init__(self, controller: Selecting | SelectingForks, *clocked: Any) -> None:
        super().__init__(*clocked)
        self._selecting = controller

    def selects(self, branches: Sequence[Branch]) -> bool:
        """See Selecting. On all ranks: every prompt has begun, and `decide` was asked about the first ones' ends."""
        return not self._engine.waiting and self._selecting.selects(branches)

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        """See Selecting."""
        growth = self._selecting.commit(branches, tokens)
        self._count()
        return growth


class _ClockedTokens(_ClockedAhead):
    """The same for one that selects tokens."""

    def __init__(self, controller: Selecting, *clocked: Any) -> None:
        super().__init__(controller, *clocked)
        self.select = controller.select


class _ClockedForks(_ClockedAhead):
    """The same for one that selects forks as well."""

    def __init__(self, controller: SelectingForks, *clocked: Any) -> None:
        super().__init__(controller, *clocked)
        self.select_forks = controller.select_forks


class _ClockedAgreeing(_ClockedForks):
    """The same for one that all ranks ask."""

    agrees = True


class _ClockedDrafts(Clocked):
    """The same for a controller that proposes drafts."""

    def __init__(self, controller: Drafting, *clocked: Any) -> None:
        super().__init__(*clocked)
        self._drafting = controller
        self.max_draft, self.draft_trees = controller.max_draft, controller.draft_trees

    def draft(self, branches: Sequence[Branch]) -> Iterable[DraftTree]:
        """See Drafting."""
        return self._drafting.draft(branches)


def clocked_controller(case: DecodingCase, *noted: Any) -> Clocked:
    """Returns the controller of a case, with a clock."""
    if isinstance(case.controller, Drafting):
        return _ClockedDrafts(case.controller, case, *noted)
    if isinstance(case.controller, Selecting):
        return _ClockedTokens(case.controller, case, *noted)
    if isinstance(case.controller, SelectingForks):
        clocked = _ClockedAgreeing if agrees(case.controller) else _ClockedForks
        return clocked(case.controller, case, *noted)
    return Clocked(case, *noted)


def synchronize(engine: Engine) -> None:
    """Waits for the engine's device."""
    if engine.pool.device.type == "cuda":
        torch.cuda.synchronize(engine.pool.device)
