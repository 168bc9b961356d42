"""The array model of cost: how long policies' plans take, many at once, without making the plans.

It counts what `lower` would do with each plan and gives these counts to the same cost model, so its times are those of
the plans' accounts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from treegen.cost.launch_counts import FP32_BYTES, evened_turns
from treegen.ir.arrays import INT32_MAX, Ints, Longs, offsets, ragged, ragged_ranges
from treegen.ir.schedule import TileClass
from treegen.ir.shape import Shape
from treegen.schedule.pack_runs import MOST_SPREAD
from treegen.search.walks import Lines, Merging, Walks, highest
from treegen.strategies.cohort import Cohort
from treegen.strategies.groupings import fragments_of
from treegen.target.cost_terms import ITEMS, MERGES, facts_of
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.target.tile_config import BLOCK_TOKENS, lanes_of, rows_per_tile, tile_class, tile_work, wanted_class

Floats = npt.NDArray[np.float64]
MOST_PAIRS = 1 << 21
"""Pairs of a cohort and a span that it reads that are counted at a time."""
_MOST_CELLS = 1 << 18  # (line, rank) pairs that are counted at a time


class PolicyCosts:
    """Times of policies for one tree, shape and target; infinite, if asked for, where plans are not isolated. Made once
    per search.
    """

    def __init__(self, problem: Problem, *, isolated: bool = False) -> None:
        self.problem = problem
        self.tree, self.shape, self.target = tree, shape, target = problem
        self.facts = facts_of(target)
        spans = tree.topology.spans
        self.lo, self.hi, self.length = spans.lo.astype(np.int64), spans.hi.astype(np.int64), spans.lengths
        self.unique = int(self.length.sum())
        self.kv_bytes = self.unique * shape.kv_token_bytes
        heads = shape.num_qo_heads
        self.q_row = heads * shape.head_dim * shape.dtype_bytes
        self.partial_row = shape.partial_bytes
        self.final_row = heads * (shape.head_dim_v * shape.dtype_bytes + FP32_BYTES)
        self._isolated = isolated
        self._whole: dict[int, Walks] = {}
        self._classes = _classes_of(shape, target)

    @cached_property
    def rows(self) -> int:
        """Rows that see something."""
        return self.rows_in(self.lo, self.hi)

    def rows_in(self, lo: Longs, hi: Longs) -> int:
        """Rows in some of the intervals."""
        cells = self.tree.num_rows + 1
        return int((np.cumsum(np.bincount(lo, minlength=cells) - np.bincount(hi, minlength=cells)) > 0).sum())

    def time_us(self, policy: Cohort) -> float:
        """Estimated microseconds of a policy's plan: those of its account by the analytic model."""
        walks = self.walks(policy)
        return float(self.times_us(walks, self.lines_of([policy], walks))[0])

    def lines_of(self, policies: Sequence[Cohort], walks: Walks) -> Lines:
        """The tile class of the work items of every way of `walks`, which is one of its policy, and its split."""
        most_rows = highest(walks.rows, walks.line // walks.stages, walks.ways).tolist()
        numbers: dict[tuple[tuple[int, int] | None, int], int] = {}
        tile = [
            numbers.setdefault((policy.tile, rows), len(numbers))
            for policy, rows in zip(policies, most_rows, strict=True)
        ]
        classes = tuple(self._classes.of(wanted, rows) for wanted, rows in numbers)
        split = [policy.split or INT32_MAX for policy in policies]
        return Lines(classes, np.array(tile, np.int64), np.array(split, np.int64))

    def rows_of(self, policy: Cohort) -> int:
        """Query rows of a cohort."""
        return rows_per_tile(policy.head_rows, self.shape.group)

    def walks(self, policy: Cohort) -> Walks:
        """The cohorts of one policy, whatever its split and tile."""
        rows = self.rows_of(policy)
        if policy.apart is None and not policy.cut and policy.merge == "reduce":
            if rows not in self._whole:
                self._whole[rows] = self.whole_walks([rows])
            return self._whole[rows]
        cut = policy.cut_nodes(self.tree)
        walks = self.walks_below(rows, cut)
        return walks if policy.merge == "reduce" else self.staged(walks, cut, np.ones((1, len(cut)), bool))

    def whole_walks(self, rows: Sequence[int]) -> Walks:
        """A line of cohorts with their whole paths for every number of rows of a cohort."""
        lines, spans, height = len(rows), len(self.lo), np.array(rows)
        most = self.tree.num_rows // int(height.min()) + 1  # cohorts of a line
        first = self.lo // height[:, None]
        pair, step = ragged(((self.hi - 1) // height[:, None] - first + 1).ravel())
        of_line = np.arange(lines)[:, None] * most
        key = (first + of_line).ravel()[pair] + step
        pairs = np.bincount(key, minlength=lines * most)
        span = (pair % max(spans, 1))[_order(key, lines * most)]
        alive = np.flatnonzero(pairs)
        pairs = pairs[alive]
        line = alive // most
        start = (alive - line * most) * height[line]
        own = np.minimum(height[line], self.tree.num_rows - start)
        of = np.repeat(np.arange(len(alive)), pairs)
        tokens = _sums(of, self.length[span], len(alive))
        return Walks(lines, 1, True, line, own, start, tokens, np.zeros(len(alive), np.int64), of, span)

    def walks_below(self, rows: int, cut: Ints) -> Walks:
        """Cohorts of `rows` rows where paths are cut at these nodes."""
        top = np.append(0, self.tree.topology.preorder[cut].astype(np.int64) + 1)
        return self._walked(top[fragments_of(self.tree, cut)[self.tree.topology.spans.node]][None, :], rows)

    def cut_walks(self, rows: int, nodes: Ints, cuts: npt.NDArray[np.bool_]) -> Walks:
        """A line for every line of `cuts`: paths cut at those of few `nodes` that are set."""
        topology = self.tree.topology
        below = topology.preorder.astype(np.int64)[topology.spans.node]
        fragment = np.zeros((len(cuts), len(below)), np.int64)
        for index, node in enumerate(nodes.tolist()):
            top = int(topology.preorder[node])
            within = (below >= top) & (below < top + topology.subtree[node])
            np.maximum(fragment, np.where(cuts[:, index, None] & within, top + 1, 0), out=fragment)
        return self._walked(fragment, rows)

    def staged(self, walks: Walks, nodes: Ints, cuts: npt.NDArray[np.bool_]) -> Walks:
        """`walks`, a line for every line of `cuts`, as under "final" merge: at those of `nodes` that are set paths are
        cut, and cohorts below which none is go into the second stage.
        """
        topology = self.tree.topology
        order = np.argsort(topology.preorder[nodes])
        place, subtree = (values[nodes[order]].astype(np.int64) for values in (topology.preorder, topology.subtree))
        # The next cut node in depth-first order lies below a node, or no other one does.
        next_cut = np.full((len(cuts), len(nodes) + 1), INT32_MAX)
        next_cut[:, :-1] = np.where(cuts[:, order], place, INT32_MAX)
        next_cut = np.minimum.accumulate(next_cut[:, ::-1], axis=1)[:, ::-1]
        lowest = np.empty((len(cuts), len(nodes) + 1), bool)
        lowest[:, 0] = next_cut[:, 0] == INT32_MAX
        lowest[:, 1:] = next_cut[:, 1:] >= place + subtree
        return walks.staged(lowest[walks.line, np.searchsorted(place, walks.top)])

    def _walked(self, fragment: Longs, rows: int) -> Walks:
        """Walks of cohorts of `rows` rows within fragments; fragment: of every line and span 1 + the place in
        depth-first order of the node at its top, 0 where that is no cut node.
        """
        topology, lines, spans = self.tree.topology, len(fragment), max(len(self.lo), 1)
        flat = fragment.ravel()
        # The ranks of every span's fragment.
        node = np.append(0, topology.nodes_in_preorder)[flat]
        base = np.where(flat > 0, topology.rank_lo[node], 0).astype(np.int64)
        limit = np.where(flat > 0, topology.rank_hi[node], self.tree.num_rows).astype(np.int64)
        lo, hi = np.tile(self.lo, lines) - base, np.tile(self.hi, lines) - base
        first = lo // rows
        pair, step = ragged((hi - 1) // rows - first + 1)
        cohort = first[pair] + step
        per_fragment = self.tree.num_rows // rows + 1
        key = (pair // spans * (len(topology.depth) + 1) + flat[pair]) * per_fragment + cohort
        order = _order(key, lines * (len(topology.depth) + 1) * per_fragment)
        key, pair, cohort = key[order], pair[order], cohort[order]
        opening = np.append(True, key[1:] != key[:-1])[: len(key)]
        opens, of = np.flatnonzero(opening), np.cumsum(opening) - 1
        head, span = pair[opens], pair % spans
        start = base[head] + cohort[opens] * rows
        tokens = _sums(of, self.length[span], len(opens))
        own = np.minimum(start + rows, limit[head]) - start
        return Walks(lines, 1, not flat.any(), head // spans, own, start, tokens, flat[head], of, span)

    @cached_property
    def _runs(self) -> tuple[Longs, Longs] | None:
        """Where the KV runs of every span begin, and their lengths; None where each span is one run."""
        tree, spans = self.tree, self.tree.topology.spans
        ends = offsets(tree.kv.length)
        begin = offsets(tree.tokens)[spans.node] + spans.start
        end = begin + self.length
        first = np.searchsorted(ends, begin, side="right") - 1
        counts = np.searchsorted(ends, end) - first
        if (counts == 1).all():
            return None
        span = np.repeat(np.arange(len(begin)), counts)
        run = ragged_ranges(first, counts)
        return offsets(counts), np.minimum(end[span], ends[run + 1]) - np.maximum(begin[span], ends[run])

    def times_us(self, walks: Walks, lines: Lines) -> Floats:
        """Microseconds of the plans of every way of `walks`, by tile and split of `lines`."""
        count, stages = walks.lines, walks.stages
        tiles = np.array([self._classes.counts(tile) for tile in lines.classes], np.int64)[lines.tile]
        splits = lines.split
        kv_bytes: Longs | int = self.kv_bytes
        if stages > 1:
            tiles, splits = np.repeat(tiles, stages, axis=0), np.repeat(splits, stages)
            splits[1::2] = INT32_MAX
            kv_bytes = self.kv_bytes_of(walks)
        tokens, rows, flops, loaded, lanes = tiles.T
        parts = -(-walks.tokens // splits[walks.line])
        item_tiles, item_line = self._tiles(walks, parts, splits, tokens)
        full, packed, most = item_tiles
        merging = self.merging(walks, parts)
        work = np.bincount(walks.line, parts, count)
        item_rows = np.bincount(walks.line, walks.rows * parts, count)
        partial = merging.written + merging.joined
        memory = item_rows * self.q_row + partial * self.partial_row + (item_rows - merging.written) * self.final_row
        alive: npt.NDArray[np.bool_] = work > 0
        turns = np.maximum(work, 1) * lanes
        items = {
            "turns": turns,
            "evened": evened_turns(turns, self.target.sms),
            "full": np.bincount(item_line, full, count) * lanes,
            "packed": np.bincount(item_line, packed, count) * lanes,
            "longest_turns": alive * 1.0,
            "longest_full": _of_line(full, most, alive),
            "longest_packed": _of_line(packed, most, alive),
            "longest_merges": merging.longest_joined.astype(np.float64),
            "tile_flops": flops.astype(np.float64),
            "tile_bytes": loaded.astype(np.float64),
            "tile_rows": rows.astype(np.float64),
            "memory_bytes": kv_bytes + memory,
        }
        merges = {
            "read_bytes": merging.read * float(self.partial_row),
            "written_bytes": merging.rows * float(self.final_row),
            "longest": merging.longest.astype(np.float64),
        }
        facts, merged = self.facts, merging.rows > 0
        items_us = np.where(alive, ITEMS.values(SimpleNamespace(**items, **facts))["items_us"], 0.0)
        launches = alive.reshape(-1, stages).sum(1) + merged
        total = np.where(launches > 0, facts["launch_us"] + (launches - 1) * facts["next_launch_us"], 0.0)
        total += items_us.reshape(-1, stages).sum(1)
        if merged.any():
            total += np.where(merged, MERGES.values(SimpleNamespace(**merges, **facts))["merge_us"], 0.0)
        return np.where(self.admits(walks), total, np.inf) if self._isolated else total

    def admits(self, walks: Walks) -> npt.NDArray[np.bool_]:
        """Per way whether its plan is one that is asked for: any, or one in which cohorts read what all of them see."""
        admitted = np.ones(walks.ways, np.bool_)
        if self._isolated:
            begin = walks.lo[walks.of]
            masked = (self.lo[walks.span] > begin) | (self.hi[walks.span] < begin + walks.rows[walks.of])
            admitted[walks.line[walks.of[masked]] // walks.stages] = False
        return admitted

    def times_of(self, walks: Walks, ways: Longs, lines: Lines) -> Floats:
        """`times_us` of these ways of `walks`, by their `lines`: some at a time where they have many spans."""
        some = max(MOST_PAIRS // max(len(walks.span), 1), 1)
        parts = [np.arange(begin, min(begin + some, len(ways))) for begin in range(0, len(ways), some)]
        return np.concatenate([self.times_us(walks.taken(ways[part]), lines.taken(part)) for part in parts])

    def kv_bytes_of(self, walks: Walks) -> Longs:
        """Per line bytes of keys and values that come from device memory."""
        tokens = _sums(walks.line, walks.tokens, walks.lines)
        return np.minimum(tokens, self.unique) * self.shape.kv_token_bytes

    def _tiles(
        self, walks: Walks, parts: Longs, splits: Longs, tokens: Longs
    ) -> tuple[tuple[Longs, Longs, Longs], Longs]:
        """(full tiles, packed tiles) of every item and the item of every line with the most, and the items' lines."""
        of, length = walks.of, self.length[walks.span]
        if self._runs is not None:
            first, run_length = self._runs
            counts = np.diff(first)[walks.span]
            of, length = np.repeat(of, counts), run_length[ragged_ranges(first[walks.span], counts)]
        items, item = len(parts), of
        if (parts > 1).any():
            # Every run as tokens begin:end of its cohort's walk, then cut at multiples of the split.
            end = np.cumsum(length)
            start = (end - length)[np.searchsorted(of, np.arange(len(parts)))][of]
            begin, end, split = end - length - start, end - start, splits[walks.line][of]
            before = begin // split
            index, step = ragged((end - 1) // split - before + 1)
            part, split = before[index] + step, split[index]
            length = np.minimum(end[index], (part + 1) * split) - np.maximum(begin[index], part * split)
            item_of = offsets(parts)
            of, items = of[index], int(item_of[-1])
            item = item_of[of] + part
            item_line = np.repeat(walks.line, parts)
        else:
            item_line = walks.line
        per_tile = tokens[walks.line][of] if (tokens != tokens[0]).any() else tokens[:1]
        full: Longs = length // per_tile
        rest = length - full * per_tile
        block = np.minimum(BLOCK_TOKENS, tokens)
        per_block = block[walks.line][of] if (block != block[0]).any() else block[:1]
        blocks: Longs = -(-rest // per_block)
        full, blocks, slots = _sums(item, full, items), _sums(item, blocks, items), _sums(item, rest, items)
        # By blocks or by slots, as `lower` decides for a whole launch.
        by_block = -(-blocks * block[item_line] // tokens[item_line])
        by_slot = -(-slots // tokens[item_line])
        block_tiles, slot_tiles = (np.bincount(item_line, full + own, walks.lines) for own in (by_block, by_slot))
        packed = np.where((block_tiles > MOST_SPREAD * slot_tiles)[item_line], by_slot, by_block)
        # One with most packed tiles among those with most tiles.
        size = (full + packed) * INT32_MAX + packed
        longest = np.flatnonzero(size == highest(size, item_line, walks.lines)[item_line])
        most = np.zeros(walks.lines, np.int64)
        most[item_line[longest[::-1]]] = longest[::-1]
        return (full, packed, most), item_line

    def merging(self, walks: Walks, parts: Longs) -> Merging:
        """What is merged, where a cohort's rows have `parts` results each of what the cohort walks."""
        n, count, ways = self.tree.num_rows, walks.lines, walks.ways
        none = np.zeros(count, np.int64)
        if walks.whole:
            rows = _sums(walks.line, walks.rows, count)
            cut = parts > 1
            line, own, pieces = walks.line[cut], walks.rows[cut], parts[cut]
            written = _sums(line, own * pieces, count)
            merged = _sums(line, own, count) + n - rows
            return Merging(merged, highest(pieces, line, count), written, written, none, none)
        width = max(_MOST_CELLS // (n + 1), 1)
        if ways > width:
            chunks = [np.arange(begin, min(begin + width, ways)) for begin in range(0, ways, width)]
            first = np.searchsorted(walks.line, np.arange(ways + 1) * walks.stages)
            done = [
                self.merging(walks.taken(chunk, spans=False), parts[first[chunk[0]] : first[chunk[-1] + 1]])
                for chunk in chunks
            ]
            return Merging(*(np.concatenate(column) for column in zip(*done, strict=True)))
        begin = walks.line // walks.stages * (n + 1) + walks.lo
        end = begin + walks.rows
        cells = ways * (n + 1)
        results = _covered(begin, end, parts, cells)
        several = offsets(results > 1)
        partial = several[end] > several[begin]
        if walks.stages > 1:
            lowest = walks.line % 2 > 0
            partial &= ~lowest
            joins = _covered(begin[lowest], end[lowest], parts[lowest], cells).reshape(ways, n + 1)[:, :n] > 0
        covered = _covered(begin[partial], end[partial], np.ones(int(partial.sum())), cells) > 0
        results = results.reshape(ways, n + 1)[:, :n]
        covered = covered.reshape(ways, n + 1)[:, :n]
        written = _sums(walks.line[partial], (walks.rows * parts)[partial], count)
        merged = (covered | (results == 0)).sum(axis=1)
        partials = np.where(covered, results, 0)
        if walks.stages == 1:
            return Merging(merged, partials.max(axis=1, initial=0).astype(np.int64), written, written, none, none)
        joined, longest_joined = np.zeros((2, count), np.int64)
        own = np.where(joins, np.maximum(partials - 1, 0), 0)  # all but what the item itself has
        joined[1::2], longest_joined[1::2] = own.sum(axis=1), own.max(axis=1, initial=0)
        merged -= (covered & joins).sum(axis=1)
        longest = np.where(joins, 0, partials).max(axis=1, initial=0).astype(np.int64)
        return Merging(merged, longest, written[::2] - joined[1::2], written, joined, longest_joined)


class _Classes:
    """The tile classes that plans for a shape on a target have had, and what their tiles do."""

    def __init__(self, shape: Shape, target: Target) -> None:
        self._shape, self._target = shape, target
        self._made: dict[tuple[tuple[int, int] | None, int], TileClass] = {}
        self._counts: dict[TileClass, tuple[int, ...]] = {}

    def of(self, wanted: tuple[int, int] | None, most_rows: int) -> TileClass:
        """The class of a policy's `tile` and of cohorts of at most so many rows."""
        if (wanted, most_rows) not in self._made:
            shape, target = self._shape, self._target
            own = wanted_class(*wanted, shape, target) if wanted else tile_class(shape, target, max(most_rows, 1))
            self._made[wanted, most_rows] = own
        return self._made[wanted, most_rows]

    def counts(self, tile: TileClass) -> tuple[int, ...]:
        """Tokens and rows of a tile, the work of one, and how many a cohort's rows take over all KV heads."""
        if tile not in self._counts:
            lanes = lanes_of(tile, self._shape)
            self._counts[tile] = (tile.tokens, tile.rows, *tile_work(tile, self._shape), lanes)
        return self._counts[tile]


@cache
def _classes_of(shape: Shape, target: Target) -> _Classes:
    return _Classes(shape, target)


def _order(keys: Longs, below: int) -> Longs:
    """The stable order of non-negative keys; few different ones are sorted by their digits."""
    return np.argsort(keys.astype(np.uint16) if below <= 1 << 16 else keys, kind="stable")


def _of_line(values: Longs, most: Longs, alive: npt.NDArray[np.bool_]) -> Floats:
    """The value of the item `most` of every line that has items."""
    return np.where(alive, np.append(values, 0)[np.where(alive, most, len(values))], 0).astype(np.float64)


def _sums(owner: Longs, values: Longs, owners: int) -> Longs:
    """The sum of every owner's values."""
    return np.bincount(owner, values, owners).astype(np.int64)


def _covered(begin: Longs, end: Longs, weight: npt.NDArray[Any], cells: int) -> Floats:
    """The sum of the weights of intervals over every cell."""
    sums: Floats = np.cumsum(np.bincount(begin, weight, cells + 1) - np.bincount(end, weight, cells + 1))[:cells]
    return sums
