"""Growth: tokens that rows gain between two plans, entered into the tables that are on the device.

A token more in the block that a row fills is 1 more in the length of that block's entry. For all rows at once, the
places of these lengths are on the device beforehand, step by step; for some of them they are copied when needed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from treegen.backends.check_inputs import check_captured
from treegen.backends.torch_program import TorchProgram
from treegen.backends.triton_program import TritonProgram, copied
from treegen.ir.arrays import INT32_MAX, IntsLike, Longs, frozen
from treegen.ir.schedule import RUN_FIELDS, Schedule
from treegen.ir.tree import Tree, edits
from treegen.schedule.passes.reserve import Room

Program: TypeAlias = "TritonProgram | TorchProgram"

_LENGTH = RUN_FIELDS.index("length")
_MOST_SLOTS = 1 << 28
"""Slots among which rows grow apart in place, at most: a byte each of host memory, and no GPU holds such a cache."""


class _Entered(NamedTuple):
    """One token of some rows: whose lengths are 1 more, and which entries begin in another slot than they had, as
    numbers in Room.entry, flat; and those slots.
    """

    lengths: Longs
    begins: Longs
    slots: Longs


class Growth:
    """What rows of a tree have gained since it was planned for; one for every plan with room.

    Rows grow here as long as there is room: alone at their leaves, in any slots, where a token whose slot is not the
    one behind the row's last begins the row's next block.
    """

    def __init__(self, tree: Tree, room: Room) -> None:
        self._tree, self._room = tree, room
        rows = len(room.rows)
        self._all, self._everyone = np.arange(rows), rows == tree.num_rows
        self._number = np.full(tree.num_rows, -1)
        self._number[room.rows] = self._all
        self._limit = room.entries * room.block
        # Of each row: its next token's place in its blocks, one after another, and slot; tokens gained; their slots.
        self._place, self._next = room.filled.copy(), room.slot.copy()
        self._gained = np.zeros(rows, np.int64)
        self._slots = room.slot + np.arange(int((self._limit - room.filled).max()))[:, None]
        # So often all rows can grow at once, in the slots behind their last ones; None once rows have gone apart.
        self._steps = int(np.minimum(self._limit - room.filled, room.free).min())
        self._common: int | None = 0
        self._settled = 0  # of these steps, what the arrays above know
        self._held = np.zeros(0, bool)  # by slot, whether a token that was gained is there, once rows have gone apart
        self._jumped = False  # whether some row went on elsewhere than behind its last slot
        self._behind_all = int(room.slot.max())
        self.last_slot = tree.kv.last_slot
        self._entered: list[_Entered] = []  # what `_blocks` do not know yet
        self._blocks = room.schedule.blocks.copy()
        self._devices: dict[int, _GrowthOnDevice] = {}
        self._grown = tree

    @property
    def schedule(self) -> Schedule:
        """The schedule with room, as it is on the device now."""
        self._settle()
        flat, room = self._blocks.reshape(-1), self._room
        first = room.schedule.column("block0")[room.item].astype(np.int64)
        places = ((first + room.entry) * len(RUN_FIELDS)).reshape(-1)
        for lengths, begins, slots in self._entered:
            flat[places[lengths] + _LENGTH] += 1
            flat[places[begins]] = slots
        self._entered.clear()
        return replace(room.schedule, blocks=frozen(self._blocks.copy()))

    @property
    def tree(self) -> Tree:
        """The tree with all that its rows have gained; made when asked for."""
        self._settle()
        known = (self._grown.tokens - self._tree.tokens)[self._tree.row_node[self._room.rows]]
        if (self._gained != known).any():
            rows = np.flatnonzero(self._gained)
            gained = self._gained[rows]
            slots = self._slots.T[rows][np.arange(len(self._slots)) < gained[:, None]]
            parts, topology = edits.longer_leaves(self._tree, self._room.rows[rows], gained, slots)
            self._grown = Tree(*parts, topology)
        return self._grown

    def take(
        self,
        rows: IntsLike | None,
        tokens: int,
        slots: npt.ArrayLike | None,
        programs: Collection[Program],
        captured: int | None,
    ) -> bool:
        """Enters what Tree.appended would add, on the current stream of each program's device; False, with nothing
        changed, where there is no room for it, a row is none of those that grow, or a slot is taken. captured: slots of
        the smallest cache that graphs read by these programs' tables. Raises TreeError for slots that are not such, and
        InputError for those beyond `captured`.
        """
        if type(tokens) is not int or not 1 <= tokens <= INT32_MAX:
            return False
        everyone, common = rows is None and self._everyone, self._common
        number = self._all if everyone else self._number[edits.chosen_rows(rows, self._tree.num_rows)]
        given = edits.given_slots(slots, len(number), tokens)
        if everyone and common is not None and common + tokens <= self._steps and self._go_on(given, common, tokens):
            last = self._behind_all + common + tokens - 1
            check_captured(last, captured)
            self._common, self.last_slot = common + tokens, max(self.last_slot, last)
            for program in programs:
                if isinstance(program, TritonProgram):
                    self._device(program).enter_steps(common, tokens)
        elif not len(number) or (number < 0).any() or not self._take_some(number, tokens, given, programs, captured):
            return False
        return True

    def _go_on(self, given: Longs | None, common: int, tokens: int) -> bool:
        """Whether slots [rows, tokens] are those behind the last ones of all rows, after so many common steps."""
        if given is None:
            return True
        return not np.count_nonzero(self._slots[common : common + tokens] != given.T)

    def _take_some(
        self, number: Longs, tokens: int, given: Longs | None, programs: Collection[Program], captured: int | None
    ) -> bool:
        """See take: for rows that go apart."""
        room = self._room
        self._settle()
        place, slot, jumped = self._place[number], self._next[number], self._jumped
        if given is not None:
            if tokens > 1 and (given[:, 1:] != given[:, :-1] + 1).any():
                return False
            apart = given[:, 0] != slot
            if np.count_nonzero(apart):  # in the next block
                size = room.block[number]
                place, jumped = np.where(apart, (place + size - 1) & -size, place), True
            slot = given[:, 0]
        if np.count_nonzero(place + tokens > self._limit[number]):
            return False
        slots = np.sort(slot if tokens == 1 else (slot[:, None] + np.arange(tokens)).reshape(-1))
        if not self._free(slots):
            return False
        last = int(slots[-1])
        check_captured(last, captured)
        self._held[slots] = True
        self._common, self._jumped, self.last_slot = None, jumped, max(self.last_slot, last)
        for step in range(tokens):
            self._enter(number, place + step, slot + step, programs)
        return True

    def _free(self, slots: Longs) -> bool:
        """Whether these slots, in ascending order, are different ones that hold no token; `_held` reaches them then."""
        highest = max(self.last_slot, int(slots[-1]))
        if highest >= _MOST_SLOTS:
            return False
        if highest >= len(self._held):
            before, self._held = self._held, np.zeros(1 << highest.bit_length(), bool)
            self._held[: len(before)] = before
        if self._common:
            self._held[self._slots[: self._common]] = True
        refused = slots[1:] == slots[:-1], self._room.taken.holds(slots), self._held[slots]
        return not any(map(np.count_nonzero, refused))

    def _enter(self, number: Longs, place: Longs, slot: Longs, programs: Collection[Program]) -> None:
        """A token more for each of these rows, at a place in its blocks."""
        room, rows = self._room, len(self._all)
        size = room.block[number]
        entry = place // size * rows + number
        self._place[number], self._next[number] = place + 1, slot + 1
        gained = self._gained[number]
        self._slots[gained, number] = slot
        self._gained[number] = gained + 1
        other = slot[:0]
        if self._jumped:  # else blocks begin where they were thought to
            moved = slot - place != room.slot[number] - room.filled[number]
            other = np.flatnonzero(moved & (place & (size - 1) == 0))
        entered = _Entered(entry, entry[other], slot[other])
        self._entered.append(entered)
        for program in programs:
            if isinstance(program, TritonProgram):
                self._device(program).enter(entered)

    def _settle(self) -> None:
        """Lets the arrays know of steps of all rows."""
        if self._common is None or self._settled == self._common:
            return
        nothing = self._all[:0]
        for _ in range(self._settled, self._common):
            entry = self._place // self._room.block * len(self._all) + self._all
            self._entered.append(_Entered(entry, nothing, nothing))
            self._place += 1
        self._next += self._common - self._settled
        self._gained += self._common - self._settled
        self._settled = self._common

    def _device(self, program: TritonProgram) -> _GrowthOnDevice:
        device = self._devices.get(id(program))
        if device is None:
            device = self._devices[id(program)] = _GrowthOnDevice(program, self._room, self._steps)
        return device


class _GrowthOnDevice:
    """The rows' entries in a program's table, whose lengths at `steps` steps of all rows are on the device."""

    def __init__(self, program: TritonProgram, room: Room, steps: int) -> None:
        self._table = program.table
        self._places = program.places_of_blocks(room.schedule, room.item, room.entry).reshape(-1)
        self._rows = len(room.rows)
        entry = (room.filled + np.arange(steps)[:, None]) // room.block * self._rows + np.arange(self._rows)
        self._lengths = copied(self._places[entry.reshape(-1)] + _LENGTH, self._table.device)
        ones = max(steps, 1) * self._rows
        self._ones = torch.ones(ones, dtype=torch.int32, device=self._table.device)

    def enter_steps(self, first: int, count: int) -> None:
        """A token more for all rows, `count` times, behind `first` earlier ones."""
        begin, end = first * self._rows, (first + count) * self._rows
        self._table.index_add_(0, self._lengths[begin:end], self._ones[begin:end])

    def enter(self, entered: _Entered) -> None:
        """A token more for some rows."""
        lengths, begins, slots = entered
        n, m = len(lengths), len(begins)
        if not m:
            self._table.index_add_(0, copied(self._places[lengths] + _LENGTH, self._table.device), self._ones[:n])
            return
        places = self._places[np.concatenate([lengths, begins])]
        places[:n] += _LENGTH
        given = copied(np.concatenate([places, slots]), self._table.device)
        self._table.index_add_(0, given[:n], self._ones[:n])
        self._table.index_copy_(0, given[n : n + m], given[n + m :].to(torch.int32))
