"""Speculative decoding: several draft tokens of a branch are checked in one step, and the right ones are kept.

branch  [ stored tokens | last token | draft draft draft ]     4 rows in one step
drawn                     a            b     c     d           a is the first draft, b is not the second
kept    [ stored tokens | last token | a     b ]               two tokens in one step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from treegen.engine.control import Continuation, Frontier, Growth, Label, Next
from treegen.engine.sampling import Sampling
from treegen.engine.sequences import Branch
from treegen.ir.arrays import positive_int
from treegen.ir.errors import BranchError, InputError

Drafter = Callable[[Sequence[int], int], Sequence[int]]
"""Takes a branch's tokens and a number; returns at most that many tokens that may follow."""


@dataclass(frozen=True, slots=True)
class NGrams:
    """Drafts what followed the branch's last tokens where they occurred before, the latest time (prompt lookup).

    Args:
        longest: The most last tokens to look for. Fewer are looked for where they do not occur.

    Raises:
        InputError: `longest` is not at least 1.
    """

    longest: int = 3

    def __post_init__(self) -> None:
        positive_int("longest", self.longest, InputError)

    def __call__(self, tokens: Sequence[int], most: int) -> list[int]:
        """Returns up to `most` tokens; none where not even the last token occurred before."""
        known = np.asarray(tokens)
        for length in range(min(self.longest, len(known) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(known[:-1], length)
            places = np.flatnonzero((windows == known[-length:]).all(1))
            if len(places):
                begin = int(places[-1]) + length
                return [int(token) for token in known[begin : begin + most]]
        return []


@dataclass(frozen=True, slots=True)
class Speculate:
    """Draws the same samples as `Sample`, in fewer steps where drafts are right.

    A step computes the logits after each draft. From these the tokens are drawn as without drafts, with the same noise,
    up to the first that is not the draft. So tokens do not depend on the drafter; with a temperature, too, they are
    distributed as the model says (Leviathan et al. 2023 accept drafts by chance, which a noise that is fixed by
    position does not need).

    Args:
        drafter: Proposes tokens.
        max_draft: The most draft tokens of a branch in a step.
        n: Samples of each prompt.
        sampling: How tokens are drawn; by default the most likely one.
        max_new_tokens: Tokens at which a sample ends.
        stop_ids: Tokens that end a sample, each with itself as the last token.

    Raises:
        InputError: A number is out of range.
    """

    drafter: Drafter = field(default_factory=NGrams)
    max_draft: int = 4
    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 64
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_draft", "n", "max_new_tokens"):
            positive_int(name, getattr(self, name), InputError)

    @property
    def width(self) -> int:
        """See Controller."""
        return self.n

    @property
    def together(self) -> bool:
        """See Controller."""
        return False

    def draft(self, branch: Branch) -> list[int]:
        """Returns draft tokens of a branch, as few as may follow. Raises BranchError where the drafter gives more."""
        most = min(self.max_draft, self.max_new_tokens - len(branch.new_tokens) - 1)
        drafts = list(self.drafter(branch.tokens, most)) if most else []
        if len(drafts) > most:
            raise BranchError("drafter", f"{len(drafts)} tokens", f"is more than the {most} asked for", "return fewer")
        return drafts

    def decide(self, frontier: Frontier) -> Growth:
        """See Controller."""
        rows: list[int] = []
        labels: list[Label] = []
        positions: list[int] = []
        begin = 0
        for branch in frontier.branches:
            given = len(branch.tokens) - branch.drafts
            first = given == branch.prompt
            for label in [(*branch.label, sample) for sample in range(self.n)] if first else [branch.label]:
                rows += range(begin, begin + 1 + branch.drafts)
                positions += range(given, given + 1 + branch.drafts)
                labels += [label] * (1 + branch.drafts)
            begin += 1 + branch.drafts
        logits = frontier.logits if rows == list(range(begin)) else frontier.logits[rows]
        drawn = self.sampling.draw(logits, labels, positions)
        grown: dict[int, list[Next]] = {branch.number: [] for branch in frontier.branches}
        results: list[Continuation] = []
        accepted: dict[int, int] = {}
        place = 0
        for branch in frontier.branches:
            count = self.n if len(branch.tokens) - branch.drafts == branch.prompt else 1
            for _ in range(count):
                label, own = labels[place], drawn[place : place + 1 + branch.drafts]
                place += len(own)
                right = _right(branch, own, self.stop_ids)
                made = [*branch.tokens[branch.prompt : len(branch.tokens) - branch.drafts], *own[: right + 1]]
                accepted[branch.number] = right
                if made[-1] in self.stop_ids or len(made) >= self.max_new_tokens:
                    results.append(Continuation(label, made))
                else:
                    grown[branch.number].append(Next(made[-1], label))
        return Growth(grown, results, accepted)


def _right(branch: Branch, drawn: Sequence[int], stop_ids: Sequence[int]) -> int:
    """Returns how many drafts are what was drawn, up to the first that is not, or that ends the branch."""
    drafts = branch.tokens[len(branch.tokens) - branch.drafts :]
    for place, draft in enumerate(drafts):
        if drawn[place] != draft or draft in stop_ids:
            return place
    return len(drafts)
