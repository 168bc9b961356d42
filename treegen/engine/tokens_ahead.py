"""TokensAhead: a step whose tokens were selected on the device, which the host has not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from treegen.engine.branch import Branch
from treegen.engine.control import Frontier, Growth
from treegen.engine.engine_checks import check_selected, check_tokens
from treegen.engine.forward import Forward
from treegen.engine.graphs import chosen_rows
from treegen.engine.growth_checks import check_form
from treegen.engine.host_copy import HostCopy
from treegen.ir.errors import BranchError

UNKNOWN = -1
"""Stands for a token that the host has not read: no prompt has it, so the prefix cache never finds its page."""


class TokensAhead:
    """Selects a token for each branch, and launches the step that stores them.

    Subclasses do so for controllers that select more than tokens.

    Attributes:
        controller: Selects on the device.
        forward: Takes the steps.
        rows: Rows of a branch in a step.

    Args:
        controller: The controller.
        forward: Takes the steps.
    """

    rows = 1

    def __init__(self, controller: Any, forward: Forward) -> None:
        self.controller, self.forward = controller, forward
        self._selected = torch.empty(0, dtype=torch.int64)

    def begin(self) -> None:
        """Begins with branches whose tokens the host knows."""

    def settle(self, branches: Sequence[Branch]) -> None:
        """Waits until the host knows all tokens of these branches."""

    def follows(self, branches: Sequence[Branch]) -> bool:
        """Says whether a step may follow that has these branches in this order."""
        return self._in_order(branches) and not any(branch.drafts for branch in branches)

    def have_room(self, branches: Sequence[Branch]) -> bool:
        """Says whether each of these branches may get tokens after the next one, and there are pages for these."""
        most, sequences = self.controller.max_new_tokens, self.forward.sequences
        if any(len(branch.tokens) - branch.drafts - branch.prompt + 1 >= most for branch in branches):
            return False
        return sequences.have_pages(dict.fromkeys((branch.number for branch in branches), self.rows))

    def select(self, frontier: Frontier) -> HostCopy:
        """Selects tokens without waiting; returns the copy of what is selected."""
        self._selected = self.controller.select(frontier)
        check_selected("select()", self._selected, len(frontier.branches))
        return HostCopy(self._selected)

    def launch(self, branches: Sequence[Branch]) -> Frontier:
        """Launches the step that stores what was selected."""
        for branch in branches:
            branch.tokens.append(UNKNOWN)
        return self._launched(branches, self._selected)

    def commit(self, branches: Sequence[Branch], read: list[Any], launched: bool) -> Growth:
        """Returns the controller's decision about what the host has read, and undoes what `launch` has assumed."""
        check_tokens("select()", read, self.forward.vocabulary)
        if launched:
            self._take_back(branches)
        growth = check_form("commit()", self.controller.commit(branches, read))
        for place, branch in enumerate(branches):
            found = [token for token, _ in growth.grown.get(branch.number, ())]
            if launched and found and found != [read[place]]:
                raise BranchError("commit()", branch.number, "has not the token that was selected", "return it")
        return growth

    def places(self, branches: Sequence[Branch]) -> Mapping[tuple[int, int], Branch]:
        """Returns the branch whose place each fork has taken on the device, by the parent's number and the token."""
        return {}

    def followed(self, following: Frontier) -> Frontier:
        """Returns the frontier after the step that was launched, without branches that have ended."""
        present = {branch.seat: branch for branch in self.forward.sequences.branches.values()}
        after = [present.get(branch.seat) for branch in following.branches]
        going = [place for place, branch in enumerate(after) if branch is not None]
        branches = [branch for branch in after if branch is not None]
        for branch in branches:
            branch.stored += 1
        return Frontier(branches, self.chosen(following, going).logits)

    def chosen(self, frontier: Frontier, places: Sequence[int]) -> Frontier:
        """Returns the branches in these places of a frontier, with their logits."""
        rows = [place * self.rows + row for place in places for row in range(self.rows)]
        return Frontier([frontier.branches[place] for place in places], chosen_rows(frontier.logits, rows))

    def _launched(self, branches: Sequence[Branch], ids: torch.Tensor, **options: torch.Tensor) -> Frontier:
        """Launches the step; `options` are those of `Forward`."""
        within = ids.clamp(0, self.forward.vocabulary - 1)  # the host sees only later whether they are
        return self.forward(dict.fromkeys((branch.number for branch in branches), self.rows), within, **options)

    def _take_back(self, branches: Sequence[Branch]) -> None:
        for branch in branches:
            branch.tokens.pop()
            branch.stored -= 1

    def _in_order(self, branches: Sequence[Branch]) -> bool:
        rows = self.forward.sequences.live.row.take([branch.seat for branch in branches])
        return bool((rows[1:] > rows[:-1]).all())
