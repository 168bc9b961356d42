"""Schedule: work items in launch order, the KV tiles they walk, where their results go, and who merges what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from treegen.ir.arrays import Ints, LazySequence, frozen
from treegen.ir.errors import FormatError, PlanError
from treegen.ir.json_form import read_object, write_object
from treegen.ir.plan import checked_ints

ITEM_FIELDS = ("row0", "rows", "tile0", "tiles", "block0", "block_tiles", "slot0", "group")
"""Columns of `Schedule.items`, in the order in which kernels read them."""
RUN_FIELDS = ("slot", "length", "lo", "hi")
"""Columns of `Schedule.tiles` and `Schedule.blocks`: KV slots, and the item's rows that see them."""
ALIGNMENT = 16
"""Every section of the arena begins at a multiple of this many int32 (64 bytes)."""


@dataclass(frozen=True, slots=True)
class TileClass:
    """One kernel specialisation. rows: query head rows per block; tokens: KV tokens per tile; block: granularity, in
    tokens, of the runs that are packed into one tile; masked: whether rows see runs by interval; warps, stages:
    Triton's.
    """

    rows: int
    tokens: int
    block: int
    masked: bool
    warps: int
    stages: int

    @property
    def blocks_per_tile(self) -> int:
        """Runs packed into one tile."""
        return self.tokens // self.block

    def __str__(self) -> str:
        mask = "interval mask" if self.masked else "no mask"
        return f"{self.rows}x{self.tokens}/{self.block} {mask}, {self.warps} warps, {self.stages} stages"


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


@dataclass(frozen=True, slots=True)
class Capacity:
    """Room of every section of an arena: items per tile class, row table, tiles, blocks, merged rows, merged slots."""

    items: tuple[int, ...]
    rows: int
    tiles: int
    blocks: int
    merges: int
    merge_slots: int


