"""The law over lengths: what a plan by request reads is right for any lengths that its requests may come to have.

Beside the coverage law of plans: entries are expanded here as step kernels expand them, at lengths other than those
that the plan was made for.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples
from treegen import Shape
from treegen.ir.arrays import frozen
from treegen.ir.request_schedule import RequestSchedule
from treegen.ir.tree import Tree
from treegen.ir.tree.requests import claimed_sharing, of_queries, of_requests
from treegen.runtime.batch_room import RESERVE, batch_config
from treegen.schedule.by_request import ItemRoom, run_tokens_of
from treegen.schedule.query_runs import lower_requests
from treegen.strategies import Strategy, cohort, deft_flatten, deft_node_chunk, query
from treegen.target.problem import Problem
from treegen.target.targets import target_from

TARGET = target_from("h200")
HEADS = ((4, 2), (8, 1), (32, 8), (80, 1), (6, 2))
STRATEGIES: tuple[Strategy, ...] = (
    cohort(64), cohort(16), cohort(64, split=64), cohort(64, split=100, split_shared_rows=2), cohort(32, split=50),
    cohort(128, split=200), query(), query(split=128), deft_flatten(block=32), deft_flatten(),
    deft_node_chunk(chunk=16), deft_node_chunk(chunk=24),
)  # fmt: skip


@dataclass
class Plan:
    """A plan by request, with what it was made of. owner: by seat, the seats that own its tokens, from position to
    position, as far as it shares.
    """

    tree: Tree
    made: RequestSchedule
    page_size: int
    tokens: int

    @property
    def run_tokens(self) -> int:
        """Tokens of a packed run."""
        return run_tokens_of(self.page_size)

    def queries(self, seat: int) -> int:
        """Query rows of a seat."""
        return 1 if self.made.queries is None else int(self.made.queries.rows[seat])

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(seat, which of its query rows) of all rows."""
        assert self.tree.requests is not None
        seats: list[int] = self.tree.requests.seat.tolist()
        return [(seat, number) for seat in seats for number in range(self.queries(seat))]

    def listed(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The rows of entries `begin:end` of the row table."""
        seats = self.made.schedule.rows[begin:end].tolist()
        if self.made.queries is None:
            return [(seat, 0) for seat in seats]
        return list(zip(seats, self.made.queries.row_number[begin:end].tolist(), strict=True))

    def merged(self) -> list[tuple[int, int]]:
        """The rows whose partial results are merged."""
        seats = self.made.schedule.merge_rows.tolist()
        if self.made.queries is None:
            return [(seat, 0) for seat in seats]
        return list(zip(seats, self.made.queries.merge_number.tolist(), strict=True))

    def seen(self, row: tuple[int, int], lengths: dict[int, int]) -> int:
        """Tokens that a row sees."""
        return max(lengths[row[0]] - self.queries(row[0]) + row[1] + 1, 0)

    def owners(self, seat: int) -> list[tuple[int, int, int]]:
        """(owner, first, end) of the tokens that a seat shares."""
        claims = self.made.claims_of(seat).tolist()
        return [(owner, first * self.page_size, end * self.page_size) for owner, first, end in claims]


def plan_of(seed: int) -> Plan:
    """A plan for random requests that share with one another, in random seats. Half of the plans have requests of
    several query rows.
    """
    source = random.Random(seed)
    page_size, count = source.choice([1, 2, 8, 16, 32, 64, 128]), source.randint(1, 14)
    shape = Shape(*source.choice(HEADS), 64, page_size=page_size)
    longest = source.choice([40, 300, 1500])
    lengths, above, shared = [], [], []
    for request in range(count):
        other = source.randrange(request) if request and source.random() < 0.8 else -1
        most = lengths[other] if other >= 0 else 0
        begin = source.choice([most, source.randint(0, most)]) if other >= 0 else 0
        above.append(other)
        shared.append(begin)
        lengths.append(begin + source.choice([0, 1, page_size, source.randint(0, longest)]))
    seats = source.sample(range(count + 3), count) if source.random() < 0.5 else [*range(count)]
    length, places = frozen(np.array(lengths)), (frozen(np.array(seats)), frozen(np.zeros(count)), page_size)
    if seed % 2:
        queries = frozen(np.array([source.choice([1, 2, 5, source.randint(1, 90)]) for _ in lengths]))
        whole = np.array(shared) // page_size * page_size
        made = of_queries(queries, length, np.where(whole > 0, above, -1), whole, *places)
    else:
        made = of_requests(length, *claimed_sharing(length, above, shared, page_size), *places)
    parts, topology, requests = made
    tree = Tree(*parts, topology, requests)
    problem = Problem(tree, shape, TARGET)
    tile = batch_config(shape, TARGET)
    lowered = lower_requests(source.choice(STRATEGIES).plan(problem), problem, ItemRoom(tile, page_size, RESERVE))
    return Plan(tree, lowered, page_size, tile.tokens)


def lengths_of(plan: Plan, source: random.Random) -> dict[int, int]:
    """Lengths by seat that leave requests with what they share, and within what items have room for."""
    made, found = plan.made, {}
    assert plan.tree.requests is not None
    seats = plan.tree.requests.seat.tolist()
    least = dict.fromkeys(seats, 0)
    for seat in seats:
        for owner, _, end in plan.owners(seat):
            least[seat], least[owner] = max(least[seat], end), max(least[owner], end)
    for seat in seats:
        low, most = least[seat], int(made.most[seat])
        low = max(low, int(made.least[seat]))
        tile = min(most, low + plan.tokens * source.randint(0, 6))
        near = min(max(low, tile + source.choice([-1, 0, 1])), most)
        found[seat] = source.choice([low, most, near, source.randint(low, most)])
    return found


def entries(plan: Plan, item: int) -> list[list[int]]:
    """The entries of an item."""
    listed: list[list[int]] = plan.made.entries[
        plan.made.entry_indptr[item] : plan.made.entry_indptr[item + 1]
    ].tolist()
    return listed


def clamped(plan: Plan, entry: list[int], lengths: dict[int, int], window_begin: int) -> tuple[int, int]:
    """The tokens that an entry stands for now."""
    seat, first, end, _, _ = entry
    length = lengths.get(seat, 0)
    end = max(length + end, 0) if end <= 0 else min(end, length)
    if first < 0:
        first = max(length + first, 0)
        assert end - first <= 1
        return first, end
    unit = max(plan.tokens, plan.page_size)
    first += max(window_begin - first, 0) // unit * unit
    return first, max(end, first)


def check_coverage(plan: Plan, lengths: dict[int, int], window: int) -> None:
    """Each row sees each of its tokens once, where its owner has it; what is before its window at most once."""
    seen: dict[tuple[int, int], Counter[tuple[int, int]]] = {row: Counter() for row in plan.rows}
    for number, (row0, count, *_) in enumerate(plan.made.schedule.items.tolist()):
        rows = plan.listed(row0, row0 + count)
        begin = max(min(plan.seen(row, lengths) for row in rows) - 1 - window, 0) if window >= 0 else 0
        for entry in entries(plan, number):
            first, end = clamped(plan, entry, lengths, begin)
            for row in rows[entry[3] : entry[4]]:
                seen[row].update((entry[0], position) for position in range(first, end))
    for row in plan.rows:
        seat, length = row[0], plan.seen(row, lengths)
        owner = dict.fromkeys(range(length), seat)
        for other, first, end in plan.owners(seat):
            owner.update(dict.fromkeys(range(first, min(end, length)), other))
        begin = max(length - 1 - window, 0) if window >= 0 else 0
        expected = {(owner[position], position) for position in range(length)}
        assert set(seen[row]) <= expected, f"row {row} of {length} reads what is not its own"
        assert max(seen[row].values(), default=1) == 1, f"row {row} reads a token twice"
        assert {token for token in expected if token[1] >= begin} <= set(seen[row]), f"row {row} of {length}"


def check_rooms(plan: Plan, lengths: dict[int, int], window_begin: int) -> None:
    """What items read fits into the rooms that they have, which do not overlap."""
    made, items = plan.made, plan.made.schedule.items
    packed = plan.tokens // plan.run_tokens
    tile_ends = [*items[1:, 2].tolist(), made.tile_room]
    run_ends = [*items[1:, 4].tolist(), made.run_room]
    for number, line in enumerate(items.tolist()):
        now = [clamped(plan, entry, lengths, window_begin) for entry in entries(plan, number)]
        tiles = sum((end - first) // plan.tokens for first, end in now)
        runs = sum(math.ceil((end - first) % plan.tokens / plan.run_tokens) for first, end in now)
        assert line[2] + tiles <= tile_ends[number], f"item {number}: {tiles} tiles at {lengths}"
        assert line[4] + math.ceil(runs / packed) * packed <= run_ends[number], f"item {number}: {runs} runs"


@given(st.integers(0, 2**32))
@examples(120)
def test_every_row_sees_every_token_once_at_any_lengths(seed: int) -> None:
    plan, source = plan_of(seed), random.Random(seed + 1)
    assert plan.tree.requests is not None
    planned = dict(zip(plan.tree.requests.seat.tolist(), plan.tree.requests.length.tolist(), strict=True))
    check_coverage(plan, planned, -1)
    for _ in range(3):
        check_coverage(plan, lengths_of(plan, source), source.choice([-1, -1, 0, 37, 500]))


@given(st.integers(0, 2**32))
@examples(300)
def test_rooms_hold_at_any_lengths(seed: int) -> None:
    """Also at lengths below what is shared, and of seats that others have taken: items read these all the same."""
    plan, source = plan_of(seed), random.Random(seed + 2)
    most = dict(enumerate(plan.made.most.tolist()))
    check_rooms(plan, most, 0)
    for _ in range(4):
        lengths = {seat: source.choice([0, tokens, source.randint(0, tokens)]) for seat, tokens in most.items()}
        check_rooms(plan, lengths, 0)
        check_rooms(plan, lengths, source.randint(0, max(most.values())))
        close = {seat: max(0, tokens - source.randint(0, plan.tokens)) for seat, tokens in most.items()}
        check_rooms(plan, close, source.choice([0, source.randint(0, max(most.values()))]))


@given(st.integers(0, 2**32))
@examples(300)
def test_entries_begin_at_pages_and_one_of_each_row_is_open(seed: int) -> None:
    plan = plan_of(seed)
    made, opened = plan.made, Counter[int]()
    at_page = made.entries[:, 1] >= 0
    assert not (made.entries[at_page, 1] % plan.page_size).any()
    for number, (row0, count, *_) in enumerate(made.schedule.items.tolist()):
        rows = plan.listed(row0, row0 + count)
        for seat, first, end, lo, hi in entries(plan, number):
            assert 0 <= lo < hi <= count
            if end <= 0:
                assert {row[0] for row in rows[lo:hi]} == {seat}, "an open entry is its own rows'"
                assert rows[hi - 1][1] == plan.queries(seat) - 1 or hi == count, "and that of all rows behind"
                assert first >= 0 or end == first + 1
            else:
                assert end % plan.page_size == 0
                assert first <= end
            if end <= 0 and rows[lo][1] == plan.queries(seat) - 1 + end:  # ends with the first row's own token
                opened[rows[lo]] += 1
    assert opened == Counter(plan.rows)


@given(st.integers(0, 2**32))
@examples(300)
def test_each_row_is_written_once(seed: int) -> None:
    """By one final item, or by a merge of the slots that its items fill."""
    plan = plan_of(seed)
    schedule = plan.made.schedule
    final, slots = Counter[tuple[int, int]](), dict[tuple[int, int], list[int]]()
    for row0, count, _, tiles, _, runs, partial0, _ in schedule.items.tolist():
        assert tiles == runs == 0
        for index, row in enumerate(plan.listed(row0, row0 + count)):
            if partial0 < 0:
                final[row] += 1
            else:
                slots.setdefault(row, []).append(partial0 + index)
    merged = {
        row: schedule.merge_partials[schedule.merge_indptr[j] : schedule.merge_indptr[j + 1]].tolist()
        for j, row in enumerate(plan.merged())
    }
    assert len(merged) == len(schedule.merge_rows)
    for rows in (plan.listed(0, len(schedule.rows)), plan.merged()):  # a request's are neighbours, and in order
        assert all(b[1] > a[1] for a, b in itertools.pairwise(rows) if a[0] == b[0])
        assert sum(a[0] != b[0] for a, b in itertools.pairwise(rows)) == max(len({seat for seat, _ in rows}) - 1, 0)
    assert {row: sorted(own) for row, own in slots.items()} == {row: sorted(own) for row, own in merged.items()}
    used = [slot for own in slots.values() for slot in own]
    assert len(used) == len(set(used))
    assert final + Counter(merged.keys()) == Counter(plan.rows)


@pytest.mark.full
@given(st.integers(0, 2**32))
@examples(3000)
def test_the_law_at_length(seed: int) -> None:
    plan, source = plan_of(seed), random.Random(seed)
    lengths = lengths_of(plan, source)
    check_coverage(plan, lengths, source.choice([-1, 0, 37, 500]))
    most = dict(enumerate(plan.made.most.tolist()))
    check_rooms(plan, most, 0)
    check_rooms(plan, {seat: source.randint(0, tokens) for seat, tokens in most.items()}, source.randint(0, 1000))


def test_the_law_sees_what_is_wrong() -> None:
    """An entry that ends a page early, begins late, is open or has too little room."""
    plan = next(plan for plan in map(plan_of, range(0, 100, 2)) if (plan.made.entries[:, 2] > plan.page_size).any())
    entry = int((plan.made.entries[:, 2] > plan.page_size).argmax())
    lengths = dict(enumerate(plan.made.most.tolist()))
    assert plan.tree.requests is not None
    lengths = {seat: lengths[seat] for seat in plan.tree.requests.seat.tolist()}
    check_coverage(plan, lengths, -1)
    good = plan.made.entries
    for column, change in ((2, -plan.page_size), (1, plan.page_size), (2, plan.page_size)):
        wrong = np.array(good)
        wrong[entry, column] += change
        object.__setattr__(plan.made, "entries", wrong)
        with pytest.raises(AssertionError):
            check_coverage(plan, lengths, -1)
    object.__setattr__(plan.made, "entries", good)
    check_rooms(plan, lengths, 0)
    last = plan.made.schedule.items[-1]
    object.__setattr__(plan.made, "tile_room", int(last[2]))
    object.__setattr__(plan.made, "run_room", int(last[4]))
    with pytest.raises(AssertionError):
        check_rooms(plan, lengths, 0)
