"""The bucket of a tree: a coarse description, so that trees that one policy serves well share a cache entry."""

from __future__ import annotations

import math
from typing import NamedTuple

from treegen.ir.tree import Tree

_EXACT_LEVELS = 8
_BATCH_LEVELS = 3


class Figures(NamedTuple):
    """The figures of a tree that its buckets round.

    Attributes:
        rows: The rows.
        levels: The most nodes on a path with tokens that some row sees.
        tokens: The tokens that some row sees.
        sharing: Path tokens over those tokens.
        private: Tokens that exactly one row sees, per row; at least 1 if there are any.
    """

    rows: int
    levels: int
    tokens: int
    sharing: float
    private: float

    @classmethod
    def of(cls, tree: Tree) -> Figures:
        """Returns the figures of a tree."""
        topology = tree.topology
        return cls.of_counts(
            *(tree.num_rows, topology.unique_tokens, topology.levels, topology.path_tokens, topology.private_tokens)
        )

    @classmethod
    def of_counts(cls, rows: int, tokens: int, levels: int, path_tokens: int, private_tokens: int) -> Figures:
        """Returns the figures of a tree with these numbers, which Topology has."""
        sharing = path_tokens / tokens if tokens else 0.0
        private = private_tokens / rows if rows else 0.0
        return cls(rows, levels, tokens, sharing, max(private, 1.0) if private else 0.0)

    @property
    def policy_bucket(self) -> str:
        """Rows, levels, tokens, sharing and private tokens, rounded to powers of two.

        For instance `rows 2^8, levels 3, tokens 2^12, sharing 2^3.5, private 2^5`. Levels are exact up to 8, sharing is
        in steps of half a power, and a number of 0 is written as 0.
        """
        levels = str(self.levels) if self.levels <= _EXACT_LEVELS else _power(self.levels)
        return _text(self.rows, levels, _power(self.tokens), _power(self.sharing, steps=2), _power(self.private))

    @property
    def batch_bucket(self) -> str:
        """A coarser bucket: levels up to 3, rows in powers of two, and all other numbers in powers of four."""
        rounded = (_power(value, steps=0.5) for value in (self.tokens, self.sharing, self.private))
        return _text(self.rows, str(min(self.levels, _BATCH_LEVELS)), *rounded)


def policy_bucket(tree: Tree) -> str:
    """Returns the bucket of a tree. The order of siblings and rows, and KV slots, do not change it."""
    return Figures.of(tree).policy_bucket


def batch_bucket(tree: Tree) -> str:
    """Returns the coarser bucket of a batch, which changes all the time."""
    return Figures.of(tree).batch_bucket


def _text(rows: int, levels: str, tokens: str, sharing: str, private: str) -> str:
    return f"rows {_power(rows)}, levels {levels}, tokens {tokens}, sharing {sharing}, private {private}"


def _power(value: float, steps: float = 1) -> str:
    """Rounds to a power of two whose exponent is a multiple of 1 / steps. No whole number is halfway between two."""
    return f"2^{round(steps * math.log2(value)) / steps:g}" if value else "0"
