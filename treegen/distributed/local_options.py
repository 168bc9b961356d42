"""Options of the whole attention, and the kernels that ranks make of them for their heads and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from treegen.api.compile import compile
from treegen.api.compile_batch import compile_batch
from treegen.backends.page_table import PageTable
from treegen.distributed.parallel import Parallel
from treegen.distributed.sharded_scores import local_scores, needs_positions
from treegen.ir.errors import InputError
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.runtime.batch_kernel import BatchKernel
from treegen.runtime.kernel import Kernel
from treegen.scoring.options import ScoreOptions
from treegen.strategies import Strategy

_SCORES = ("score_mod", "mask_mod", "logits_soft_cap", "alibi_slopes", "window_left", "sinks")


@dataclass(frozen=True)
class LocalOptions:
    """The arguments of `treegen.compile` or `treegen.compile_batch`, and how attention is divided.

    Args:
        shape: The shape of the whole attention.
        parallel: How it is divided.
        given: Further arguments. Those with an entry for each head have all heads.
        device: The rank's device.

    Raises:
        InputError: An argument has a wrong type, or ranks cannot serve the option.
        ShapeError: The ranks do not divide the heads.
    """

    shape: Shape
    parallel: Parallel
    given: Mapping[str, Any]
    device: torch.device
    scores: ScoreOptions = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.shape, Shape):
            fix = "give treegen.Shape(num_qo_heads, num_kv_heads, head_dim)"
            raise InputError("shape", self.shape, "is not a Shape", fix)
        if not isinstance(self.parallel, Parallel):
            fix = "give treegen.distributed.Parallel(...), or Parallel.over(mesh, ...)"
            raise InputError("parallel", type(self.parallel).__name__, "is not a Parallel", fix)
        self.parallel.local_shape(self.shape)
        strategy = self.given.get("strategy")
        invariant = self.given.get("batch_invariant") or (isinstance(strategy, Strategy) and strategy.batch_invariant)
        if invariant and self.parallel.shard.size > 1:
            reason = "merges partial results in another order on several ranks than on one"
            fix = "divide heads (tensor parallel), which keeps every bit"
            raise InputError("batch_invariant", invariant, reason, fix)
        scores = ScoreOptions(**{name: self.given[name] for name in _SCORES if name in self.given})
        object.__setattr__(self, "scores", scores)

    @property
    def needs_positions(self) -> bool:
        """Whether the rank's scores need the positions of query rows."""
        return needs_positions(self.scores, self.parallel)

    def room_for(self, positions: torch.Tensor) -> torch.Tensor:
        """Allocates room for these positions of rows, and more rows."""
        return positions.new_zeros(max(2 * len(positions), self.given.get("max_rows") or 0))

    def compile(self, tree: Tree, positions: torch.Tensor | None) -> Kernel:
        """Makes the rank's kernel for its part of a tree. positions: `[rows]`, where rows' positions are needed."""
        return compile(tree, shape=self.parallel.local_shape(self.shape), **self._local(positions))

    def compile_batch(self, pages: PageTable, max_tokens: int, positions: torch.Tensor | None) -> BatchKernel:
        """Makes the rank's kernel for running batches. max_tokens: the most tokens of a request that it holds."""
        local = self.parallel.local_shape(self.shape)
        return compile_batch(local, pages, max_tokens=max_tokens, **self._local(positions))

    def _local(self, positions: torch.Tensor | None) -> dict[str, Any]:
        """Returns the arguments of the rank's kernel."""
        heads = self.parallel.kv_heads(self.shape)
        local = {name: value for name, value in self.given.items() if name not in _SCORES}
        for name in ("k_scale", "v_scale"):
            if isinstance(local.get(name), torch.Tensor):
                local[name] = self.parallel.of_heads(local[name], heads)
        return {**local, **local_scores(self.scores, self.shape, self.parallel, positions)}
