"""Requests in the order of their pages, in which those that share a prefix are neighbours."""

from __future__ import annotations

from itertools import count

import numpy as np

from treegen.ir.arrays import Ints, Longs, largest, ramp

# A window has at most ENTRIES entries, but is not narrowed below NARROWEST pages for that.
ENTRIES, NARROWEST = 1 << 17, 8
# Attempts at sorting rows by the columns in which neighbours differ, before all columns are used.
_ATTEMPTS = 3


def in_order_of_pages(begin: Longs, pages: Longs, indices: Ints) -> tuple[Longs, Longs]:
    """Returns requests in the order of their pages, and the pages that each has in common with the request before it.

    A request comes before those that begin with all of its pages. Pages are compared in windows: only requests that
    agree with a neighbour in all of a window go on to the next window.

        order       3      1      0        2
        pages       7 5    7 9    7 9 4    7 9 4 8
        in common   -      1      2        3
    """
    width, whole = _width(pages, len(indices))
    number, agreeing = ordered_rows(_padded(pages, indices, width) if whole else _window(begin, pages, indices, width))
    # Neighbours share the columns in which they agree, and no more pages than the second of them has.
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
    """Returns the pages of a window, and whether they are all pages that the requests have left.

    left: the pages that each request has left, `total` in all.
    """
    longest = largest(left)
    width = min(longest, 2 * (total // len(left)) + 1, max(NARROWEST, ENTRIES // len(left)))
    return width, width == longest


def _padded(pages: Longs, indices: Ints, width: int) -> Ints:
    """Returns the pages of all requests [requests, width], with -1 after a request's last page."""
    if len(pages) * width == len(indices):
        return indices.reshape(-1, width)
    table = np.full((len(pages), width), -1, np.int32)
    table[np.arange(width) < pages[:, None]] = indices
    return table


def _window(begin: Longs, left: Longs, indices: Ints, width: int) -> Ints:
    """Returns the pages of requests from `begin` on [requests, width], with -1 where none is `left`."""
    columns = np.arange(width)
    table = indices.take(begin[:, None] + columns, mode="clip")
    table[columns >= left[:, None]] = -1
    return table


def ordered_rows(table: Ints) -> tuple[Longs, Longs]:
    """Returns the stable lexical order of a table's rows, and the columns that each row shares with the one before it.

    The second array counts, for every row of the order but the first, the columns in which it begins like the row
    before. Entries are numbers from -1 on. Most columns follow from earlier ones, so rows are sorted by the few columns
    in which neighbours first differ. Neighbours in the new order show whether that was enough, and if not, which
    columns to add.
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
        if len(columns) == 1:  # all rows agree up to this column
            column = table[:, columns.item()].take(order)
            if np.count_nonzero(column[1:] > column[:-1]) == rows - 1:
                return order, np.full(rows - 1, columns.item())
        ordered = table.take(order, 0)
    first[before == after] = width
    return order, first


def _order(columns: Ints) -> Longs:
    """Returns the stable order by the first of the columns [columns, rows], where equal by the next, and so on.

    Entries are numbers from -1 on. Several columns are a radix sort, the last columns first. Each key is a 64-bit
    number of several columns with the row's number in the lowest bits: sorting values is several times faster than
    sorting indices.
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
