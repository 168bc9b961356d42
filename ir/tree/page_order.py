"""Requests in the order of their pages: those which share a prefix are neighbours then."""

from __future__ import annotations

from itertools import count

import numpy as np

from treegen.ir.arrays import Ints, Longs, largest, ramp

# A window's entries, beyond which it is no wider than the narrowest.
_ENTRIES, _NARROWEST = 1 << 17, 8
# Rows are sorted so often by columns that neighbours show to decide, then by all.
_ATTEMPTS = 3


def in_order_of_pages(begin: Longs, pages: Longs, indices: Ints) -> tuple[Longs, Longs]:
    """Requests in the order of their pages, one before those that go on where it ends; and how many pages each has in
    common with the one before it in this order.

    Pages are compared in windows; only requests that agree with a neighbour in all of a window go on to the next.
    """
    width, whole = _width(pages, len(indices))
    number, agreeing = ordered_rows(_padded(pages, indices, width) if whole else _window(begin, pages, indices, width))
    # Neighbours have as much in common as they agree in, and no more than the second of them has left.
    shared, left = np.zeros(len(pages), np.int64), pages[number]
    np.minimum(agreeing, left[1:], out=shared[1:])
    if whole:
        return number, shared
    number, place, depth = number.copy(), np.arange(len(pages)), 0
    while not whole:
        undecided = (agreeing == width) & (left[1:] >= width)
        goes_on = np.append(undecided, False) | np.append(False, undecided)
        group = np.cumsum(~np.append(False, undecided), dtype=np.int32)[goes_on]
        place, left, depth = place[goes_on], left[goes_on] - width, depth + width
        if not np.count_nonzero(left):
            break
        width, whole = _width(left, int(np.add.reduce(left)))
        table = _window(begin[number[place]] + depth, left, indices, width)
        order, agreeing = ordered_rows(np.column_stack([group, table]))
        agreeing -= 1
        number[place], left = number[place[order]], left[order]
        related = np.flatnonzero(agreeing >= 0)
        shared[place[1:][related]] = depth + np.minimum(agreeing, left[1:])[related]
    return number, shared


def _width(left: Longs, total: int) -> tuple[int, bool]:
    """Pages of a window on requests that have so many left, `total` in all; and whether no request has more."""
    longest = largest(left)
    width = min(longest, 2 * (total // len(left)) + 1, max(_NARROWEST, _ENTRIES // len(left)))
    return width, width == longest


def _padded(pages: Longs, indices: Ints, width: int) -> Ints:
    """All pages of requests [requests, width], -1 behind a request's last."""
    if len(pages) * width == len(indices):
        return indices.reshape(-1, width)
    table = np.full((len(pages), width), -1, np.int32)
    table[np.arange(width) < pages[:, None]] = indices
    return table


def _window(begin: Longs, left: Longs, indices: Ints, width: int) -> Ints:
    """Pages of requests from `begin` on [requests, width]; -1 where none is `left`."""
    columns = np.arange(width)
    table = indices.take(begin[:, None] + columns, mode="clip")
    table[columns >= left[:, None]] = -1
    return table


def ordered_rows(table: Ints) -> tuple[Longs, Longs]:
    """The stable lexical order of a table's rows of numbers from -1 on; and in how many columns every row but the first
    of that order begins like the one before.

    Most columns follow from those before them: rows are sorted by the few in which neighbours first differ. Neighbours
    of the new order show whether that was enough, and if not, by which columns to sort too.
    """
    rows, width = table.shape
    order, ordered = ramp(rows), table
    begin, deciding = np.arange(0, (rows - 1) * width, width), None
    for attempt in count():
        first = (ordered[1:] != ordered[:-1]).argmax(1)
        at, flat = begin + first, ordered.reshape(-1)
        before, after = flat.take(at), flat[width:].take(at)
        if not np.count_nonzero(before > after):
            break
        if deciding is None:
            deciding = np.zeros(width, bool)
        deciding[first] = True
        if attempt == _ATTEMPTS:
            deciding[:] = True
        columns = deciding.nonzero()[0]
        order = _order(table.take(columns, 1).T)
        if len(columns) == 1:  # all rows begin alike, up to this column
            column = table[:, columns.item()].take(order)
            if np.count_nonzero(column[1:] > column[:-1]) == rows - 1:
                return order, np.full(rows - 1, columns.item())
        ordered = table.take(order, 0)
    first[before == after] = width
    return order, first


def _order(columns: Ints) -> Longs:
    """The stable order by the first of the columns [columns, rows] of numbers from -1 on, where equal by the next, and
    so on.

    Of several columns a radix sort, the last ones first: as many as fit, and the row behind them, are a 64-bit key,
    since sorting values is several times faster than sorting indices by them.
    """
    order: Longs | None = None
    if len(columns) == 1:
        order = columns[0].argsort(kind="stable")
        return order
    columns = np.add(columns, 1, dtype=np.int64, order="C")
    index = ramp(columns.shape[1])
    index_bits, bits = len(index).bit_length(), largest(columns).bit_length()
    digits = (63 - index_bits) // max(bits, 1)
    for stop in range(len(columns), 0, -digits):
        start = max(stop - digits, 0)
        key = columns[start]
        for column in columns[start + 1 : stop]:
            key = (key << bits) | column
        key = (key if order is None else key[order]) << index_bits
        key |= index
        key.sort()
        key &= (1 << index_bits) - 1
        order = key if order is None else order[key]
    return index if order is None else order
