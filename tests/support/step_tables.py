"""What step kernels wrote, read back from the arena: which tokens each row of q gets, and from which items."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from treegen.backends.request_program import RequestProgram
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.request_tables import RequestRoom, RequestTables
from treegen.schedule.by_request import run_tokens_of

Token = tuple[int, int]
"""A slot and the position of its token, -1 where kernels are not told positions."""


@dataclass
class Item:
    """A work item: rows of q, -1 for those left out; tokens by row; its first partial slot, -1 for none; the
    entries of the tables of tiles and packed runs that it reads; the seats of its rows, if it is the plan's.
    """

    rows: list[int]
    tokens: list[list[Token]]
    partial0: int
    tiles: range
    packed_runs: range
    seats: list[int] = field(default_factory=list)


@dataclass
class Step:
    """A step: items of the plan, items of requests that are alone, and slots to merge by row."""

    planned: list[Item]
    alone: list[Item]
    merged: dict[int, list[int]]
    states: list[int]
    counters: list[int]
    positions: list[int]
    twice: list[int] = field(default_factory=list)

    def written(self) -> dict[int, list[Token]]:
        """The tokens of every row that is written, which is once; partial results are merged."""
        parts = {
            item.partial0 + index: tokens
            for item in (*self.planned, *self.alone)
            if item.partial0 >= 0
            for index, tokens in enumerate(item.tokens)
        }
        found = {row: [token for slot in slots for token in parts[slot]] for row, slots in self.merged.items()}
        for item in (*self.planned, *self.alone):
            for row, tokens in zip(item.rows, item.tokens, strict=True):
                if item.partial0 < 0 and row >= 0:
                    assert row not in found, f"row {row} is written twice"
                    found[row] = tokens
        return found


def step_of(program: RequestProgram, config: KernelConfig, page_size: int, *, positions: bool) -> Step:
    """The latest step of a program."""
    room = program.form.room
    places = RequestTables.of(room)
    words = {name: program.tables[name].cpu().numpy() for name in program.tables}
    planned, alone = (
        [
            _item(line, words, config, room, page_size, positions=positions)
            for line in words[name][: items * 8].reshape(-1, 8).tolist()
        ]
        for name, items in (("planned", room.items), ("alone", room.lone_items))
    )
    indptr, slots = words["merge_indptr"].tolist(), words["lone_partials" if room.chunk else "merge_partials"].tolist()
    merged: dict[int, list[int]] = {}
    rows, ends = words["merge_rows"][: room.merges].tolist(), indptr[1 : room.merges + 1]
    for number, row in enumerate(rows):
        if number < room.rows and ends[number] < 0:
            continue
        if row >= 0:
            assert row not in merged, f"row {row} is merged twice"
            merged[row] = slots[indptr[number] : indptr[number + 1]]
    states = words["states"][: room.seats].tolist()
    assert places.words <= len(words["items"])
    return Step(
        [item for item in planned if item.rows],
        [item for item in alone if item.rows],
        merged,
        states,
        program.counters.tolist(),
        words["positions"][: room.rows].tolist(),
    )


def _item(
    line: list[int],
    words: dict[str, np.ndarray],
    config: KernelConfig,
    room: RequestRoom,
    page_size: int,
    *,
    positions: bool,
) -> Item:
    row0, count, tile0, tiles, run0, packed_tiles, partial0, _ = line
    if not count:
        return Item([], [], -1, range(0), range(0))
    packed = config.tokens // run_tokens_of(page_size)
    runs: list[tuple[int, int, int, int, int]] = []  # slot, length, lo, hi, position
    per_slot = min(page_size, config.tokens)
    for number in range(tile0, tile0 + tiles):
        entry = words["tiles"][number * room.tile_width : (number + 1) * room.tile_width].tolist()
        lo, hi, *position = entry[room.tile_width - 2 - positions :]
        slots = entry[: config.tokens // per_slot]
        for index, slot in enumerate(slots):
            runs.append((slot, per_slot, lo, hi, position[0] + index * per_slot if positions else -1))
    for number in range(run0, run0 + packed_tiles * packed):
        entry = words["packed_runs"][number * room.run_width : (number + 1) * room.run_width].tolist()
        if entry[1] > 0:
            runs.append((*entry[:4], entry[4] if positions else -1))
        else:
            assert entry[1] == 0, "a block that nobody emptied"
    tokens = [
        [
            (slot + i, position + i if positions else -1)
            for slot, n, lo, hi, position in runs
            if lo <= r < hi
            for i in range(n)
        ]
        for r in range(count)
    ]
    packed_runs = range(run0, run0 + packed_tiles * packed)
    rows, seats = (words[name][row0 : row0 + count].tolist() for name in ("rows", "read_rows"))
    return Item(rows, tokens, partial0, range(tile0, tile0 + tiles), packed_runs, seats)
