"""Sample: draws samples of each prompt, independent of one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from treegen.engine.branch import Branch
from treegen.engine.control import Continuation, Frontier, Growth, Label, Next
from treegen.engine.engine_checks import check_count, check_limits, checked_stop_ids
from treegen.engine.sampling import Sampling, check_sampling, select_next
from treegen.ir.arrays import set_positive_ints
from treegen.ir.errors import InputError


@dataclass(frozen=True, slots=True)
class Sample:
    """Draws samples of each prompt, independent of one another.

    Args:
        n: Samples of each prompt.
        sampling: How tokens are drawn; by default the most likely one.
        max_new_tokens: Tokens at which a sample ends.
        stop_ids: Tokens that end a sample, each with itself as the last token.
        limits: For each prompt the tokens at which its samples end, at most max_new_tokens; by default that for all.

    Raises:
        InputError: A number is out of range.
    """

    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    limits: Sequence[int] = ()

    def __post_init__(self) -> None:
        set_positive_ints(self, ("n", "max_new_tokens"), InputError)
        check_sampling(self.sampling)
        object.__setattr__(self, "stop_ids", checked_stop_ids(self.stop_ids))
        check_limits(self.limits, self.max_new_tokens)

    @property
    def width(self) -> int:
        """See Controller."""
        return self.n

    @property
    def together(self) -> bool:
        """See Controller."""
        return False

    def begin_run(self, prompts: int, vocabulary: int) -> None:
        """See BeginsRuns."""
        check_count(self.limits, prompts)

    def decide(self, frontier: Frontier) -> Growth:
        """See Controller."""
        if self.selects(frontier.branches):
            return self.commit(frontier.branches, self.select(frontier).tolist())
        rows, labels, branches = [], [], []
        for row, branch in enumerate(frontier.branches):
            first = len(branch.tokens) == branch.prompt
            for label in [(*branch.label, sample) for sample in range(self.n)] if first else [branch.label]:
                rows.append(row)
                labels.append(label)
                branches.append(branch)
        logits = frontier.logits if rows == list(range(len(frontier.branches))) else frontier.logits[rows]
        drawn = self.sampling.draw(logits, labels, [len(branch.tokens) for branch in branches])
        return self._growth([branch.number for branch in frontier.branches], branches, labels, drawn)

    def selects(self, branches: Sequence[Branch]) -> bool:
        """See Selecting. The first token of a prompt forks."""
        return all(branch.new_tokens for branch in branches)

    def select(self, frontier: Frontier) -> torch.Tensor:
        """See Selecting."""
        return select_next(self.sampling, frontier)

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        """See Selecting."""
        return self._growth([each.number for each in branches], branches, [each.label for each in branches], tokens)

    def _growth(
        self, numbers: Sequence[int], branches: Sequence[Branch], labels: Sequence[Label], drawn: Sequence[int]
    ) -> Growth:
        """Returns what follows from a token for each of these branches, which are listed once for each label."""
        grown: dict[int, list[Next]] = {number: [] for number in numbers}
        results = []
        for branch, label, token in zip(branches, labels, drawn, strict=True):
            most = self.limits[label[0]] if self.limits else self.max_new_tokens
            if token in self.stop_ids or len(branch.tokens) + 1 - branch.prompt >= most:
                results.append(Continuation(label, [*branch.new_tokens, token]))
            else:
                grown[branch.number].append(Next(token, label))
        return Growth(grown, results)
