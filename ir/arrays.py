"""Read-only int32 arrays and the few ragged (CSR) operations that the IR is built on.

All functions are vectorised: no Python loop runs over tokens, rows or segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeAlias, TypeGuard, TypeVar, overload

import numpy as np
import numpy.typing as npt

from treegen.ir.errors import TreeError, TreegenError

Ints: TypeAlias = npt.NDArray[np.int32]
Longs: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
IntsLike: TypeAlias = "Sequence[int] | npt.NDArray[Any]"

Entry = TypeVar("Entry")

INT32_MAX = 2**31 - 1
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_UINT32 = np.dtype(np.uint32)
_UNSIGNED: dict[np.dtype[Any], np.dtype[Any]] = {_INT32: _UINT32, _INT64: np.dtype(np.uint64)}
_RAMP = np.arange(1 << 15)
_INT32_RAMP, _ZEROS = _RAMP.astype(np.int32), np.zeros(len(_RAMP), np.int64)
for _of_any_length in (_RAMP, _INT32_RAMP, _ZEROS):
    _of_any_length.setflags(write=False)


def int32_array(
    argument: str,
    values: IntsLike,
    *,
    low: int,
    high: int = INT32_MAX,
    error: type[TreegenError] = TreeError,
    copy: bool = True,
) -> Ints:
    """A read-only int32 copy of `values`, each in low..high; raises `error` naming the first value that is not. Without
    `copy` it may be `values` itself, for who only reads them and does not keep them.
    """
    if not copy and low == 0 and _is_int32(values) and (not len(values) or largest(values.view(_UINT32)) <= high):
        return values
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as cause:
        raise error(argument, values, "is not a flat sequence of integers", "give one integer per entry") from cause
    if array.ndim != 1:
        raise error(
            argument,
            f"shape {array.shape}" if array.ndim else values,
            "has to be one-dimensional",
            "give one integer per entry",
        )
    if array.size == 0:
        return frozen(np.empty(0, np.int32))
    if array.dtype.kind not in "iu" or (array is not values and any(isinstance(value, bool) for value in values)):
        index = next((i for i, value in enumerate(values) if not _is_integer(value)), None)
        if index is None:  # whole numbers, but some do not fit into 64 bits
            index = next(i for i, value in enumerate(values) if not low <= value <= high)
            raise error(f"{argument}[{index}]", values[index], f"is outside {low}..{high}", "correct the value")
        raise error(f"{argument}[{index}]", values[index], "is not an integer", "give whole numbers")
    # Negative numbers are large ones where they are taken to be unsigned.
    unsigned = _UNSIGNED.get(array.dtype) if low == 0 else None
    if array.min() < low or array.max() > high if unsigned is None else largest(array.view(unsigned)) > high:
        index = int(((array < low) | (array > high)).argmax())
        raise error(f"{argument}[{index}]", int(array[index]), f"is outside {low}..{high}", "correct the value")
    return frozen(array.astype(np.int32))


def _is_int32(values: IntsLike) -> TypeGuard[Ints]:
    """Whether this is a flat array of int32."""
    return isinstance(values, np.ndarray) and values.dtype is _INT32 and values.ndim == 1


def positive_int(argument: str, value: object, error: type[TreegenError]) -> int:
    """`value` if it is an integer of at least 1; raises `error` otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise error(argument, value, "is not a positive integer", "give a whole number of at least 1")
    return value


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def frozen(array: npt.NDArray[Any]) -> Ints:
    """`array` as contiguous int32, marked read-only (copied only if the type or layout differs)."""
    if array.dtype is not _INT32 or not array.flags.c_contiguous:
        array = array.astype(_INT32, "C")
    array.setflags(False)  # type: ignore[call-arg]  # by keyword, or as flags.writeable, twice as long
    return array


def ramp(length: int) -> Longs:
    """The numbers from 0 to `length` - 1, read-only."""
    return _RAMP[:length] if length <= len(_RAMP) else np.arange(length)


def int32_ramp(length: int) -> Ints:
    """`ramp` in int32."""
    return _INT32_RAMP[:length] if length <= len(_INT32_RAMP) else np.arange(length, dtype=np.int32)


def zeros(length: int) -> Longs:
    """So many zeros, read-only."""
    return _ZEROS[:length] if length <= len(_ZEROS) else np.zeros(length, np.int64)


@lru_cache(256)
def number(value: int) -> Longs:
    """A number as an array without dimensions: with a Python number an operation on a few hundred others takes twice as
    long.
    """
    return np.array(value)


def largest(values: npt.NDArray[Any]) -> int:
    """The largest of integers, at least one: a fraction of the time of a reduction."""
    most: int = values.item(values.argmax())
    return most


def stacked(*parts: npt.NDArray[Any] | int) -> Ints:
    """A read-only table [columns, length] of these columns, so that they are marked at once and can be gathered all at
    once. The first one is an array; a number stands for a column of it.
    """
    first = parts[0]
    assert not isinstance(first, int)
    table = np.empty((len(parts), len(first)), _INT32)
    for column, values in enumerate(parts):
        table[column] = values
    table.setflags(False)  # type: ignore[call-arg]  # as in `frozen`
    return table


def offsets(lengths: npt.NDArray[Any]) -> Longs:
    """Exclusive running sum with the total at the end: the `indptr` of ragged rows of these lengths."""
    result = np.empty(len(lengths) + 1, _INT64)
    result[0] = 0
    np.add.accumulate(lengths, 0, None, result[1:])
    return result


def ragged(lengths: npt.NDArray[Any]) -> tuple[Longs, Longs]:
    """(owner, position) of every entry of ragged rows of these lengths, in order."""
    return ramp(len(lengths)).repeat(lengths), positions(offsets(lengths), lengths)


def positions(indptr: Longs, lengths: npt.NDArray[Any]) -> Longs:
    """The place in its row of every entry of ragged rows of these lengths, whose `offsets` are `indptr`."""
    before = indptr[:-1].repeat(lengths)
    return np.subtract(ramp(len(before)), before, before)


def ragged_ranges(starts: npt.NDArray[Any], lengths: npt.NDArray[Any], indptr: Longs | None = None) -> Longs:
    """The concatenation of `range(start, start + length)` over all pairs. indptr: the `offsets` of the lengths, if they
    are at hand.
    """
    if indptr is None:
        indptr = offsets(lengths)
    moved: Longs = (starts - indptr[:-1]).repeat(lengths)
    moved += ramp(len(moved))
    return moved


class LazySequence(Sequence[Entry], Generic[Entry]):
    """A sequence whose entries are made on access."""

    def __init__(self, length: int, make: Callable[[int], Entry]) -> None:
        self._length = length
        self._make = make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._length))]
        return self._make(range(self._length)[index])
