"""Plan: groups of query rows, and the runs of KV that each group reads. A strategy's output, a schedule's input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

import treegen.ir.plan_json as plan_json
from treegen.ir.arrays import Ints, LazySequence, Longs, frozen, offsets, ragged_ranges, stacked
from treegen.ir.errors import PlanError
from treegen.ir.groups import ARRAYS, SEGMENT_ARRAYS, Group, Segment, arrays_of
from treegen.ir.notebook_form import Drawn
from treegen.ir.plan_checks import check_intervals, check_offsets
from treegen.ir.unchecked import unchecked

Mask: TypeAlias = Literal["interval", "token-bits", "row-bits", "dense"]
"""How a plan stores which rows see a run of tokens, where not all rows of a group see it.

- interval: two row numbers per run.
- token-bits: one 64-bit word per token, bit j for row j of a tile (DeFT, published code).
- row-bits: one bit per row and token, in 64-bit words (SpecInfer).
- dense: one element of q's type per row and token, added to materialised scores; such a plan runs unfused (Medusa).
"""

BIT_MASKS = ("token-bits", "row-bits")
"""Masks that store words of bits."""

MergePlace: TypeAlias = Literal["reduce", "final"]
"""How the partial results of a row are merged, where several items work on the row.

- reduce: by merge kernels, after each round.
- final: by the row's item of the last round, before it writes its output. Nothing is merged between rounds, and groups
  of the last round write no partials.
