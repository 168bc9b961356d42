"""Read-only int32 arrays and the few ragged (CSR) operations that the IR is built on.

All functions are vectorised: no Python loop runs over tokens, rows or segments.

    lengths     3 0 2
    offsets     0 3 3 5             the indptr: row i has the entries offsets[i]:offsets[i + 1]
    entries     a b c │ │ d e
    owner       0 0 0     2 2       the row of each entry
    position    0 1 2     0 1       the entry's place in its row
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
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
IntsLike: TypeAlias = "Sequence[int] | npt.NDArray[Any]"

Entry = TypeVar("Entry")

INT32_MAX = 2**31 - 1
MOST_MADE = 10_000_000
"""The most nodes, rows or tokens that a few numbers (levels, copies, a text) may ask for: about 1 GB of memory."""
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
    """Returns a checked, read-only int32 copy of `values`.

    Args:
        argument: The caller's name of the values, for errors.
        values: A flat list, array or CPU tensor of integers.
        low: The lowest value that is allowed.
        high: The highest value that is allowed.
        error: The error to raise.
        copy: False returns `values` itself where it is fit already, for callers that only read it and do not keep it.

    Raises:
        error: The values are not flat or not integers, or one lies outside of low..high; it names the first such value.
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
    # Read as unsigned, negative numbers are large ones: one comparison finds both kinds.
    unsigned = _UNSIGNED.get(array.dtype) if low == 0 else None
    if array.min() < low or array.max() > high if unsigned is None else largest(array.view(unsigned)) > high:
        index = int(((array < low) | (array > high)).argmax())
        raise error(f"{argument}[{index}]", int(array[index]), f"is outside {low}..{high}", "correct the value")
    return frozen(array.astype(np.int32))


def _is_int32(array: npt.NDArray[Any]) -> TypeGuard[Ints]:
    """Tells whether the array is a flat array of int32."""
    return array.dtype is _INT32 and array.ndim == 1


def host_array(argument: str, values: Any, error: type[TreegenError] = TreeError) -> npt.NDArray[Any]:
    """Returns `values` as an array of any shape and type; it shares the memory of a CPU tensor.

    Raises `error` for values that are no array, and for a tensor on a GPU, since fetching it would wait for the GPU.
    """
    if type(values) is np.ndarray:
        return values
    if getattr(values, "is_cuda", False):
        raise error(argument, f"on {values.device}", "is not on the host", "pass its copy there, as engines keep one")
    if isinstance(values, np.ma.MaskedArray):
        raise error(argument, "a masked array", "may lack entries", "give an array of its valid entries")
    try:
        array = np.asarray(values.numpy() if hasattr(values, "numpy") else values)
    except Exception as cause:  # whatever the conversion of a foreign value raises
        raise error(argument, values, "is not an array of integers", "give one integer per entry") from cause
    return array


def whole_numbers(
    argument: str, values: Any, array: npt.NDArray[Any], error: type[TreegenError] = TreeError
) -> npt.NDArray[Any]:
    """Returns `array`, which is `host_array` of `values`, with an integer type of 64 bits at most.

    Raises `error` for the first entry, in row-major order, that is no integer. Booleans are no integers, neither in a
    list nor in an array.
    """
    if array.size == 0:
        return array
    entries: Any = array.reshape(-1)
    is_made = not hasattr(values, "dtype")
    if is_made:  # NumPy has given all entries of a list one type, so the list itself shows their types
        entries = values if array.ndim == 1 else np.asarray(values, object).reshape(-1)
    if array.dtype.kind in "iu" and not (is_made and _has_truths(entries)):
        return array
    index = next((i for i, value in enumerate(entries) if not is_integer(value)), None)
    if index is not None:
        raise error(f"{argument}[{index}]", entries[index], "is not an integer", "give whole numbers")
    index = next((i for i, value in enumerate(entries) if not -(2**63) <= value < 2**63), None)
    if index is not None:
        raise error(f"{argument}[{index}]", entries[index], "is outside 64 bits", "correct the value")
    return array.astype(np.int64)


def listed(argument: str, values: Any, fix: str, reason: str = "is not a list") -> list[Any]:
    """Returns the entries of a list, an array or a CPU tensor.

    Raises TreeError for texts, and for values without entries.
    """
    if hasattr(values, "dtype"):
        values = host_array(argument, values)
        if values.ndim == 0:
            raise TreeError(argument, values, reason, fix)
    elif not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise TreeError(argument, values, reason, fix)
    return list(values)


def positive_int(argument: str, value: object, error: type[TreegenError]) -> int:
    """Returns `value` as an int if it is an integer of 1..2^31 - 1, also of NumPy; raises `error` otherwise."""
    if not is_integer(value) or value < 1:
        raise error(argument, value, "is not a positive integer", "give a whole number of at least 1")
    if value > INT32_MAX:
        raise error(argument, value, f"exceeds {INT32_MAX}", "give a smaller number")
    return int(value)


def set_positive_ints(made: object, fields: Iterable[str], error: type[TreegenError]) -> None:
    """Sets these fields of a frozen dataclass to their `positive_int`."""
    for field in fields:
        object.__setattr__(made, field, positive_int(field, getattr(made, field), error))


