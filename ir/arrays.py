"""Read-only int32 arrays and the few ragged (CSR) operations that the IR is built on.

All functions are vectorised: no Python loop runs over tokens, rows or segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
MOST_MADE = 10_000_000
"""Nodes, rows or tokens that a few numbers may ask for (levels, copies, a text), at most: some 1 GB of memory."""
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
    array = host_array(argument, values, error)
    if not copy and low == 0 and _is_int32(array) and (not len(array) or largest(array.view(_UINT32)) <= high):
        return array
    if array.ndim != 1:
        shown = f"shape {array.shape}" if array.ndim else values
        raise error(argument, shown, "has to be one-dimensional", "give one integer per entry")
    array = whole_numbers(argument, values, array, error)
    if array.size == 0:
        return frozen(np.empty(0, np.int32))
    # Negative numbers are large ones where they are taken to be unsigned.
    unsigned = _UNSIGNED.get(array.dtype) if low == 0 else None
    if array.min() < low or array.max() > high if unsigned is None else largest(array.view(unsigned)) > high:
        index = int(((array < low) | (array > high)).argmax())
        raise error(f"{argument}[{index}]", int(array[index]), f"is outside {low}..{high}", "correct the value")
    return frozen(array.astype(np.int32))


def _is_int32(array: npt.NDArray[Any]) -> TypeGuard[Ints]:
    """Whether this is a flat array of int32."""
    return array.dtype is _INT32 and array.ndim == 1


def host_array(argument: str, values: Any, error: type[TreegenError] = TreeError) -> npt.NDArray[Any]:
    """`values` as an array of any shape and type; that of a CPU tensor shares its memory. Raises `error` for what is no
    array, and for a tensor of a GPU, since fetching it would wait for the GPU.
    """
    if type(values) is np.ndarray:
        return values
    if getattr(values, "is_cuda", False):
        raise error(argument, f"on {values.device}", "is not on the host", "pass its copy there, as engines keep one")
    try:
        array = np.asarray(values.numpy() if hasattr(values, "numpy") else values)
    except Exception as cause:  # whatever the conversion of a foreign value raises
        raise error(argument, values, "is not an array of integers", "give one integer per entry") from cause
    return array


def whole_numbers(
    argument: str, values: Any, array: npt.NDArray[Any], error: type[TreegenError] = TreeError
) -> npt.NDArray[Any]:
    """`array`, which is `host_array` of `values`, with integers of 64 bits at most; raises `error` naming the first
    entry, counted in one row, that is none. Booleans are no integers, neither in a list nor in an array.
    """
    if array.size == 0:
        return array
    entries: Any = array.reshape(-1)
    is_made = not hasattr(values, "dtype")
    if is_made:  # an array made of a list has one type for all entries, whatever types they had
        entries = values if array.ndim == 1 else np.asarray(values, object).reshape(-1)
    if array.dtype.kind in "iu" and not (is_made and _has_truths(entries)):
        return array
    index = next((i for i, value in enumerate(entries) if not _is_integer(value)), None)
    if index is not None:
        raise error(f"{argument}[{index}]", entries[index], "is not an integer", "give whole numbers")
    index = next((i for i, value in enumerate(entries) if not -(2**63) <= value < 2**63), None)
    if index is not None:
        raise error(f"{argument}[{index}]", entries[index], "is outside 64 bits", "correct the value")
    return array.astype(np.int64)


def listed(argument: str, values: Any, fix: str, reason: str = "is not a list") -> list[Any]:
    """The entries of a list, an array or a CPU tensor; raises TreeError for what has none, and for texts."""
    if hasattr(values, "dtype"):
        values = host_array(argument, values)
        if values.ndim == 0:
            raise TreeError(argument, values, reason, fix)
    elif not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise TreeError(argument, values, reason, fix)
    return list(values)


def positive_int(argument: str, value: object, error: type[TreegenError]) -> int:
    """`value` if it is an integer of 1..2^31 - 1; raises `error` otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise error(argument, value, "is not a positive integer", "give a whole number of at least 1")
    if value > INT32_MAX:
        raise error(argument, value, f"exceeds {INT32_MAX}", "give a smaller number")
    return value


def check_total(tokens: npt.NDArray[Any]) -> None:
    """Raises TreeError where the tokens of all nodes are more than an int32 can count."""
    total = int(tokens.sum(dtype=np.int64))
    if total > INT32_MAX:
        raise TreeError("tokens", total, "total exceeds 2^31 - 1 tokens", "split the forest")


def check_made(argument: str, value: object, count: int, what: str, error: type[TreegenError] = TreeError) -> None:
    """Raises `error` where a few numbers ask for more than MOST_MADE of something."""
    if count > MOST_MADE:
        raise error(argument, value, f"makes {count} {what}", f"stay at or below {MOST_MADE}")


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _has_truths(values: Iterable[object]) -> bool:
    """Whether there is a boolean among these, also one of NumPy's or PyTorch's."""
    return not {*map(type, values)} <= {int} and any(
        isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool") for value in values
    )


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
