"""A rank's place, from the environment variables that torchrun sets."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from treegen.distributed.shared_store import CONNECT_S, SharedStore, connected
from treegen.ir.errors import RankError

_FIX = "start ranks with torchrun, or unset RANK"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a process among the ranks.

    Attributes:
        rank: Its number among all ranks.
        ranks: The number of ranks.
        local_rank: Its number among the ranks of its host, which is also the number of its GPU.
        host: The name of its host, with the number of its group of ranks.
    """

    rank: int
    ranks: int
    local_rank: int
    host: str

    @classmethod
    def of_environment(cls, variables: Mapping[str, str] | None = None) -> RankPlace | None:
        """Returns the place that torchrun gave this process; None for a process that works alone.

        Args:
            variables: Environment variables, by default those of this process.

        Raises:
            RankError: RANK is set, and another variable is missing or wrong.
        """
        given = os.environ if variables is None else variables
        if "RANK" not in given:
            return None
        ranks = _number(given, "WORLD_SIZE", 1)
        rank = _number(given, "RANK", 0, ranks - 1)
        if ranks == 1:
            return None
        _address(given)
        group = given.get("GROUP_RANK", "")
        name = socket.gethostname()
        return cls(rank, ranks, _number(given, "LOCAL_RANK", 0), f"{group} ({name})" if group else name)

    @property
    def text(self) -> str:
        """The rank, its host and its GPU, in words."""
        return f"rank {self.rank} on host {self.host}, cuda:{self.local_rank}"

    def store(self, variables: Mapping[str, str] | None = None, seconds: float = CONNECT_S) -> SharedStore:
        """Connects to the store of all ranks. Without torchrun rank 0 serves it.

        Args:
            variables: Environment variables, by default those of this process.
            seconds: How long to try.

        Raises:
            RankError: The variables name no store.
        """
        given = os.environ if variables is None else variables
        return connected(*_address(given), serves=self.serves(given), seconds=seconds)

    def serves(self, variables: Mapping[str, str] | None = None) -> bool:
        """Says whether this process serves the store: rank 0, unless torchrun serves it."""
        given = os.environ if variables is None else variables
        return self.rank == 0 and given.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def take_gpu(self) -> int | None:
        """Makes the GPU of this rank the current one, and returns its number; None on a machine without GPUs.

        Raises RankError where there are fewer GPUs than ranks.
        """
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            return None
        if self.local_rank >= count:
            reason = f"has no GPU: this process sees {count}"
            raise RankError("LOCAL_RANK", self.local_rank, reason, f"start {count} ranks on a host, one for each GPU")
        torch.cuda.set_device(self.local_rank)
        return self.local_rank


def _address(given: Mapping[str, str]) -> tuple[str, int]:
    """Returns the host and the port of the store."""
    if not given.get("MASTER_ADDR"):
        raise _missing("MASTER_ADDR")
    return given["MASTER_ADDR"], _number(given, "MASTER_PORT", 1, 65535)


def _number(given: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    """Returns a variable's whole number."""
    text = given.get(name)
    if text is None:
        raise _missing(name)
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RankError(name, text, "is not a whole number", _FIX)
    number = int(text)
    if number < least or (most is not None and number > most):
        wanted = f"from {least} to {most}" if most is not None else f"at least {least}"
        raise RankError(name, number, f"is out of range: {wanted}", _FIX)
    return number


def _missing(name: str) -> RankError:
    return RankError(name, None, "is not set, but RANK is", _FIX)
