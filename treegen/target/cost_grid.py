"""CostGrid: the profiled time of one thread block by rows and tokens, interpolated (FlashForge, section 5.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Floats
from treegen.ir.errors import BackendError

_FIELDS = ("rows", "tokens", "microseconds", "source")


@dataclass(frozen=True)
class CostGrid:
    """Times of one thread block for one KV head's query head rows and one run of tokens, as C_est of FlashForge.

    Attributes:
        rows: Knots of query head rows, ascending positive integers.
        tokens: Knots of tokens, ascending positive integers.
        microseconds: For each knot of tokens, the time at each knot of rows.
        source: The origin of the times.

    Raises:
        BackendError: Sizes differ, knots do not ascend, or a time is not a positive finite number.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    microseconds: tuple[tuple[float, ...], ...]
    source: str
    # The knots between two cells, which are all but the first and the last, and the coefficients of each cell.
    _row_borders: Floats = field(init=False, repr=False, compare=False)
    _token_borders: Floats = field(init=False, repr=False, compare=False)
    _coefficients: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, knots in (("rows", self.rows), ("tokens", self.tokens)):
            if not knots or not all(type(knot) is int and knot > 0 for knot in knots):
                raise BackendError(f"{name} of a cost grid", knots, "are not positive integers", "give at least one")
            if any(low >= high for low, high in pairwise(knots)):
                raise BackendError(f"{name} of a cost grid", knots, "do not ascend", "sort them, each once")
        if [len(line) for line in self.microseconds] != [len(self.rows)] * len(self.tokens):
            wanted = f"give {len(self.tokens)} lines (tokens) of {len(self.rows)} times (rows)"
            lengths = [len(line) for line in self.microseconds]
            raise BackendError("microseconds of a cost grid", lengths, "are lines that do not match the knots", wanted)
        for tokens, line in zip(self.tokens, self.microseconds, strict=True):
            for rows, time in zip(self.rows, line, strict=True):
                if type(time) not in (int, float) or not 0 < time < math.inf:
                    argument = f"microseconds of a cost grid at {rows} rows, {tokens} tokens"
                    raise BackendError(argument, time, "is not a positive finite number", "measure it again")
        if not isinstance(self.source, str) or not self.source:
            raise BackendError("source of a cost grid", self.source, "is no text", "name the origin of the times")
        object.__setattr__(self, "_row_borders", np.array(self.rows[1:-1], np.float64))
        object.__setattr__(self, "_token_borders", np.array(self.tokens[1:-1], np.float64))
        object.__setattr__(self, "_coefficients", self._cells())

    def _cells(self) -> Floats:
        """Returns the coefficients c[4, cells] of all cells.

        In a cell the time is c0 + c1 u + c2 v + c3 u v, with u = log rows and v = log tokens.
        """
        u, v = np.log(self.rows), np.log(self.tokens)
        times = np.array(self.microseconds, np.float64)
        # An axis with one knot has one cell, in which the time is constant.
        u, times = (np.append(u, u + 1.0), np.repeat(times, 2, axis=1)) if len(u) == 1 else (u, times)
        v, times = (np.append(v, v + 1.0), np.repeat(times, 2, axis=0)) if len(v) == 1 else (v, times)
        along_u = np.diff(times, axis=1)[:-1] / np.diff(u)
        along_v = np.diff(times, axis=0)[:, :-1] / np.diff(v)[:, None]
        both = np.diff(np.diff(times, axis=0), axis=1) / np.diff(v)[:, None] / np.diff(u)
        u, v = u[:-1], v[:-1, None]
        constant = times[:-1, :-1] - along_u * u - along_v * v + both * u * v
        return np.stack([constant, along_u - both * v, along_v - both * u, both]).reshape(4, -1)

    def cost(self, rows: npt.ArrayLike, tokens: npt.ArrayLike) -> Floats:
        """Returns microseconds for positive numbers of rows and tokens, whole or not, broadcast against each other.

        Between knots the time is bilinear in (log rows, log tokens). Below the first knot of an axis it is constant.
        Beyond the last knot it grows linearly: the time at the last knot times x / last knot.
        """
        row_count = np.maximum(rows, float(self.rows[0]))
        token_count = np.maximum(tokens, float(self.tokens[0]))
        inner_rows = np.minimum(row_count, float(self.rows[-1]))
        inner_tokens = np.minimum(token_count, float(self.tokens[-1]))
        u, v = np.log(inner_rows), np.log(inner_tokens)
        cell = self._token_borders.searchsorted(inner_tokens, "right") * (len(self._row_borders) + 1)
        cell = cell + self._row_borders.searchsorted(inner_rows, "right")
        c0, c1, c2, c3 = self._coefficients.take(cell, axis=1)
        return np.asarray((c0 + c1 * u + (c2 + c3 * u) * v) * (row_count / inner_rows) * (token_count / inner_tokens))

    @classmethod
    def from_object(cls, value: object) -> CostGrid:
        """Makes a grid of a JSON object with the fields rows, tokens, microseconds and source. Raises BackendError."""
        if not isinstance(value, dict) or value.keys() != set(_FIELDS):
            shown = sorted(map(str, value)) if isinstance(value, dict) else value
            raise BackendError("cost grid", shown, "does not have its fields", f"give {', '.join(_FIELDS)}")
        for name in _FIELDS[:3]:
            if not isinstance(value[name], (list, tuple)):
                raise BackendError(f"{name} of a cost grid", value[name], "is not a list", "give a list")
        for line in value["microseconds"]:
            if not isinstance(line, (list, tuple)):
                raise BackendError("microseconds of a cost grid", line, "is not a list", "give a list of times")
        times = tuple(tuple(line) for line in value["microseconds"])
        return cls(tuple(value["rows"]), tuple(value["tokens"]), times, value["source"])

    def to_object(self) -> dict[str, Any]:
        """Returns the fields as JSON types, which `from_object` reads."""
        times = [list(line) for line in self.microseconds]
        return {"rows": list(self.rows), "tokens": list(self.tokens), "microseconds": times, "source": self.source}
