"""Expressions computed in PyTorch, for the torch backend and for unfused attention."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from treegen.scoring.expressions import computed

Value: TypeAlias = "torch.Tensor | float | bool"


def _floor_mod(a: Any, b: Any) -> Any:
    return torch.remainder(a, b)


def _floor_div(a: Any, b: Any) -> Any:
    return torch.div(a, b, rounding_mode="floor")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "power": operator.pow,
    "floor_div": _floor_div, "whole_div": _floor_div, "floor_mod": _floor_mod, "whole_mod": _floor_mod,
    "bit_and": torch.bitwise_and, "right_shift": torch.bitwise_right_shift,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
    "and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor, "not": torch.logical_not,
    "minimum": torch.minimum, "maximum": torch.maximum, "where": torch.where, "abs": torch.abs,
    "floor": torch.floor, "ceil": torch.ceil, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "sin": torch.sin, "cos": torch.cos,
    "erf": torch.erf, "float": torch.Tensor.float, "int": torch.Tensor.long,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Values:
    """An algebra of tensors. symbols: tensors by name. captured: the tensors that loads read."""

    symbols: dict[str, torch.Tensor]
    captured: tuple[torch.Tensor, ...]

    def of(self, *expressions: sympy.Basic) -> list[torch.Tensor]:
        """Computes expressions."""
        known: dict[sympy.Basic, torch.Tensor] = {}
        return [computed(expression, self, known) for expression in expressions]

    def symbol(self, name: str) -> torch.Tensor:
        """Returns the tensor of this name."""
        return self.symbols[name]

    def constant(self, value: float | bool) -> torch.Tensor:
        """Returns a scalar."""
        kind = torch.float32 if isinstance(value, float) else None
        return torch.tensor(value, dtype=kind, device=next(iter(self.symbols.values())).device)

    def call(self, name: str, *arguments: torch.Tensor) -> torch.Tensor:
        """Calls PyTorch's function."""
        result: torch.Tensor = _FUNCTIONS[name](*arguments)
        return result

    def load(self, number: int, indices: tuple[torch.Tensor, ...], wrapped: tuple[bool, ...]) -> torch.Tensor:
        """Returns an entry of a captured tensor. An index out of bounds takes the nearest entry, as in kernels."""
        tensor = self.captured[number]
        tensor = tensor.float() if tensor.dtype.is_floating_point else tensor.long()
        places = []
        for size, index, wraps in zip(tensor.shape, indices, wrapped, strict=True):
            inside = torch.where(index < 0, index + size, index) if wraps else index
            places.append(inside.clamp(0, size - 1))
        return tensor[tuple(places)]

    def kept(self, expression: sympy.Basic, value: torch.Tensor) -> torch.Tensor:
        """Returns the value itself."""
        return value
