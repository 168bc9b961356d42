"""DraftsAhead: the step after drafts that were accepted on the device, with the next drafts, which were proposed there.

    select    a token after each draft
    launch    accept ──▶ append to texts, move KV ──▶ draft ──▶ step, drawn back by what was rejected (see `draft_rows`)

All branches have drafts of the same shape. For the host the step's tokens are unknown, and the longest path of drafts
of the step before accepted, until it has read which were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from treegen.engine.branch import Branch
from treegen.engine.control import Frontier, Growth
from treegen.engine.draft_rows import DraftPaths, DraftTexts, move_drafts
from treegen.engine.engine_checks import check_drafted, check_selected, check_tokens
from treegen.engine.forward import Forward
from treegen.engine.growth_checks import check_form
from treegen.engine.host_copy import HostCopy
from treegen.engine.tokens_ahead import UNKNOWN, TokensAhead
from treegen.ir.arrays import Longs


class DraftsAhead(TokensAhead):
    """Selects a token after each draft, and proposes the next drafts."""

    def __init__(self, controller: Any, forward: Forward) -> None:
        super().__init__(controller, forward)
        self._parents = list(controller.draft_parents)
        self._count, self._device = len(self._parents), forward.sequences.pool.device
        self.rows = 1 + self._count
        self._paths = DraftPaths(self._parents, self._device) if self._parents else None
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
        able = self._paths is not None and self.forward.decoding.takes_lengths
        return able and all(branch.draft_parents == self._parents for branch in branches) and self._in_order(branches)

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
            known = torch.tensor([branch.tokens[-self._count :] for branch in branches])
            self._drafts = known.to(self._device, non_blocking=True)
        return HostCopy(torch.cat([self._selected, self._drafts], 1))

    def launch(self, branches: Sequence[Branch]) -> Frontier:
        """See TokensAhead."""
        assert self._paths is not None
        assert self._drafts is not None
        rows = self.forward.sequences.live.row
        facts = np.array(
            [(each.seat, len(each.tokens) - self._count, rows[each.seat]) for each in branches], np.int64
        ).T
        seats, given, table_rows = torch.from_numpy(facts).to(self._device, non_blocking=True)
        accepted = self._paths.accept(self._selected, self._drafts)
        if not self._paths.is_chain:
            sequences = self.forward.sequences
            move_drafts(sequences.pool, self.forward.decoding.pages.table, table_rows, given, accepted.paths)
        texts = self._written(branches, facts[1], seats, given, accepted.tokens)
        lengths = given + accepted.counts + 1
        self._drafts = self.controller.drafts_after(branches, texts, lengths)
        check_selected("drafts_after()", self._drafts, len(branches), self._count)
        assumed = self._paths.deepest
        for branch, begin in zip(branches, facts[1].tolist(), strict=True):
            branch.tokens[begin:] = [UNKNOWN] * (assumed + self.rows)
            branch.stored = begin + assumed
        following = accepted.tokens.gather(1, accepted.counts[:, None])
        ids = torch.cat([following, self._drafts], 1).view(-1)
        return self._launched(branches, ids, behind=assumed - accepted.counts)

    def commit(self, branches: Sequence[Branch], read: list[Any], launched: bool) -> Growth:
        """See TokensAhead."""
        drawn = [row[: self.rows] for row in read]
        tokens = [token for row in drawn for token in row]
        check_tokens("select()", tokens, self.forward.vocabulary)
        if launched:
            self._take_back(branches)
        self._learn(branches, [row[self.rows :] for row in read])
        growth = check_form("commit()", self.controller.commit(branches, tokens))
        if launched:
            for branch, row in zip(branches, drawn, strict=True):
                check_drafted(branch, row, growth)
        return growth

    def followed(self, following: Frontier) -> Frontier:
        """See TokensAhead."""
        numbers = self.forward.sequences.branches
        frontier = super().followed(following)
        for branch in frontier.branches:
            branch.tokens += [UNKNOWN] * self._count
            branch.draft_parents = self._parents[:]
            branch.stored = len(branch.tokens)
        going = [place for place, branch in enumerate(following.branches) if branch.number in numbers]
        if self._drafts is not None and len(going) < len(following.branches):
            self._drafts = self._drafts[torch.tensor(going, dtype=torch.int64).to(self._device, non_blocking=True)]
        return frontier

    def _written(
        self, branches: Sequence[Branch], known: Longs, seats: torch.Tensor, given: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Returns the texts of branches, with these tokens after those that the host knows."""
        self._texts.write(branches, known, self.rows)
        texts, after = self._texts.tokens, given[:, None] + torch.arange(tokens.shape[1], device=self._device)
        texts[seats[:, None], after] = tokens.clamp(0, self.forward.vocabulary - 1).to(texts.dtype)
        return texts[seats, : int(known.max()) + self.rows]

    def _take_back(self, branches: Sequence[Branch]) -> None:
        assert self._paths is not None
        for branch in branches:
            begin = len(branch.tokens) - self.rows - self._paths.deepest
            branch.tokens[begin:] = [UNKNOWN] * self._count
            branch.stored = len(branch.tokens)

    def _learn(self, branches: Sequence[Branch], drafts: list[list[int]]) -> None:
        """Notes the drafts of branches."""
        check_tokens("drafts_after()", [token for row in drafts for token in row], self.forward.vocabulary)
        for branch, own in zip(branches, drafts, strict=True):
            branch.tokens[-self._count :] = own
