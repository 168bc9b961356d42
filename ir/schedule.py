"""Schedule: work items in launch order, the KV tiles they walk, where their results go, and who merges what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from treegen.ir.arena import Arena, Capacity, pack, size_of
from treegen.ir.arrays import Ints, LazySequence, frozen, largest
from treegen.ir.errors import FormatError, PlanError
from treegen.ir.json_form import read_object, write_object
from treegen.ir.plan import checked_ints
from treegen.ir.unchecked import unchecked

ITEM_FIELDS = ("row0", "rows", "tile0", "tiles", "block0", "block_tiles", "slot0", "group")
"""Columns of `Schedule.items`, in the order in which kernels read them; the last one is for the host (see Arena)."""
RUN_FIELDS = ("slot", "length", "lo", "hi")
"""Columns of `Schedule.tiles` and `Schedule.blocks`: KV slots, and the item's rows that see them: `lo:hi`, or in a
class with bit masks the lower and the upper half of a 64-bit word whose bit j stands for row j."""
POSITIONED_RUN_FIELDS = (*RUN_FIELDS, "position")
"""The same where scores depend on positions (treegen.scoring): with that of the run's first token."""
MOST_BIT_ROWS = 64
"""Rows of an item in a class with bit masks, at most."""
TileMask: TypeAlias = Literal["none", "interval", "bits", "dense"]
UNFUSED_LAUNCHES = 5
"""Operations of an unfused class: scores, scaling, mask, softmax, product with the values."""


