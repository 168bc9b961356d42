"""Engine: runs a model and a controller over a pool until all branches have ended.

    schedule ──▶ step.begin ──▶ model: layers, step.attend ──▶ step.end ──▶ controller.decide ──▶ extend, fork, drop

Branches that decode come first in a step, prompts in chunks after them, under a budget of rows. Older branches go
before younger ones. Where pages run out, the youngest branch is preempted: it keeps its tokens, and their KV is
computed again later. A prompt takes over the pages that a running branch has for the same first tokens.

On a GPU, steps without chunks of prompts are CUDA graphs. They have a Step of their own, whose kernels have few rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from treegen.engine.accounting import Accounting
from treegen.engine.attention_kernels import KernelMaker, tree_kernels
from treegen.engine.control import Continuation, Controller, Frontier, Next
from treegen.engine.graphs import StepGraphs, row_buckets
from treegen.engine.pool import KVPool
from treegen.engine.prefix import PrefixCache
from treegen.engine.scheduling import schedule
from treegen.engine.sequences import Branch, SequenceTree
from treegen.engine.step import Step
from treegen.ir.errors import BranchError
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
        cuda_graphs: Whether to capture steps in which every branch gets one token; by default where the model is on a
            GPU. The first step of each number of rows takes longer; `warm_up` does that ahead.
        make_kernel: Makes the kernels of these steps in place of the strategy's, to compare them. Steps with chunks of
            prompts use the strategy's.

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
        cuda_graphs: bool | None = None,
        make_kernel: KernelMaker | None = None,
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
        kernels = tree_kernels(strategy)
        self.step = Step(self.sequences, most, max_rows, make_kernel=kernels, accounting=self.accounting)
        buckets = row_buckets(max_branches)
        self.decoding = Step(
            self.sequences, most, buckets[-1], max_new=1, make_kernel=make_kernel or kernels, accounting=self.accounting
        )
        """The step in which every branch gets one token."""
        captures = model.device.type == "cuda" if cuda_graphs is None else cuda_graphs
        self.graphs = StepGraphs(self.decoding, model, buckets) if captures else None
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
            counts, preempted = schedule(self.sequences, self.step.max_rows, self.controller.together)
            for number in preempted:
                self._logits.pop(number, None)
            self.accounting.preempted += len(preempted)
            step, graphs = self.step, None
            if max(counts.values()) == 1:
                step, graphs = self.decoding, self.graphs
            last_rows = step.begin(counts, None if graphs is None else graphs.rows_for(len(self.sequences)))
            ready = [self.sequences[number] for number in last_rows]
            ready = [branch for branch in ready if branch.pending == counts[branch.number]]
            kept = [last_rows[branch.number] for branch in ready]
            self._count(sum(counts.values()))
        with part("model"):
            if graphs is None:
                logits = step.compute(self.model, torch.tensor(kept, dtype=torch.int64, device=self.pool.device))
            else:
                logits = _chosen(graphs.compute(), kept)
        with part("pages"):
            step.end()
        with part("control"):
            frontier = self._frontier(ready, logits)
            if frontier.branches:
                self._grow(frontier)

    def warm_up(self) -> None:
        """Captures the graphs of all numbers of rows, so that no step does; without graphs it does nothing.

        Raises:
            BranchError: Branches are running.
        """
        if self.graphs is None:
            return
        if len(self.sequences):
            raise BranchError("branches", len(self.sequences), "are running", "warm up before run")
        number = self.sequences.add([0], (0,)).number
        try:
            for rows in reversed(self.graphs.buckets):  # the largest first: smaller ones reuse its memory
                self.decoding.begin({number: 1}, rows)
                self.graphs.compute()
        finally:
            self.sequences.drop(number)

    def _count(self, rows: int) -> None:
        """Counts a step of this many rows, and the pages that are held."""
        known, branches = self.accounting, self.sequences.branches.values()
        known.steps, known.rows = known.steps + 1, known.rows + rows
        known.most_pages = max(known.most_pages, self.pool.num_pages - self.sequences.available)
        known.most_unshared = max(known.most_unshared, sum(len(branch.pages) for branch in branches))

    def _frontier(self, ready: Sequence[Branch], logits: torch.Tensor) -> Frontier:
        """Returns the branches to decide about, with their logits: without those that wait for others of a prompt."""
        if not self.controller.together:
            return Frontier(ready, logits)
        branches = self.sequences.branches.values()
        known = self._logits.keys() | {branch.number for branch in ready}
        late = {branch.label[0] for branch in branches if branch.number not in known}
        if not self._logits and not late:
            return Frontier(ready, logits)
        self._logits |= {branch.number: row.clone() for branch, row in zip(ready, logits, strict=True)}
        complete = [branch for branch in branches if branch.number in known and branch.label[0] not in late]
        rows = [self._logits.pop(branch.number) for branch in complete]
        return Frontier(complete, torch.stack(rows) if rows else logits[:0])

    def _grow(self, frontier: Frontier) -> None:
        ready = frontier.branches
        grown, results = self.controller.decide(frontier)
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
        if len(following) == 1:
            branch.label = following[0].label
            branch.tokens.append(following[0].token)
            return
        forks = [self.sequences.fork(branch.number) for _ in following[1:]]
        for own, (token, label) in zip([branch, *forks], following, strict=True):
            self.sequences.extend(own.number, [token])
            own.label = label


def _chosen(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Returns these rows of logits; those from the first one on without a copy."""
    count = len(rows)
    return logits[:count] if rows == list(range(count)) else logits[torch.tensor(rows, device=logits.device)]
