"""Engine: runs a model and a controller over a pool until all branches have ended.

    schedule ──▶ step.begin ──▶ model: layers, step.attend ──▶ step.end ──▶ controller.decide ──▶ extend, fork, drop

Branches that decode come first in a step, prompts in chunks after them, under a budget of rows. Older branches go
before younger ones. Where pages run out, the youngest branch is preempted: it keeps its tokens, and their KV is
computed again later. A prompt takes over the pages that a running branch has for the same first tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from treegen.engine.accounting import Accounting
from treegen.engine.control import Continuation, Controller, Frontier, Next
from treegen.engine.pool import KVPool
from treegen.engine.prefix import PrefixCache
from treegen.engine.sequences import Branch, SequenceTree
from treegen.engine.step import Step
from treegen.ir.errors import BranchError, PoolError
from treegen.ir.shape import Shape
from treegen.strategies import Strategy


class Model(Protocol):
    """A decoder whose attention layers call `Step.attend`."""

    @property
    def shape(self) -> Shape:
        """The attention shape of all layers; its page size is ignored."""

    @property
    def layers(self) -> int:
        """The number of attention layers."""

    @property
    def max_tokens(self) -> int:
        """The most tokens of a sequence."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""

    def __call__(self, step: Step, keep: torch.Tensor) -> torch.Tensor:
        """Computes a step's `ids` at its `positions`; returns logits `[rows kept, vocabulary]` of the rows `keep`."""


