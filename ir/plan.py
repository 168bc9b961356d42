"""Plan: which query rows read which runs of KV together. A strategy's output, a schedule's input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import (
    INT32_MAX,
    Ints,
    LazySequence,
    Longs,
    frozen,
    int32_array,
    offsets,
    ragged_ranges,
    stacked,
)
from treegen.ir.errors import PlanError
from treegen.ir.json_form import read_object, write_object
from treegen.ir.unchecked import unchecked

Mask: TypeAlias = Literal["interval", "token-bits", "row-bits", "dense"]
"""How it is stored which rows see a run of tokens, where not all rows of a group do.

interval: two row numbers per run. token-bits: one 64-bit word per token, bit j for row j of a tile (DeFT, published
code). row-bits: one bit per row and token, in 64-bit words (SpecInfer). dense: one element of q's type per row and
token, added to materialised scores; such a plan runs unfused (Medusa).
"""

BIT_MASKS = ("token-bits", "row-bits")
"""Masks that have a word of bits."""

Merge: TypeAlias = Literal["reduce", "final"]
"""How the partial results of a row that several items work on become one.

reduce: by merge kernels, one behind every stage. final: by the row's item of the last stage, before that writes its
output; nothing is merged between stages, and groups of the last stage write no partials.
"""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start:stop` of one node, read by a group and seen by its rows `seen[0]:seen[1]` (group row numbers)."""

    node: int
    start: int
    stop: int
    seen: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are processed together, as ascending disjoint rank intervals, and the segments they read.

    stage: groups of a later stage are launched after those of earlier ones have been merged.
    """

    rows: tuple[tuple[int, int], ...]
    segments: tuple[Segment, ...]
    stage: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of all intervals; inside the group they are numbered from 0 in rank order."""
        return sum(hi - lo for lo, hi in self.rows)

    @property
    def masked(self) -> bool:
        """Whether some segment is not seen by all rows."""
        return any(segment.seen != (0, self.num_rows) for segment in self.segments)

    def __str__(self) -> str:
        rows = ",".join(f"{lo}-{hi - 1}" for lo, hi in self.rows)
        stage = f"stage {self.stage} | " if self.stage else ""
        return f"{stage}rows {rows} | " + ", ".join(self._segment_text(segment) for segment in self.segments)

    def _segment_text(self, segment: Segment) -> str:
        text = f"n{segment.node}[{segment.start}:{segment.stop}]"
        lo, hi = segment.seen
        if (lo, hi) == (0, self.num_rows):
            return text
        return f"{text} seen {lo}-{hi - 1}" if hi > lo else f"{text} unseen"


