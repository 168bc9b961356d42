"""Schedule: work items in launch order, the KV tiles that they read, and the partial results that are merged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import treegen.ir.schedule_json as schedule_json
from treegen.ir.arena import Arena, ArenaSizes, pack, size_of
from treegen.ir.arrays import Ints, LazySequence, frozen, largest
from treegen.ir.errors import PlanError
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.schedule_checks import check_offsets
from treegen.ir.unchecked import unchecked
from treegen.ir.work_items import ARRAYS, ITEM_FIELDS, POSITIONED_RUN_FIELDS, RUN_FIELDS, WorkItem

UNFUSED_LAUNCHES = 5
"""Operations of an unfused config: scores, scaling, mask, softmax, and the product with the values."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Work items and merge lists as a struct of arrays; immutable.

    Items. Class c has the items `config_indptr[c]:config_indptr[c + 1]`. An item's rows are `rows[row0:row0 + rows]`,
    indices into the caller's q and out. It reads `tiles[tile0:tile0 + tiles]`, which are runs of exactly one tile, and
    then `packed_tiles` tiles that are packed from `runs_per_tile` entries of `packed_runs` each, from `run0` on:

        items     row0 rows tile0 tiles run0 packed_tiles partial0 group
                   │         │           │                  └─▶ partial slots from partial0 on; -1: final output
                   │         │           └─▶ packed_runs[run0 : run0 + packed_tiles * runs_per_tile]
                   │         └─▶ tiles[tile0 : tile0 + tiles]
                   └─▶ rows[row0 : row0 + rows]

    Runs have the columns RUN_FIELDS, or POSITIONED_RUN_FIELDS in a schedule with `row_positions`, the positions of all
    rows in the caller's order.

    Merges. Row i of a partial item goes to partial slot `partial0 + i`. The caller's row `merge_rows[j]` is the merge
    of the partial slots `merge_partials[merge_indptr[j]:merge_indptr[j + 1]]`, in this order; an empty list gives out 0
    and lse -inf. A negative entry, `merge_rows[j] = -1 - slot`, merges into that partial slot, which a later round
    reads.

    Epilogues. Final items of a config with epilogue_merge merge by themselves. Before such an item writes its row i,
    which is entry `e = row0 + i` of the row table, it joins the partial slots
    `epilogue_partials[epilogue_indptr[e]:epilogue_indptr[e + 1]]`, in this order. Items of other configs do not read
    these lists. Without such configs there are none, and the indptr is [0]. Final items of a config with fused_merge do
    the same with partial slots of earlier items; its kernel counts on the lists that treegen.schedule.passes.fuse_merge
    makes.

    Work. Where the config has work lists, thread block b works on `work[work_indptr[b]:work_indptr[b + 1]]`. An entry
    is `item * lanes + lane`, with a lane for each KV head and tile of its query heads.

    Rounds. Round s launches the configs `round_indptr[s]:round_indptr[s + 1]` and then merges the rows
    `merge_round_indptr[s]:merge_round_indptr[s + 1]`. By default there is one round.

    `fixed` is whether merges have one form, whatever is merged (Plan.invariant_block).
    """

    configs: tuple[KernelConfig, ...]
    config_indptr: Ints
    items: Ints
    rows: Ints
    tiles: Ints
    packed_runs: Ints
    merge_rows: Ints
    merge_indptr: Ints
    merge_partials: Ints
    round_indptr: Ints = field(default_factory=lambda: frozen(np.empty(0)))
    merge_round_indptr: Ints = field(default_factory=lambda: frozen(np.empty(0)))
    work_indptr: Ints = field(default_factory=lambda: frozen(np.zeros(1)))
    work: Ints = field(default_factory=lambda: frozen(np.empty(0)))
    epilogue_indptr: Ints = field(default_factory=lambda: frozen(np.zeros(1)))
    epilogue_partials: Ints = field(default_factory=lambda: frozen(np.empty(0)))
    row_positions: Ints = field(default_factory=lambda: frozen(np.empty(0)))
    fixed: bool = False

    def __post_init__(self) -> None:
        for name, all_of in (("round_indptr", self.configs), ("merge_round_indptr", self.merge_rows)):
            if len(getattr(self, name)) == 0:
                object.__setattr__(self, name, np.array([0, len(all_of)]))
        for name in ARRAYS:
            object.__setattr__(self, name, frozen(getattr(self, name)))
        for name, width in (("items", len(ITEM_FIELDS)), ("tiles", self.run_width), ("packed_runs", self.run_width)):
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
        """Columns of `tiles` and `packed_runs`."""
        return len(POSITIONED_RUN_FIELDS if len(self.row_positions) else RUN_FIELDS)

    @property
    def work_items(self) -> Sequence[WorkItem]:
        """The items as small objects, made on access."""
        return LazySequence(len(self.items), lambda index: WorkItem(*self.items[index].tolist()))

    @property
    def num_partials(self) -> int:
        """Partial slots of the partial buffer."""
        merged = largest(self.merge_partials) if len(self.merge_partials) else -1
        final = largest(self.epilogue_partials) if len(self.epilogue_partials) else -1
        return 1 + max(merged, final)

    @property
    def num_rounds(self) -> int:
        """The number of rounds: launches, and the merges that follow them."""
        return len(self.round_indptr) - 1

    @property
    def rounds(self) -> Iterator[tuple[range, slice]]:
        """The configs of each round, in launch order, and its part of `merge_rows`."""
        for s in range(self.num_rounds):
            merges = slice(int(self.merge_round_indptr[s]), int(self.merge_round_indptr[s + 1]))
            yield range(self.round_indptr[s], self.round_indptr[s + 1]), merges

    @property
    def launches(self) -> int:
        """Kernel launches: one per config with items (several if it is unfused), and one per round with merges."""
        items = np.diff(self.config_indptr).tolist()
        of_configs = (
            1 if config.fused else UNFUSED_LAUNCHES for config, n in zip(self.configs, items, strict=True) if n
        )
        return sum(of_configs) + int((np.diff(self.merge_round_indptr) > 0).sum())

    @property
    def has_fused_merge(self) -> bool:
        """Whether some items wait for others."""
        return any(config.fused_merge for config in self.configs)

    @property
    def size(self) -> ArenaSizes:
        """The exact capacity of the schedule."""
        return size_of(self)

    def pack(self, capacity: ArenaSizes | None = None) -> Arena:
        """Lays the schedule out as an arena, with room for `capacity`.

        Args:
            capacity: The entries to leave room for; by default exactly those of the schedule.

        Raises:
            PlanError: The schedule does not fit the capacity.
        """
        return pack(self, capacity)

    def text(self, most_items: int | None = None) -> str:
        """Returns configs, counts, and a line for each item, of at most `most_items` items."""
        partial = int((self.column("partial0") >= 0).sum())
        merged = int((np.diff(self.epilogue_indptr) > 0).sum())
        lines = [
            f"schedule: {len(self.items)} items ({len(self.items) - partial} final, {partial} partial), "
            f"{self.num_partials} partial slots, {len(self.merge_rows)} merged rows, "
            + (f"{merged} rows merged in epilogues, " if merged else "")
            + f"{self.launches} launches"
        ]
        shown = len(self.items) if most_items is None else min(most_items, len(self.items))
        for c, config in enumerate(self.configs):
            lines.append(f"  config {config}: {self.config_indptr[c + 1] - self.config_indptr[c]} items")
            for index in range(min(self.config_indptr[c], shown), min(self.config_indptr[c + 1], shown)):
                item = self.work_items[index]
                where = "final" if item.partial0 < 0 else f"slots {item.partial0}-{item.partial0 + item.rows - 1}"
                lines.append(
                    f"    item {index}: group {item.group}, {item.rows} rows, "
                    f"{item.tiles} full + {item.packed_tiles} packed tiles, {where}"
                )
        if shown < len(self.items):
            lines.append(f"    ... {len(self.items) - shown} more items")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text(most_items=32)

    def to_json(self) -> str:
        """Returns a versioned JSON text, which `from_json` reads back."""
        return schedule_json.write(self)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Makes a schedule of the text that `to_json` wrote. Raises FormatError or PlanError for any other text."""
        return cls(**schedule_json.read(text))
