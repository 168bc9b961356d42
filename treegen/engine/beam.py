"""Beam search: the most likely continuations of a prompt, a fixed number at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np
import torch

from treegen.engine.branch import Branch
from treegen.engine.control import Continuation, Frontier, Growth, Next
from treegen.engine.engine_checks import check_stop_ids
from treegen.engine.forward import chosen_rows
from treegen.ir.arrays import positive_int
from treegen.ir.errors import InputError
from treegen.ir.scalars import is_finite


@dataclass(slots=True)
class _PromptBeams:
    """The search of one prompt: the sums of log-probabilities of its beams in order, and the best ended ones."""

    sums: list[float]
    ended: list[Continuation] = field(default_factory=list)


class _Candidate(NamedTuple):
    """A continuation of a beam by a token. total: the sum of log-probabilities. beam: its place among the beams."""

    total: float
    beam: int
    token: int


class Beam:
    """Keeps the `width` most likely beams of each prompt, and returns the `width` best that have ended.

    In each step all continuations of all beams compete. Of the best `width`, those that end are candidates for results;
    their score is the sum of log-probabilities over `length ** length_penalty`. The best that do not end go on. The
    rules are those of Transformers' `generate` with `num_beams`, and so are results.

    Args:
        width: Beams of each prompt.
        max_new_tokens: Tokens at which a beam ends.
        length_penalty: Above 0 favours long results, below 0 short ones.
        early_stopping: True stops when `width` beams have ended. False also goes on while the best running beam could
            still become a result if it ended now; "never" while it could with its best possible length.
        stop_ids: Tokens that end a beam, each with itself as the last token.

    Raises:
        InputError: A number is out of range, or early_stopping is something else.
    """

    def __init__(
        self,
        width: int,
        max_new_tokens: int = 64,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        stop_ids: tuple[int, ...] = (),
    ) -> None:
        self.width = positive_int("width", width, InputError)
        self.max_new_tokens = positive_int("max_new_tokens", max_new_tokens, InputError)
        if not is_finite(length_penalty):
            raise InputError("length_penalty", length_penalty, "is not a finite number", "give one, for instance 1.0")
        if not isinstance(early_stopping, bool) and early_stopping != "never":
            raise InputError("early_stopping", early_stopping, "is unknown", 'use True, False or "never"')
        check_stop_ids(stop_ids)
        self.length_penalty, self.early_stopping, self.stop_ids = length_penalty, early_stopping, frozenset(stop_ids)
        self.together = True
        self._searches: dict[int, _PromptBeams] = {}  # by prompt

    def decide(self, frontier: Frontier) -> Growth:
        """See Controller."""
        grown: dict[int, list[Next]] = {branch.number: [] for branch in frontier.branches}
        results: list[Continuation] = []
        rows: dict[int, list[int]] = {}
        for row in sorted(range(len(frontier.branches)), key=lambda row: frontier.branches[row].label):
            rows.setdefault(frontier.branches[row].label[0], []).append(row)
        for prompt, own in rows.items():
            branch = frontier.branches[own[0]]
            if len(branch.tokens) == branch.prompt:
                self._searches[prompt] = _PromptBeams([0.0])
        for prompt, candidates in self._candidates(rows, frontier.logits).items():
            search, branches = self._searches[prompt], [frontier.branches[row] for row in rows[prompt]]
            going = self._advance(search, prompt, branches, candidates)
            for branch, following in going:
                grown[branch.number].append(following)
            if not going:
                results += [each._replace(label=(prompt, place)) for place, each in enumerate(search.ended)]
                del self._searches[prompt]
        return Growth(grown, results)

    def _candidates(self, rows: dict[int, list[int]], logits: torch.Tensor) -> dict[int, list[_Candidate]]:
        """Returns the best continuations of each prompt, best first. Waits for the device once.

        Args:
            rows: The rows of each prompt's beams.
            logits: `[rows, vocabulary]`.
        """
        order = [row for own in rows.values() for row in own]
        sums = torch.tensor([total for prompt in rows for total in self._searches[prompt].sums])
        scores = chosen_rows(logits, order).float().log_softmax(-1) + sums.to(logits.device, non_blocking=True)[:, None]
        vocabulary, begin = logits.shape[1], 0
        best = []
        for width, group in groupby(rows, key=lambda prompt: len(rows[prompt])):  # prompts begin with one beam
            prompts = len(list(group))
            own = scores[begin : begin + prompts * width].view(prompts, -1)
            most = min(max(2, 1 + len(self.stop_ids)) * self.width, own.shape[1])
            best.append(torch.stack([each.double() for each in own.topk(most)], -1).flatten(0, 1))
            begin += prompts * width
        totals, places = torch.cat(best).cpu().numpy().T
        beams, tokens = divmod(places.astype(np.int64), vocabulary)
        known = map(_Candidate, totals.tolist(), beams.tolist(), tokens.tolist())
        found = {}
        for prompt, own_rows in rows.items():
            most = min(max(2, 1 + len(self.stop_ids)) * self.width, len(own_rows) * vocabulary)
            found[prompt] = list(islice(known, most))
        return found

    def _advance(
        self, search: _PromptBeams, prompt: int, branches: list[Branch], candidates: list[_Candidate]
    ) -> list[tuple[Branch, Next]]:
        """Takes the best continuations of a prompt's beams; returns those that go on, best first, none at the end."""
        length = len(branches[0].tokens) - branches[0].prompt + 1
        going: list[tuple[Branch, Next]] = []
        sums = []
        for rank, (total, beam, token) in enumerate(candidates):
            if rank >= self.width and len(going) == self.width:
                break
            if token in self.stop_ids or length >= self.max_new_tokens:
                if rank < self.width:
                    score = total / length**self.length_penalty
                    search.ended.append(Continuation((prompt,), [*branches[beam].new_tokens, token], score))
            elif len(going) < self.width:
                going.append((branches[beam], Next(token, (prompt, len(going)))))
                sums.append(total)
        search.ended = sorted(search.ended, key=lambda each: -each.score)[: self.width]
        search.sums = sums
        return going if going and self._can_improve(search, length) else []

    def _can_improve(self, search: _PromptBeams, length: int) -> bool:
        """Says whether the best running beam may become a result that is better than the worst one so far."""
        if len(search.ended) < self.width:
            return True
        if self.early_stopping is True:
            return False
        longest = self.early_stopping == "never" and self.length_penalty > 0
        best = search.sums[0] / float((self.max_new_tokens if longest else length) ** self.length_penalty)
        return best > search.ended[-1].score
