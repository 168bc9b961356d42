"""Kernels of several ranks: each rank attends with its heads to its tokens, and the states are merged across ranks.

q, the rank's caches ──▶ kernel of the rank ──▶ out, lse of its tokens ──▶ merge_across ──▶ out, lse of all tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from treegen.cost.communication import Link, Mode, Wanted
from treegen.distributed.agreement import check_agreement
from treegen.distributed.local_options import LocalOptions
from treegen.distributed.merge_across import check_how, merge_across
from treegen.distributed.parallel import Parallel
from treegen.environment import checks_inputs
from treegen.ir.live_batch import LiveBatch
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree, check_is_tree
from treegen.ir.tree.shards import row_positions
from treegen.runtime.batch_kernel import BatchKernel
from treegen.runtime.kernel import Kernel

CallInputs: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
"""q, k_cache and v_cache."""
CallOutputs: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
"""out, or out and lse."""


@dataclass(frozen=True)
class Merge:
    """How states are merged, where ranks hold different tokens: the arguments of `merge_across` of these names.

    Raises:
        InputError: There is no such mode, or no such form of heads.
    """

    mode: Mode | Literal["auto"] = "auto"
    heads: Wanted = "all"
    link: Link | None = None

    def __post_init__(self) -> None:
        check_how(self.mode, self.heads)

    def attend(
        self, kernel: Kernel | BatchKernel, parallel: Parallel, tensors: CallInputs, return_lse: bool, lse_base: str
    ) -> CallOutputs:
        """Calls a rank's kernel, and merges its states with those of the other ranks."""
        group = parallel.context
        if group is None:
            return kernel(*tensors, return_lse=True, lse_base=lse_base) if return_lse else kernel(*tensors)
        out, lse = kernel(*tensors, return_lse=True, lse_base=lse_base)
        how: Mapping[str, Any] = {"mode": self.mode, "heads": self.heads, "link": self.link}
        merged = merge_across(out, lse, group, lse_base=lse_base, **how)
        return merged if return_lse else merged[0]


class ParallelKernel:
    """A rank's part of an attention kernel for a tree. `treegen.distributed.compile` makes it.

    Attributes:
        tree: The whole tree.
        options: The options of the whole attention, and how it is divided.
        local: The kernel of this rank, for its heads and its tokens.
    """

    def __init__(self, tree: Tree, options: LocalOptions, merge: Merge) -> None:
        self.options, self._merge = options, merge
        self._positions: torch.Tensor | None = None
        self._take(tree, None)

    @property
    def parallel(self) -> Parallel:
        """How attention is divided."""
        return self.options.parallel

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
        return_lse: bool = False, lse_base: str = "ln",
    ) -> CallOutputs:  # fmt: skip
        """Computes attention of every row over the tokens that it sees; all ranks call it.

        Args:
            q: `[rows, query heads of the rank, head_dim]`; the same on all ranks that share KV.
            k_cache: The rank's cache: its KV heads of its tokens, at the slots of `local.tree`.
            v_cache: The same with head_dim_v.
            return_lse: Whether to return the log-sum-exp as well.
            lse_base: "ln" or "log2".

        Returns:
            out `[rows, heads, head_dim_v]`, with return_lse also the lse `[rows, heads]`: of all heads of q, or of this
            rank's part of them with `Merge(heads="own")`.

        Raises:
            InputError: A tensor does not fit; before any launch.
        """
        return self._merge.attend(self.local, self.parallel, (q, k_cache, v_cache), return_lse, lse_base)

    def update(self, tree: Tree) -> None:
        """Plans for another tree; all ranks call it. Errors as of `treegen.Kernel.update`, and RankError."""
        check_is_tree("tree", tree)
        self._take(tree, self.local)

    def explain(self) -> str:
        """Returns the explanation of this rank's kernel."""
        return self.local.explain()

    def _take(self, tree: Tree, kernel: Kernel | None) -> None:
        shard = self.parallel.shard
        own = tree if shard.size == 1 else tree.shard(shard.rank, shard.size, shard.interleave)
        check_equal(self.parallel, _facts(tree, self.options.shape, self.parallel))
        if self.options.needs_positions:
            positions = torch.from_numpy(row_positions(tree).copy()).to(self.options.device)
            if self._positions is None or len(self._positions) < len(positions):
                self._positions, kernel = self.options.room_for(positions), None  # more rows seldom need a new kernel
            self._positions[: len(positions)] = positions
        if kernel is None:
            kernel = self.options.compile(own, self._positions)
        else:
            kernel.update(own)
        self.tree, self.local = tree, kernel
        if self.parallel.tensor is not None and checks_inputs():
            plan = {"strategy": str(kernel.choice.strategy), "plan": str(kernel.plan)}
            check_agreement(self.parallel.tensor, plan)


class ParallelBatchKernel:
    """A rank's part of an attention kernel for running batches. `treegen.distributed.compile_batch` makes it.

    Batch, page table and lengths are the rank's: they count the tokens that the rank holds (`Parallel.tokens`).

    Attributes:
        parallel: How attention is divided.
        local: The kernel of this rank.
    """

    def __init__(self, kernel: BatchKernel, parallel: Parallel, merge: Merge) -> None:
        self.local, self.parallel, self._merge = kernel, parallel, merge

    @property
    def rows(self) -> int:
        """The rows of q that a call needs at least."""
        return self.local.rows

    def prepare(self, batch: LiveBatch) -> bool:
        """See treegen.BatchKernel.prepare."""
        return self.local.prepare(batch)

    def refresh(self, batch: LiveBatch) -> bool:
        """See treegen.BatchKernel.refresh."""
        return self.local.refresh(batch)

    def update(self, batch: LiveBatch) -> None:
        """See treegen.BatchKernel.update."""
        self.local.update(batch)

    def seat(self, batch: LiveBatch) -> None:
        """See treegen.BatchKernel.seat."""
        self.local.seat(batch)

    def step(self) -> None:
        """See treegen.BatchKernel.step."""
        self.local.step()

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
        return_lse: bool = False, lse_base: str = "ln",
    ) -> CallOutputs:  # fmt: skip
        """Computes attention of each request's query row; all ranks call it. See ParallelKernel.__call__."""
        return self._merge.attend(self.local, self.parallel, (q, k_cache, v_cache), return_lse, lse_base)


def check_equal(parallel: Parallel, facts: Mapping[str, Any]) -> None:
    """Compares facts among all ranks, with `TREEGEN_CHECK=1`. Raises RankError."""
    if checks_inputs():
        for group in parallel.groups:
            check_agreement(group, facts)


def _facts(tree: Tree, shape: Shape, parallel: Parallel) -> dict[str, Any]:
    return {
        "shape": shape, "interleave": parallel.interleave, "tree.parent": tree.parent, "tree.tokens": tree.tokens,
        "tree.row_node": tree.row_node, "tree.row_sees": tree.row_sees,
    }  # fmt: skip
