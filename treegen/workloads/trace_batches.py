"""Batches of recorded traces: a server that runs the requests of a trace in their order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treegen.ir.errors import FormatError
from treegen.text_files import parsed_json, read_text
from treegen.workloads.served_batch import PAGE_SIZE, BatchCourse, BatchRequest, ServedBatch, whole_pages

TRACE_BLOCK = 512
"""Tokens of a block of the recorded traces."""


def trace_batches(data: Path, seed: int) -> tuple[ServedBatch, ...]:
    """Makes the family `traces` from the recorded traces in the folder `data`.

    Raises:
        FormatError: A trace file cannot be read.
    """
    conversation, synthetic = (_recorded(data / f"mooncake_{name}.json") for name in ("conversation", "synthetic"))
    return (
        _trace("trace-32", conversation, 32, 100, seed),
        _trace("trace-128", conversation, 128, 300, seed),
        _trace("trace-256", conversation, 256, 0, seed),
        _trace("trace-synthetic-64", synthetic, 64, 200, seed),
    )


def _recorded(path: Path) -> list[dict[str, Any]]:
    """Reads the requests of a recorded trace. Raises FormatError."""
    requests = parsed_json(read_text(path), path)
    try:
        if all(entry["len"] > 0 and entry["out"] > 0 and isinstance(entry["blocks"], list) for entry in requests):
            return list(requests)
    except (TypeError, KeyError) as cause:
        reason = f"is not a trace of requests ({cause})"
        raise FormatError("path", str(path), reason, "name a recorded trace") from cause
    raise FormatError("path", str(path), "has requests without tokens", "name a recorded trace")


def _trace(name: str, recorded: list[dict[str, Any]], width: int, first: int, seed: int) -> ServedBatch:
    """Runs `width` requests of a trace at a time, from request `first` on. Each decodes its recorded number of tokens.

    An arriving request shares leading blocks with the running request that has most of them in common.
    """
    source = np.random.default_rng((seed, 0, width))
    first = (first + 101 * seed) % len(recorded)
    order = recorded[first:] + recorded[:first]
    known: dict[int, dict[str, Any]] = {}

    def request(entry: dict[str, Any], running: dict[int, dict[str, Any]], done: int) -> BatchRequest:
        owner, shared = None, 0
        for number, other in running.items():
            common = _common(entry, other)
            if common > shared:
                owner, shared = number, common
        return BatchRequest(entry["len"] + 1 + done, max(1, entry["out"] - done), owner, shared)

    requests = []
    for number, entry in enumerate(order[:width]):
        requests.append(request(entry, known, int(source.integers(entry["out"]))))
        known[number] = entry

    def follow(course: BatchCourse) -> Sequence[BatchRequest]:
        running = {number: order[number % len(order)] for number in course.running}
        arrived = []
        for number in range(course.joined, course.joined + course.free()):
            entry = order[number % len(order)]
            arrived.append(request(entry, running, 0))
            running[number] = entry
        return arrived

    return ServedBatch(name, "traces", PAGE_SIZE, tuple(requests), seed, follow)


def _common(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Counts the leading tokens that two recorded requests have in common, in whole pages."""
    blocks = 0
    for a, b in zip(one["blocks"], other["blocks"], strict=False):
        if a != b:
            break
        blocks += 1
    tokens = min(blocks * TRACE_BLOCK, one["len"], other["len"])
    return int(whole_pages(tokens))
