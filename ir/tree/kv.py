"""The places of nodes' keys and values in the cache, as runs of neighbouring slots.

A slot is a token's place in the cache: `page * page_size + offset in the page`. Any placement (contiguous, paged, one
slot per token) is a list of runs, and kernels read at the granularity of these runs.

    indptr    0                2        3  3        node v has the runs indptr[v]:indptr[v + 1]
              │     node 0     │ node 1 │           node 2 has no tokens
    start     16      64       80
    length    16      8        3
    slots     16..31  64..71   80..82
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import (
    INT32_MAX,
    Ints,
    IntsLike,
    Longs,
    check_total,
    frozen,
    int32_array,
    listed,
    number,
    offsets,
    positive_int,
    ragged_ranges,
)
from treegen.ir.errors import TreeError


@dataclass(frozen=True, slots=True, eq=False)
class KVRuns:
    """The KV slots of each node, as runs of neighbouring slots; immutable.

    Node v has the runs `indptr[v]:indptr[v + 1]`. Run i covers the slots `start[i]` to `start[i] + length[i] - 1`. A
    node's runs in order are its tokens in order. No run is empty, and no run continues the one before it in a node.

    Make one with `from_slots`, `from_pages`, `from_runs` or `contiguous`.
    """

    indptr: Ints
    start: Ints
    length: Ints

    @classmethod
    def contiguous(cls, tokens: IntsLike) -> KVRuns:
        """Makes the runs of nodes that are stored one after another from slot 0.

        Args:
            tokens: The tokens of each node.

        Raises:
            TreeError: A number is negative, or the tokens exceed 2^31 - 1 in all.
        """
        tokens = int32_array("tokens", tokens, low=0)
        check_total(tokens)
        ends = offsets(tokens)
        filled = tokens > 0
        return cls(frozen(offsets(filled)), frozen(ends[:-1][filled]), frozen(tokens[filled]))

    @classmethod
    def from_slots(cls, tokens: IntsLike, slots: Sequence[IntsLike]) -> KVRuns:
        """Makes runs of a list of slots for each node.

        Args:
            tokens: The tokens of each node.
            slots: For each node a sequence of slots, in token order.

        Raises:
            TreeError: A node has not one slot per token, or a slot is out of range.
        """
        tokens = int32_array("tokens", tokens, low=0)
        of_nodes = listed("kv", slots, "give one sequence of slots per node")
        high = INT32_MAX - 1
        checked = [int32_array(f"kv[{node}]", node_slots, low=0, high=high) for node, node_slots in enumerate(of_nodes)]
        _check_lengths("kv", tokens, [len(node_slots) for node_slots in checked])
        flat = np.concatenate([np.empty(0, np.int32), *checked]).astype(np.int64)
        return cls._compressed(flat, np.ones(len(flat), np.int64), offsets(tokens))

    @classmethod
    def from_pages(cls, tokens: IntsLike, pages: Sequence[IntsLike], page_size: int) -> KVRuns:
        """Makes runs of a list of pages for each node.

        Args:
            tokens: The tokens of each node.
            pages: For each node a sequence of page ids; token t is in page `pages[node][t // page_size]`.
            page_size: Tokens of a page.

        Raises:
            TreeError: A node has too few or too many pages, or a page is out of range.
        """
        page_size = positive_int("page_size", page_size, TreeError)
        tokens = int32_array("tokens", tokens, low=0)
        high = INT32_MAX // page_size - 1  # so that all slots are below 2^31 - 1
        of_nodes = listed("kv", pages, "give one sequence of pages per node")
        checked = [int32_array(f"kv[{node}]", node_pages, low=0, high=high) for node, node_pages in enumerate(of_nodes)]
        counts = -(-tokens // page_size)
        _check_lengths("kv", counts, [len(node_pages) for node_pages in checked])
        flat = np.concatenate([np.empty(0, np.int32), *checked])
        return cls.of_pages(flat, page_size, offsets(counts), counts * page_size - tokens)

    @classmethod
    def of_pages(
        cls, pages: npt.NDArray[Any], page_size: int, ends: Longs, missing: npt.NDArray[Any] | None = None
    ) -> KVRuns:
        """Makes runs of the page ids of all nodes, one node after another; unchecked.

        ends: `[nodes + 1]`; offsets of each node's pages. missing: the slots of its last page that each node does not
        have; None where all pages are full.
        """
        head = np.empty(len(pages) + 1, bool)
        np.not_equal(pages[1:] - pages[:-1], 1, out=head[1:-1])
        head[ends] = True
        first = head.nonzero()[0]
        indptr = ends if len(first) == len(head) else first.searchsorted(ends)
        length = first[1:] - first[:-1]
        length *= number(page_size)
        if missing is not None:
            partial = missing.nonzero()[0]
            length[indptr[partial + 1] - 1] -= missing[partial]
        return cls(frozen(indptr), frozen(pages.take(first[:-1]) * page_size), frozen(length))

    @classmethod
    def from_runs(cls, tokens: IntsLike, runs: Sequence[Sequence[tuple[int, int]]]) -> KVRuns:
        """Makes runs of a list of runs for each node.

        Args:
            tokens: The tokens of each node.
            runs: For each node a sequence of pairs (start, length), in token order.

        Raises:
            TreeError: A node's runs do not add up to its tokens, or a run is out of range.
        """
        tokens = int32_array("tokens", tokens, low=0)
        fix = "give (start, length) runs for every node, or slots to from_slots"
        of_nodes = [listed(f"kv[{node}]", given, fix) for node, given in enumerate(listed("kv", runs, fix))]
        pairs = [listed("kv's run", run, fix) for node_runs in of_nodes for run in node_runs]
        if not all(len(run) == 2 for run in pairs):
            raise TreeError("kv", pairs, "is not made of (start, length) runs", fix)
        counts = np.array([len(node_runs) for node_runs in of_nodes], np.int64)
        start = int32_array("kv's starts", [run[0] for run in pairs], low=0)
        length = int32_array("kv's lengths", [run[1] for run in pairs], low=1)
        beyond = np.flatnonzero(start.astype(np.int64) + length > INT32_MAX)
        if len(beyond):
            run = int(beyond[0])
            reason = "ends beyond slot 2^31 - 1"
            raise TreeError(f"kv's run {run}", (int(start[run]), int(length[run])), reason, "correct the run")
        node = np.repeat(np.arange(len(counts)), counts)
        totals = np.bincount(node, length, len(counts)).astype(np.int64)
        _check_lengths("kv", tokens, totals.tolist())
        return cls._compressed(start.astype(np.int64), length.astype(np.int64), offsets(counts))

    @classmethod
    def _compressed(cls, start: npt.NDArray[Any], length: npt.NDArray[Any], indptr: npt.NDArray[Any]) -> KVRuns:
        """Makes runs, joining each to the run before it in its node where it continues that.

        indptr: the offsets of each node's runs.
        """
        head = np.zeros(len(start) + 1, bool)
        head[indptr] = True
        head[1:-1] |= start[1:] != start[:-1] + length[:-1]
        first = np.flatnonzero(head[:-1])
        ends = offsets(length)
        return cls(
            frozen(np.searchsorted(first, indptr)),
            frozen(start[first]),
            frozen(np.diff(np.append(ends[first], ends[-1]))),
        )

    def check_fits(self, tokens: Ints) -> None:
        """Raises TreeError unless all runs lie within 2^31 - 1 slots and each node has one slot per token.

        Args:
            tokens: The tokens of each node.
        """
        for name, low in (("indptr", 0), ("start", 0), ("length", 1)):
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != np.int32:
                raise TreeError(f"kv.{name}", array, "is not an array of int32", "make it with KVRuns.from_runs")
            int32_array(f"kv.{name}", array, low=low)
        runs, indptr = len(self.start), self.indptr
        if (
            len(self.length) != runs
            or len(indptr) == 0
            or indptr[0]
            or indptr[-1] != runs
            or (np.diff(indptr) < 0).any()
        ):
            reason = f"does not divide {runs} starts and {len(self.length)} lengths among nodes"
            raise TreeError("kv.indptr", indptr.tolist(), reason, "make it with KVRuns.from_runs")
        if self.last_slot >= INT32_MAX:
            raise TreeError("kv", self.last_slot, "is a slot beyond 2^31 - 2", "correct the runs")
        ends = offsets(self.length)
        _check_lengths("kv", tokens, np.diff(ends[self.indptr]).tolist())

    def slots(self, node: int) -> Ints:
        """Returns the slots of a node's tokens, in token order.

        Args:
            node: The node.

        Returns:
            A new int32 array, which may be written to.
        """
        runs = slice(self.indptr[node], self.indptr[node + 1])
        return ragged_ranges(self.start[runs], self.length[runs]).astype(np.int32)

    def slots_at(self, node: npt.NDArray[Any], token: npt.NDArray[Any]) -> Longs:
        """Returns the slot of token number `token` of each node; unchecked."""
        ends = offsets(self.length)
        place = ends[self.indptr[node]] + token
        run = ends.searchsorted(place, "right") - 1
        slots: Longs = self.start[run] + place - ends[run]
        return slots

    def of_ranges(self, node: npt.NDArray[Any], start: npt.NDArray[Any], stop: npt.NDArray[Any]) -> KVRuns:
        """Returns the runs of new nodes, each the tokens `start:stop` of a node of this tree; unchecked.

        runs of a node      [ 16 ... 31 ][ 64 .. 71 ]
        its tokens            0 .... 15    16 .. 23
        tokens 8:20             [ 24 .. 31 ][ 64 .. 67 ]       cut at both ends
        """
        ends = offsets(self.length)
        begin = ends[self.indptr[node]] + start
        end = begin + stop - start
        first = ends.searchsorted(begin, "right") - 1
        counts = np.where(end > begin, ends.searchsorted(end) - first, 0)
        run = ragged_ranges(first, counts)
        from_token = np.maximum(begin.repeat(counts), ends[run])
        length = np.minimum(end.repeat(counts), ends[run + 1]) - from_token
        return KVRuns(frozen(offsets(counts)), frozen(self.start[run] + from_token - ends[run]), frozen(length))

    def extended(self, nodes: int, node: npt.NDArray[Any], slots: npt.NDArray[Any]) -> KVRuns:
        """Returns the runs with one more token for each entry of `node`, after the node's tokens; unchecked.

        nodes: the number of nodes afterwards. slots: the slots of the new tokens, whose order is kept.
        """
        before = np.repeat(np.arange(len(self.indptr) - 1), self.indptr[1:] - self.indptr[:-1])
        owner = np.concatenate([before, node])
        order = np.argsort(owner, kind="stable")
        start = np.concatenate([self.start, slots]).astype(np.int64)[order]
        length = np.append(self.length, np.ones(len(slots), np.int64))[order]
        return self._compressed(start, length, offsets(np.bincount(owner, minlength=nodes)))

    @property
    def last_slot(self) -> int:
        """The highest slot of all runs, -1 for none."""
        return int((self.start.astype(np.int64) + self.length).max(initial=0)) - 1


def _check_lengths(argument: str, expected: npt.NDArray[Any], found: list[int]) -> None:
    """Raises TreeError unless there is an entry for each node, of the expected length."""
    if len(found) != len(expected):
        raise TreeError(argument, f"{len(found)} entries", f"does not match {len(expected)} nodes", "give one per node")
    wrong = np.flatnonzero(expected != np.asarray(found, np.int64))
    if len(wrong):
        node = int(wrong[0])
        raise TreeError(
            f"{argument}[{node}]", f"{found[node]} entries", f"node {node} needs {expected[node]}", "give exactly these"
        )
