"""The groups of a plan as data for drawings: where they lie on the tree, the largest ones, and their work items."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Longs, distinct, offsets
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.tree import Tree
from treegen.report.page.drawn_marks import Boxes, fold
from treegen.schedule.passes.fuse_merge import with_fused_merge

MOST_GROUP_MARKS = 5_000
"""The most marks of a plan's groups."""
COLOURS = 7
"""Colours of groups; the number after the last one is the colour of marks that stand for several."""
_MOST_BESIDE = 64  # left neighbours of a mark that its colour avoids
MOST_SHOWN = 200, 1_500
"""The most groups that a page lists, and the most segments, rank intervals and items that they have together."""


def group_marks(plan: Plan, tree: Tree) -> dict[str, Any]:
    """Returns where groups read KV for rows that see it, for JSON forms.

    By the coverage law the boxes of all groups cover the tree's drawing once. The columns have an entry for each mark:

    - start, stop: tokens, counted from the root;
    - lo, hi: rows, in depth-first order;
    - group: the first group of the mark;
    - count: the number of groups that it stands for, 1 in plans that are not too large to draw;
    - colour: a number below 7, which boxes of other groups that touch it rarely have; 7 for marks of several groups.
    """
    segment, lo, hi = plan.rank_intervals(plan.segment_group, plan.seen_lo, plan.seen_hi)
    above = tree.topology.prefix[plan.node[segment]].astype(np.int64)
    lo, hi = (ranks.astype(np.int64) for ranks in (lo, hi))
    folding = fold(Boxes(above + plan.start[segment], above + plan.stop[segment], lo, hi), MOST_GROUP_MARKS)
    group = plan.segment_group[segment].astype(np.int64)
    pairs = distinct(folding.mark * max(len(plan), 1) + group)
    columns = {
        **folding.bounds._asdict(),
        "group": group[folding.first],
        "count": np.bincount(pairs // max(len(plan), 1), minlength=len(folding.first)),
    }
    marks = {name: column.tolist() for name, column in columns.items()}
    return {**marks, "colour": _colours(marks)}


def _colours(marks: dict[str, list[int]]) -> list[int]:
    """Returns a colour for each mark: the same for all marks of a group, another one than those of earlier neighbours.

    Marks are met from the left to the right, and downward. A group that is met again keeps its colour.
    """
    columns = list(zip(*(marks[name] for name in ("start", "stop", "lo", "hi", "group", "count")), strict=True))
    of_group: dict[int, int] = {}
    ending: dict[int, list[tuple[int, int, int]]] = {}  # by stop: (lo, hi, colour), by rising lo
    colours = [COLOURS] * len(columns)
    above = 0, 0, COLOURS  # start, hi and colour of the mark before
    for index in sorted(range(len(columns)), key=lambda index: (columns[index][0], columns[index][2])):
        start, stop, lo, hi, group, count = columns[index]
        if count == 1:
            if group not in of_group:
                beside = ending.get(start, [])
                beside = beside[: bisect_left(beside, (hi, 0, 0))][-_MOST_BESIDE:]
                touching = {colour for _, end, colour in beside if end > lo}
                if above[:2] == (start, lo):
                    touching.add(above[2])
                turn = [(len(of_group) + step) % COLOURS for step in range(COLOURS)]
                of_group[group] = next((colour for colour in turn if colour not in touching), turn[0])
            colours[index] = of_group[group]
        above = start, hi, colours[index]
        insort(ending.setdefault(stop, []), (lo, hi, colours[index]))
    return colours


def shown_groups(plan: Plan, schedule: Schedule) -> list[int]:
    """Returns the groups that a page lists: those with the most rows times tokens, the largest first.

    Groups of very many segments, rank intervals or items are left out.
    """
    parts = np.diff(plan.row_indptr) + np.diff(plan.segment_indptr)
    parts = parts + np.bincount(schedule.column("group"), minlength=len(plan))
    work = plan.group_rows.astype(np.int64) * plan.group_tokens
    order = np.argsort(-work, kind="stable")
    order = order[parts[order] <= MOST_SHOWN[1]][: MOST_SHOWN[0]]
    count = int(np.searchsorted(np.cumsum(parts[order]), MOST_SHOWN[1], side="right"))
    shown: list[int] = order[:count].tolist()
    return shown


def items_object(schedule: Schedule, groups: list[int] | None = None) -> dict[str, Any]:
    """Returns the work items of groups, for JSON forms: a column for each field, with an entry for each item.

    - group: its group;
    - config: its kernel config, a place in `distinct_configs`;
    - rows: its rows;
    - full_tiles, packed_tiles: its tiles of KV;
    - tokens: the tokens that these hold;
    - partial: its first partial slot; -1 where it writes final output.

    Args:
        schedule: The schedule.
        groups: The groups; by default all.
    """
    number = np.repeat(np.arange(len(schedule.configs)), np.diff(schedule.config_indptr))
    places = {config: place for place, config in enumerate(distinct_configs(schedule))}
    of_config = np.array([places[config] for config in schedule.configs], np.int64)
    kept = slice(None) if groups is None else np.flatnonzero(np.isin(schedule.column("group"), groups))
    columns: dict[str, npt.NDArray[Any]] = {
        "group": schedule.column("group"),
        "config": of_config[number],
        "rows": schedule.column("rows"),
        "full_tiles": schedule.column("tiles"),
        "packed_tiles": schedule.column("packed_tiles"),
        "tokens": _tokens(schedule, number),
        "partial": schedule.column("partial0"),
    }
    return {name: column[kept].tolist() for name, column in columns.items()}


def distinct_configs(schedule: Schedule) -> list[KernelConfig]:
    """Returns the kernel configs of a schedule, each once: launches of several rounds may have the same one."""
    return list(dict.fromkeys(schedule.configs))


def _tokens(schedule: Schedule, number: Longs) -> Longs:
    """Returns the tokens in the tiles of each item. number: that of its kernel config."""
    tile0, tiles, run0, packed = (
        schedule.column(name).astype(np.int64) for name in ("tile0", "tiles", "run0", "packed_tiles")
    )
    runs = packed * np.array([config.runs_per_tile for config in schedule.configs], np.int64)[number]
    tile_ends, run_ends = offsets(schedule.tiles[:, 1]), offsets(schedule.packed_runs[:, 1])
    tokens: Longs = tile_ends[tile0 + tiles] - tile_ends[tile0] + run_ends[run0 + runs] - run_ends[run0]
    return tokens


def merged_by(schedule: Schedule, *, fixed: bool = False) -> str:
    """Says in words who merges the partial results of a schedule; empty if there are none.

    fixed: whether its launches are those of a fixed capacity, in which no item waits for others.
    """
    if not schedule.num_partials:
        return ""
    if not fixed and with_fused_merge(schedule).has_fused_merge:
        return "final items of the same launch, which wait for them"
    ways = []
    if any(config.epilogue_merge for config in schedule.configs):
        ways.append("items of the last round, before they write")
    if launches := int((np.diff(schedule.merge_round_indptr) > 0).sum()):
        ways.append("a merge launch" if launches == 1 else f"{launches} merge launches")
    return " and ".join(ways)
