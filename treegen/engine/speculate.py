"""Speculative decoding: several draft tokens of a branch are checked in one step, and the right ones are kept.

branch  [ stored tokens | last token | draft draft draft ]     4 rows in one step
drawn                     a            b     c     d           a is the first draft, b is not the second
kept    [ stored tokens | last token | a     b ]               two tokens in one step
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from treegen.engine.argument_checks import check_drafter
from treegen.engine.branch import Branch
from treegen.engine.control import Continuation, Frontier, Growth, Label, Next, warm_up
from treegen.engine.draft_trees import DraftTree, draft_shape, longest_path
from treegen.engine.drafters import DeviceDrafter, Drafter, DraftModel, NGrams
from treegen.engine.engine_checks import check_count, check_drafts, check_limits, checked_drafts, checked_stop_ids
from treegen.engine.sampling import Sampling, check_sampling
from treegen.ir.arrays import set_positive_ints
from treegen.ir.errors import InputError


@dataclass(frozen=True, slots=True)
class Speculate:
    """Draws the same samples as `Sample`, in fewer steps where drafts are right.

    A step computes the logits after each draft. From these the tokens are drawn as without drafts, with the same noise:
    the first after the branch's last token, then after the draft that was drawn, as long as there is one. So tokens do
    not depend on the drafter; with a temperature, too, they are distributed as the model says. (Leviathan et al. 2023
    accept drafts by chance, which noise that is fixed by position does not need.)

    Each branch has `max_draft` drafts in each step: where the drafter gives fewer, the branch's last token is drafted
    again and again after them. So branches keep their numbers of query rows, and kernels their plans.

    Args:
        drafter: Proposes tokens.
        max_draft: The draft tokens of a branch in a step, and the most that the drafter may propose.
        n: Samples of each prompt.
        sampling: How tokens are drawn; by default the most likely one.
        max_new_tokens: Tokens at which a sample ends.
        stop_ids: Tokens that end a sample, each with itself as the last token.
        limits: For each prompt the tokens at which its samples end, at most max_new_tokens; by default that for all.

    Raises:
        InputError: A number is out of range.
    """

    drafter: Drafter = field(default_factory=NGrams)
    max_draft: int = 4
    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    limits: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_drafter(self.drafter)
        set_positive_ints(self, ("max_draft", "n", "max_new_tokens"), InputError)
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

    @property
    def draft_trees(self) -> bool:
        """See Drafting."""
        return self.drafter.trees

    def begin_run(self, prompts: int, vocabulary: int) -> None:
        """See BeginsRuns."""
        check_count(self.limits, prompts)
        if isinstance(self.drafter, DraftModel):
            self.drafter.draft_within(vocabulary)

    def warm_up(self) -> None:
        """See WarmsUp."""
        warm_up(self.drafter)

    def draft(self, branches: Sequence[Branch]) -> list[DraftTree]:
        """See Drafting. Branches that fork get none."""
        drafts = [DraftTree((), ())] * len(branches)
        able = [place for place, branch in enumerate(branches) if len(branch.tokens) > branch.prompt]
        if able:
            found = checked_drafts(self.drafter([branches[place].tokens for place in able], self.max_draft), len(able))
            for place, own in zip(able, found, strict=True):
                check_drafts(own, self.max_draft, self.draft_trees)
                drafts[place] = own.filled(self.max_draft, branches[place].tokens[-1])
        return drafts

    def decide(self, frontier: Frontier) -> Growth:
        """See Controller."""
        rows: list[int] = []
        asked: list[_Asked] = []
        begin = 0
        for branch in frontier.branches:
            given = len(branch.tokens) - branch.drafts
            first = given == branch.prompt
            for label in [(*branch.label, sample) for sample in range(self.n)] if first else [branch.label]:
                asked.append(_Asked(branch, label, given))
                rows += range(begin, begin + 1 + branch.drafts)
            begin += 1 + branch.drafts
        labels = [each.label for each in asked for _ in range(1 + each.branch.drafts)]
        positions = [position for each in asked for position in each.positions()]
        logits = frontier.logits if rows == list(range(begin)) else frontier.logits[rows]
        return self._growth(frontier.branches, asked, self.sampling.draw(logits, labels, positions))

    def selects(self, branches: Sequence[Branch]) -> bool:
        """See SelectingDrafts. Drafters that read texts on the host, and first tokens of prompts, need `decide`; so do
        classes of your own that override `decide` or `draft`, and not this method.
        """
        own = type(self)
        if own.selects is Speculate.selects and (own.decide, own.draft) != (Speculate.decide, Speculate.draft):
            return False
        return bool(self.draft_parents) and all(branch.new_tokens for branch in branches)

    @property
    def draft_parents(self) -> list[int]:
        """See SelectingDrafts."""
        return self.drafter.fixed_parents(self.max_draft) if isinstance(self.drafter, DeviceDrafter) else []

    def select(self, frontier: Frontier) -> torch.Tensor:
        """See SelectingDrafts."""
        asked = self._asked(frontier.branches)
        labels = [each.label for each in asked for _ in range(1 + each.branch.drafts)]
        positions = [position for each in asked for position in each.positions()]
        return self.sampling.select(frontier.logits, labels, positions)

    def drafts_after(self, branches: Sequence[Branch], texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """See SelectingDrafts."""
        assert isinstance(self.drafter, DeviceDrafter)
        return self.drafter.drafts_after(branches, texts, lengths, self.max_draft)

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        """See SelectingDrafts."""
        return self._growth(branches, self._asked(branches), tokens)

    def _asked(self, branches: Sequence[Branch]) -> list[_Asked]:
        """Returns the samples that branches are."""
        return [_Asked(branch, branch.label, len(branch.tokens) - branch.drafts) for branch in branches]

    def _growth(self, branches: Sequence[Branch], asked: Sequence[_Asked], tokens: Sequence[int]) -> Growth:
        """Returns what follows from the tokens that were drawn for all rows of these samples."""
        drawn = iter(tokens)
        grown: dict[int, list[Next]] = {branch.number: [] for branch in branches}
        results: list[Continuation] = []
        accepted: dict[int, list[int]] = {}
        for each in asked:
            branch = each.branch
            most = self.limits[each.label[0]] if self.limits else self.max_new_tokens
            made, accepted[branch.number] = each.taken(drawn, self.stop_ids, most)
            tokens = [*branch.tokens[branch.prompt : each.given], *made]
            if made[-1] in self.stop_ids or len(tokens) >= most:
                results.append(Continuation(each.label, tokens))
            else:
                grown[branch.number].append(Next(made[-1], each.label))
        return Growth(grown, results, accepted)


class _Asked(NamedTuple):
    """A sample that gets tokens. given: the tokens of its branch before the drafts."""

    branch: Branch
    label: Label
    given: int

    def positions(self) -> list[int]:
        """Returns the positions of the tokens that are drawn: after the last token, and after each draft."""
        depths = draft_shape(tuple(self.branch.draft_parents)).depths
        return [self.given, *(self.given + depths).tolist()]

    def taken(self, drawn: Iterator[int], stop_ids: Sequence[int], most: int) -> tuple[list[int], list[int]]:
        """Takes the drawn tokens of its rows; returns the tokens that follow, and the drafts that these are.

        With these tokens the sample has at most `most`.
        """
        own = [next(drawn) for _ in range(1 + self.branch.drafts)]
        path = longest_path(own, self.branch.tokens[self.given :], self.branch.draft_parents)
        made = [own[0]]
        left = most - (self.given - self.branch.prompt)
        for draft in path:
            if made[-1] in stop_ids or len(made) == left:
                break
            made.append(own[1 + draft])
        return made, path[: len(made) - 1]
