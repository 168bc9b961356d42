"""Spans of a node that all rows of a group see, and so are one segment where requests have several query rows."""

from __future__ import annotations

import numpy as np

from treegen.ir.arrays import Bools, Ints, Longs, number
from treegen.ir.tree.spans import Spans


def _begins(spans: Spans) -> Bools:
    """Says which spans do not go on where the span before ends, in the same node and with the same last row."""
    node, start, stop, _, hi = spans.table
    begins = np.ones(len(spans), np.bool_)
    begins[1:] = (node[1:] != node[:-1]) | (start[1:] != stop[:-1]) | (hi[1:] != hi[:-1])
    return begins


def read_apart(spans: Spans, first: Longs, pairs: Longs, row_lo: Ints) -> Longs:
    """Returns the number of cohorts that read each span as a segment of its own, from the first one on.

    A cohort whose rows all see several spans of a node reads them as one segment: it is that of the first of them. Of
    512 rows that see one token each more than the row before, each 16 so read 16 spans, and not up to 512.

    first: the first cohort that reads each span. pairs: the number of those that do. row_lo: the first row of each.
    """
    apart = spans.lo > row_lo.take(first)  # not all rows of the first cohort see the span, but all of others
    return np.where(_begins(spans), pairs, apart)


def last_seen_by_all(spans: Spans, span: Longs, begin: Ints) -> Longs:
    """Returns the last span of each segment. span: its first span. begin: the first row of the cohort that reads it."""
    run = _begins(spans).cumsum() << number(32)
    last = (run + spans.lo).searchsorted(run.take(span) + begin, "right") - 1
    return np.maximum(last, span)  # a span that not all rows see is alone
