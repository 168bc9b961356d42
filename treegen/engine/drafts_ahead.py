"""DraftsAhead: the step after drafts that were accepted on the device, with the next drafts, which were proposed there.

    select    a token after each draft
    launch    accept ──▶ append to texts ──▶ draft ──▶ step, drawn back by what was rejected (see `draft_rows`)

Drafts are chains, equally long for all branches. For the host the step's tokens are unknown, and all drafts of the step
before accepted, until it has read which were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from treegen.engine.branch import Branch
from treegen.engine.control import Frontier, Growth
from treegen.engine.draft_rows import DraftTexts, accepted_counts
from treegen.engine.draft_trees import chain
from treegen.engine.engine_checks import check_drafted, check_selected, check_tokens
from treegen.engine.forward import Forward
from treegen.engine.host_copy import HostCopy
from treegen.engine.tokens_ahead import UNKNOWN, TokensAhead


class DraftsAhead(TokensAhead):
    """Selects a token after each draft, and proposes the next drafts."""

    def __init__(self, controller: Any, forward: Forward) -> None:
        super().__init__(controller, forward)
        self._most = controller.max_draft
        self.rows = 1 + self._most
        self._device = forward.sequences.pool.device
        self._texts = DraftTexts(forward.sequences.max_branches, self._device)
        self._drafts: torch.Tensor | None = None  # int64 [branches, drafts], where the host does not know them

    def begin(self) -> None:
        """See TokensAhead."""
        self._drafts = None

    def settle(self, branches: Sequence[Branch]) -> None:
        """See TokensAhead."""
        if self._drafts is not None:
            self._learn(branches, self._drafts.tolist())
            self._drafts = None

    def follows(self, branches: Sequence[Branch]) -> bool:
        """See TokensAhead."""
        usual = chain(self._most)
        able = self.forward.decoding.takes_lengths and all(branch.draft_parents == usual for branch in branches)
        return able and self._in_order(branches)

    def have_room(self, branches: Sequence[Branch]) -> bool:
        """See TokensAhead."""
        most = self.forward.sizes.max_tokens - self.rows
        return all(len(branch.tokens) <= most for branch in branches) and super().have_room(branches)

    def select(self, frontier: Frontier) -> HostCopy:
        """See TokensAhead."""
        branches = frontier.branches
        drawn = self.controller.select(frontier)
        check_selected("select()", drawn, len(branches) * self.rows)
        self._selected = drawn.view(-1, self.rows)
        if self._drafts is None:
            known = torch.tensor([branch.tokens[-self._most :] for branch in branches])
            self._drafts = known.to(self._device, non_blocking=True)
        return HostCopy(torch.cat([self._selected, self._drafts], 1))

    def launch(self, branches: Sequence[Branch]) -> Frontier:
        """See TokensAhead."""
        assert self._drafts is not None
        facts = np.array([(branch.seat, len(branch.tokens) - self._most) for branch in branches]).T
        seats, given = torch.from_numpy(facts).to(self._device, non_blocking=True)
        accepted = accepted_counts(self._selected, self._drafts)
        self._texts.write(branches, facts[1], self.rows)
        texts = self._texts.tokens
        after = given[:, None] + torch.arange(self.rows, device=self._device)
        texts[seats[:, None], after] = self._selected.clamp(0, self.forward.vocabulary - 1).to(texts.dtype)
        longest = int(facts[1].max()) + self.rows
        drafted = self.controller.drafts_after(branches, texts[seats, :longest], given + accepted + 1)
        check_selected("drafts_after()", drafted, len(branches), self._most)
        following = self._selected.gather(1, accepted[:, None])
        for branch, begin in zip(branches, facts[1].tolist(), strict=True):
            branch.tokens[begin:] = [UNKNOWN] * (self._most + self.rows)
        ids = torch.cat([following, drafted], 1).view(-1)
        frontier = self._launched(branches, ids, behind=self._most - accepted)
        self._drafts = drafted
        return frontier

    def commit(self, branches: Sequence[Branch], read: list[Any], launched: bool) -> Growth:
        """See TokensAhead."""
        drawn = [row[: self.rows] for row in read]
        tokens = [token for row in drawn for token in row]
        check_tokens("select()", tokens, self.forward.vocabulary)
        if launched:
            self._take_back(branches)
        self._learn(branches, [row[self.rows :] for row in read])
        growth: Growth = self.controller.commit(branches, tokens)
        if launched:
            for branch, row in zip(branches, drawn, strict=True):
                check_drafted(branch, row, growth)
        return growth

    def followed(self, following: Frontier) -> Frontier:
        """See TokensAhead."""
        numbers = self.forward.sequences.branches
        frontier = super().followed(following)
        for branch in frontier.branches:
            branch.tokens += [UNKNOWN] * self._most
            branch.draft_parents = chain(self._most)
            branch.stored = len(branch.tokens)
        going = [place for place, branch in enumerate(following.branches) if branch.number in numbers]
        if self._drafts is not None and len(going) < len(following.branches):
            self._drafts = self._drafts[torch.tensor(going, dtype=torch.int64).to(self._device, non_blocking=True)]
        return frontier

    def _take_back(self, branches: Sequence[Branch]) -> None:
        for branch in branches:
            del branch.tokens[len(branch.tokens) - self.rows :]
            branch.stored -= self.rows

    def _learn(self, branches: Sequence[Branch], drafts: list[list[int]]) -> None:
        """Notes the drafts of branches."""
        check_tokens("drafts_after()", [token for row in drafts for token in row], self.forward.vocabulary)
        for branch, own in zip(branches, drafts, strict=True):
            branch.tokens[-self._most :] = own
