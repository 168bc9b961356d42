"""The bucket of a tree: a coarse description, so that trees that one policy serves well share a cache entry."""

from __future__ import annotations

import math

import numpy as np

from treegen.ir.tree import Tree

_EXACT_LEVELS = 8
_BATCH_LEVELS = 3


def policy_bucket(tree: Tree) -> str:
    """Returns rows, levels, unique tokens, mean sharing and mean private tokens, rounded to powers of two.

    For instance `rows 2^8, levels 3, tokens 2^12, sharing 2^3.5, private 2^5`. The order of siblings and rows, and KV
    slots, do not change it.

    - levels: the most nodes on a path with tokens that some row sees; exact up to 8.
    - tokens: the tokens that some row sees.
    - sharing: path tokens over unique tokens, in steps of half a power.
    - private: tokens that exactly one row sees, per row; at least 2^0 if there are any.

    A number of 0 is written as 0.
    """
    levels, tokens, sharing, private = _figures(tree)
    counted = str(levels) if levels <= _EXACT_LEVELS else _power(levels)
    return _text(tree.num_rows, counted, _power(tokens), _power(sharing, steps=2), _power(private))


def batch_bucket(tree: Tree) -> str:
    """Returns a coarser bucket, for batches that change all the time.

    It has levels up to 3, rows in powers of two, and all other numbers in powers of four.
    """
    levels, tokens, sharing, private = _figures(tree)
    rounded = (_power(value, steps=0.5) for value in (tokens, sharing, private))
    return _text(tree.num_rows, str(min(levels, _BATCH_LEVELS)), *rounded)


def _text(rows: int, levels: str, tokens: str, sharing: str, private: str) -> str:
    return f"rows {_power(rows)}, levels {levels}, tokens {tokens}, sharing {sharing}, private {private}"


def _figures(tree: Tree) -> tuple[int, int, float, float]:
    """Returns levels, unique tokens, path tokens over unique tokens, and private tokens per row, at least 1 if any."""
    topology, (_, start, stop, lo, hi) = tree.topology, tree.topology.spans.table
    tokens = topology.unique_tokens
    lengths, seen_by = (stop - start).astype(np.int64), (hi - lo).astype(np.int64)
    sharing = int(np.dot(lengths, seen_by)) / tokens if tokens else 0.0
    private = int(np.add.reduce(lengths[seen_by == 1])) / tree.num_rows if tree.num_rows else 0.0
    return topology.levels, tokens, sharing, max(private, 1.0) if private else 0.0


def _power(value: float, steps: float = 1) -> str:
    """Rounds to a power of two whose exponent is a multiple of 1 / steps. No whole number is halfway between two."""
    return f"2^{round(steps * math.log2(value)) / steps:g}" if value else "0"
