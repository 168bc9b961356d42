"""Compares predicted timelines of thread blocks with measured ones, for six plans.

    python benchmarks/timelines.py [--data FOLDER] [--json FILE] [--html FOLDER]

Three trees of FastTree's table (small, large, and bound by arithmetic), a ragged batch of a recorded trace (with
--data, or TREEGEN_DATA), a speculative tree, and a batch that shares nothing; fp16, head dim 128, on the current CUDA
device and its target. Plans are those that `auto` chooses. Kernels that record are checked against the float64 oracle
as the usual ones are. Times are medians of 15 calls on a cold L2 (treegen.tuning.timing). The file of --json holds the
explanations of all plans, with both timelines; the folder of --html gets their pages.

The last table has a line for each plan. `block error` is the predicted time of a thread block over the measured one,
less 1: the least and the largest of the classes of work items, and the mean of the absolute errors of all blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

import treegen
from treegen.backends.devices import current_target
from treegen.cli.arguments import print_table
from treegen.report.explain import Explanation, explain
from treegen.report.timelines import PlanTimeline
from treegen.text_files import save_text
from treegen.tuning.measured_timeline import record
from treegen.workloads.batch_pages import BatchPages, BatchSizes
from treegen.workloads.generate import in_shuffled_pages
from treegen.workloads.trace_batches import trace_batches

FASTTREE = ("1,2,64/8,256,32", "1,4,16,64,256,1024/256,8,256,64,32,256", "1,1024/2048,32")


def cases(data: Path | None) -> Iterator[tuple[str, treegen.Tree, int]]:
    """Yields the name, the tree and the page size of each case. data: the folder of recorded traces."""
    yield from ((f"FastTree {text}", treegen.Tree.parse(text), 1) for text in FASTTREE)
    if data is not None:
        batch = trace_batches(data, 0)[1]
        pages = BatchPages(batch, BatchSizes.of(batch, ()))
        lengths = pages.lengths[pages.rows]
        tree = treegen.Tree.from_block_table(pages.table[pages.rows], lengths, pages.page_size)
        yield f"{batch.name}: {len(lengths)} of {lengths.min()} to {lengths.max()}", tree, 16
    drafts = [(0,) * depth for depth in range(1, 5)] + [(rank,) for rank in range(1, 10)]
    drafts += [(0, rank) for rank in range(1, 6)] + [(1, rank) for rank in range(3)]
    yield "21 drafts after 4096 tokens", treegen.Tree.from_token_tree(drafts, 4096), 1
    unshared = treegen.Tree.from_levels([64], [4096])
    yield "64 requests of 4096 in pages", in_shuffled_pages(unshared, 16), 16


def total_row(name: str, found: PlanTimeline, estimate_us: float) -> list[str]:
    """Makes the row of a plan in the table of plans."""
    recording = found.recording
    assert recording is not None
    both = found.predicted, recording.timeline
    lead = (min((each.start_us for each in timeline.launches), default=0.0) for timeline in both)
    cells = [f"{estimate_us:.1f}", f"{recording.plain_us:.1f}", _percent(estimate_us / recording.plain_us - 1)]
    cells += [f"{recording.recorded_us:.1f}", f"{100 * (recording.recorded_us / recording.plain_us - 1):+.1f} %"]
    cells += [*block_errors(found), " / ".join(f"{us:.1f}" for us in lead)]
    cells += [" / ".join(f"{timeline.tail_us:.1f}" for timeline in both)]
    return [name, *cells, " / ".join(f"{timeline.imbalance:.2f}" for timeline in both)]


def block_errors(found: PlanTimeline) -> tuple[str, str]:
    """Returns the range of the errors of classes of work items, and the mean absolute error of their blocks."""
    known = [(each.error, each.items) for each in found.classes if each.error is not None]
    if not known:
        return "-", "-"
    errors = [error for error, _ in known]
    mean = sum(abs(error) * items for error, items in known) / sum(items for _, items in known)
    least, most = _percent(min(errors)), _percent(max(errors))
    return (least if least == most else f"{least} to {most}"), f"{100 * mean:.0f} %"


def _percent(part: float) -> str:
    return f"{100 * part:+.0f} %"


def launch_rows(found: PlanTimeline) -> Iterator[list[str]]:
    """Yields a row for each launch of a plan: start and end, and blocks that an SM holds, predicted and measured."""
    assert found.recording is not None
    both = found.predicted, found.recording.timeline
    slots = " / ".join(str(timeline.slots) for timeline in both)
    for launches in zip(*(timeline.launches for timeline in both), strict=True):
        spans = (f"{each.start_us:.1f} to {each.end_us:.1f}" for each in launches)
        yield ["", launches[0].name, *spans, slots]


def class_rows(found: PlanTimeline) -> Iterator[list[str]]:
    """Yields a row for each class of work."""
    for each in found.classes:
        measured = "-" if each.measured_us is None else f"{each.measured_us:.2f}"
        error = "-" if each.error is None else f"{100 * each.error:+.0f} %"
        yield ["", each.name, str(each.items), f"{each.predicted_us:.2f}", measured, error]


def report(explanations: Sequence[tuple[str, Explanation]]) -> None:
    """Prints three tables: classes of work, launches, and plans, which come last."""
    titles = ["plan", "estimate us", "usual us", "error", "recording us", "overhead", "block error", "mean"]
    plans = [[*titles, "start us", "tail us", "imbalance"]]
    launches = [["plan", "launch", "predicted us", "measured us", "slots"]]
    classes = [["plan", "class", "blocks", "predicted us", "measured us", "error"]]
    clocks = set()
    for name, told in explanations:
        (entry,) = told.entries
        assert entry.timeline.recording is not None
        clocks.add(f"{entry.timeline.recording.resolution_ns:.0f} ns")
        plans.append(total_row(name, entry.timeline, entry.estimate.time_us))
        launches += [[f"{name}: {entry.strategy}", "", "", "", ""], *launch_rows(entry.timeline)]
        classes += [[name, "", "", "", "", ""], *class_rows(entry.timeline)]
    for rows in (classes, launches, plans):
        print_table(rows)
        print()
    print(f"start, tail, imbalance and slots: predicted / measured; resolution of the clock: {', '.join(clocks)}")


def main() -> None:
    """Measures all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("TREEGEN_DATA"), help="folder of recorded traces")
    parser.add_argument("--json", type=Path, help="write the explanations to this file")
    parser.add_argument("--html", type=Path, help="write a page of each plan to this folder")
    given = parser.parse_args()
    explanations = []
    for name, tree, page_size in cases(None if given.data is None else Path(given.data)):
        begun = perf_counter()
        shape = treegen.Shape(32, 8, 128, dtype="fp16", page_size=page_size)
        explanations.append((name, explain(tree, ("auto",), shape, current_target(), recorder=record)))
        print(f"{name}: {perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
    if given.html is not None:
        given.html.mkdir(parents=True, exist_ok=True)
        for number, (name, told) in enumerate(explanations):
            save_text(given.html / f"timeline{number}.html", told.to_html(name))
    if given.json is not None:
        objects = {name: json.loads(told.to_json()) for name, told in explanations}
        save_text(given.json, json.dumps(objects, separators=(",", ":")) + "\n")
    report(explanations)


if __name__ == "__main__":
    main()
