"""ForksAhead: the step after forks that were selected on the device. Its rows become forks there (see `row_forks`).

The host's branches follow when it has read which. Kernels are told that the branches of a prompt share what all of them
share: no fork changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from treegen.engine.branch import Branch
from treegen.engine.control import Frontier, Growth
from treegen.engine.engine_checks import check_forks, check_selected, check_tokens
from treegen.engine.forward import Forward
from treegen.engine.growth_checks import check_form, checked_selection
from treegen.engine.host_copy import HostCopy
from treegen.engine.shared_pages import share_by_prompt
from treegen.engine.tokens_ahead import UNKNOWN, TokensAhead

_TOLD = 64
"""Steps after which kernels are told what the branches of a prompt have come to share."""


class ForksAhead(TokensAhead):
    """Selects a token and a parent for the place of each branch."""

    def __init__(self, controller: Any, forward: Forward) -> None:
        super().__init__(controller, forward)
        self._parents = torch.empty(0, dtype=torch.int64)
        self._steps = 0
        self._table_rows: list[int] = []
        self._read: list[list[int]] = [[], []]

    def begin(self) -> None:
        """See TokensAhead."""
        self._steps = 0

    def follows(self, branches: Sequence[Branch]) -> bool:
        """See TokensAhead."""
        return self.forward.decoding.takes_forks and super().follows(branches)

    def select(self, frontier: Frontier) -> HostCopy:
        """See TokensAhead."""
        self._selected, parents = checked_selection(self.controller.select_forks(frontier))
        check_selected("select_forks()", self._selected, len(frontier.branches))
        check_selected("select_forks()", parents, len(frontier.branches))
        self._parents = parents.contiguous()
        return HostCopy(torch.stack([self._selected, self._parents]))

    def launch(self, branches: Sequence[Branch]) -> Frontier:
        """See TokensAhead."""
        sequences = self.forward.sequences
        if self._steps % _TOLD == 0:
            share_by_prompt(sequences.live, branches, sequences.pool.page_tokens)
        self._steps += 1
        self._table_rows = sequences.live.row.take([branch.seat for branch in branches]).tolist()
        for branch in branches:
            branch.tokens.append(UNKNOWN)
        return self._launched(branches, self._selected, parents=self._parents)

    def commit(self, branches: Sequence[Branch], read: list[Any], launched: bool) -> Growth:
        """See TokensAhead."""
        self._read = read
        check_tokens("select()", read[0], self.forward.vocabulary)
        if launched:
            self._take_back(branches)
        growth = check_form("commit()", self.controller.commit(branches, read[0]))
        if launched:
            check_forks(branches, read[0], read[1], growth)
        return growth

    def places(self, branches: Sequence[Branch]) -> Mapping[tuple[int, int], Branch]:
        """See TokensAhead."""
        tokens, parents = self._read
        return {(branches[parents[place]].number, tokens[place]): branches[place] for place in self._forked()}

    def followed(self, following: Frontier) -> Frontier:
        """See TokensAhead."""
        frontier = super().followed(following)
        of_seat = dict(zip((branch.seat for branch in following.branches), self._table_rows, strict=True))
        held = {of_seat[branch.seat]: branch for branch in frontier.branches}
        self.forward.decoding.forked(held, [self._table_rows[place] for place in self._forked()])
        return frontier

    def _forked(self) -> list[int]:
        """Returns the places that have become forks."""
        return [place for place, parent in enumerate(self._read[1]) if parent != place]
