"""The words of a plan that the host copies to the device, written in C for plans that C made."""

from __future__ import annotations

import ctypes

import treegen.compiled.c_library as c_library
from treegen.compiled.batch_tables import BatchTables, CompiledTables
from treegen.ir.arrays import Ints
from treegen.ir.request_schedule import UNKNOWN, RequestSchedule
from treegen.ir.request_tables import RequestRoom, RequestTables
from treegen.ir.work_items import ITEM_FIELDS

_NAMES = (
    *("items", "planned", "running", "entries", "entry_indptr", "read_rows", "seats", "claims", "merge_partials"),
    *("merge_indptr", "queries", "row_number", "merge_number", "copied", "age"),
)


class _Places(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in (*_NAMES, "second", "room_of_seats", "at_once", "has_queries")),
        ("unknown", ctypes.c_void_p),
    )


class TableWords:
    """Writes plans into the words that the host copies to the device.

    places: those of all tables.

    Args:
        room: The sizes of the tables.
    """

    def __init__(self, room: RequestRoom) -> None:
        self._room, self.places = room, RequestTables.of(room)
        second = max(self.places.planned, self.places.alone) - len(ITEM_FIELDS)
        numbers = *(getattr(self.places, name) for name in _NAMES), second, room.seats, room.at_once, room.queries
        self._places = _Places(*numbers, UNKNOWN.ctypes.data)

    def write(self, made: BatchTables | RequestSchedule, words: Ints) -> None:
        """Writes `made`, which the room holds, into the words up to `copied`. See RequestTables.write."""
        library = c_library.library()
        if not isinstance(made, CompiledTables) or library is None or self._room.chunk:
            schedule = made if isinstance(made, RequestSchedule) else made.schedule
            self.places.write(schedule, self._room, words)
            return
        at = ctypes.addressof(made.table_sizes), ctypes.addressof(self._places)
        library.write_tables(made.address, *at, c_library.address_of(words))
