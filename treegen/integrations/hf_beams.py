"""LockstepBeams: beam search by the rules of Transformers, with its logits processors and stopping criteria."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from treegen.engine import Branch, Frontier, Growth, Next, Selection
from treegen.engine.fork_places import in_places
from treegen.engine.host_copy import HostCopy
from treegen.integrations.hf_requests import GenerateRequest
from treegen.integrations.hf_rules import TokenRules, resting, rows_of, spread

NEVER = -1.0e9
"""Is added to sums of log-probabilities of what must not be taken, as Transformers does, so that equals stay equal."""


class Beams(NamedTuple):
    """Beams of all prompts.

    ids: `[prompts, beams, length]`. paths: int32 `[prompts, beams, new tokens]`; the row that each token was added to,
    -1 after the last one. scores: `[prompts, beams]`. ended: bool `[prompts, beams]`; False for places of results that
    nothing has taken yet, and for beams that run.
    """

    ids: torch.Tensor
    paths: torch.Tensor
    scores: torch.Tensor
    ended: torch.Tensor

    def taken(self, places: torch.Tensor) -> Beams:
        """Returns the beams at these places, `[prompts, beams]`."""
        prompts = torch.arange(len(places), device=places.device)[:, None]
        return Beams(*(each[prompts, places] for each in self))


class LockstepBeams:
    """Extends the beams of all prompts by a token in each step, until those of no prompt can improve.

    In each step all continuations of a prompt's beams compete. Those that end, among the best `width`, compete with the
    results so far; the best `width` of the others go on. With sampling, the continuations that compete are drawn.

    Args:
        rules: Give the scores, and say which continuations end.
        request: What was asked for.

    Attributes:
        results: The best beams that have ended, best first.
    """

    together = True

    def __init__(self, rules: TokenRules, request: GenerateRequest) -> None:
        config, ids = request.config, request.ids
        self.rules, self.width, self.max_new_tokens = rules, request.width, request.new_tokens
        self._longest = int(config.max_length) - ids.shape[1]
        self._early, self._penalty = config.early_stopping, config.length_penalty
        self._fill, self._many = request.fill, max(2, 1 + len(request.ends)) * self.width
        prompts, device = len(request.prompts), ids.device
        ids, paths = ids.view(prompts, self.width, -1), torch.empty(prompts, self.width, 0, device=device).int()
        sums = torch.full((prompts, self.width), NEVER, device=device)
        none = torch.zeros_like(sums, dtype=torch.bool)
        self.results = Beams(ids, paths, sums, none)
        sums = sums.clone()
        sums[:, 0] = 0  # all beams of a prompt are the same before the first token: only one of them counts
        self._beams = Beams(ids, paths, sums, none)
        self._improvable = torch.ones(prompts, 1, dtype=torch.bool, device=device)
        self._running, self._read = prompts, HostCopy(torch.zeros(0))

    def decide(self, frontier: Frontier) -> Growth:
        """See Controller."""
        if len(frontier.branches) < self._running:
            return resting(frontier)
        self._advance(frontier)
        return self._growth(frontier.branches)

    def selects(self, branches: Sequence[Branch]) -> bool:
        """See SelectingForks. The first tokens of a prompt fork one branch."""
        return len(branches) == self._running and all(len(branch.label) > 1 for branch in branches)

    def select_forks(self, frontier: Frontier) -> Selection:
        """See SelectingForks."""
        self._advance(frontier)
        device = frontier.logits.device
        parents, tokens = (each[:, :, -1].long().to(device) for each in (self._beams.paths, self._beams.ids))
        rows = [rows_of(branch, self.width)[0] for branch in frontier.branches]
        places = torch.tensor(sorted(range(len(rows)), key=rows.__getitem__)).to(device, non_blocking=True)
        return in_places(places.view(parents.shape), parents % self.width, tokens)

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        """See SelectingForks."""
        return self._growth(branches)

    def _growth(self, branches: Sequence[Branch]) -> Growth:
        """Decides by what `_advance` has chosen. Waits for the device."""
        goes_on, *chosen = self._read.read().tolist()
        grown: dict[int, list[Next]] = {branch.number: [] for branch in branches}
        if not goes_on:
            return Growth(grown, [])
        number_of = {row: branch.number for branch in branches for row in rows_of(branch, self.width)}
        count = len(chosen) // 2
        for row, (parent, token) in enumerate(zip(chosen[:count], chosen[count:], strict=True)):
            grown[number_of[parent]].append(Next(token, (row // self.width, row % self.width)))
        self._running = count
        return Growth(grown, [])

    def _advance(self, frontier: Frontier) -> None:
        """Takes the best continuations. Whether there are more, and the parents and tokens of the beams that then go
        on, are on their way to the host.
        """
        ids = self._beams.ids.flatten(0, 1)
        logits = spread(frontier.branches, frontier.logits, self.width, ids)
        candidates = self._candidates(self.rules.scored(ids, logits, normal=True))
        length = candidates.paths.shape[2]
        top = torch.arange(self._many, device=candidates.scores.device) < self.width
        unended = candidates.scores + candidates.ended.float() * NEVER
        kept = unended.topk(self.width).indices
        self._beams = candidates._replace(scores=unended).taken(kept)
        self._collect(candidates._replace(ended=candidates.ended & top), length)
        longest = self._early == "never" and self._penalty > 0
        best = self._beams.scores[:, :1] / (self._longest if longest else length) ** self._penalty
        found = self.results
        worst = torch.where(found.ended, found.scores.min(1, keepdim=True).values, NEVER)
        self._improvable = self._improvable & (best > worst).any(-1, keepdim=True)
        goes_on = self._improvable.any() & ~candidates.ended.all()
        if self._early is True:
            goes_on &= ~found.ended.all()
        following = (each[:, :, -1].flatten().long() for each in (self._beams.paths, self._beams.ids))
        self._read = HostCopy(torch.cat([goes_on.long()[None], *following]))

    def _candidates(self, scores: torch.Tensor) -> Beams:
        """Returns the continuations that compete, with one more token each, and whether they end."""
        beams, vocabulary = self._beams, scores.shape[1]
        prompts = len(beams.scores)
        sums = (scores.view(prompts, self.width, vocabulary) + beams.scores[:, :, None]).flatten(1)
        places = sums.softmax(-1).multinomial(self._many) if self.rules.samples else sums.topk(self._many).indices
        parents, tokens = places // vocabulary, places % vocabulary
        rows = parents + self.width * torch.arange(prompts, device=places.device)[:, None]
        of_parents = beams.taken(parents)
        ids = torch.cat([of_parents.ids, tokens[:, :, None]], 2)
        paths = torch.cat([of_parents.paths, rows[:, :, None].int()], 2)
        ended = self.rules.ended(ids.flatten(0, 1)).view(prompts, self._many)
        return Beams(ids, paths, sums.gather(1, places), ended)

    def _collect(self, candidates: Beams, length: int) -> None:
        """Keeps the best of the results so far and the continuations that have ended."""
        closed = ~self._improvable
        if self._early is True:
            closed = closed | self.results.ended.all(1, keepdim=True)
        scores = candidates.scores / length**self._penalty
        scores = scores + closed.float() * NEVER + (~candidates.ended).float() * NEVER
        found = self.results._replace(
            ids=pad(self.results.ids, (0, 1), value=self._fill), paths=pad(self.results.paths, (0, 1), value=-1)
        )
        merged = Beams(*(torch.cat(pair, 1) for pair in zip(found, candidates._replace(scores=scores), strict=True)))
        self.results = merged.taken(merged.scores.topk(self.width).indices)
