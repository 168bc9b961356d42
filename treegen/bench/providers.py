"""Providers: treegen's strategies and other libraries, behind one face."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from treegen.api.compile import compile as compile_tree
from treegen.tuning.kernel_meter import Case

Call: TypeAlias = Callable[[], torch.Tensor]
"""One attention on the current stream, which a CUDA graph can capture: out [rows, num_qo_heads, head_dim_v] in the
tree's order of rows."""


class UnavailableError(Exception):
    """What a provider cannot serve, with the reason in a line; a benchmark goes on without it."""


class Provider(Protocol):
    """Something that computes attention over trees."""

    @property
    def name(self) -> str:
        """What its results are listed under."""

    def prepare(self, case: Case) -> Call:
        """Plans and allocates for a case; raises UnavailableError when it cannot serve it."""


@dataclass(frozen=True, slots=True)
class Treegen:
    """treegen with a strategy, by its name."""

    name: str

    def prepare(self, case: Case) -> Call:
        """Compiles the tree; a call does what a user's call with `out` does."""
        kernel = compile_tree(case.tree, strategy=self.name, shape=case.shape)
        q, k_cache, v_cache, out = case.q, case.k_cache, case.v_cache, torch.empty_like(case.q)
        return lambda: kernel(q, k_cache, v_cache, out=out)