@dataclass(frozen=True, eq=False)
class Plan:
    """Groups as a struct of arrays; immutable.

    Group g has the rank intervals `row_lo[i]:row_hi[i]` for i in `row_indptr[g]:row_indptr[g + 1]`, ascending and
    disjoint, and the segments `segment_indptr[g]:segment_indptr[g + 1]`: tokens `start:stop` of `node`, seen by the
    group's rows `seen_lo:seen_hi`, numbered from 0 in rank order. `tiles`: the (query head rows, KV tokens) of the
    tiles that the strategy wants, larger rows first, of which a row tile takes the last that holds it; without any,
    lowering chooses. `mask`: see Mask. `blocks`: thread blocks that work items are dealt to beforehand, the costliest
    first; 0 leaves it to the device. `stage` (default: 0 for all): each group's place in the order of launches.
    `merge`: see Merge. `fixed_block`: not 0 where rows' bits are to follow from the rows' own tokens, whatever else is
    in the plan; lowering then packs tiles of runs of so many tokens, each token at its place along the path, in the one
    tile class that all such plans have, and merges in one form. `group_rows` counts each group's rows. `segments` [5,
    segments] has the columns of segments, from `node` to `seen_hi`, so that they can be gathered all at once. The
    constructor raises PlanError when arrays contradict one another; `treegen.ir.verify` checks the coverage law.
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
    stage: Ints = field(default_factory=lambda: frozen(np.empty(0)))
    merge: Merge = "reduce"
    fixed_block: int = 0
    group_rows: Ints = field(init=False, repr=False)
    segments: Ints = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.stage) == 0:
            object.__setattr__(self, "stage", np.zeros(max(len(self.row_indptr) - 1, 0)))
        for name in _ARRAYS:
            object.__setattr__(self, name, frozen(getattr(self, name)))
        for indptr, columns in (("row_indptr", _ROW_ARRAYS), ("segment_indptr", _SEGMENT_ARRAYS)):
            _check_indptr(indptr, getattr(self, indptr), [(name, getattr(self, name)) for name in columns])
        if len(self.row_indptr) != len(self.segment_indptr):
            reason = f"does not match {len(self.segment_indptr) - 1} groups of segments"
            raise PlanError("row_indptr", f"{len(self.row_indptr) - 1} groups", reason, "give both for every group")
        if len(self.stage) != len(self.row_indptr) - 1 or (self.stage < 0).any():
            reason = f"does not number the stages of {len(self.row_indptr) - 1} groups from 0"
            raise PlanError("stage", f"{len(self.stage)} entries", reason, "give one stage per group")
        if self.mask not in get_args(Mask):
            raise PlanError("mask", self.mask, "is unknown", f"use one of {', '.join(get_args(Mask))}")
        if self.merge not in get_args(Merge):
            raise PlanError("merge", self.merge, "is unknown", f"use one of {', '.join(get_args(Merge))}")
        if type(self.blocks) is not int or self.blocks < 0:
            raise PlanError("blocks", self.blocks, "is not a count", "give 0 or a number of thread blocks")
        if type(self.fixed_block) is not int or self.fixed_block not in (0, 1, 16):
            raise PlanError("fixed_block", self.fixed_block, "is unknown", "use 0, 1 or 16")
        plain = (self.tiles, self.mask, self.blocks, self.merge) == ((), "interval", 0, "reduce")
        if self.fixed_block and not (plain and not self.stage.any()):
            reason = "goes with no tiles, other masks, thread blocks, stages or merges"
            raise PlanError("fixed_block", self.fixed_block, reason, "leave these at their defaults, or use 0")
        for tile in self.tiles:
            if len(tile) != 2 or not all(type(size) is int and size >= 16 and size & (size - 1) == 0 for size in tile):
                raise PlanError("tiles", self.tiles, "has a size that is no power of two from 16", "give powers of two")
        if [tile[0] for tile in self.tiles] != sorted({tile[0] for tile in self.tiles}, reverse=True):
            raise PlanError("tiles", self.tiles, "is not in order of falling rows", "list larger tiles first")
        ends = offsets(self.row_hi.astype(np.int64) - self.row_lo)[self.row_indptr]
        object.__setattr__(self, "group_rows", frozen(ends[1:] - ends[:-1]))

        # The end of the interval before, 0 for a group's first one: where a group without intervals begins, another
        # does, too, or the list ends.
        previous = np.zeros(len(self.row_lo) + 1, np.int32)
        previous[1:] = self.row_hi
        previous[self.row_indptr] = 0
        wrong = (self.row_lo < previous[:-1]) | (self.row_hi <= self.row_lo)
        self._reject("rows", self.row_indptr, wrong)
        wrong = (self.start < 0) | (self.stop <= self.start) | (self.node < 0)
        self._reject("segments", self.segment_indptr, wrong)
        visible = self.group_rows[self.segment_group]
        wrong = (self.seen_lo < 0) | (self.seen_hi < self.seen_lo) | (self.seen_hi > visible)
        self._reject("seen intervals", self.segment_indptr, wrong)
        object.__setattr__(self, "segments", stacked(*(getattr(self, name) for name in _SEGMENT_ARRAYS)))

    def _reject(self, what: str, indptr: Ints, wrong: npt.NDArray[np.bool_]) -> None:
        if wrong.any():
            group = int(np.searchsorted(indptr, wrong.argmax(), side="right")) - 1
            reason = f"{what} are empty, out of order or out of range"
            raise PlanError(f"group {group} of {self.strategy}", str(self.groups[group]), reason, "correct the pass")

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
        """A plan of arrays that treegen itself has made, with the segments as one table, and of options as `changed`
        takes them; unchecked.
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
        if "stage" not in options:
            values["stage"] = _first_stage(len(group_rows))
        return unchecked(cls, values)

    def changed(self, **options: Any) -> Plan:
        """The same groups with other options (strategy, tiles, mask, blocks, stage, merge, fixed_block), unchecked."""
        return unchecked(Plan, {**self.__dict__, **options})

    def with_segments(self, indptr: npt.NDArray[Any], segments: npt.NDArray[Any]) -> Plan:
        """The same groups with other segments, as one table; unchecked."""
        segments = frozen(segments)
        columns = dict(zip(_SEGMENT_ARRAYS, segments, strict=True))
        return self.changed(segment_indptr=frozen(indptr), segments=segments, **columns)

    @classmethod
    def from_groups(cls, strategy: str, groups: Sequence[Group]) -> Plan:
        """A plan from Group objects."""
        intervals = [interval for group in groups for interval in group.rows]
        segments = [(s.node, s.start, s.stop, *s.seen) for group in groups for s in group.segments]
        return cls(
            strategy,
            row_indptr=frozen(offsets(np.array([len(group.rows) for group in groups], np.int64))),
            segment_indptr=frozen(offsets(np.array([len(group.segments) for group in groups], np.int64))),
            stage=frozen(np.array([group.stage for group in groups], np.int64)),
            **_columns(_ROW_ARRAYS, intervals),
            **_columns(_SEGMENT_ARRAYS, segments),
        )

    def __len__(self) -> int:
        return len(self.row_indptr) - 1

    @property
    def groups(self) -> Sequence[Group]:
        """The groups as small objects made on access."""
        return LazySequence(len(self), self._group)

    def _group(self, index: int) -> Group:
        rows = slice(self.row_indptr[index], self.row_indptr[index + 1])
        segments = slice(self.segment_indptr[index], self.segment_indptr[index + 1])
        intervals = zip(self.row_lo[rows].tolist(), self.row_hi[rows].tolist(), strict=True)
        columns = (getattr(self, name)[segments].tolist() for name in _SEGMENT_ARRAYS)
        read = tuple(Segment(v, a, b, (lo, hi)) for v, a, b, lo, hi in zip(*columns, strict=True))
        return Group(tuple(intervals), read, int(self.stage[index]))

    @property
    def row_interval_group(self) -> Longs:
        """The group of every rank interval."""
        return np.arange(len(self)).repeat(self.row_indptr[1:] - self.row_indptr[:-1])

    @property
    def segment_group(self) -> Longs:
        """The group of every segment."""
        return np.arange(len(self)).repeat(self.segment_indptr[1:] - self.segment_indptr[:-1])

    @property
    def read_tokens(self) -> Longs:
        """Tokens that every segment reads."""
        return (self.stop - self.start).astype(np.int64)

    @property
    def group_tokens(self) -> Longs:
        """Tokens that every group reads."""
        ends = offsets(self.stop - self.start)[self.segment_indptr]
        return ends[1:] - ends[:-1]

    @property
    def masked(self) -> npt.NDArray[np.bool_]:
        """For every segment whether some row of its group does not see it."""
        return (self.seen_lo > 0) | (self.seen_hi < self.group_rows[self.segment_group])

    @property
    def isolated(self) -> bool:
        """Whether all rows of every group see all that it reads, so that a value reaches only rows that see it."""
        return not self.masked.any()

    def rank_intervals(
        self, group: npt.NDArray[Any], lo: npt.NDArray[Any], hi: npt.NDArray[Any]
    ) -> tuple[Longs, Longs, Longs]:
        """The ranks behind intervals `lo:hi` of group row numbers, as (index of the interval, rank lo, rank hi).

        An interval that reaches over several rank intervals of its group gives several entries, an empty one none.
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
        """One line per group, at most `most_groups` of them."""
        shown = len(self) if most_groups is None else min(most_groups, len(self))
        merge = "" if self.merge == "reduce" else f", {self.merge} merge"
        merge += f", fixed blocks of {self.fixed_block}" if self.fixed_block else ""
        lines = [f"plan {self.strategy}: {len(self)} groups, {len(self.node)} segments{merge}"]
        lines += [f"  group {index}: {self.groups[index]}" for index in range(shown)]
        if shown < len(self):
            lines.append(f"  ... {len(self) - shown} more groups")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text(most_groups=32)

    def to_json(self) -> str:
        """A versioned JSON form that `from_json` reads back."""
        return write_object(
            "plan",
            {
                "strategy": self.strategy,
                "tiles": self.tiles,
                "mask": self.mask,
                "blocks": self.blocks,
                "merge": self.merge,
                **({"fixed_block": self.fixed_block} if self.fixed_block else {}),
                **{name: getattr(self, name).tolist() for name in _ARRAYS},
            },
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`. Raises FormatError or PlanError."""
        value = read_object(text, "plan", _FIELDS | {"fixed_block"}, _FIELDS)
        arrays = {name: checked_ints(f"plan.{name}", value[name]) for name in _ARRAYS}
        if not isinstance(value["tiles"], list) or not all(isinstance(tile, list) for tile in value["tiles"]):
            raise PlanError("plan.tiles", value["tiles"], "is not a list of tiles", "give [rows, tokens] per tile")
        tiles = tuple(tuple(tile) for tile in value["tiles"])
        mask, blocks, merge = (value[name] for name in ("mask", "blocks", "merge"))
        fixed = value.get("fixed_block", 0)
        name = str(value["strategy"])
        return cls(name, **arrays, tiles=tiles, mask=mask, blocks=blocks, merge=merge, fixed_block=fixed)


