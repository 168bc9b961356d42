"""TokenRules: the logits processors and stopping criteria of Transformers, for controllers that keep rows in step.

        step      0  1  2  3
row 0  · · p p p  t  t  t  t      every row has one more token after each step, as in Transformers' own loop,
row 1  p p p p p  t  t  E  ·      so processors and criteria get all rows at one length: E ends a row, · pads
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treegen.engine import Frontier, Growth
from treegen.engine.branch import Branch

Processors = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes ids `[rows, length]` and scores `[rows, vocabulary]`; returns scores."""

Criteria = Callable[[torch.Tensor, Any], torch.Tensor]
"""Takes ids `[rows, length]` and the scores of all steps, or None; returns bool `[rows]`, True for rows that end."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """How the tokens of a call are chosen, and what is kept of each step.

    Args:
        processors: Change the scores.
        criteria: Say which rows end.
        samples: Whether tokens are drawn; if not, the most likely ones are taken.
        scores: Gets the scores of each step; None keeps none.
        logits: Gets the logits of each step; None keeps none.
        streamer: Gets the tokens of each step; None for nobody.
    """

    processors: Processors
    criteria: Criteria
    samples: bool
    scores: list[torch.Tensor] | None = None
    logits: list[torch.Tensor] | None = None
    streamer: Any = None

    def scored(self, ids: torch.Tensor, logits: torch.Tensor, normal: bool = False) -> torch.Tensor:
        """Returns the scores `[rows, vocabulary]` of the next tokens; `normal` has processors get log-probabilities."""
        if self.logits is not None:
            self.logits.append(logits.clone())
        scores = self.processors(ids, logits.log_softmax(-1) if normal else logits)
        if self.scores is not None:
            self.scores.append(scores.clone())
        return scores

    def chosen(self, scores: torch.Tensor) -> torch.Tensor:
        """Returns the next token of each row, with one draw of all rows where tokens are drawn."""
        return scores.softmax(-1).multinomial(1)[:, 0] if self.samples else scores.argmax(-1)

    def ended(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns bool `[rows]`, True for rows that end with their last token."""
        return self.criteria(ids, None if self.scores is None else tuple(self.scores))

    def stream(self, tokens: torch.Tensor) -> None:
        """Hands tokens to the streamer."""
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())


def rows_of(branch: Branch, width: int) -> range:
    """Returns the rows of a call that a branch stands for: before its first token those of all copies of its prompt."""
    prompt, *place = branch.label
    begin = prompt * width
    return range(begin + place[0], begin + place[0] + 1) if place else range(begin, begin + width)


def spread(branches: Sequence[Branch], logits: torch.Tensor, width: int, ids: torch.Tensor) -> torch.Tensor:
    """Returns logits in fp32 for all rows of a call, `[rows, vocabulary]`, with zeros for rows that have ended.

    Args:
        branches: The branches.
        logits: `[branches, vocabulary]`; their logits.
        width: Rows of each prompt.
        ids: `[rows, length]`; says how many rows there are, and where the result is.
    """
    pairs = [(row, place) for place, branch in enumerate(branches) for row in rows_of(branch, width)]
    rows, places = (torch.tensor(each).to(logits.device, non_blocking=True) for each in zip(*pairs, strict=True))
    made = torch.zeros(len(ids), logits.shape[1], device=logits.device)
    return made.index_copy_(0, rows, logits[places].float()).to(ids.device)


def resting(frontier: Frontier) -> Growth:
    """Returns the decision that all branches wait for those that are not in the frontier."""
    numbers = [branch.number for branch in frontier.branches]
    return Growth({number: [] for number in numbers}, [], resting=numbers)