"""


@dataclass(frozen=True, eq=False)
class Plan(Drawn):
    """Groups of rows and the segments that they read, as a struct of arrays; immutable.

    The arrays are cut into groups by two lists of offsets. Group g has the rank intervals `row_lo[i]:row_hi[i]` for i
    in `row_indptr[g]:row_indptr[g + 1]`, ascending and disjoint, and the segments j in
    `segment_indptr[g]:segment_indptr[g + 1]`::

        row_indptr   0         1         3          segment_indptr   0         2         3
                     │ group 0 │ group 1 │                           │ group 0 │ group 1 │
        row_lo         0         0   6              node               0    1    2
        row_hi         4         2   8              start, stop        0:90 0:70 16:48
                                                    seen_lo, seen_hi   0:4  0:2  0:4

    Here group 1 has the ranks 0, 1, 6 and 7. It reads tokens 16 to 47 of node 2, which all of its four rows see.

    Attributes:
        strategy: The name of the strategy, with its options.
        row_indptr: `[groups + 1]`; offsets into row_lo and row_hi.
        row_lo: The first rank of each interval.
        row_hi: The end of each interval of ranks.
        segment_indptr: `[groups + 1]`; offsets into the columns of segments.
        node: The node of each segment.
        start: Its first token in the node.
        stop: Its end in the node.
        seen_lo: The first row that sees it; a group's rows are numbered from 0 in rank order.
        seen_hi: The end of the rows that see it.
        tiles: The (query head rows, KV tokens) of the tiles that the strategy wants, larger rows first. A row tile
            takes the last one that holds it. Without any, lowering chooses.
        mask: See Mask.
        blocks: Thread blocks that work items are dealt to beforehand, the costliest first; 0 leaves it to the device.
        round: `[groups]`; the round of each group. By default all groups are in round 0.
        merge: See MergePlace.
        invariant_block: Not 0 in batch-invariant plans, where a row's bits follow from its own tokens alone. Lowering
            then packs tiles of runs of this many tokens, with each token at its place along the path. All such plans
            have one kernel config and one form of merges.
        group_rows: `[groups]`; rows of each group.
        segments: `[5, segments]`; the columns from `node` to `seen_hi` as one table, so that they can be gathered in
            one operation.

    Raises:
        PlanError: Arrays contradict one another, or an option is unknown. `treegen.ir.verify` checks the coverage law.
    """

    strategy: str
    row_indptr: Ints
    row_lo: Ints
    row_hi: Ints
    segment_indptr: Ints
    node: Ints
    start: Ints
    stop: Ints
    seen_lo: Ints
    seen_hi: Ints
    tiles: tuple[tuple[int, int], ...] = ()
    mask: Mask = "interval"
    blocks: int = 0
    round: Ints = field(default_factory=lambda: frozen(np.empty(0)))
    merge: MergePlace = "reduce"
    invariant_block: int = 0
    group_rows: Ints = field(init=False, repr=False)
    segments: Ints = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.round) == 0:
            object.__setattr__(self, "round", np.zeros(max(len(self.row_indptr) - 1, 0)))
        for name in ARRAYS:
            object.__setattr__(self, name, frozen(getattr(self, name)))
        check_offsets(self)
        self._check_options()
        ends = offsets(self.row_hi.astype(np.int64) - self.row_lo)[self.row_indptr]
        object.__setattr__(self, "group_rows", frozen(ends[1:] - ends[:-1]))
        check_intervals(self)
        object.__setattr__(self, "segments", stacked(*(getattr(self, name) for name in SEGMENT_ARRAYS)))

    def _check_options(self) -> None:
        """Raises PlanError for an unknown or impossible option."""
        if self.mask not in get_args(Mask):
            raise PlanError("mask", self.mask, "is unknown", f"use one of {', '.join(get_args(Mask))}")
        if self.merge not in get_args(MergePlace):
            raise PlanError("merge", self.merge, "is unknown", f"use one of {', '.join(get_args(MergePlace))}")
        if type(self.blocks) is not int or self.blocks < 0:
            raise PlanError("blocks", self.blocks, "is not a count", "give 0 or a number of thread blocks")
        if type(self.invariant_block) is not int or self.invariant_block not in (0, 1, 16):
            raise PlanError("invariant_block", self.invariant_block, "is unknown", "use 0, 1 or 16")
        plain = (self.tiles, self.mask, self.blocks, self.merge) == ((), "interval", 0, "reduce")
        if self.invariant_block and not (plain and not self.round.any()):
            reason = "goes with no tiles, other masks, thread blocks, rounds or merges"
            raise PlanError("invariant_block", self.invariant_block, reason, "leave these at their defaults, or use 0")
        for tile in self.tiles:
            if len(tile) != 2 or not all(type(size) is int and size >= 16 and size & (size - 1) == 0 for size in tile):
                raise PlanError("tiles", self.tiles, "has a size that is no power of two from 16", "give powers of two")
        if [tile[0] for tile in self.tiles] != sorted({tile[0] for tile in self.tiles}, reverse=True):
            raise PlanError("tiles", self.tiles, "is not in order of falling rows", "list larger tiles first")

    @classmethod
    def trusted(
        cls,
        strategy: str,
        row_indptr: npt.NDArray[Any],
        row_lo: npt.NDArray[Any],
        row_hi: npt.NDArray[Any],
        segment_indptr: npt.NDArray[Any],
        segments: npt.NDArray[Any],
        group_rows: npt.NDArray[Any],
        **options: Any,
    ) -> Plan:
        """Makes a plan of arrays of treegen's own making, with the segments as one table; unchecked.

        options: as for `changed`.
        """
        segments = frozen(segments)
        node, start, stop, seen_lo, seen_hi = segments  # read-only as the table is
        values = {
            "strategy": strategy,
            "row_indptr": frozen(row_indptr),
            "row_lo": frozen(row_lo),
            "row_hi": frozen(row_hi),
            "segment_indptr": frozen(segment_indptr),
            "node": node,
            "start": start,
            "stop": stop,
            "seen_lo": seen_lo,
            "seen_hi": seen_hi,
            "segments": segments,
            "group_rows": frozen(group_rows),
            **_DEFAULTS,
            **options,
        }
        if "round" not in options:
            values["round"] = _first_round(len(group_rows))
        return unchecked(cls, values)

    def changed(self, **options: Any) -> Plan:
        """Returns the same groups with other options, unchecked.

        options: any of strategy, tiles, mask, blocks, round, merge and invariant_block.
        """
        return unchecked(Plan, {**self.__dict__, **options})

    def with_segments(self, indptr: npt.NDArray[Any], segments: npt.NDArray[Any]) -> Plan:
        """Returns the same groups with other segments, as one table; unchecked."""
        segments = frozen(segments)
        columns = dict(zip(SEGMENT_ARRAYS, segments, strict=True))
        return self.changed(segment_indptr=frozen(indptr), segments=segments, **columns)

    @classmethod
    def from_groups(cls, strategy: str, groups: Sequence[Group]) -> Plan:
        """Makes a plan of Group objects.

        Args:
            strategy: The name of the strategy.
            groups: The groups, in order.

        Raises:
            PlanError: An interval is empty, out of order or out of range.
        """
        return cls(strategy, **arrays_of(groups))

    def __len__(self) -> int:
        return len(self.row_indptr) - 1

    @property
    def groups(self) -> Sequence[Group]:
        """The groups as small objects, made on access."""
        return LazySequence(len(self), self._group)

    def _group(self, index: int) -> Group:
        rows = slice(self.row_indptr[index], self.row_indptr[index + 1])
        segments = slice(self.segment_indptr[index], self.segment_indptr[index + 1])
        intervals = zip(self.row_lo[rows].tolist(), self.row_hi[rows].tolist(), strict=True)
        columns = (getattr(self, name)[segments].tolist() for name in SEGMENT_ARRAYS)
        read = tuple(Segment(v, a, b, (lo, hi)) for v, a, b, lo, hi in zip(*columns, strict=True))
        return Group(tuple(intervals), read, int(self.round[index]))

    @property
    def row_interval_group(self) -> Longs:
        """The group of each rank interval."""
        return np.arange(len(self)).repeat(self.row_indptr[1:] - self.row_indptr[:-1])

    @property
    def segment_group(self) -> Longs:
        """The group of each segment."""
        return np.arange(len(self)).repeat(self.segment_indptr[1:] - self.segment_indptr[:-1])

    @property
    def read_tokens(self) -> Longs:
        """Tokens that each segment reads."""
        return (self.stop - self.start).astype(np.int64)

    @property
    def group_tokens(self) -> Longs:
        """Tokens that each group reads."""
        ends = offsets(self.stop - self.start)[self.segment_indptr]
        return ends[1:] - ends[:-1]

    @property
    def masked(self) -> npt.NDArray[np.bool_]:
        """Whether some row of its group does not see a segment, for each segment."""
        return (self.seen_lo > 0) | (self.seen_hi < self.group_rows[self.segment_group])

    @property
    def isolated(self) -> bool:
        """Whether the rows of each group see everything that it reads, so that values reach only rows that see them."""
        return not self.masked.any()

    def rank_intervals(
        self, group: npt.NDArray[Any], lo: npt.NDArray[Any], hi: npt.NDArray[Any]
    ) -> tuple[Longs, Longs, Longs]:
        """Returns the ranks of intervals `lo:hi` of row numbers in groups, as (interval, rank lo, rank hi).

        An interval that covers several rank intervals of its group gives several entries; an empty one gives none:

            ranks of the group             4 5 6   10 11
            row numbers in the group       0 1 2    3  4
            row numbers 1:4                  └──────┘         gives ranks 5:7 and 10:11
        """
        counts = (self.row_indptr[1:] - self.row_indptr[:-1])[group]
        index = np.arange(len(group)).repeat(counts)
        interval = ragged_ranges(self.row_indptr[group], counts)
        ends = offsets(self.row_hi.astype(np.int64) - self.row_lo)
        begin = (ends[:-1] - ends[self.row_indptr[self.row_interval_group]])[interval]
        rank_lo = self.row_lo[interval] + np.maximum(lo[index] - begin, 0)
        rank_hi = np.minimum(self.row_hi[interval], self.row_lo[interval] + hi[index] - begin)
        kept = np.flatnonzero(rank_hi > rank_lo)
        return index[kept], rank_lo[kept], rank_hi[kept]

    def text(self, most_groups: int | None = None) -> str:
        """Returns a heading and a line for each group, of at most `most_groups` groups."""
        shown = len(self) if most_groups is None else min(most_groups, len(self))
        merge = "" if self.merge == "reduce" else f", {self.merge} merge"
        merge += f", packed runs of {self.invariant_block}" if self.invariant_block else ""
        lines = [f"plan {self.strategy}: {len(self)} groups, {len(self.node)} segments{merge}"]
        lines += [f"  group {index}: {self.groups[index]}" for index in range(shown)]
        if shown < len(self):
            lines.append(f"  ... {len(self) - shown} more groups")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text(most_groups=32)

    def to_json(self) -> str:
        """Returns a versioned JSON text, which `from_json` reads back."""
        return plan_json.write(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Makes a plan of the text that `to_json` wrote. Raises FormatError or PlanError for any other text."""
        return cls(**plan_json.read(text))


_DEFAULTS = {field.name: field.default for field in fields(Plan) if field.default is not MISSING}


@lru_cache(64)
def _first_round(groups: int) -> Ints:
    """Returns the rounds of this many groups that are all in round 0."""
    return frozen(np.zeros(groups))
