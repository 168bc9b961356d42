"""Steps of the step kernels, compared with what the page table says and with NumPy."""

from __future__ import annotations

from support.batch_events import Server
from support.batch_loops import Case
from support.step_tables import Step, step_of
from treegen.backends.request_program import RequestProgram
from treegen.ir.request_tables import NO_REQUEST
from treegen.runtime.batch_kernel import BatchKernel
from treegen.schedule.expand import INVALID, NEW, PLANNED, RunningRequests, expanded, states_of


def running(kernel: BatchKernel, server: Server) -> RunningRequests:
    """Who runs, as the host sees it, with epochs of the plan where it serves other requests than it was made for."""
    assert kernel.planned is not None
    pages, seats, known = server.pages, NO_REQUEST.repeat(server.rows, 1), kernel.planned.schedule.epoch
    count = min(server.rows, len(server.batch.row))
    seats[:, :count] = kernel.program.running.numpy()[:, :count]
    assert seats[0, :count].tolist() == server.batch.row[:count].tolist()
    changed = ((seats[1, :count] != server.batch.epoch[:count]) & (seats[0, :count] >= 0)).nonzero()[0]
    assert seats[1, changed].tolist() == known[changed].tolist()
    return RunningRequests(
        seats, pages.lengths(), pages.of_rows(), pages.num_pages, server.most_tokens, server.page_size,
        pages.queries(), server.query_rows,
    )  # fmt: skip


def visible(server: Server, row: int, length: int, window: int) -> tuple[set[int], list[int]]:
    """The positions that a query row of a row of the batch sees, where it sees `length` tokens without a window; and
    the slots of all these.
    """
    seat = {int(server.batch.row[seat]): seat for seat in server.of_seat}[row]
    pages, size = server.of_seat[seat], server.page_size
    begin = max(0, length - 1 - window) if window >= 0 else 0
    return set(range(begin, length)), [pages[token // size] * size + token % size for token in range(length)]


def check(kernel: BatchKernel, server: Server, case: Case, lengths: dict[int, int], *, positions: bool) -> Step:
    """Compares a step with what the page table says, and with NumPy."""
    program, config, window = kernel.program, kernel.form.config, case.window
    assert isinstance(program, RequestProgram)
    assert kernel.planned is not None
    requests = running(kernel, server)
    step = step_of(program, config, server.page_size, positions=positions)
    assert step.states == states_of(kernel.planned.schedule, requests).tolist()

    written, queries = step.written(), server.seen(lengths)
    assert set(written) == set(queries)
    for place, (row, length) in queries.items():
        seen, slots = visible(server, row, max(length, 0), window)
        found = written[place]
        assert len(found) == len(set(found)), f"query row {place} reads a token twice"
        if positions:
            assert {position for _, position in found} >= seen
            assert all(slots[position] == slot for slot, position in found)
        else:
            assert sorted(slot for slot, _ in found) == sorted(slots), f"query row {place} of {length}"
        if positions and length > 0:
            assert step.positions[place] == length - 1

    # A request is alone or planned; with an impossible one all are alone.
    alone = {row for item in step.alone for row in item.rows}
    least = PLANNED if INVALID in step.states else NEW
    rows = requests.seats[0]
    lone_rows = {int(rows[seat]) for seat, state in enumerate(step.states) if state >= least}
    assert alone == {place for place, (row, _) in queries.items() if row in lone_rows}
    for item in step.planned:
        assert not alone & set(item.rows)
        seen_by = list(zip(item.tokens, item.seats, strict=True))
        for other in {seat for seat in item.seats if requests.seats[1, seat] != kernel.planned.schedule.epoch[seat]}:
            # Another request than planned is in this seat, and the plan reads nothing for it.
            rest = {token for tokens, seat in seen_by if seat != other for token in tokens}
            assert {token for tokens, seat in seen_by if seat == other for token in tokens} <= rest

    # NumPy's schedule gives each row the same tokens, but for those before its window. What rows share is read once.
    schedule, _ = expanded(kernel.planned.schedule, config, requests, window, positions=positions)
    parts: dict[int, list[int]] = {}
    finals: dict[int, list[int]] = {}
    together = [schedule.rows[row0 : row0 + count].tolist() for row0, count, *_ in schedule.items.tolist()]
    if INVALID not in step.states:
        served = [item.rows for item in step.planned if max(item.rows, default=-1) >= 0]
        assert together[: len(served)] == served
    for row0, count, _, _, run0, packed_runs, slot, _ in schedule.items.tolist():
        runs = schedule.packed_runs[run0 : run0 + packed_runs].tolist()
        for number, row in enumerate(schedule.rows[row0 : row0 + count].tolist()):
            tokens = [s + i for s, n, lo, hi, *_ in runs if lo <= number < hi for i in range(n)]
            if row >= 0:
                (finals if slot < 0 else parts)[row if slot < 0 else slot + number] = tokens
    for number, row in enumerate(schedule.merge_rows.tolist()):
        slots = schedule.merge_partials[schedule.merge_indptr[number] : schedule.merge_indptr[number + 1]].tolist()
        assert row not in finals
        finals[row] = [token for slot in slots for token in parts[slot]]
    assert set(finals) == set(written)
    for place, (row, length) in queries.items():
        seen, slots = visible(server, row, max(length, 0), window)
        shown = {slots[position] for position in seen}
        assert len(finals[place]) == len(set(finals[place])), f"query row {place} reads a token twice"
        assert shown == shown & set(finals[place]) == shown & {slot for slot, _ in written[place]}
        assert positions or sorted(finals[place]) == sorted(slots)

    # Items write only to the room that they have.
    plan = kernel.planned.schedule.schedule
    count = len(plan.items)
    assert len(step.planned) == count
    tile_ends = [*plan.items[1:, 2].tolist(), kernel.planned.schedule.tile_room][:count]
    run_ends = [*plan.items[1:, 4].tolist(), kernel.planned.schedule.run_room][:count]
    for item, tile_end, block_end in zip(step.planned, tile_ends, run_ends, strict=True):
        assert item.tiles.stop <= tile_end
        assert item.packed_runs.stop <= block_end
    room = kernel.form.room
    for number, item in enumerate(step.alone):
        assert item.tiles.start == room.tiles + number * room.lone_tiles
        assert item.tiles.stop <= room.tiles + (number + 1) * room.lone_tiles
        assert item.packed_runs.stop <= room.packed_runs + (number + 1) * room.lone_runs
    return step
