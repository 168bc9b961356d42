"""Growth: tokens that rows gain between two plans, entered into the tables that are on the device.

A token more in the block that a row fills is 1 more in the length of that block's entry. For all rows at once, the
places of these lengths are on the device beforehand, step by step; for some of them they are copied when needed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from treegen.ir import edits
from treegen.ir.arrays import IntsLike, Longs, frozen
from treegen.ir.schedule import RUN_FIELDS, Schedule
from treegen.ir.tree import Tree
from treegen.room import Room
from treegen.torch_backend import TorchProgram
from treegen.triton_backend import TritonProgram, copied

Program: TypeAlias = "TritonProgram | TorchProgram"

_LENGTH = RUN_FIELDS.index("length")


class Growth:
    """What rows of a tree have gained since it was planned for; one for every plan with room.

    Rows grow here as long as there is room: alone at their leaves, in any slots, where a token whose slot is not the
    one behind the row's last begins the row's next block.
    """

    def __init__(self, tree: Tree, room: Room) -> None:
        self._tree, self._room = tree, room
        rows = len(room.rows)
        self._number = np.full(tree.num_rows, -1)
        self._number[room.rows] = np.arange(rows)
        self._capacity = room.entries * room.block - room.filled
        self._place = room.filled.copy()  # of each row's next token in its blocks, one after another
        self._next = room.slot.copy()
        self._counts = np.zeros(rows, np.int64)
        self._slots = room.slot + np.arange(int(self._capacity.max()))[:, None]
        self._everyone = rows == tree.num_rows
        # So often all rows can grow at once, in the slots behind their last ones; None once rows have gone apart.
        self._steps = int(np.minimum(self._capacity, room.free).min())
        self._common: int | None = 0
        self._entered = 0  # of these steps, what the arrays above know
        self._jumped = False
        self._blocks = room.schedule.blocks.copy()
        first = room.schedule.column("block0")[room.item].astype(np.int64)
        self._host = (first + room.entry) * len(RUN_FIELDS)
        self._devices: dict[int, _Device] = {}
        self._grown = tree

    @property
    def schedule(self) -> Schedule:
        """The schedule with room, as it is on the device now."""
        self._settle()
        return replace(self._room.schedule, blocks=frozen(self._blocks.copy()))

    @property
    def tree(self) -> Tree:
        """The tree with all that its rows have gained; made when asked for."""
        self._settle()
        gained = self._counts - (self._grown.tokens - self._tree.tokens)[self._tree.row_node[self._room.rows]]
        if gained.any():
            grown = np.flatnonzero(self._counts)
            listed = np.arange(len(self._slots)) < self._counts[grown, None]
            slots = self._slots.T[grown][listed]
            parts, topology = edits.longer_leaves(self._tree, self._room.rows[grown], self._counts[grown], slots)
            self._grown = Tree(*parts, topology)
        return self._grown

    def take(
        self, rows: IntsLike | None, tokens: int, slots: npt.ArrayLike | None, programs: Collection[Program]
    ) -> bool:
        """Enters what Tree.appended would add, on the current stream of each program's device; False, with nothing
        changed, where there is no room for it or it is none of the plain cases. Raises TreeError for bad slots.
        """
        common = self._common
        if rows is None and slots is None and common is not None:
            if type(tokens) is not int or not (self._everyone and 0 < tokens <= self._steps - common):
                return False
            self._common = common + tokens
            for program in programs:
                if isinstance(program, TritonProgram):
                    self._device(program).enter_steps(common, tokens)
            self._load_torch(programs)
            return True
        return self._take_some(rows, tokens, slots, programs)

    def _take_some(
        self, rows: IntsLike | None, tokens: int, slots: npt.ArrayLike | None, programs: Collection[Program]
    ) -> bool:
        if type(tokens) is not int or tokens < 1:
            return False
        chosen = edits.chosen_rows(rows, self._tree.num_rows)
        places = edits.given_slots(slots, len(chosen), tokens)
        number = self._number[chosen]
        if not len(number) or (number < 0).any():
            return False
        self._settle()
        expected = self._next[number]
        room = self._room
        if places is None:
            if self._jumped or (self._counts[number] + tokens > room.free[number]).any():
                return False
            places = expected[:, None] + np.arange(tokens)
        elif rows is None and self._common is not None and (places == expected[:, None] + np.arange(tokens)).all():
            return self._common + tokens <= self._steps and self.take(None, tokens, None, programs)
        # Where a slot is not the next one, the row goes on in its next block.
        size = room.block[number]
        before = np.concatenate([expected[:, None] - 1, places[:, :-1]], 1)
        apart = places != before + 1
        steps = np.empty_like(places)
        place = self._place[number]
        for step in range(tokens):
            steps[:, step] = place = np.where(apart[:, step], -(-place // size) * size, place)
            place = place + 1
        if (place - room.filled[number] > self._capacity[number]).any():
            return False
        self._common = None
        self._jumped |= bool(apart.any() or (self._counts[number] + tokens > room.free[number]).any())
        for step in range(tokens):
            self._enter(number, steps[:, step], places[:, step], programs)
        self._load_torch(programs)
        return True

    def _enter(self, number: Longs, place: Longs, slot: Longs, programs: Collection[Program]) -> None:
        """A token more for each of these rows, at a place in its blocks."""
        room, size = self._room, self._room.block[number]
        entry = place // size
        # The slots that blocks begin with are there beforehand, for tokens that go on behind those before.
        other = np.flatnonzero((place % size == 0) & (slot != room.slot[number] + place - room.filled[number]))
        self._place[number], self._next[number] = place + 1, slot + 1
        self._slots[self._counts[number], number] = slot
        self._counts[number] += 1
        begins = entry[other], number[other]
        flat = self._blocks.reshape(-1)
        flat[self._host[entry, number] + _LENGTH] += 1
        flat[self._host[begins]] = slot[other]
        for program in programs:
            if isinstance(program, TritonProgram):
                device = self._device(program)
                device.enter(device.places[entry, number] + _LENGTH, device.places[begins], slot[other])

    def _settle(self) -> None:
        """Lets the host's arrays know of steps of all rows."""
        if self._common is None or self._entered == self._common:
            return
        flat, everyone = self._blocks.reshape(-1), np.arange(len(self._place))
        for _ in range(self._entered, self._common):
            flat[self._host[self._place // self._room.block, everyone] + _LENGTH] += 1
            self._place += 1
        self._next += self._common - self._entered
        self._counts += self._common - self._entered
        self._entered = self._common

    def _load_torch(self, programs: Collection[Program]) -> None:
        """Programs of the torch backend have no table to change: they take the schedule anew."""
        for program in programs:
            if isinstance(program, TorchProgram):
                program.load(self.schedule)

    def _device(self, program: TritonProgram) -> _Device:
        device = self._devices.get(id(program))
        if device is None:
            device = self._devices[id(program)] = _Device(program, self._room, self._steps)
        return device


class _Device:
    """Where the rows' entries are in a program's table. places [k, rows]: as Room.entry."""

    def __init__(self, program: TritonProgram, room: Room, steps: int) -> None:
        self._table = program.table
        self.places = program.places_of_blocks(room.schedule, room.item, room.entry)
        entry = (room.filled + np.arange(steps)[:, None]) // room.block
        self._rows = len(room.rows)
        self._lengths = copied(np.take_along_axis(self.places, entry, 0).reshape(-1) + _LENGTH, self._table.device)
        self._ones = torch.ones(steps * self._rows, dtype=torch.int32, device=self._table.device)

    def enter_steps(self, first: int, count: int) -> None:
        """A token more for all rows, `count` times, behind `first` earlier ones."""
        begin, end = first * self._rows, (first + count) * self._rows
        self._table.index_add_(0, self._lengths[begin:end], self._ones[begin:end])

    def enter(self, lengths: Longs, begins: Longs, slots: Longs) -> None:
        """Lengths that become 1 more, and entries that begin in other slots than they had."""
        given = copied(np.concatenate([lengths, begins, slots]), self._table.device)
        n, m = len(lengths), len(begins)
        self._table.index_add_(0, given[:n], torch.ones(n, dtype=torch.int32, device=given.device))
        if m:
            self._table.index_copy_(0, given[n : n + m], given[n + m :].to(torch.int32))