_DEFAULTS = {field.name: field.default for field in fields(Plan) if field.default is not MISSING}
_ROW_ARRAYS = ("row_lo", "row_hi")
_SEGMENT_ARRAYS = ("node", "start", "stop", "seen_lo", "seen_hi")
_ARRAYS = ("row_indptr", *_ROW_ARRAYS, "segment_indptr", *_SEGMENT_ARRAYS, "stage")
_FIELDS = frozenset({"strategy", "tiles", "mask", "blocks", "merge", *_ARRAYS})


def _columns(names: tuple[str, ...], rows: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """The columns of these rows by name."""
    table = np.array(rows, np.int64).reshape(-1, len(names))
    return {name: frozen(column) for name, column in zip(names, table.T, strict=True)}


@lru_cache(64)
def _first_stage(groups: int) -> Ints:
    """The stage of so many groups of which none is later than another."""
    return frozen(np.zeros(groups))


def checked_ints(argument: str, value: Any) -> Ints:
    """A JSON list of int32 values as an array. Raises PlanError."""
    if not isinstance(value, list):
        raise PlanError(argument, value, "is not a list", "give integers")
    return int32_array(argument, value, low=-INT32_MAX, error=PlanError)


def _check_indptr(name: str, indptr: Ints, columns: list[tuple[str, Ints]]) -> None:
    if len(indptr) == 0 or indptr[0] != 0 or (indptr[1:] < indptr[:-1]).any():
        raise PlanError(name, indptr.tolist(), "is not an ascending list from 0", "give offsets of the groups")
    for column, values in columns:
        if len(values) != indptr[-1]:
            raise PlanError(column, f"{len(values)} entries", f"{name} ends at {indptr[-1]}", "make both agree")
