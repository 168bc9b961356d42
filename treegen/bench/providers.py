"""Providers of attention over trees: treegen's strategies and other libraries, with one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from treegen.api.compile import compile as compile_tree
from treegen.tuning.kernel_meter import Case

TimedCall: TypeAlias = Callable[[], torch.Tensor]
"""Computes attention on the current stream, also in a CUDA graph: out `[rows, num_qo_heads, head_dim_v]` in the tree's
order of rows."""


class UnavailableError(Exception):
    """A provider cannot serve a case, for a reason in one line. Benchmarks continue without it."""


class Provider(Protocol):
    """Something that computes attention over trees."""

    @property
    def name(self) -> str:
        """The provider's name in results."""

    def prepare(self, case: Case) -> TimedCall:
        """Plans and allocates for a case. Raises UnavailableError where the provider cannot serve it."""


@dataclass(frozen=True, slots=True)
class Treegen:
    """treegen with the strategy of this name."""

    name: str

    def prepare(self, case: Case) -> TimedCall:
        """Compiles the tree. A call is a user's call of the kernel with `out`."""
        kernel = compile_tree(case.tree, strategy=self.name, shape=case.shape)
        q, k_cache, v_cache, out = case.q, case.k_cache, case.v_cache, torch.empty_like(case.q)
        return lambda: kernel(q, k_cache, v_cache, out=out)
