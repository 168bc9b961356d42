"""Led controllers: on several ranks the controller of rank 0 decides, and all ranks do what it has decided.

    rank 0    logits ──▶ controller ──▶ tokens, growth or drafts ──┬──▶ branches
    rank 1                                                         └──▶ branches

Logits of ranks may differ in their last bits, and functions of users may be random. So controllers of other ranks are
not asked what to choose; only what follows from the branches and their tokens alone: `selects` and `commit`. Those that
say `agrees` are asked on all ranks, and go on from numbers of rank 0 (`Frontier.agreed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from treegen.distributed.broadcasts import broadcast_tensor, is_first, made_by_first
from treegen.distributed.parallel import Parallel
from treegen.engine.branch import Branch
from treegen.engine.control import (
    Controller,
    Drafting,
    Frontier,
    Growth,
    Selecting,
    SelectingDrafts,
    SelectingForks,
    Selection,
)
from treegen.engine.draft_trees import DraftTree
from treegen.engine.engine_checks import check_selected, checked_drafts
from treegen.engine.growth_checks import check_form, checked_selection


class _Led:
    """A controller of several ranks."""

    def __init__(self, controller: Any, parallel: Parallel) -> None:
        self._controller, self._parallel = controller, parallel

    @property
    def width(self) -> int:
        """See Controller."""
        return int(self._controller.width)

    @property
    def max_new_tokens(self) -> int:
        """See Controller and Selecting."""
        return int(self._controller.max_new_tokens)

    @property
    def together(self) -> bool:
        """See Controller."""
        return bool(self._controller.together)

    def decide(self, frontier: Frontier) -> Growth:
        """See Controller."""

        def decided() -> Growth:
            growth = check_form("decide()", self._controller.decide(frontier))
            grown, accepted = dict(growth.grown), dict(growth.accepted)
            return Growth(grown, list(growth.results), accepted, list(growth.resting))

        return made_by_first(self._parallel, "decide()", decided)

    def _of_first(self, name: str, make: Callable[[], torch.Tensor], device: torch.device, *sizes: int) -> torch.Tensor:
        """Returns what rank 0 makes, int64 of these sizes on the device, without waiting for it. name: as in errors."""
        made = torch.zeros(sizes, dtype=torch.int64, device=device)
        if is_first(self._parallel):
            found = make()
            check_selected(name, found, *sizes)
            made = found.contiguous()
        broadcast_tensor(made, self._parallel)
        return made


class _LedAhead(_Led):
    """One that selects on the device."""

    def selects(self, branches: Sequence[Branch]) -> bool:
        """See Selecting and SelectingForks."""
        return bool(self._controller.selects(branches))

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        """See Selecting and SelectingForks."""
        growth: Growth = self._controller.commit(branches, tokens)
        return growth


class _LedSelecting(_LedAhead):
    """One that selects tokens."""

    def select(self, frontier: Frontier) -> torch.Tensor:
        """See Selecting."""
        return self._of_first(
            "select()", lambda: self._controller.select(frontier), frontier.logits.device, len(frontier.logits)
        )


class _SharedFrontier(Frontier):
    """A frontier of several ranks."""

    parallel: Parallel

    def agreed(self, numbers: torch.Tensor) -> torch.Tensor:
        """See Frontier."""
        numbers = numbers.contiguous()
        broadcast_tensor(numbers, self.parallel)
        return numbers


class _LedSelectingForks(_LedAhead):
    """One that selects tokens and forks. All ranks ask their own, which go on from numbers of rank 0."""

    def decide(self, frontier: Frontier) -> Growth:
        """See Controller."""
        growth: Growth = self._controller.decide(self._shared(frontier))
        return growth

    def select_forks(self, frontier: Frontier) -> Selection:
        """See SelectingForks."""
        return checked_selection(self._controller.select_forks(self._shared(frontier)))

    def _shared(self, frontier: Frontier) -> Frontier:
        shared = _SharedFrontier(*frontier)
        shared.parallel = self._parallel
        return shared


class _LedDrafting(_Led):
    """One that proposes drafts."""

    @property
    def max_draft(self) -> int:
        """See Drafting."""
        return int(self._controller.max_draft)

    @property
    def draft_trees(self) -> bool:
        """See Drafting."""
        return bool(self._controller.draft_trees)

    def draft(self, branches: Sequence[Branch]) -> Sequence[DraftTree]:
        """See Drafting."""

        def drafted() -> list[DraftTree]:
            return checked_drafts(self._controller.draft(branches), len(branches))

        return made_by_first(self._parallel, "draft()", drafted)


class _LedSelectingDrafts(_LedDrafting, _LedSelecting):
    """One that selects tokens and proposes drafts on the device."""

    @property
    def draft_parents(self) -> Sequence[int]:
        """See SelectingDrafts."""
        return list(self._controller.draft_parents)

    def drafts_after(self, branches: Sequence[Branch], texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """See SelectingDrafts."""
        return self._of_first(
            "drafts_after()", lambda: self._controller.drafts_after(branches, texts, lengths), texts.device,
            len(branches), len(self.draft_parents),
        )  # fmt: skip


def agrees(controller: SelectingForks) -> bool:
    """Says whether all ranks ask a controller: its own class says so, since a subclass may decide otherwise."""
    return bool(vars(type(controller)).get("agrees", False))


def led(controller: Controller, parallel: Parallel | None) -> Controller:
    """Returns the controller of a rank: one that follows rank 0; the controller itself where there is one rank."""
    if parallel is None or not parallel.groups:
        return controller
    selects = not getattr(controller, "keeps_notes", False)
    if isinstance(controller, Drafting):
        ahead = selects and isinstance(controller, SelectingDrafts)
        return (_LedSelectingDrafts if ahead else _LedDrafting)(controller, parallel)
    if isinstance(controller, SelectingForks) and agrees(controller):
        return _LedSelectingForks(controller, parallel)
    return (_LedSelecting if selects and isinstance(controller, Selecting) else _Led)(controller, parallel)
