"""Copies: `copy`, `deepcopy` and `pickle` of objects with locks and device tables, which copies cannot share."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

from treegen.ir.errors import InputError

Copied = TypeVar("Copied", bound="Copyable")


class Copyable(ABC):
    """An object that makes copies of itself from a state without locks and tables, which each copy makes anew."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Returns the values that a copy is made of, by name."""

    @abstractmethod
    def _restore(self, state: dict[str, Any]) -> None:
        """Sets up a new object, whose `__init__` was not called, from a state. May change the state."""

    @abstractmethod
    def _given(self) -> dict[str, object]:
        """Returns what callers gave and pickle may refuse, by the names of arguments."""

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
