"""Broadcasts from the first rank to all others, over both groups of Parallel.

        cp 0     cp 1
tp 0     a        b
         │        │      first among the ranks that divide heads,
tp 1     a        b      then among those that divide tokens: b becomes a
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from treegen.distributed.parallel import Parallel
from treegen.ir.errors import RankError

if TYPE_CHECKING:
    import torch

Made = TypeVar("Made")


def is_first(parallel: Parallel) -> bool:
    """Says whether this rank is the first of all groups."""
    return all(group.rank() == 0 for group in parallel.groups)


def broadcast_tensor(tensor: torch.Tensor, parallel: Parallel) -> None:
    """Fills a contiguous tensor with that of the first rank, on the current stream; the host does not wait on a GPU."""
    import torch.distributed as dist

    for group in parallel.groups:
        dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)


def made_by_first(parallel: Parallel, name: str, make: Callable[[], Made]) -> Made:
    """Calls a function on the first rank, and returns its result on all ranks, which wait for it.

    Args:
        parallel: The ranks; all of them call this.
        name: What errors name.
        make: The function. Its result can be pickled.

    Raises:
        RankError: The function failed on the first rank, which raises its error itself.
    """
    import torch.distributed as dist

    sent: list[Any] = [None, ""]
    error: Exception | None = None
    if is_first(parallel):
        try:
            sent[0] = make()
        except Exception as cause:  # whatever it is, the other ranks end as well
            error, sent[1] = cause, f"{type(cause).__name__}: {cause}"
    for group in parallel.groups:
        dist.broadcast_object_list(sent, dist.get_global_rank(group, 0), group=group)
    if error is not None:
        raise error
    if sent[1]:
        raise RankError(name, "rank 0", f"failed with {sent[1]}", "see the error of rank 0")
    made: Made = sent[0]
    return made