class Engine:
    """Decodes prompts with a model, in branches that share the KV of their common tokens.

    Args:
        model: The model, for instance `treegen.integrations.hf.HFModel`.
        controller: Decides how branches grow.
        num_pages: Pages of the KV pool.
        page_size: Tokens of a page, a power of two up to 128.
        max_branches: The most branches that run at a time.
        max_rows: The most tokens of a step.
        strategy: Who reads which KV together, as in `treegen.compile_batch`.
        prefix_cache: Whether pages of branches that have ended are kept, until their room is needed, for prompts that
            begin with the same tokens.

    Raises:
        TreegenError: A number is out of range, or the controller needs more branches than run at a time.
    """

    def __init__(
        self,
        model: Model,
        controller: Controller,
        *,
        num_pages: int,
        page_size: int = 16,
        max_branches: int = 64,
        max_rows: int = 512,
        strategy: str | Strategy = "auto",
        prefix_cache: bool = True,
    ) -> None:
        if controller.width > max_branches:
            reason = f"of a prompt is more than max_branches = {max_branches}"
            raise BranchError("controller.width", controller.width, reason, "raise max_branches")
        if max_rows < max_branches:
            raise BranchError("max_rows", max_rows, f"is less than max_branches = {max_branches}", "raise max_rows")
        self.model, self.controller = model, controller
        shape = replace(model.shape, page_size=page_size)
        self.pool = KVPool(shape, model.layers, num_pages, model.device)
        self.sequences = SequenceTree(self.pool, max_branches, PrefixCache(self.pool) if prefix_cache else None)
        most = min(model.max_tokens, num_pages * page_size)
        self.accounting = Accounting()
        """What the engine has done, and where its time went."""
        self.step = Step(self.sequences, most, max_rows, strategy, self.accounting)
        self._waiting: deque[tuple[int, list[int]]] = deque()
        self._logits: dict[int, torch.Tensor] = {}  # of branches that wait for others of their prompt, by number
        self._results: list[list[Continuation]] = []

    def run(self, prompts: Sequence[Sequence[int]]) -> list[list[Continuation]]:
        """Decodes prompts until all their branches have ended.

        Args:
            prompts: The tokens of each prompt.

        Returns:
            For each prompt its results, in the order of their labels.

        Raises:
            BranchError: A prompt is empty or too long, or the controller names an unknown branch; before any launch, or
                with all branches dropped.
            PoolError: One branch alone needs more pages than the pool has. All branches are dropped.
        """
        self._check(prompts)
        self._results = [[] for _ in prompts]
        self._waiting.extend((number, list(prompt)) for number, prompt in enumerate(prompts))
        try:
            while self._waiting or len(self.sequences):
                self._admit()
                self._advance()
        finally:  # also when somebody stops it in the middle
            self._waiting.clear()
            self._logits.clear()
            for number in list(self.sequences.branches):
                self.sequences.drop(number)
        return [sorted(results) for results in self._results]

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        most = self.step.max_tokens - self.controller.max_new_tokens
        for number, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= most:
                reason = (
                    f"is not within 1..{most} tokens, which leaves room for {self.controller.max_new_tokens} new ones"
                )
                raise BranchError(f"prompts[{number}]", f"{len(prompt)} tokens", reason, "shorten it, or add pages")

    def _admit(self) -> None:
        """Starts waiting prompts while all branches of one more would fit."""
        running = {branch.label[0] for branch in self.sequences.branches.values()}
        while self._waiting and (len(running) + 1) * self.controller.width <= self.sequences.max_branches:
            number, prompt = self._waiting.popleft()
            self.sequences.add(prompt, (number,))
            running.add(number)

    def _advance(self) -> None:
        """Takes one step of the model, and does what the controller decides."""
        part = self.accounting.part
        with part("pages"):
            counts = self._scheduled()
            last_rows = self.step.begin(counts)
            ready = [number for number in last_rows if self.sequences[number].pending == counts[number]]
            keep = torch.tensor([last_rows[number] for number in ready], dtype=torch.int64, device=self.pool.device)
            self._count(sum(counts.values()))
        with part("model"):
            logits = self.model(self.step, keep)
        with part("pages"):
            self.step.end()
        with part("control"):
            self._logits |= dict(zip(ready, logits, strict=True))
            if branches := self._complete():
                self._grow(branches, torch.stack([self._logits.pop(branch.number) for branch in branches]))

    def _count(self, rows: int) -> None:
        """Counts a step of this many rows, and the pages that are held."""
        known, branches = self.accounting, self.sequences.branches.values()
        known.steps, known.rows = known.steps + 1, known.rows + rows
        known.most_pages = max(known.most_pages, self.pool.num_pages - self.sequences.available)
        known.most_unshared = max(known.most_unshared, sum(len(branch.pages) for branch in branches))

    def _complete(self) -> list[Branch]:
        """Returns the branches with logits, but for those that wait for others of their prompt."""
        branches = self.sequences.branches.values()
        late = {branch.label[0] for branch in branches if branch.number not in self._logits}
        waits = late if self.controller.together else set()
        return [branch for branch in branches if branch.number in self._logits and branch.label[0] not in waits]

    def _scheduled(self) -> dict[int, int]:
        """Returns the tokens of each branch in the next step. Preempts branches where pages run out."""
        counts: dict[int, int] = {}
        left, taken = self.step.max_rows, 0
        pages = self.sequences.available
        pending = (branch for branch in self.sequences.branches.values() if branch.pending)
        for branch in sorted(pending, key=lambda each: (each.pending > 1, *_age(each))):
            if not branch.stored:
                if not self.sequences.adopt(branch.number) and self._is_coming(branch, counts):
                    continue
                pages = self.sequences.available - taken
                if pages < 0:  # it took over pages that others of the step are to get
                    self.sequences.preempt(branch.number)
                    continue
            count = min(branch.pending, left)
            missing = self.sequences.pages_missing({branch.number: count})
            while missing > pages and (victim := self._victim(branch, counts)) is not None:
                self._preempt(victim)
                pages = self.sequences.available - taken
            if count and missing <= pages:
                counts[branch.number] = count
                left, taken, pages = left - count, taken + missing, pages - missing
        if not counts:
            self._raise_needed()
        return counts

    def _is_coming(self, branch: Branch, counts: dict[int, int]) -> bool:
        """Says whether a branch of the step stores the first page of this one, which can then take it over."""
        page = branch.tokens[: self.pool.page_size]
        others = (self.sequences[number] for number in counts)
        return len(branch.tokens) > len(page) and any(
            not each.stored and each.tokens[: len(page)] == page for each in others
        )

    def _victim(self, branch: Branch, counts: dict[int, int]) -> Branch | None:
        """Returns the youngest branch with pages that may make room for `branch`: a younger one outside of the step.

        Where all branches of a prompt are needed together, one of the same prompt makes no room.
        """
        able = [
            each for each in self.sequences.branches.values()
            if each.pages and each.number not in counts and _age(each) > _age(branch)
            and not (self.controller.together and each.label[0] == branch.label[0])
        ]  # fmt: skip
        return max(able, key=_age, default=None)

    def _preempt(self, branch: Branch) -> None:
        self.sequences.preempt(branch.number)
        self._logits.pop(branch.number, None)
        self.accounting.preempted += 1

    def _raise_needed(self) -> None:
        """Raises PoolError: what has to run together needs more pages than there are."""
        oldest = min(self.sequences.branches.values(), key=_age)
        others = [each for each in self.sequences.branches.values() if each.label[0] == oldest.label[0]]
        needy = others if self.controller.together else [oldest]
        missing = self.sequences.pages_missing({each.number: each.pending for each in needy})
        needed = missing + len({page for each in needy for page in each.pages})
        what = f"{len(needy)} branches that run together" if len(needy) > 1 else "one branch"
        raise PoolError("num_pages", self.pool.num_pages, f"is less than the {needed} that {what} need", "add pages")

    def _grow(self, ready: Sequence[Branch], logits: torch.Tensor) -> None:
        grown, results = self.controller.decide(Frontier(ready, logits))
        unknown = grown.keys() ^ {branch.number for branch in ready}
        if unknown:
            reason = "is not in the frontier, or has no decision"
            raise BranchError("decide()", sorted(unknown), reason, "decide for each branch of the frontier")
        for branch in ready:
            if not grown[branch.number]:
                self.sequences.drop(branch.number)
        for branch in ready:
            if grown[branch.number]:
                self._extend(branch, grown[branch.number])
        for result in results:
            self._results[result.label[0]].append(result)

    def _extend(self, branch: Branch, following: Sequence[Next]) -> None:
        """Gives a branch its first next token, and forks of it the others."""
        forks = [self.sequences.fork(branch.number) for _ in following[1:]]
        for own, (token, label) in zip([branch, *forks], following, strict=True):
            self.sequences.extend(own.number, [token])
            own.label = label


def _age(branch: Branch) -> tuple[int, int]:
    """Returns what orders branches by age: those of earlier prompts are older."""
    return branch.label[0], branch.number
