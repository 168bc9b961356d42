"""Waiting: branches without a decision, because others of their prompt are late or go on, and their logits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from treegen.engine.branch import Branch
from treegen.engine.control import Frontier, Growth
from treegen.engine.draft_trees import check_path
from treegen.engine.graphs import chosen_rows
from treegen.engine.sequences import SequenceTree


class WaitingBranches:
    """Branches that the model has given logits for, and that the controller has not decided about, or lets rest.

    Args:
        sequences: The running branches.
    """

    def __init__(self, sequences: SequenceTree) -> None:
        self._sequences = sequences
        self._logits: dict[int, torch.Tensor] = {}  # by number
        self._resting: set[int] = set()

    def forget(self, numbers: Collection[int]) -> None:
        """Forgets branches, which get logits anew, and others that do not wait."""
        for number in numbers:
            self._logits.pop(number, None)
        self._resting.difference_update(numbers)

    def clear(self) -> None:
        """Forgets all branches."""
        self._logits.clear()
        self._resting.clear()

    def complete(self, ready: Sequence[Branch], logits: torch.Tensor) -> Frontier:
        """Returns the branches of the prompts all of whose branches have logits; the others wait.

        ready, logits: the branches that have got logits, as in Frontier.
        """
        branches = self._sequences.branches.values()
        known = self._logits.keys() | {branch.number for branch in ready}
        late = {branch.label[0] for branch in branches if branch.number not in known}
        if not self._logits and not late:
            return Frontier(ready, logits)
        self._keep(ready, torch.split(logits, [1 + branch.drafts for branch in ready]))
        complete = [branch for branch in branches if branch.number in known and branch.label[0] not in late]
        rows = [self._logits[branch.number] for branch in complete]
        self.forget([branch.number for branch in complete])
        return Frontier(complete, torch.cat(rows) if rows else logits[:0])

    def rest(self, branches: Sequence[Branch], logits: torch.Tensor) -> None:
        """Keeps branches that rest, with the logits after their last token: a row for each."""
        self._keep(branches, torch.split(logits, 1))
        self._resting |= {branch.number for branch in branches}

    def rest_after(self, frontier: Frontier, growth: Growth) -> None:
        """Keeps the branches of a frontier that rest by this decision about it, without the drafts that it removes."""
        branches, rows, begin = [], [], 0
        for branch in frontier.branches:
            if branch.number in growth.resting:
                accepted = growth.accepted.get(branch.number, ())
                check_path(branch.number, accepted, branch.draft_parents)
                branches.append(branch)
                rows.append(begin + [-1, *accepted][-1] + 1)
            begin += 1 + branch.drafts
        if branches:
            self.rest(branches, chosen_rows(frontier.logits, rows))

    def are_all_but(self, branches: Sequence[Branch]) -> bool:
        """Says whether the branches that rest are all running ones but these, and wait for some of these."""
        if len(branches) + len(self._resting) != len(self._sequences):
            return False
        of_prompts = {branch.label[0] for branch in branches}
        return all(self._sequences[number].label[0] in of_prompts for number in self._resting)

    def _keep(self, branches: Sequence[Branch], logits: Iterable[torch.Tensor]) -> None:
        """Copies logits, because the next step writes over them."""
        self._logits |= {branch.number: rows.clone() for branch, rows in zip(branches, logits, strict=True)}
