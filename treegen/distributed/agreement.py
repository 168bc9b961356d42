"""Check mode: ranks compare what has to be the same on all of them, and name the first difference."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from treegen.ir.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_agreement(group: ProcessGroup, facts: Mapping[str, Any]) -> None:
    """Compares facts among the ranks of a group; all ranks call it, and all of them raise or none does.

    Waits for the other ranks.

    Args:
        group: The ranks.
        facts: Arrays, or values with a text, by name; the same names on all ranks.

    Raises:
        RankError: A fact differs; of several the first one is named, with the first rank and entry that differ.
    """
    digests = _gathered(group, {name: _digest(fact) for name, fact in facts.items()})
    for name, fact in facts.items():
        others = [rank for rank, found in enumerate(digests) if found.get(name) != digests[0].get(name)]
        if others:
            rank = others[0]
            of_ranks = _gathered(group, fact)
            value, there, here = _first_difference(of_ranks[rank], of_ranks[0])
            reason = f"{there} on rank {rank} is {here} on rank 0"
            raise RankError(f"{name}{value}", there, reason, "give all ranks of the group the same")


def _gathered(group: ProcessGroup, fact: Any) -> list[Any]:
    import torch.distributed as dist

    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, fact, group=group)
    return found


def _digest(fact: Any) -> str:
    data = fact.tobytes() if isinstance(fact, np.ndarray) else str(fact).encode()
    return hashlib.sha256(data).hexdigest()


def _first_difference(one: Any, other: Any) -> tuple[str, str, str]:
    """Returns the place of the first difference, as an index or "", and the two texts there."""
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return "", str(one), str(other)
    if len(one) != len(other):
        return "", f"{len(one)} entries", f"{len(other)} entries"
    place = int((one != other).argmax())
    return f"[{place}]", str(one[place]), str(other[place])