@dataclass(frozen=True, slots=True)
class Arena:
    """A schedule as one int32 array, and the section offsets in it. The array goes to the device in one copy.

    Section `counts` holds, 16 entries apart, the number of items of every class and then of merged rows: kernels launch
    on the capacity and blocks beyond the count exit at once.
    """

    array: Ints
    counts: int
    items: tuple[int, ...]
    rows: int
    tiles: int
    blocks: int
    merge_rows: int
    merge_indptr: int
    merge_slots: int


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Work items and merge lists as a struct of arrays; immutable.

    Items of class c are `items[class_indptr[c]:class_indptr[c + 1]]` (columns ITEM_FIELDS). An item's rows are
    `rows[row0:row0 + rows]`, indices into the caller's q and out. It walks `tiles[tile0:tile0 + tiles]`, runs of
    exactly the class's tokens, then `block_tiles` tiles of `blocks_per_tile` entries of `blocks` each from `block0`
    (columns RUN_FIELDS). Row i of a partial item writes partial slot `slot0 + i`. Caller's row `merge_rows[j]` is the
    merge of the slots `merge_slots[merge_indptr[j]:merge_indptr[j + 1]]`, in this order; an empty list gives out 0,
    lse -inf.
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

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            object.__setattr__(self, name, frozen(getattr(self, name)))
        for name, width in (("items", len(ITEM_FIELDS)), ("tiles", len(RUN_FIELDS)), ("blocks", len(RUN_FIELDS))):
            if getattr(self, name).ndim != 2 or getattr(self, name).shape[1] != width:
                raise PlanError(name, f"shape {getattr(self, name).shape}", f"needs {width} columns", "add the columns")
        indptr = self.class_indptr
        if len(indptr) != len(self.classes) + 1 or indptr[0] != 0 or indptr[-1] != len(self.items):
            raise PlanError("class_indptr", indptr.tolist(), "does not match items", "give class offsets")
        indptr = self.merge_indptr
        if len(indptr) != len(self.merge_rows) + 1 or indptr[0] != 0 or indptr[-1] != len(self.merge_slots):
            raise PlanError("merge_indptr", f"{len(self.merge_indptr)} entries", "does not match", "give row offsets")

    def column(self, name: str) -> Ints:
        """One field of all items, by its name in ITEM_FIELDS."""
        return self.items[:, ITEM_FIELDS.index(name)]

    @property
    def work_items(self) -> Sequence[WorkItem]:
        """The items as small objects made on access."""
        return LazySequence(len(self.items), lambda index: WorkItem(*self.items[index].tolist()))

    @property
    def num_slots(self) -> int:
        """Rows of the partial buffer."""
        return len(self.merge_slots)

    @property
    def launches(self) -> int:
        """Kernel launches: one per tile class that has items, and the merge if rows need one."""
        return int((np.diff(self.class_indptr) > 0).sum()) + (len(self.merge_rows) > 0)

    @property
    def size(self) -> Capacity:
        """The exact capacity."""
        return Capacity(
            tuple(np.diff(self.class_indptr).tolist()),
            len(self.rows),
            len(self.tiles),
            len(self.blocks),
            len(self.merge_rows),
            len(self.merge_slots),
        )

    def pack(self, capacity: Capacity | None = None) -> Arena:
        """The arena, with room for `capacity` (default: exactly this schedule). Raises PlanError when it does not
        fit.
        """
        size = self.size
        capacity = capacity or size
        for field in fields(Capacity):
            needed, room = getattr(size, field.name), getattr(capacity, field.name)
            if np.shape(needed) != np.shape(room) or np.any(np.greater(needed, room)):
                raise PlanError(f"capacity.{field.name}", room, f"is less than {needed}", "declare a larger capacity")
        classes = range(len(self.classes))
        counts = np.zeros((len(self.classes) + 1, ALIGNMENT), np.int32)
        counts[:, 0] = [*np.diff(self.class_indptr), len(self.merge_rows)]
        items = [self.items[self.class_indptr[c] : self.class_indptr[c + 1]] for c in classes]
        # Kernels load run and slot entries one step ahead: these tables keep room for one step more.
        spare = max((tile.blocks_per_tile for tile in self.classes), default=1) * len(RUN_FIELDS)
        sections = [
            (counts, counts.size),
            *((items[c], capacity.items[c] * len(ITEM_FIELDS)) for c in classes),
            (self.rows, capacity.rows),
            (self.tiles, (capacity.tiles + 1) * len(RUN_FIELDS)),
            (self.blocks, capacity.blocks * len(RUN_FIELDS) + spare),
            (self.merge_rows, capacity.merges),
            (self.merge_indptr, capacity.merges + 1),
            (self.merge_slots, capacity.merge_slots + 1),
        ]
        places = [0]
        for _, room in sections:
            places.append(places[-1] + -(-room // ALIGNMENT) * ALIGNMENT)
        array = np.zeros(places[-1], np.int32)
        for place, (section, _) in zip(places, sections, strict=False):
            array[place : place + section.size] = section.ravel()
        first_shared = 1 + len(self.classes)
        return Arena(frozen(array), 0, tuple(places[1:first_shared]), *places[first_shared : first_shared + 6])

    def text(self, most_items: int | None = None) -> str:
        """Classes, counts and one line per item, at most `most_items` of them."""
        partial = int((self.column("slot0") >= 0).sum())
        lines = [
            f"schedule: {len(self.items)} items ({len(self.items) - partial} final, {partial} partial), "
            f"{self.num_slots} partial slots, {len(self.merge_rows)} merged rows, {self.launches} launches"
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
        return write_object("schedule", {"classes": [asdict(tile) for tile in self.classes], **arrays})

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """The inverse of `to_json`. Raises FormatError or PlanError."""
        names = frozenset({"classes", *_ARRAYS})
        value = read_object(text, "schedule", names, names)
        try:
            classes = tuple(TileClass(**entry) for entry in value["classes"])
        except TypeError as cause:
            raise FormatError("schedule.classes", value["classes"], str(cause), "give tile classes") from cause
        arrays = {name: checked_ints(f"schedule.{name}", value[name]) for name in _FLAT}
        for name, width in _TABLES.items():
            rows = value[name]
            if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == width for row in rows):
                raise FormatError(
                    f"schedule.{name}", rows, f"is not a list of rows with {width} columns", "complete the rows"
                )
            flat = checked_ints(f"schedule.{name}", [entry for row in rows for entry in row])
            arrays[name] = frozen(flat.reshape(-1, width))
        return cls(classes, **arrays)


_TABLES = {"items": len(ITEM_FIELDS), "tiles": len(RUN_FIELDS), "blocks": len(RUN_FIELDS)}
_FLAT = ("class_indptr", "rows", "merge_rows", "merge_indptr", "merge_slots")
_ARRAYS = (*_FLAT, *_TABLES)
