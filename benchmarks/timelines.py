"""Compares predicted timelines of thread blocks with measured ones, for six plans.

    python benchmarks/timelines.py [--data FOLDER] [--json FILE]

Three trees of FastTree's table (small, large, and bound by arithmetic), a ragged batch of a recorded trace (with
--data, or TREEGEN_DATA), a speculative tree, and a batch that shares nothing; fp16, head dim 128, on the current CUDA
device and its target. Plans are those that `auto` chooses. Kernels that record are checked against the float64 oracle
as the usual ones are. Times are medians of 15 calls on a cold L2 (treegen.tuning.timing). The file of --json holds the
explanations of all plans, with both timelines.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

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
        yield f"{batch.name}: {len(lengths)} requests of {lengths.min()} to {lengths.max()} tokens", tree, 16
    drafts = [(0,) * depth for depth in range(1, 5)] + [(rank,) for rank in range(1, 10)]
    drafts += [(0, rank) for rank in range(1, 6)] + [(1, rank) for rank in range(3)]
    yield "speculative: 21 drafts after 4096 tokens", treegen.Tree.from_token_tree(drafts, 4096), 1
    unshared = treegen.Tree.from_levels([64], [4096])
    yield "unshared: 64 requests of 4096 tokens in pages", in_shuffled_pages(unshared, 16), 16


def total_row(name: str, found: PlanTimeline, estimate_us: float) -> list[str]:
    """Makes the row of a plan in the table of plans."""
    recording = found.recording
    assert recording is not None
    both = found.predicted, recording.timeline
    lead = (min((each.start_us for each in timeline.launches), default=0.0) for timeline in both)
    cells = [f"{estimate_us:.1f}", f"{recording.plain_us:.1f}", f"{recording.recorded_us:.1f}"]
    cells += [f"{100 * (recording.recorded_us / recording.plain_us - 1):+.1f} %"]
    cells += [f"{100 * (estimate_us / recording.plain_us - 1):+.0f} %", " / ".join(f"{us:.1f}" for us in lead)]
    cells += [" / ".join(f"{timeline.tail_us:.1f}" for timeline in both)]
    cells += [" / ".join(f"{timeline.imbalance:.2f}" for timeline in both)]
    cells += [" / ".join(str(timeline.slots) for timeline in both), f"{recording.resolution_ns:.0f} ns"]
    return [name, *cells]


def launch_rows(found: PlanTimeline) -> Iterator[list[str]]:
    """Yields a row for each launch of a plan: the predicted and the measured start and end."""
    assert found.recording is not None
    for one, other in zip(found.predicted.launches, found.recording.timeline.launches, strict=True):
        spans = (f"{each.start_us:.1f} to {each.end_us:.1f}" for each in (one, other))
        yield ["", one.name, *spans]


def class_rows(found: PlanTimeline) -> Iterator[list[str]]:
    """Yields a row for each class of work."""
    for each in found.classes:
        measured = "-" if each.measured_us is None else f"{each.measured_us:.2f}"
        error = "-" if each.error is None else f"{100 * each.error:+.0f} %"
        yield ["", each.name, str(each.items), f"{each.predicted_us:.2f}", measured, error]


def report(explanations: Sequence[tuple[str, Explanation]]) -> None:
    """Prints three tables: plans, their launches, and their classes of work."""
    titles = ["plan", "estimate us", "usual us", "recording us", "overhead", "error", "start us", "tail us"]
    plans = [[*titles, "imbalance", "slots", "clock"]]
    launches = [["plan", "launch", "predicted us", "measured us"]]
    classes = [["plan", "class", "blocks", "predicted us", "measured us", "error"]]
    for name, told in explanations:
        (entry,) = told.entries
        plans.append(total_row(name, entry.timeline, entry.estimate.time_us))
        launches += [[f"{name}: {entry.strategy}", "", "", ""], *launch_rows(entry.timeline)]
        classes += [[name, "", "", "", "", ""], *class_rows(entry.timeline)]
    for rows in (classes, launches, plans):
        print_table(rows)
        print()
    print("start, tail, imbalance and slots: predicted / measured")


def main() -> None:
    """Measures all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("TREEGEN_DATA"), help="folder of recorded traces")
    parser.add_argument("--json", type=Path, help="write the explanations to this file")
    given = parser.parse_args()
    explanations = []
    for name, tree, page_size in cases(None if given.data is None else Path(given.data)):
        shape = treegen.Shape(32, 8, 128, dtype="fp16", page_size=page_size)
        explanations.append((name, explain(tree, ("auto",), shape, current_target(), recorder=record)))
    if given.json is not None:
        objects = {name: json.loads(told.to_json()) for name, told in explanations}
        save_text(given.json, json.dumps(objects, separators=(",", ":")) + "\n")
    report(explanations)


if __name__ == "__main__":
    main()
