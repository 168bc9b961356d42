"""Checks of the seats, rows and numbers that callers give to a LiveBatch. `row`: the row of each seat, -1 if free."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from treegen.ir.arrays import INT32_MAX, Bools, Ints, IntsLike, Longs, int32_array, largest
from treegen.ir.errors import TreeError


def checked_count(argument: str, value: int, low: int = 0) -> int:
    """Returns `value` as an int of low..2^31 - 1; raises TreeError for anything else."""
    if type(value) is int and low <= value <= INT32_MAX:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TreeError(argument, value, "is not an integer", "give a whole number")
    if not low <= value <= INT32_MAX:
        raise TreeError(argument, int(value), f"is outside {low}..{INT32_MAX}", "correct the value")
    return int(value)


def one_for_each(argument: str, values: int | IntsLike, seats: int, low: int = 0) -> Ints:
    """Returns a number for each of `seats` seats. Raises TreeError for one below `low`, or too few or many numbers."""
    if isinstance(values, (int, np.integer)):
        return np.full(seats, checked_count(argument, values, low), np.int32)
    numbers = int32_array(argument, values, low=low)
    check_lengths(seats, **{argument: numbers})
    return numbers


def check_lengths(seats: int, **arrays: IntsLike) -> None:
    """Raises TreeError unless each array has an entry for each of `seats` seats."""
    for name, values in arrays.items():
        if not hasattr(values, "__len__") or getattr(values, "ndim", 1) == 0:
            raise TreeError(name, values, "has to be one-dimensional", "give one integer per seat")
        if len(values) != seats:
            raise TreeError(name, f"{len(values)} entries", f"does not match {seats} seats", "give one per seat")


def longer(tokens: Ints, more: Ints, seats: Longs) -> Longs:
    """Returns the sums of both; raises TreeError, which names the seat, for more than 2^31 - 1 tokens."""
    after = np.add(tokens, more, dtype=np.int64)
    if len(after) and largest(after) > INT32_MAX:
        seat = int(seats[after.argmax()])
        raise TreeError("tokens", int(after.max()), f"is more than 2^31 - 1 for seat {seat}", "give fewer")
    return after


def running_seat(argument: str, seat: int, row: Ints) -> int:
    """Returns the seat; raises TreeError unless a request runs there."""
    number = checked_count(argument, seat)
    if number >= len(row) or row.item(number) < 0:
        raise TreeError(argument, number, "is the seat of no running request", "name one of `seats`")
    return number


def running_seats(seats: int | IntsLike, row: Ints) -> Longs:
    """Returns the seats as an array; raises TreeError unless they differ and a request runs in each."""
    if type(seats) is np.ndarray and seats.dtype == np.int64 and seats.ndim == 1 and len(seats):
        chosen = seats
    else:
        given = [seats] if isinstance(seats, (int, np.integer)) else seats
        chosen = int32_array("seats", given, low=0).astype(np.int64)
    runs: Bools = chosen.view(np.uint64) < len(row)  # negative numbers are large ones
    if np.count_nonzero(runs) == len(chosen):
        np.greater_equal(row.take(chosen), 0, out=runs)
    else:
        runs[runs] = row[chosen[runs]] >= 0
    if np.count_nonzero(runs) < len(chosen):
        index = int(runs.argmin())
        reason = "is the seat of no running request"
        raise TreeError(f"seats[{index}]", int(chosen[index]), reason, "name some of `seats`")
    _check_differ(chosen)
    return chosen


def found_seats(seats: IntsLike, epochs: IntsLike, count: int) -> tuple[Ints, Ints]:
    """Returns some of `count` seats, and an epoch for each. Raises TreeError unless seats differ and exist."""
    seat, epoch = int32_array("seats", seats, low=0, high=count - 1), int32_array("epochs", epochs, low=-(2**31))
    check_lengths(len(seat), epochs=epoch)
    _check_differ(seat)
    return seat, epoch


def _check_differ(seats: Ints | Longs) -> None:
    if len(seats) > 1 and largest(counts := np.bincount(seats)) > 1:
        raise TreeError("seats", seats.tolist(), f"names seat {int(counts.argmax())} twice", "name every seat once")


def checked_claim(
    shared_with: int | None, shared_tokens: int, tokens: int, row: Ints, of_seats: Ints
) -> tuple[int, int]:
    """Returns the seat that a request shares its first tokens with, -1 for none, and their number.

    tokens: those of the request. of_seats: those of all seats. Raises TreeError if one of both has fewer tokens.
    """
    shared = checked_count("shared_tokens", shared_tokens)
    if shared_with is None:
        if shared:
            raise TreeError("shared_tokens", shared, "are shared with no seat", "give shared_with, or 0")
        return -1, 0
    above = running_seat("shared_with", shared_with, row)
    of_above = of_seats.item(above)
    if shared > tokens or shared > of_above:
        most, whose = (tokens, "the request has") if shared > tokens else (of_above, f"seat {above} has")
        raise TreeError("shared_tokens", shared, f"is more than the {most} tokens that {whose}", "lower it")
    return above, shared


def free_row(place: int | None, row: Ints, active: int) -> int:
    """Returns a free row: `place`, or by default the lowest one. Raises TreeError if it is taken.

    active: the number of running requests.
    """
    if place is None:
        taken = np.zeros(active + 1, bool)
        taken[row[(row >= 0) & (row <= active)]] = True
        return int(taken.argmin())
    place = checked_count("row", place)
    taken = row == place
    if np.count_nonzero(taken):
        seat = int(taken.argmax())
        raise TreeError("row", place, f"is taken by seat {seat}", "give a free place, or finish that request")
    return place


def reordered_rows(rows: Mapping[int, int] | IntsLike, row: Ints, seats: Longs) -> Ints:
    """Returns the new row of each seat. Raises TreeError unless the running requests in `seats` get different rows."""
    after: Ints = row.copy()
    if isinstance(rows, Mapping):
        named = running_seats(list(rows), row)
        after[named] = int32_array("rows", list(rows.values()), low=0)
    else:
        given = int32_array("rows", rows, low=-(2**31))
        if len(seats) and len(given) <= seats[-1]:
            reason = f"has no row for seat {seats[-1]}"
            raise TreeError("rows", f"{len(given)} entries", reason, "give one row per seat")
        after[seats] = given[seats]
        if len(seats) and after[seats].min() < 0:
            seat = int(seats[after[seats].argmin()])
            raise TreeError(f"rows[{seat}]", int(after[seat]), "is outside 0..2147483647", "correct the value")
    used = np.sort(after[seats])
    if len(twice := (used[1:] == used[:-1]).nonzero()[0]):
        raise TreeError("rows", rows, f"gives row {used[twice[0]]} to two requests", "give every request its own")
    return after
