"""Schedule: work items in launch order, the KV tiles that they read, and the partial results that are merged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from treegen.ir.arena import Arena, Capacity, pack, size_of
from treegen.ir.arrays import Ints, LazySequence, frozen, largest
from treegen.ir.errors import FormatError, PlanError
from treegen.ir.json_form import checked_ints, read_object, write_object
from treegen.ir.schedule_checks import check_offsets
from treegen.ir.unchecked import unchecked

ITEM_FIELDS = ("row0", "rows", "tile0", "tiles", "block0", "block_tiles", "slot0", "group")
"""Columns of `Schedule.items`, in the order in which kernels read them; the last one is for the host (see Arena)."""
RUN_FIELDS = ("slot", "length", "lo", "hi")
"""Columns of `Schedule.tiles` and `Schedule.blocks`: a run of KV slots, and the item's rows that see it.

The rows are `lo:hi`, or in a class with bit masks the two halves of a 64-bit word whose bit j stands for row j.
"""
POSITIONED_RUN_FIELDS = (*RUN_FIELDS, "position")
"""The columns where scores depend on positions (treegen.scoring): also the position of the run's first token."""
MOST_BIT_ROWS = 64
"""The most rows of an item in a class with bit masks."""
TileMask: TypeAlias = Literal["none", "interval", "bits", "dense"]
UNFUSED_LAUNCHES = 5
"""Operations of an unfused class: scores, scaling, mask, softmax, and the product with the values."""


