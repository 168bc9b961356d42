"""Copies: `copy`, `deepcopy` and `pickle` of what holds locks, and tables on a device, that no copy can share."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

from treegen.ir.errors import InputError

Copied = TypeVar("Copied", bound="Copyable")


class Copyable(ABC):
    """Makes copies of itself from a state without locks and tables, which copies make anew."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """What a copy is made of, by name."""

    @abstractmethod
    def _restore(self, state: dict[str, Any]) -> None:
        """Takes a state, which may be changed, in a new object whose `__init__` was not called."""

    @abstractmethod
    def _given(self) -> dict[str, object]:
        """What callers gave that may not be picklable, by the names of their arguments."""

    def __copy__(self: Copied) -> Copied:
        return _restored(type(self), self._state())

    def __deepcopy__(self: Copied, memo: dict[int, Any]) -> Copied:
        return _restored(type(self), deepcopy(self._state(), memo))

    def __reduce__(self) -> tuple[Callable[..., Copyable], tuple[type[Copyable], dict[str, Any]]]:
        for name, part in self._given().items():
            try:
                pickle.dumps(part)
            except Exception as cause:
                fix = "define it at the top level of a module, or pickle the kernel's tree and compile it again"
                raise InputError(name, part, f"cannot be pickled: {cause}", fix) from cause
        return _restored, (type(self), self._state())


def _restored(kind: type[Copied], state: dict[str, Any]) -> Copied:
    made = kind.__new__(kind)
    made._restore(state)
    return made
