"""Plans of running batches with their schedules: made in C for `cohort` and `query`, else in NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

import treegen.compiled.c_library as c_library
from treegen.compiled.batch_tree import BatchTree
from treegen.compiled.share_rules import SHARE_RULES, ShareRules
from treegen.ir.arrays import MOST_MADE, Ints, int32_ramp, largest
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.plan import Plan
from treegen.ir.request_schedule import (
    CLAIM_FIELDS,
    ENTRY_FIELDS,
    SEAT_FIELDS,
    UNKNOWN,
    Queries,
    RequestSchedule,
    ScheduleSizes,
    SharedChunks,
)
from treegen.ir.request_tables import RequestRoom
from treegen.ir.shape import Shape
from treegen.ir.work_items import ITEM_FIELDS
from treegen.schedule.by_request import ItemRoom, run_tokens_of, schedule_of_tables
from treegen.schedule.query_runs import lower_requests
from treegen.strategies.baselines import query
from treegen.strategies.cohort import Cohort
from treegen.strategies.groupings import by_row
from treegen.strategies.strategy import Pipeline, Strategy
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.target.tile_config import rows_per_tile

_WORDS_OF_ROW, _WORDS_OF_PART, _MOST_EXPECTED = 64, 48, 1 << 14
"""Words of a plan and its tables for each row and each part, and parts, roughly. Where they are too few, C tells
how many it needs.
"""
_SEATS, _CLAIMS, _QUERY_ROWS = 7, 8, 9
"""Numbers of tables, see batch_tables.h."""


class _Policy(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "split_shared_rows", "split")),
        ("shares", ctypes.c_double),
        ("rules", ShareRules),
        ("most_made", ctypes.c_int64),
    )


class _Room(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("height", "tile_power", "run_power", "page_size", "reserve", "causal")),
        ("unknown", ctypes.c_void_p),
    )


class TableSizes(ctypes.Structure):
    """See batch_tables.h. at: where each table begins in the words."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("groups", "segments", "widest", "tokens", "tiles", "runs")),
        *(
            (name, ctypes.c_int64)
            for name in ("items", "entries", "rows", "merged", "partials", "seats", "claims", "several")
        ),
        ("at", ctypes.c_int64 * 12),
    )


class SeatedTables(NamedTuple):
    """The columns of seats and the claims of a schedule: how many there are, and their addresses."""

    seats: int
    claims: int
    at_seats: int
    at_claims: int


class LoweredPlan:
    """A plan that NumPy made, and its schedule, which is made when it is asked for."""

    def __init__(self, plan: Plan, lower: Callable[[], RequestSchedule]) -> None:
        self.plan, self._lower = plan, lower

    @cached_property
    def schedule(self) -> RequestSchedule:
        """The schedule."""
        return self._lower()

    @property
    def widest(self) -> int:
        """The most rows of a group; 0 for no groups."""
        return largest(self.plan.group_rows) if len(self.plan) else 0

    @property
    def tokens(self) -> int:
        """The tokens that all groups read."""
        return int(self.plan.group_tokens.sum(dtype=np.int64))

    @property
    def queries(self) -> Queries | None:
        """RequestSchedule.queries."""
        return self.schedule.queries

    @property
    def chunks(self) -> SharedChunks | None:
        """RequestSchedule.chunks."""
        return self.schedule.chunks

    def __reduce__(self) -> tuple[Callable[..., LoweredPlan], tuple[Plan, RequestSchedule]]:
        return _lowered, (self.plan, self.schedule)

    @property
    def seated(self) -> SeatedTables:
        """See SeatedTables."""
        seats, claims = self.schedule.seats, self.schedule.claims
        return SeatedTables(seats.shape[1], len(claims), c_library.address_of(seats), c_library.address_of(claims))

    def fits(self, room: RequestRoom) -> bool:
        """Tells whether there is room for the schedule."""
        return room.holds(self.schedule)


