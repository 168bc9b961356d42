"""Beam search: the most likely continuations of a prompt, a fixed number at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np
import torch

from treegen.engine.branch import Branch
from treegen.engine.control import Continuation, Frontier, Growth, Next, Selection
from treegen.engine.engine_checks import checked_stop_ids
from treegen.engine.fork_places import in_places
from treegen.engine.graphs import chosen_rows
from treegen.engine.host_copy import HostCopy
from treegen.ir.arrays import positive_int
from treegen.ir.errors import InputError
from treegen.ir.scalars import is_finite, plain_number

_LARGEST_LOG = 600.0
"""Of what sums are divided by; floats end at 709."""


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

    agrees = True

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
        length_penalty = plain_number(length_penalty)
        if not is_finite(length_penalty):
            raise InputError("length_penalty", length_penalty, "is not a finite number", "give one, for instance 1.0")
        if abs(length_penalty) * math.log(self.max_new_tokens) > _LARGEST_LOG:
            reason = f"makes scores of {max_new_tokens} tokens too large or too small for a float"
            raise InputError("length_penalty", length_penalty, reason, "give one nearer to 0")
        if not isinstance(early_stopping, bool) and early_stopping != "never":
            raise InputError("early_stopping", early_stopping, "is unknown", 'use True, False or "never"')
        self.length_penalty, self.early_stopping = length_penalty, early_stopping
        self.stop_ids = frozenset(checked_stop_ids(stop_ids))
        self.together = True
        self._searches: dict[int, _PromptBeams] = {}  # by prompt
        self._best: tuple[dict[int, list[int]], HostCopy]  # the rows of prompts, and their candidates
        self._vocabulary = 0

    def decide(self, frontier: Frontier) -> Growth:
        """See Controller."""
        for branch in frontier.branches:
            if len(branch.tokens) == branch.prompt:
                self._searches[branch.label[0]] = _PromptBeams([0.0])
        rows = _rows_by_prompt(frontier.branches)
        self._best = rows, HostCopy(torch.cat([best.flatten(1) for best in self._candidates(rows, frontier)], 1))
        return self._growth(frontier.branches)

    def selects(self, branches: Sequence[Branch]) -> bool:
        """See SelectingForks. The first tokens of a prompt fork one branch, and the last ones end all."""
        counts = Counter(branch.label[0] for branch in branches)
        lengths = [len(branch.tokens) - branch.prompt for branch in branches]
        return {*counts.values()} == {self.width} and min(lengths) > 0 and max(lengths) + 1 < self.max_new_tokens

    def select_forks(self, frontier: Frontier) -> Selection:
        """See SelectingForks."""
        rows = _rows_by_prompt(frontier.branches)
        (best,) = self._candidates(rows, frontier)
        self._best = rows, HostCopy(best.flatten(1))
        beams, tokens = best[1].long() // frontier.logits.shape[1], best[1].long() % frontier.logits.shape[1]
        if self.stop_ids:
            stops = torch.tensor(sorted(self.stop_ids)).to(tokens.device, non_blocking=True)
            going = torch.isin(tokens, stops).int().sort(dim=1, stable=True).indices  # those that end come last
            beams, tokens = beams.gather(1, going), tokens.gather(1, going)
        places = torch.tensor(list(rows.values())).to(tokens.device, non_blocking=True)
        return in_places(places, beams[:, : self.width], tokens[:, : self.width])

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        """See SelectingForks."""
        return self._growth(branches)

    def _growth(self, branches: Sequence[Branch]) -> Growth:
        """Decides by the candidates that were computed last. Waits for the device."""
        rows, copy = self._best
        grown: dict[int, list[Next]] = {branch.number: [] for branch in branches}
        results: list[Continuation] = []
        for prompt, candidates in self._read(rows, copy).items():
            search, own = self._searches[prompt], [branches[row] for row in rows[prompt]]
            going = self._advance(search, prompt, own, candidates)
            for branch, following in going:
                grown[branch.number].append(following)
            if not going:
                results += [each._replace(label=(prompt, place)) for place, each in enumerate(search.ended)]
                del self._searches[prompt]
        return Growth(grown, results)

    def _candidates(self, rows: dict[int, list[int]], frontier: Frontier) -> list[torch.Tensor]:
        """Returns the best continuations of prompts, best first, without waiting for the device.

        Args:
            rows: The rows of each prompt's beams.
            frontier: The beams and their logits.

        Returns:
            `[2, prompts, candidates]` in fp64 for each run of prompts with equal numbers of beams: the sums of
            log-probabilities, and `beam * vocabulary + token`, where beams are counted in the order of their rows.
        """
        logits, order = frontier.logits, [row for own in rows.values() for row in own]
        sums = torch.tensor([total for prompt in rows for total in self._searches[prompt].sums])
        scores = chosen_rows(logits, order).float().log_softmax(-1) + sums.to(logits.device, non_blocking=True)[:, None]
        best, begin = [], 0
        for width, group in groupby(rows, key=lambda prompt: len(rows[prompt])):  # prompts begin with one beam
            prompts = len(list(group))
            own = scores[begin : begin + prompts * width].view(prompts, -1)
            candidates = torch.stack([each.double() for each in own.topk(self._most(own.shape[1]))])
            best.append(frontier.agreed(candidates))
            begin += prompts * width
        self._vocabulary = logits.shape[1]
        return best

    def _most(self, continuations: int) -> int:
        """Returns the number of candidates of a prompt with this many continuations."""
        return min(max(2, 1 + len(self.stop_ids)) * self.width, continuations)

    def _read(self, rows: dict[int, list[int]], copy: HostCopy) -> dict[int, list[_Candidate]]:
        """Returns the candidates of each prompt, best first. Waits for the device. Raises InputError for NaN."""
        totals, places = copy.read().numpy()
        if np.isnan(totals).any():
            raise InputError("logits", "NaN or -inf", "give beams no scores", "look for NaN in the model's weights")
        beams, tokens = divmod(places.astype(np.int64), self._vocabulary)
        known = map(_Candidate, totals.tolist(), beams.tolist(), tokens.tolist())
        return {prompt: list(islice(known, self._most(len(own) * self._vocabulary))) for prompt, own in rows.items()}

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


def _rows_by_prompt(branches: Sequence[Branch]) -> dict[int, list[int]]:
    """Returns the places of each prompt's beams among these branches, in the order of the beams."""
    rows: dict[int, list[int]] = {}
    for row in sorted(range(len(branches)), key=lambda row: branches[row].label):
        rows.setdefault(branches[row].label[0], []).append(row)
    return rows
