"""Forward: runs a model over the next tokens of branches, stores their KV and returns their logits.

Steps in which every branch gets one token, and its drafts, have a `Step` of their own, whose kernels have few rows. On
a GPU these steps are CUDA graphs, and those with chunks of prompts where they have few rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from treegen.engine.accounting import Accounting
from treegen.engine.attention_kernels import KernelMaker
from treegen.engine.control import Frontier
from treegen.engine.graphs import StepGraphs, prompt_buckets, row_buckets
from treegen.engine.sequences import SequenceTree
from treegen.engine.step import Step
from treegen.ir.errors import BranchError
from treegen.ir.shape import Shape


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
    def vocabulary(self) -> int:
        """The number of different tokens, which are 0, 1 and so on."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""

    def __call__(self, step: Step, keep: torch.Tensor) -> torch.Tensor:
        """Computes a step's `ids` at its `positions`; returns logits `[rows kept, vocabulary]` of the rows `keep`."""


class StepSizes(NamedTuple):
    """How much steps hold.

    max_tokens: the most tokens of a branch. max_rows: the most tokens of a step. max_new: the most tokens of a branch
    in a step without chunks of prompts. max_tree: the most drafts of a branch, where drafts may be trees.
    """

    max_tokens: int
    max_rows: int
    max_new: int = 1
    max_tree: int = 0


class Forward:
    """The two kinds of steps of a model.

    Attributes:
        step: The step with chunks of prompts.
        decoding: The step in which every branch gets one token, and its drafts.
        sizes: How much steps hold.
        graphs: The CUDA graphs of `decoding`; None without them.
        prompt_graphs: Those of `step`.
        vocabulary: The number of different tokens of the model.

    Args:
        model: The model.
        sequences: The branches.
        sizes: How much steps hold.
        kernels: Makes the kernels of `step`, and of `decoding`.
        accounting: Counts the time.
        captures: Whether to capture steps.
    """

    def __init__(
        self,
        model: Model,
        sequences: SequenceTree,
        sizes: StepSizes,
        kernels: tuple[KernelMaker, KernelMaker],
        accounting: Accounting,
        captures: bool,
    ) -> None:
        self._model, self.sequences, self.sizes, self._accounting = model, sequences, sizes, accounting
        self.vocabulary = model.vocabulary
        of_prompts, of_decoding = kernels
        self.step = Step(
            sequences, sizes.max_tokens, sizes.max_rows, max_tree=sizes.max_tree, make_kernel=of_prompts,
            accounting=accounting,
        )  # fmt: skip
        buckets = row_buckets(sequences.max_branches * sizes.max_new)
        self.decoding = Step(
            sequences, sizes.max_tokens, buckets[-1], max_new=sizes.max_new, max_tree=sizes.max_tree,
            make_kernel=of_decoding, accounting=accounting,
        )  # fmt: skip
        self.graphs = StepGraphs(self.decoding, model, buckets) if captures else None
        self.prompt_graphs: StepGraphs | None = None
        if self.graphs is not None and (of_step := prompt_buckets(sizes.max_rows)):
            # Mixtures of experts may compute few rows without the host, and many with it.
            self.prompt_graphs = StepGraphs(self.step, model, of_step, buckets[-1], needed=False)

    def __call__(
        self,
        counts: Mapping[int, int],
        ids: torch.Tensor | None = None,
        parents: torch.Tensor | None = None,
        behind: torch.Tensor | None = None,
    ) -> Frontier:
        """Takes a step.

        Args:
            counts: The tokens that each branch stores; other branches rest.
            ids: int64 `[tokens]` on the device; the tokens, in the order of the rows, where the host does not know them
                yet. By default they are the branches' own.
            parents, behind: As in `Step.begin`.

        Returns:
            The branches whose tokens are all stored, in the order of their rows, and their logits.

        Raises:
            TreegenError: As of `Step.begin` and `Step.compute`.
        """
        part, branches = self._accounting.part, self.sequences
        with part("pages"):
            step, graphs = self.step, self.prompt_graphs
            if all(count == 1 + branches[number].drafts for number, count in counts.items()):
                step, graphs = self.decoding, self.graphs
            resting = len(branches) - len(counts)
            rows = None if graphs is None else graphs.rows_for(sum(counts.values()) + resting)
            last_rows = step.begin(counts, rows, ids, parents, behind)
            ready = [branches[number] for number in last_rows]
            ready = [branch for branch in ready if branch.pending == counts[branch.number]]
            kept = [last_rows[branch.number] + place for branch in ready for place in range(-branch.drafts, 1)]
            self._count(sum(counts.values()))
        with part("model"):
            if graphs is None or rows is None:
                keep = torch.tensor(kept, dtype=torch.int64).to(branches.pool.device, non_blocking=True)
                logits = step.compute(self._model, keep)
            else:
                logits = graphs.compute(kept)
        with part("pages"):
            step.end()
        return Frontier(ready, logits)

    def warm_up(self) -> torch.Tensor | None:
        """Captures the graphs of all numbers of rows, and compiles what forks launch; without graphs it does nothing.

        Returns:
            Logits `[1, vocabulary]` of a step; None without graphs.

        Raises:
            BranchError: Branches are running.
        """
        if self.graphs is None:
            return None
        if len(self.sequences):
            raise BranchError("branches", len(self.sequences), "are running", "warm up before run")
        pool = self.sequences.pool
        itself = torch.zeros(1, dtype=torch.int64, device=pool.device)
        number = self.sequences.add([0], (0,)).number
        try:
            if self.prompt_graphs is not None:
                self.prompt_graphs.capture_all(lambda rows: self.step.begin({number: 1}, rows))
            self.graphs.capture_all(lambda rows: self.decoding.begin({number: 1}, rows, parents=itself))
            logits = self.graphs.compute([0])
        finally:
            self.sequences.drop(number)
        pool.copy([pool.num_pages], [pool.num_pages])  # the page that nobody reads; compiles the copies of forks
        pool.move([pool.spare_slot], [pool.spare_slot])
        return logits

    def _count(self, rows: int) -> None:
        """Counts a step of this many rows, and the pages that are held."""
        known, branches = self._accounting, self.sequences
        known.steps, known.rows = known.steps + 1, known.rows + rows
        known.most_pages = max(known.most_pages, branches.pool.num_pages - branches.available)
        known.most_unshared = max(known.most_unshared, sum(len(each.pages) for each in branches.branches.values()))