class CompiledTables:
    """A plan and its tables as C made them. Plan and RequestSchedule are made when somebody asks for them.

    words: the plan, and then its tables. address: that of the first word. table_sizes: how long each table is, and
    where it begins. widest: the most rows of a group. tokens: those that all groups read.
    queries: RequestSchedule.queries.
    """

    chunks = None

    def __init__(self, strategy: Strategy, config: KernelConfig, words: Ints, address: int, sizes: TableSizes) -> None:
        self._strategy, self._config = strategy, config
        self.words, self.address, self.table_sizes = words, address, sizes
        self.widest: int = sizes.widest
        self.tokens: int = sizes.tokens
        self.queries = self._queries() if sizes.several else None

    def __reduce__(self) -> tuple[Callable[..., LoweredPlan], tuple[Plan, RequestSchedule]]:
        return _lowered, (self.plan, self.schedule)  # a copy has no addresses

    @property
    def seated(self) -> SeatedTables:
        """See SeatedTables."""
        made = self.table_sizes
        at_seats, at_claims = self.address + 4 * made.at[_SEATS], self.address + 4 * made.at[_CLAIMS]
        return SeatedTables(made.seats, made.claims, at_seats, at_claims)

    def fits(self, room: RequestRoom) -> bool:
        """Tells whether there is room for the schedule."""
        return not room.chunk and room.has_room(self.sizes)

    @property
    def sizes(self) -> ScheduleSizes:
        """RequestSchedule.sizes."""
        made = self.table_sizes
        return ScheduleSizes(
            *(made.seats, made.items, made.rows, made.entries, made.claims),
            *(made.partials, made.partials, made.tiles, made.runs),
        )

    def _queries(self) -> Queries:
        made = self.table_sizes
        lengths = zip(made.at[_QUERY_ROWS:], (made.seats, made.rows, made.merged), strict=True)
        return Queries(*(self.words[begin : begin + length] for begin, length in lengths))

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        groups, segments, words = self.table_sizes.groups, self.table_sizes.segments, self.words
        rows, indptr, tile = 2 * groups, 3 * groups, getattr(self._strategy, "tile", None)
        table = indptr + groups + 1
        return Plan.trusted(
            self._strategy.text if isinstance(self._strategy, Cohort) else str(self._strategy),
            int32_ramp(groups + 1),
            words[:groups],
            words[groups:rows],
            words[indptr:table],
            words[table : table + 5 * segments].reshape(5, segments),
            words[rows:indptr],
            tiles=() if tile is None else (tile,),
        )

    @cached_property
    def schedule(self) -> RequestSchedule:
        """The schedule."""
        made = self.table_sizes
        lengths = (
            *(made.items * len(ITEM_FIELDS), made.entries * len(ENTRY_FIELDS), made.items + 1, made.rows),
            *(made.merged, made.merged + 1, made.partials),
            *(len(SEAT_FIELDS) * made.seats, len(CLAIM_FIELDS) * made.claims),
        )
        tables = [self.words[begin : begin + length] for begin, length in zip(made.at, lengths, strict=False)]
        item, entry, entry_indptr, rows, merge_rows, merge_indptr, merge_partials, seats, claims = tables
        items = item.reshape(-1, len(ITEM_FIELDS))
        return RequestSchedule(
            schedule_of_tables(self._config, items, rows, merge_rows, merge_indptr, merge_partials),
            entry.reshape(-1, len(ENTRY_FIELDS)),
            entry_indptr,
            made.tiles,
            made.runs,
            seats.reshape(len(SEAT_FIELDS), made.seats),
            claims.reshape(-1, len(CLAIM_FIELDS)),
            self.queries,
        )


def _lowered(plan: Plan, schedule: RequestSchedule) -> LoweredPlan:
    return LoweredPlan(plan, lambda: schedule)


BatchTables: TypeAlias = "LoweredPlan | CompiledTables"
"""A plan of a running batch and its schedule."""


def tables_of(strategy: Strategy, tree: BatchTree, shape: Shape, target: Target, room: ItemRoom) -> BatchTables:
    """Plans, and makes the schedule that treegen.schedule.query_runs.lower_requests makes, in C where that is possible.

    Raises what these raise.

    Args:
        strategy: Makes the plan.
        tree: The tree.
        shape, target: The rest of the problem.
        room: The sizes of items.
    """
    made = _compiled(strategy, tree, shape.group, room)
    if made is not None:
        return made
    problem = Problem(tree.tree, shape, target)
    plan = strategy.plan(problem)
    return LoweredPlan(plan, lambda: lower_requests(plan, problem, room))


def _compiled(strategy: Strategy, tree: BatchTree, group: int, room: ItemRoom) -> CompiledTables | None:
    library, columns = c_library.library(), tree.columns
    policy = None if library is None or columns is None else _policy_of(strategy, group)
    if library is None or columns is None or policy is None:
        return None
    parts = policy.shares or (tree.counts.unique_tokens // policy.split if policy.split else 0)
    words = _WORDS_OF_ROW * columns.rows + _WORDS_OF_PART * int(min(parts, _MOST_EXPECTED)) + 256
    sizes, of_items = TableSizes(), _room_of(room, group)
    known = columns.address, ctypes.addressof(policy), ctypes.addressof(of_items)
    while True:
        made = np.empty(words, np.int32)
        address = c_library.address_of(made)
        needed = library.batch_tables(*known, address, words, ctypes.addressof(sizes))
        if needed <= 0:
            return None
        if needed <= words:
            break
        words = needed
    made.setflags(False)  # type: ignore[call-arg]  # see treegen.ir.arrays.frozen
    return CompiledTables(strategy, room.config, made, address, sizes)


def _policy_of(strategy: Strategy, group: int) -> _Policy | None:
    is_pipeline = isinstance(strategy, Pipeline) and strategy.grouping is by_row and strategy.name == "query"
    if not (is_pipeline or type(strategy) is Cohort):
        return None
    try:
        return _known_policy(strategy, group)
    except TypeError:  # a caller's own pipeline, with passes that cannot be hashed
        return None


@lru_cache(256)
def _known_policy(strategy: Strategy, group: int) -> _Policy | None:
    """Returns what C has to know of a strategy; None if it does not know such strategies. group: rows of a KV head."""
    if isinstance(strategy, Pipeline):
        split = strategy.options.get("split", 0)
        if isinstance(split, int) and split >= 0 and strategy == query(split or None):
            return _Policy(1, 0, split, 0.0, SHARE_RULES, MOST_MADE)
        return None
    if not isinstance(strategy, Cohort) or strategy.cut_nodes or strategy.merges_last:
        return None
    rows, shares = rows_per_tile(strategy.head_rows, group), float(strategy.shares or 0)
    return _Policy(rows, strategy.split_shared_rows or 0, strategy.split or 0, shares, SHARE_RULES, MOST_MADE)


@lru_cache(64)
def _room_of(room: ItemRoom, group: int) -> _Room:
    """Returns what C has to know of the sizes of items. group: rows of a KV head."""
    height = rows_per_tile(room.config.rows, group)
    powers = (size.bit_length() - 1 for size in (room.config.tokens, run_tokens_of(room.page_size)))
    return _Room(height, *powers, room.page_size, room.reserve, room.causal, UNKNOWN.ctypes.data)