@dataclass(frozen=True, slots=True)
class TileClass:
    """One kernel specialisation. rows: query head rows per block; tokens: KV tokens per tile; block: granularity, in
    tokens, of the runs that are packed into one tile; mask: how rows see runs; warps, stages: Triton's; dealt: whether
    thread blocks work off lists of items; merging: whether items join their rows' partials of earlier stages before
    they write final output; full: whether items may have full tiles; waiting: whether final items wait
    for the partials of others in the same launch (treegen.schedule.passes.fuse_merge).

    A class with a dense mask stands for unfused PyTorch operations; its warps and stages are 0.
    """

    rows: int
    tokens: int
    block: int
    mask: TileMask
    warps: int
    stages: int
    dealt: bool = False
    merging: bool = False
    full: bool = True
    waiting: bool = False

    @property
    def blocks_per_tile(self) -> int:
        """Runs packed into one tile."""
        return self.tokens // self.block

    @property
    def fused(self) -> bool:
        """Whether a kernel runs it."""
        return self.mask != "dense"

    def __str__(self) -> str:
        if not self.fused:
            return f"{self.rows} head rows, unfused"
        mask = "no mask" if self.mask == "none" else f"{self.mask} mask"
        further = (", dealt" if self.dealt else "") + (", merging" if self.merging else "")
        further += ", waiting" if self.waiting else ""
        further += "" if self.full else ", one loop"
        return f"{self.rows}x{self.tokens}/{self.block} {mask}, {self.warps} warps, {self.stages} stages{further}"


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One work item: `rows` entries of the row table from `row0`, the full tiles and packed tiles it walks, its slot.

    slot0: first row of the partial buffer, -1 when the item writes final output. group: the plan's group behind it.
    """

    row0: int
    rows: int
    tile0: int
    tiles: int
    block0: int
    block_tiles: int
    slot0: int
    group: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """Work items and merge lists as a struct of arrays; immutable.

    Items of class c are `items[class_indptr[c]:class_indptr[c + 1]]` (columns ITEM_FIELDS). An item's rows are
    `rows[row0:row0 + rows]`, indices into the caller's q and out. It walks `tiles[tile0:tile0 + tiles]`, runs of
    exactly the class's tokens, then `block_tiles` tiles of `blocks_per_tile` entries of `blocks` each from `block0`
    (columns RUN_FIELDS, or POSITIONED_RUN_FIELDS of a schedule that has `row_positions`, of all rows in the caller's
    order). Row i of a partial item writes partial slot `slot0 + i`. Caller's row `merge_rows[j]` is the
    merge of the slots `merge_slots[merge_indptr[j]:merge_indptr[j + 1]]`, in this order; an empty list gives out 0,
    lse -inf. `merge_rows[j] = -1 - slot` merges into that partial slot instead, for a later stage to read.

    A final item of a merging class merges itself: before it writes its row i, which is entry `e = row0 + i` of the row
    table, it joins the slots `epilogue_slots[epilogue_indptr[e]:epilogue_indptr[e + 1]]`, in this order. Items of other
    classes on the same entries do not read the lists; without merging classes there are none, and the indptr is [0].
    Final items of a waiting class do the same with slots of items before them in their class; their lists are those
    that its kernel counts on (treegen.schedule.passes.fuse_merge).

    Where the class is dealt, thread block b works on `work[work_indptr[b]:work_indptr[b + 1]]`, numbers of an item and
    a lane: `item * lanes + lane`, with a lane for each KV head and tile of its query heads.

    fixed: merges have one form, whatever is merged (Plan.fixed_block).

    Stage s launches the classes `stage_indptr[s]:stage_indptr[s + 1]` and then merges the rows
    `merge_stage_indptr[s]:merge_stage_indptr[s + 1]`; by default all is one stage.
    """

    classes: tuple[TileClass, ...]
    class_indptr: Ints
    items: Ints
    rows: Ints
    tiles: Ints
    blocks: Ints
    merge_rows: Ints
    merge_indptr: Ints
    merge_slots: Ints
    stage_indptr: Ints = field(default_factory=lambda: frozen(np.empty(0)))
    merge_stage_indptr: Ints = field(default_factory=lambda: frozen(np.empty(0)))
    work_indptr: Ints = field(default_factory=lambda: frozen(np.zeros(1)))
    work: Ints = field(default_factory=lambda: frozen(np.empty(0)))
    epilogue_indptr: Ints = field(default_factory=lambda: frozen(np.zeros(1)))
    epilogue_slots: Ints = field(default_factory=lambda: frozen(np.empty(0)))
    row_positions: Ints = field(default_factory=lambda: frozen(np.empty(0)))
    fixed: bool = False

    def __post_init__(self) -> None:
        for name, all_of in (("stage_indptr", self.classes), ("merge_stage_indptr", self.merge_rows)):
            if len(getattr(self, name)) == 0:
                object.__setattr__(self, name, np.array([0, len(all_of)]))
        for name in _ARRAYS:
            object.__setattr__(self, name, frozen(getattr(self, name)))
        for name, width in (("items", len(ITEM_FIELDS)), ("tiles", self.run_width), ("blocks", self.run_width)):
            if getattr(self, name).ndim != 2 or getattr(self, name).shape[1] != width:
                raise PlanError(name, f"shape {getattr(self, name).shape}", f"needs {width} columns", "add the columns")
        indptr = self.class_indptr
        if len(indptr) != len(self.classes) + 1 or indptr[0] != 0 or indptr[-1] != len(self.items):
            raise PlanError("class_indptr", indptr.tolist(), "does not match items", "give class offsets")
        indptr = self.merge_indptr
        if len(indptr) != len(self.merge_rows) + 1 or indptr[0] != 0 or indptr[-1] != len(self.merge_slots):
            raise PlanError("merge_indptr", f"{len(self.merge_indptr)} entries", "does not match", "give row offsets")
        indptr = self.work_indptr
        if len(indptr) == 0 or indptr[0] != 0 or indptr[-1] != len(self.work) or (np.diff(indptr) < 0).any():
            raise PlanError("work_indptr", f"{len(indptr)} entries", "does not match work", "give block offsets")
        if any(tile.dealt for tile in self.classes) != (len(indptr) > 1) or (len(indptr) > 1 < len(self.classes)):
            raise PlanError("classes", len(self.classes), "does not go with work", "deal the work of a single class")
        indptr = self.epilogue_indptr
        if len(indptr) not in (1, len(self.rows) + 1) or indptr[0] != 0 or indptr[-1] != len(self.epilogue_slots):
            raise PlanError("epilogue_indptr", f"{len(indptr)} entries", "does not match", "give offsets by row entry")
        listed = len(indptr) > 1 or len(self.rows) == 0
        if (np.diff(indptr) < 0).any() or any(tile.merging for tile in self.classes) > listed:
            reason = "is not an ascending list for merging classes"
            raise PlanError("epilogue_indptr", f"{len(indptr)} entries", reason, "give offsets by row entry")
        for name, total in (("stage_indptr", len(self.classes)), ("merge_stage_indptr", len(self.merge_rows))):
            indptr = getattr(self, name)
            if indptr[0] != 0 or indptr[-1] != total or (np.diff(indptr) < 0).any():
                raise PlanError(name, indptr.tolist(), f"does not divide {total} entries", "give stage offsets")
        if len(self.stage_indptr) != len(self.merge_stage_indptr):
            reason = f"does not match {len(self.merge_stage_indptr) - 1} stages of merges"
            raise PlanError("stage_indptr", f"{len(self.stage_indptr) - 1} stages", reason, "give both for every stage")

    @classmethod
    def trusted(cls, **fields: Any) -> Schedule:
        """A schedule of all its fields, which treegen itself has made, arrays int32 and read-only; unchecked."""
        return unchecked(cls, fields)

    def changed(self, **fields: Any) -> Schedule:
        """The schedule with other fields, which treegen itself has made, arrays int32 and read-only; unchecked."""
        return unchecked(type(self), {**vars(self), **fields})

    def column(self, name: str) -> Ints:
        """One field of all items, by its name in ITEM_FIELDS."""
        return self.items[:, ITEM_FIELDS.index(name)]

    @property
    def run_width(self) -> int:
        """Columns of `tiles` and `blocks`."""
        return len(POSITIONED_RUN_FIELDS if len(self.row_positions) else RUN_FIELDS)

    @property
    def work_items(self) -> Sequence[WorkItem]:
        """The items as small objects made on access."""
        return LazySequence(len(self.items), lambda index: WorkItem(*self.items[index].tolist()))

    @property
    def num_slots(self) -> int:
        """Rows of the partial buffer."""
        return 1 + max((largest(slots) for slots in (self.merge_slots, self.epilogue_slots) if len(slots)), default=-1)

    @property
    def num_stages(self) -> int:
        """Rounds of launches, each with its merges behind it."""
        return len(self.stage_indptr) - 1

    @property
    def stages(self) -> Iterator[tuple[range, slice]]:
        """In launch order the classes of every stage, and what part of `merge_rows` is merged behind them."""
        for s in range(self.num_stages):
            merges = slice(int(self.merge_stage_indptr[s]), int(self.merge_stage_indptr[s + 1]))
            yield range(self.stage_indptr[s], self.stage_indptr[s + 1]), merges

    @property
    def launches(self) -> int:
        """Kernel launches: one per tile class that has items (several if it is unfused), and one per stage that merges
        rows.
        """
        items = np.diff(self.class_indptr).tolist()
        of_classes = (1 if tile.fused else UNFUSED_LAUNCHES for tile, n in zip(self.classes, items, strict=True) if n)
        return sum(of_classes) + int((np.diff(self.merge_stage_indptr) > 0).sum())

    @property
    def size(self) -> Capacity:
        """The exact capacity."""
        return size_of(self)

    def pack(self, capacity: Capacity | None = None) -> Arena:
        """The arena, with room for `capacity` (default: exactly this schedule). Raises PlanError when it does not
        fit.
        """
        return pack(self, capacity)

    def text(self, most_items: int | None = None) -> str:
        """Classes, counts and one line per item, at most `most_items` of them."""
        partial = int((self.column("slot0") >= 0).sum())
        merged = int((np.diff(self.epilogue_indptr) > 0).sum())
        lines = [
            f"schedule: {len(self.items)} items ({len(self.items) - partial} final, {partial} partial), "
            f"{self.num_slots} partial slots, {len(self.merge_rows)} merged rows, "
            + (f"{merged} rows merged in epilogues, " if merged else "")
            + f"{self.launches} launches"
        ]
        shown = len(self.items) if most_items is None else min(most_items, len(self.items))
        for c, tile in enumerate(self.classes):
            lines.append(f"  class {tile}: {self.class_indptr[c + 1] - self.class_indptr[c]} items")
            for index in range(min(self.class_indptr[c], shown), min(self.class_indptr[c + 1], shown)):
                item = self.work_items[index]
                where = "final" if item.slot0 < 0 else f"slots {item.slot0}-{item.slot0 + item.rows - 1}"
                lines.append(
                    f"    item {index}: group {item.group}, {item.rows} rows, "
                    f"{item.tiles} full + {item.block_tiles} packed tiles, {where}"
                )
        if shown < len(self.items):
            lines.append(f"    ... {len(self.items) - shown} more items")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text(most_items=32)

    def to_json(self) -> str:
        """A versioned JSON form that `from_json` reads back."""
        arrays = {name: getattr(self, name).tolist() for name in _ARRAYS}
        fixed = {"fixed": True} if self.fixed else {}
        return write_object("schedule", {"classes": [asdict(tile) for tile in self.classes], **fixed, **arrays})

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """The inverse of `to_json`. Raises FormatError or PlanError."""
        names = frozenset({"classes", *_ARRAYS})
        value = read_object(text, "schedule", names | {"fixed"}, names)
        try:
            classes = tuple(TileClass(**entry) for entry in value["classes"])
        except TypeError as cause:
            raise FormatError("schedule.classes", value["classes"], str(cause), "give tile classes") from cause
        arrays = {name: checked_ints(f"schedule.{name}", value[name]) for name in _FLAT}
        run_width = len(POSITIONED_RUN_FIELDS if len(arrays["row_positions"]) else RUN_FIELDS)
        for name in _TABLES:
            rows, width = value[name], len(ITEM_FIELDS) if name == "items" else run_width
            if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == width for row in rows):
                raise FormatError(
                    f"schedule.{name}", rows, f"is not a list of rows with {width} columns", "complete the rows"
                )
            flat = checked_ints(f"schedule.{name}", [entry for row in rows for entry in row])
            arrays[name] = frozen(flat.reshape(-1, width))
        return cls(classes, **arrays, fixed=value.get("fixed") is True)


_TABLES = ("items", "tiles", "blocks")
_FLAT = (
    "class_indptr", "rows", "merge_rows", "merge_indptr", "merge_slots", "stage_indptr", "merge_stage_indptr",
    "work_indptr", "work", "epilogue_indptr", "epilogue_slots", "row_positions",
)  # fmt: skip
_ARRAYS = (*_FLAT, *_TABLES)