def check_total(tokens: npt.NDArray[Any]) -> None:
    """Raises TreeError if the tokens of all nodes together exceed an int32."""
    total = int(tokens.sum(dtype=np.int64))
    if total > INT32_MAX:
        raise TreeError("tokens", total, "total exceeds 2^31 - 1 tokens", "split the forest")


def check_made(argument: str, value: object, count: int, what: str, error: type[TreegenError] = TreeError) -> None:
    """Raises `error` if a few numbers ask for more than MOST_MADE of something. what: its name in the plural."""
    if count > MOST_MADE:
        raise error(argument, value, f"makes {count} {what}", f"stay at or below {MOST_MADE}")


def is_integer(value: object) -> TypeGuard[int]:
    """Tells whether this is an integer of Python or NumPy, and no boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _has_truths(values: Iterable[object]) -> bool:
    """Tells whether one of the values is a boolean of Python, NumPy or PyTorch."""
    return not {*map(type, values)} <= {int} and any(
        isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool") for value in values
    )


def frozen(array: npt.NDArray[Any]) -> Ints:
    """Returns the array as contiguous int32, marked read-only; copies it only if its type or layout differs."""
    if array.dtype is not _INT32 or not array.flags.c_contiguous:
        array = array.astype(_INT32, "C")
    array.setflags(False)  # type: ignore[call-arg]  # a keyword, or flags.writeable, takes twice the time
    return array


def ramp(length: int) -> Longs:
    """Returns the numbers from 0 to `length` - 1, read-only."""
    return _RAMP[:length] if length <= len(_RAMP) else np.arange(length)


def int32_ramp(length: int) -> Ints:
    """Returns `ramp` in int32."""
    return _INT32_RAMP[:length] if length <= len(_INT32_RAMP) else np.arange(length, dtype=np.int32)


def zeros(length: int) -> Longs:
    """Returns `length` zeros, read-only."""
    return _ZEROS[:length] if length <= len(_ZEROS) else np.zeros(length, np.int64)


@lru_cache(256)
def number(value: int) -> Longs:
    """Returns a number as a 0-dimensional array.

    An operation on a few hundred entries takes twice the time with a Python number.
    """
    return np.array(value)


def largest(values: npt.NDArray[Any]) -> int:
    """Returns the largest entry, of at least one, in a fraction of the time of a reduction."""
    most: int = values.item(values.argmax())
    return most


def stable_order(numbers: npt.NDArray[Any], end: int) -> Longs:
    """Returns the stable order that sorts numbers of 0 to `end` - 1.

    Numbers of 16 bits are sorted by radix, in a third of the time.
    """
    return (numbers.astype(np.uint16) if end <= 1 << 16 else numbers).argsort(kind="stable")


def stacked(*parts: npt.NDArray[Any] | int) -> Ints:
    """Returns a read-only table [columns, length] of these columns; a number stands for a column of it.

    A table is marked read-only once, and all of its columns can be gathered in one operation. The first column is an
    array.
    """
    first = parts[0]
    assert not isinstance(first, int)
    table = np.empty((len(parts), len(first)), _INT32)
    for column, values in enumerate(parts):
        table[column] = values
    table.setflags(False)  # type: ignore[call-arg]  # as in `frozen`
    return table


def offsets(lengths: npt.NDArray[Any]) -> Longs:
    """Returns the exclusive running sum with the total at the end: the `indptr` of ragged rows of these lengths."""
    result = np.empty(len(lengths) + 1, _INT64)
    result[0] = 0
    np.add.accumulate(lengths, 0, None, result[1:])
    return result


def distinct(values: Longs) -> Longs:
    """Returns each of these numbers of at least 0 once, sorted; np.unique takes ten times as long for millions."""
    ordered = np.sort(values)
    found: Longs = ordered[np.diff(ordered, prepend=-1) > 0]
    return found


def ragged(lengths: npt.NDArray[Any]) -> tuple[Longs, Longs]:
    """Returns the owner and the position of each entry of ragged rows of these lengths, in order."""
    return ramp(len(lengths)).repeat(lengths), positions(offsets(lengths), lengths)


def positions(indptr: Longs, lengths: npt.NDArray[Any]) -> Longs:
    """Returns each entry's position in its ragged row. indptr: the `offsets` of the lengths."""
    before = indptr[:-1].repeat(lengths)
    return np.subtract(ramp(len(before)), before, before)


def ragged_ranges(starts: npt.NDArray[Any], lengths: npt.NDArray[Any], indptr: Longs | None = None) -> Longs:
    """Concatenates `range(start, start + length)` over all pairs.

    indptr: the `offsets` of the lengths, if the caller has them.
    """
    if indptr is None:
        indptr = offsets(lengths)
    moved: Longs = (starts - indptr[:-1]).repeat(lengths)
    moved += ramp(len(moved))
    return moved


class LazySequence(Sequence[Entry], Generic[Entry]):
    """A sequence that makes each entry on access."""

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