@dataclass(frozen=True, slots=True)
class TileClass:
    """One kernel specialisation.

    A class with a dense mask stands for unfused PyTorch operations; its warps and stages are 0.

    Attributes:
        rows: Query head rows of a thread block.
        tokens: KV tokens of a tile.
        block: Tokens of the blocks that are packed into a tile.
        mask: How rows see runs.
        warps: Triton's num_warps.
        stages: Triton's num_stages.
        dealt: Whether thread blocks work off lists of items.
        merging: Whether items join their rows' partials of earlier rounds before they write final output.
        full: Whether items may have full tiles.
        waiting: Whether final items wait for the partials of others in the same launch
            (treegen.schedule.passes.fuse_merge).
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
        """Blocks that are packed into one tile."""
        return self.tokens // self.block

    @property
    def fused(self) -> bool:
        """Whether a kernel runs the class."""
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
    """One work item, as a small object.

    Attributes:
        row0: Its first entry of the row table.
        rows: Its entries of the row table.
        tile0: Its first full tile.
        tiles: Its full tiles.
        block0: Its first block.
        block_tiles: Its tiles of packed blocks.
        slot0: The partial slot of its first row; -1 when the item writes final output.
        group: Its group of the plan.
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

    Items. Class c has the items `class_indptr[c]:class_indptr[c + 1]`. An item's rows are `rows[row0:row0 + rows]`,
    indices into the caller's q and out. It reads `tiles[tile0:tile0 + tiles]`, which are runs of exactly one tile, and
    then `block_tiles` tiles that are packed from `blocks_per_tile` entries of `blocks` each, from `block0` on:

        items     row0 rows tile0 tiles block0 block_tiles slot0 group
                   │         │           │                  └─▶ partial slots slot0 : slot0 + rows, -1: final output
                   │         │           └─▶ blocks[block0 : block0 + block_tiles * blocks_per_tile]
                   │         └─▶ tiles[tile0 : tile0 + tiles]
                   └─▶ rows[row0 : row0 + rows]

    Runs have the columns RUN_FIELDS, or POSITIONED_RUN_FIELDS in a schedule with `row_positions`, the positions of all
    rows in the caller's order.

    Merges. Row i of a partial item goes to partial slot `slot0 + i`. The caller's row `merge_rows[j]` is the merge of
    the partial slots `merge_slots[merge_indptr[j]:merge_indptr[j + 1]]`, in this order; an empty list gives out 0 and
    lse -inf. A negative entry, `merge_rows[j] = -1 - slot`, merges into that partial slot, which a later round reads.

    Epilogues. Final items of a merging class merge by themselves. Before such an item writes its row i, which is entry
    `e = row0 + i` of the row table, it joins the partial slots `epilogue_slots[epilogue_indptr[e]:epilogue_indptr[e +
    1]]`, in this order. Items of other classes do not read these lists. Without merging classes there are none, and the
    indptr is [0]. Final items of a waiting class do the same with partial slots of earlier items of their class; its
    kernel counts on the lists that treegen.schedule.passes.fuse_merge makes.

    Work. Where the class is dealt, thread block b works on `work[work_indptr[b]:work_indptr[b + 1]]`. An entry is `item
    * lanes + lane`, with a lane for each KV head and tile of its query heads.

    Rounds. Round s launches the classes `stage_indptr[s]:stage_indptr[s + 1]` and then merges the rows
    `merge_stage_indptr[s]:merge_stage_indptr[s + 1]`. By default there is one round.

    `fixed` is whether merges have one form, whatever is merged (Plan.fixed_block).
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
        check_offsets(self)

    @classmethod
    def trusted(cls, **fields: Any) -> Schedule:
        """Makes a schedule of all its fields, of treegen's own making, as read-only int32 arrays; unchecked."""
        return unchecked(cls, fields)

    def changed(self, **fields: Any) -> Schedule:
        """Returns the schedule with other fields of treegen's own making, as read-only int32 arrays; unchecked."""
        return unchecked(type(self), {**vars(self), **fields})

    def column(self, name: str) -> Ints:
        """Returns one field of all items, by its name in ITEM_FIELDS."""
        return self.items[:, ITEM_FIELDS.index(name)]

    @property
    def run_width(self) -> int:
        """Columns of `tiles` and `blocks`."""
        return len(POSITIONED_RUN_FIELDS if len(self.row_positions) else RUN_FIELDS)

    @property
    def work_items(self) -> Sequence[WorkItem]:
        """The items as small objects, made on access."""
        return LazySequence(len(self.items), lambda index: WorkItem(*self.items[index].tolist()))

    @property
    def num_slots(self) -> int:
        """Partial slots of the partial buffer."""
        return 1 + max((largest(slots) for slots in (self.merge_slots, self.epilogue_slots) if len(slots)), default=-1)

    @property
    def num_stages(self) -> int:
        """The number of rounds: launches, and the merges that follow them."""
        return len(self.stage_indptr) - 1

    @property
    def stages(self) -> Iterator[tuple[range, slice]]:
        """The classes of each round, in launch order, and its part of `merge_rows`."""
        for s in range(self.num_stages):
            merges = slice(int(self.merge_stage_indptr[s]), int(self.merge_stage_indptr[s + 1]))
            yield range(self.stage_indptr[s], self.stage_indptr[s + 1]), merges

    @property
    def launches(self) -> int:
        """Kernel launches: one per class with items (several if it is unfused), and one per round with merges."""
        items = np.diff(self.class_indptr).tolist()
        of_classes = (1 if tile.fused else UNFUSED_LAUNCHES for tile, n in zip(self.classes, items, strict=True) if n)
        return sum(of_classes) + int((np.diff(self.merge_stage_indptr) > 0).sum())

    @property
    def size(self) -> Capacity:
        """The exact capacity of the schedule."""
        return size_of(self)

    def pack(self, capacity: Capacity | None = None) -> Arena:
        """Lays the schedule out as an arena, with room for `capacity`.

        Args:
            capacity: The entries to leave room for; by default exactly those of the schedule.

        Raises:
            PlanError: The schedule does not fit the capacity.
        """
        return pack(self, capacity)

    def text(self, most_items: int | None = None) -> str:
        """Returns classes, counts, and a line for each item, of at most `most_items` items."""
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
        """Returns a versioned JSON text, which `from_json` reads back."""
        arrays = {name: getattr(self, name).tolist() for name in _ARRAYS}
        fixed = {"fixed": True} if self.fixed else {}
        return write_object("schedule", {"classes": [asdict(tile) for tile in self.classes], **fixed, **arrays})

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Makes a schedule of the text that `to_json` wrote. Raises FormatError or PlanError for any other text."""
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
