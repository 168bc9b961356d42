"""The coverage law: a row sees each token of its path in exactly one group, and no other token.

`verify` proves it for a plan. `verify_isolated` proves that no row shares a group with tokens that it does not see.
`verify_schedule` proves that a schedule writes each row's result exactly once.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Ints, Longs, distinct, offsets, ragged, ragged_ranges
from treegen.ir.errors import PlanError
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.tree import Tree


def verify(plan: Plan, tree: Tree) -> None:
    """Proves that a plan obeys the coverage law on a tree.

    The proof is exact, and does no work per token. A segment and the ranks that see it are a rectangle:

        rank 3   ┌──────┬─────────────┐
        rank 2   │  A   │      C      │
        rank 1   ├──────┼──────┬──────┤
        rank 0   │  B   │  D   │  E   │
                 └──────┴──────┴──────┘
        token    0      16     32     48

    Each node is cut at all borders of its rectangles, here at 16 and 32. On each of the resulting runs of tokens the
    rank intervals of the rectangles have to follow one another without a gap, from the first to the last rank that sees
    the run.

    Raises:
        PlanError: The plan breaks the law; the error names the group.
    """
    _check_bounds(plan, tree)
    group, node, start, stop, lo, hi = _rectangles(plan)
    spans = tree.topology.spans
    base = offsets(tree.tokens)
    # Token coordinates are counted over all nodes, so that one sorted list of cuts serves the whole forest.
    begin, end = base[node] + start, base[node] + stop
    span_begin, span_end = base[spans.node] + spans.start, base[spans.node] + spans.stop
    cuts = distinct(np.concatenate([begin, end, span_begin, span_end]))

    def on_runs(first: Longs, last: Longs) -> tuple[Longs, Longs]:
        from_run, to_run = np.searchsorted(cuts, first), np.searchsorted(cuts, last)
        return np.repeat(np.arange(len(first)), to_run - from_run), ragged_ranges(from_run, to_run - from_run)

    span_of, span_run = on_runs(span_begin, span_end)
    must_lo = np.zeros(len(cuts), np.int64)
    must_hi = np.zeros(len(cuts), np.int64)
    must_lo[span_run], must_hi[span_run] = spans.lo[span_of], spans.hi[span_of]

    rectangle, run = on_runs(begin, end)
    order = np.lexsort((lo[rectangle], run))
    rectangle, run = rectangle[order], run[order]
    expected = must_lo[run].copy()
    follows = np.flatnonzero(run[1:] == run[:-1]) + 1
    expected[follows] = hi[rectangle[follows - 1]]
    last = np.append(run[1:] != run[:-1], True)[: len(run)]

    _report(plan, group[rectangle], lo[rectangle] < expected, "sees pairs that are invisible or seen elsewhere too")
    _report(plan, group[rectangle], hi[rectangle] > must_hi[run], "sees pairs that are invisible")
    gap = (lo[rectangle] > expected) | (last & (hi[rectangle] < must_hi[run]))
    _report(plan, group[rectangle], gap, "leaves visible pairs beside it that no group sees")
    covered = np.zeros(len(cuts), bool)
    covered[run] = True
    uncovered = span_run[~covered[span_run]]
    if len(uncovered):
        place = int(cuts[uncovered.min()])
        owner = int(np.searchsorted(base, place, side="right")) - 1
        raise PlanError(
            f"plan {plan.strategy}", f"node {owner} token {place - base[owner]}", "is seen in no group", "add it"
        )


def verify_isolated(plan: Plan) -> None:
    """Raises PlanError, naming the group, unless all rows of every group see everything that the group reads."""
    _report(plan, plan.segment_group, plan.masked, "reads what some of its rows do not see")


def _check_bounds(plan: Plan, tree: Tree) -> None:
    outside = plan.node >= len(tree.tokens)
    _report(plan, plan.segment_group, outside, f"names a node outside 0..{len(tree.tokens) - 1}")
    _report(plan, plan.segment_group, plan.stop > tree.tokens[plan.node], "reads beyond the end of a node")
    _report(plan, plan.row_interval_group, plan.row_hi > tree.num_rows, f"has ranks beyond {tree.num_rows - 1}")


def _report(plan: Plan, owner: Longs, wrong: npt.NDArray[np.bool_], reason: str) -> None:
    if wrong.any():
        group = int(owner[wrong.argmax()])
        error = PlanError(f"group {group} of plan {plan.strategy}", str(plan.groups[group]), reason, "correct the pass")
        if sys.version_info >= (3, 11):
            error.add_note(str(plan))
        raise error


def _rectangles(plan: Plan) -> tuple[Longs, Longs, Longs, Longs, Longs, Longs]:
    """Returns (group, node, start, stop, rank lo, rank hi) of each seen segment, one for each of its rank intervals."""
    owner = plan.segment_group
    segment, lo, hi = plan.rank_intervals(owner, plan.seen_lo, plan.seen_hi)
    columns = (owner, plan.node, plan.start, plan.stop)
    group, node, start, stop = (column[segment].astype(np.int64) for column in columns)
    return group, node, start, stop, lo, hi


def verify_schedule(schedule: Schedule, num_rows: int) -> None:
    """Proves that a schedule writes each row of the output once, and neither loses nor mixes up a partial result.

    Items that are dealt to thread blocks are dealt once each. Then, round by round: an item writes empty partial slots;
    a merge reads partial slots that hold partials of its row, and leaves at most one of them full. In the last round,
    which alone has configs with epilogue_merge, their final items read partial slots that hold partials of their rows.
    At the end all partial slots are empty. Final items of a config with fused_merge read partial slots of earlier items
    of the config, which is the only one of its round.

    Raises:
        PlanError: The schedule breaks one of these rules.
    """
    _check_work(schedule)
    rows = _rows_of_items(schedule)
    _check_written_rows(schedule, rows, num_rows)
    _check_slots(schedule, rows)
    _check_configs(schedule, rows)
    _check_rounds(schedule, rows)


class _ItemRows(NamedTuple):
    """One entry for each row of each item.

    Attributes:
        item: The item.
        entry: The entry of the row table.
        row: The row in the caller's order.
        partial: Whether the item writes a partial result.
        slot: The partial slot for this result.
    """

    item: Longs
    entry: Longs
    row: Ints
    partial: npt.NDArray[np.bool_]
    slot: Longs


def _rows_of_items(schedule: Schedule) -> _ItemRows:
    counts, first, partial0 = (schedule.column(name).astype(np.int64) for name in ("rows", "row0", "partial0"))
    item, position = ragged(counts)
    entry = first[item] + position
    return _ItemRows(item, entry, schedule.rows[entry], partial0[item] >= 0, partial0[item] + position)


def _check_work(schedule: Schedule) -> None:
    """Raises PlanError unless each item that is dealt to thread blocks is dealt once."""
    if len(schedule.work_indptr) > 1 and len(schedule.items):
        complete = len(schedule.work) > 0 and len(schedule.work) % len(schedule.items) == 0
        if not complete or not np.array_equal(np.sort(schedule.work), np.arange(len(schedule.work))):
            raise PlanError("work", f"{len(schedule.work)} entries", "do not name all work once", "deal every item")


def _check_written_rows(schedule: Schedule, rows: _ItemRows, num_rows: int) -> None:
    """Raises PlanError unless final items and merges together write each row of the output once."""
    highest = max(int(rows.row.max(initial=-1)), int(schedule.merge_rows.max(initial=-1)))
    if highest >= num_rows:
        raise PlanError(f"row {highest}", "written", f"is beyond the last row, {num_rows - 1}", "correct the schedule")
    written = np.bincount(rows.row[~rows.partial], minlength=num_rows)
    final = schedule.merge_rows >= 0
    written += np.bincount(schedule.merge_rows[final], minlength=num_rows)
    wrong = np.flatnonzero(written != 1)
    if len(wrong):
        count = int(written[wrong[0]])
        raise PlanError(f"row {wrong[0]}", f"{count} writes", "has to be written exactly once", "correct the schedule")


def _check_slots(schedule: Schedule, rows: _ItemRows) -> None:
    """Raises PlanError unless partial items write each partial slot once, and merge lists name no negative slot."""
    slot = rows.slot[rows.partial]
    if (slot >= schedule.num_partials).any() or len(np.unique(slot)) != schedule.num_partials:
        reason = f"do not fill {schedule.num_partials} slots once"
        raise PlanError("partial0", f"{len(slot)} rows", reason, "renumber slots")
    if (schedule.merge_partials < 0).any():
        raise _wrong_merge()


def _check_configs(schedule: Schedule, rows: _ItemRows) -> None:
    """Checks that epilogue_merge is only in the last round, and fused_merge in the only config, final items last."""
    merging = np.array([config.epilogue_merge for config in schedule.configs], np.bool_)
    if merging[: schedule.round_indptr[-2:][0]].any():
        reason = "merge before the last round"
        fix = "let only configs of the last round merge"
        raise PlanError("configs", f"{merging.sum()} with epilogue_merge", reason, fix)
    partial_items = rows.partial[np.diff(rows.item, prepend=-1) > 0].astype(int)
    if schedule.has_fused_merge and (len(schedule.configs) > 1 or (np.diff(partial_items) > 0).any()):
        raise PlanError(
            "configs", "fused_merge", "has others, or final items before partial ones", "let final items be last"
        )


def _check_rounds(schedule: Schedule, rows: _ItemRows) -> None:
    """Follows the contents of the partial slots through all rounds.

    Raises PlanError unless merges and epilogues read partials of their own rows, and all of them.
    """
    merging = np.array([config.epilogue_merge for config in schedule.configs], np.bool_)
    waits = schedule.has_fused_merge
    joining = ~rows.partial & (np.repeat(merging, np.diff(schedule.config_indptr))[rows.item] | waits)
    joined = rows.entry[joining]
    holds = np.full(schedule.num_partials, -1, np.int64)
    for round, (configs, merges) in enumerate(schedule.rounds):
        if round == schedule.num_rounds - 1 and not waits:
            _check_epilogues(schedule, joined, holds)
        launched = slice(schedule.config_indptr[configs.start], schedule.config_indptr[configs.stop])
        new = rows.partial & (rows.item >= launched.start) & (rows.item < launched.stop)
        holds[rows.slot[new]] = rows.row[new]
        if waits:
            _check_epilogues(schedule, joined, holds)
        _check_merges(schedule, merges, holds)
    if (holds >= 0).any():
        raise _wrong_merge()


def _check_merges(schedule: Schedule, merges: slice, holds: Longs) -> None:
    """Moves the contents of partial slots as the merges of one round do.

    Raises PlanError unless each merge reads partials of its row.
    """
    bounds = schedule.merge_indptr[merges.start : merges.stop + 1]
    read, target = schedule.merge_partials[bounds[0] : bounds[-1]], schedule.merge_rows[merges]
    lengths = np.diff(bounds)
    begins = np.minimum(bounds[:-1] - bounds[0], max(len(read) - 1, 0))
    owner = np.where(target >= 0, target, holds[read[begins]] if len(read) else -1)
    if len(np.unique(read)) != len(read) or not np.array_equal(holds[read], np.repeat(owner, lengths)):
        raise _wrong_merge()
    # A running result goes to a slot that its own merge reads: any other may hold a partial that is still needed.
    kept = np.flatnonzero(target < 0)
    running = -1 - target[kept].astype(np.int64)
    reader = np.full(schedule.num_partials, -1, np.int64)
    reader[read] = np.repeat(np.arange(len(lengths)), lengths)
    if (owner[kept] < 0).any() or (running >= schedule.num_partials).any() or (reader[running] != kept).any():
        raise _wrong_merge()
    holds[read] = -1
    holds[running] = owner[kept]


def _check_epilogues(schedule: Schedule, entries: Longs, holds: Longs) -> None:
    """Empties the partial slots that final items join into their entries of the row table.

    Raises PlanError unless these are all listed slots, each once, and they hold partials of the entries' rows.
    """
    read, lengths = schedule.epilogue_partials, np.zeros(len(entries), np.int64)
    if len(read):
        lengths = np.diff(schedule.epilogue_indptr)[entries].astype(np.int64)
        read = read[ragged_ranges(schedule.epilogue_indptr[entries], lengths)]
    complete = len(read) == len(np.unique(read)) == len(schedule.epilogue_partials) and (read >= 0).all()
    if not complete or not np.array_equal(holds[read], np.repeat(schedule.rows[entries], lengths)):
        reason = "do not name every row's own slots of earlier rounds once"
        raise PlanError("epilogue_partials", "lists", reason, "correct the lists by row entry")
    holds[read] = -1


def _wrong_merge() -> PlanError:
    return PlanError("merge_partials", "lists", "do not name every row's own slots once", "correct the merge lists")
