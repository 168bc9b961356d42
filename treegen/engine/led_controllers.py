"""Led controllers: on several ranks the controller of rank 0 decides, and all ranks do what it has decided.

    rank 0    logits ──▶ controller ──▶ tokens, growth or drafts ──┬──▶ branches
    rank 1                                                         └──▶ branches

Logits of ranks may differ in their last bits, and functions of users may be random. So controllers of other ranks are
not asked what to choose; only what follows from the branches and their tokens alone: `selects` and `commit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from treegen.distributed.broadcasts import broadcast_tensor, is_first, made_by_first
from treegen.distributed.parallel import Parallel
from treegen.engine.branch import Branch
from treegen.engine.control import Controller, Drafting, Frontier, Growth, Selecting
from treegen.engine.draft_trees import DraftTree
from treegen.engine.engine_checks import check_selected
from treegen.engine.growth_checks import check_form


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


class _LedSelecting(_Led):
    """One that selects tokens on the device."""

    def selects(self, branches: Sequence[Branch]) -> bool:
        """See Selecting."""
        return bool(self._controller.selects(branches))

    def select(self, frontier: Frontier) -> torch.Tensor:
        """See Selecting."""
        count = len(frontier.branches)
        tokens = torch.zeros(count, dtype=torch.int64, device=frontier.logits.device)
        if is_first(self._parallel):
            selected = self._controller.select(frontier)
            check_selected("select()", selected, count)
            tokens = selected.contiguous()
        broadcast_tensor(tokens, self._parallel)
        return tokens

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        """See Selecting."""
        growth: Growth = self._controller.commit(branches, tokens)
        return growth


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
            found = self._controller.draft(branches)
            return [DraftTree(list(each.tokens), list(each.parents)) for each in found]

        return made_by_first(self._parallel, "draft()", drafted)


def led(controller: Controller, parallel: Parallel | None) -> Controller:
    """Returns the controller of a rank: one that follows rank 0; the controller itself where there is one rank."""
    if parallel is None or not parallel.groups:
        return controller
    if isinstance(controller, Drafting):
        return _LedDrafting(controller, parallel)
    selects = isinstance(controller, Selecting) and not getattr(controller, "keeps_notes", False)
    return (_LedSelecting if selects else _Led)(controller, parallel)
