"""Collectives of torch.distributed, by the names that the installed torch has for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


def all_gather(received: torch.Tensor, own: torch.Tensor, group: ProcessGroup) -> None:
    """Gathers tensors of all ranks along the first dimension, in the order of the ranks."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 has a new name
    gather(received, own, group=group)


def reduce_scatter(summed: torch.Tensor, parts: torch.Tensor, group: ProcessGroup) -> None:
    """Sums tensors of all ranks; each rank gets its part of the sum along the first dimension."""
    import torch.distributed as dist

    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(summed, parts, group=group)
