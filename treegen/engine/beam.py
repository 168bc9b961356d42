"""Beam search: the most likely continuations of a prompt, a fixed number at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from treegen.engine.branch import Branch
from treegen.engine.control import Continuation, Frontier, Growth, Next
from treegen.engine.engine_checks import check_stop_ids
from treegen.ir.arrays import positive_int
from treegen.ir.errors import InputError
from treegen.ir.scalars import is_finite


@dataclass(slots=True)
class _PromptBeams:
    """The search of one prompt: the sums of log-probabilities of its beams in order, and the best ended ones."""

    sums: torch.Tensor
    ended: list[Continuation] = field(default_factory=list)


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
        grown: dict[int, list[Next]] = {}
        results: list[Continuation] = []
        rows: dict[int, list[int]] = {}
        for row, branch in enumerate(frontier.branches):
            rows.setdefault(branch.label[0], []).append(row)
        for prompt, own in rows.items():
            own.sort(key=lambda row: frontier.branches[row].label)
            branches = [frontier.branches[row] for row in own]
            if len(branches[0].tokens) == branches[0].prompt:
                self._searches[prompt] = _PromptBeams(torch.zeros(1, device=frontier.logits.device))
            search = self._searches[prompt]
            going = self._advance(search, prompt, branches, frontier.logits[own])
            grown |= {branch.number: [] for branch in branches}
            for branch, following in going:
                grown[branch.number].append(following)
            if not going:
                results += [each._replace(label=(prompt, place)) for place, each in enumerate(search.ended)]
                del self._searches[prompt]
        return Growth(grown, results)

    def _advance(
        self, search: _PromptBeams, prompt: int, branches: list[Branch], logits: torch.Tensor
    ) -> list[tuple[Branch, Next]]:
        """Takes the best continuations of a prompt's beams; returns those that go on, best first, none at the end."""
        sums = (logits.float().log_softmax(-1) + search.sums[:, None]).flatten()
        most = min(max(2, 1 + len(self.stop_ids)) * self.width, len(sums))
        best, places = sums.topk(most)
        length, vocabulary = len(branches[0].new_tokens) + 1, logits.shape[1]
        going: list[tuple[Branch, Next]] = []
        kept = []
        for rank, (place, total) in enumerate(zip(places.tolist(), best.tolist(), strict=True)):
            branch, token = branches[place // vocabulary], place % vocabulary
            if token in self.stop_ids or length >= self.max_new_tokens:
                if rank < self.width:
                    score = total / length**self.length_penalty
                    search.ended.append(Continuation((prompt,), [*branch.new_tokens, token], score))
            elif len(going) < self.width:
                going.append((branch, Next(token, (prompt, len(going)))))
                kept.append(rank)
        search.ended = sorted(search.ended, key=lambda each: -each.score)[: self.width]
        search.sums = best[kept]
        return going if going and self._can_improve(search, length) else []

    def _can_improve(self, search: _PromptBeams, length: int) -> bool:
        """Says whether the best running beam may become a result that is better than the worst one so far."""
        if len(search.ended) < self.width:
            return True
        if self.early_stopping is True:
            return False
        longest = self.early_stopping == "never" and self.length_penalty > 0
        best = float(search.sums[0]) / float((self.max_new_tokens if longest else length) ** self.length_penalty)
        return best > search.ended[-1].score
