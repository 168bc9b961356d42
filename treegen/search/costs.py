"""The array model of cost: how long policies' plans take, many at once, without making the plans.

It counts what `lower` would do with each plan and gives these counts to the same cost model, so its times are those of
the plans' accounts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from treegen.cost import ITEMS, MERGES, facts_of
from treegen.ir.arrays import INT32_MAX, Ints, Longs, offsets, ragged, ragged_ranges
from treegen.ir.schedule import TileClass
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.launches import FP32_BYTES, tile_work
from treegen.runs import MOST_SPREAD
from treegen.strategies.cohort import Cohort
from treegen.strategies.groupings import fragments_of
from treegen.targets import Target
from treegen.tiles import BLOCK_TOKENS, rows_per_tile, tile_class, wanted_class

Floats = npt.NDArray[np.float64]
_MOST_CELLS = 1 << 18  # (line, rank) pairs that are counted at a time


class Walks(NamedTuple):
    """Cohorts with something to read, of several lines (each a way to walk the tree), line by line.

    line, rows, lo, tokens: of every cohort, lo being its first rank; of, span: what every cohort reads, root first,
    cohort by cohort. whole: whether no line cuts paths, so that every row is in one cohort of it.
    """

    lines: int
    whole: bool
    line: Longs
    rows: Longs
    lo: Longs
    tokens: Longs
    of: Longs
    span: Longs

    def taken(self, lines: Longs, spans: bool = True) -> Walks:
        """The walks of these lines, in this order; a line may be taken several times. spans: with what cohorts read."""
        first = np.searchsorted(self.line, np.arange(self.lines + 1))
        counts = np.diff(first)[lines]
        cohort = ragged_ranges(first[lines], counts)
        line = np.repeat(np.arange(len(lines)), counts)
        if not spans:
            none = np.empty(0, np.int64)
            columns = (self.rows[cohort], self.lo[cohort], self.tokens[cohort])
            return Walks(len(lines), self.whole, line, *columns, none, none)
        first_pair = np.searchsorted(self.of, np.arange(len(self.line) + 1))
        pairs = np.diff(first_pair)[cohort]
        pair = ragged_ranges(first_pair[cohort], pairs)
        return Walks(
            len(lines),
            self.whole,
            line,
            self.rows[cohort],
            self.lo[cohort],
            self.tokens[cohort],
            np.repeat(np.arange(len(cohort)), pairs),
            self.span[pair],
        )


class Merging(NamedTuple):
    """Per line: merged rows, partials of the row that has most, and rows of partials in all."""

    rows: Longs
    longest: Longs
    partial_rows: Longs


@dataclass(frozen=True, slots=True)
class Line:
    """What a plan is made of besides its walks."""

    tile: TileClass
    split: int


class PolicyCosts:
    """Times of policies for one tree, shape and target. Made once per search."""

    def __init__(self, tree: Tree, shape: Shape, target: Target) -> None:
        self.tree, self.shape, self.target = tree, shape, target
        self.facts = facts_of(target)
        spans = tree.topology.spans
        self.lo, self.hi, self.length = spans.lo.astype(np.int64), spans.hi.astype(np.int64), spans.lengths
        self.unique = int(self.length.sum())
        self.kv_bytes = self.unique * shape.kv_token_bytes
        heads = shape.num_qo_heads
        self.q_row = heads * shape.head_dim * shape.dtype_bytes
        self.partial_row = heads * (shape.head_dim_v + 1) * FP32_BYTES
        self.final_row = heads * (shape.head_dim_v * shape.dtype_bytes + FP32_BYTES)
        self._whole: dict[int, Walks] = {}

    def time_us(self, policy: Cohort) -> float:
        """Estimated microseconds of a policy's plan: those of its account by the analytic model."""
        walks = self.walks(policy)
        return float(self.times_us(walks, self.lines_of([policy], walks))[0])

    def lines_of(self, policies: Sequence[Cohort], walks: Walks) -> list[Line]:
        """The tile class of the work items of every line of `walks`, which is one of its policy, and its split."""
        most_rows = highest(walks.rows, walks.line, walks.lines).tolist()
        return [
            Line(self._tile_class(policy, rows), policy.split or INT32_MAX)
            for policy, rows in zip(policies, most_rows, strict=True)
        ]

    def _tile_class(self, policy: Cohort, most_rows: int) -> TileClass:
        wanted, shape, target = policy.tile, self.shape, self.target
        return wanted_class(*wanted, shape, target) if wanted else tile_class(shape, target, max(most_rows, 1))

    def rows_of(self, policy: Cohort) -> int:
        """Query rows of a cohort."""
        return rows_per_tile(policy.head_rows, self.shape.group)

    def walks(self, policy: Cohort) -> Walks:
        """The cohorts of one policy, whatever its split and tile."""
        rows = self.rows_of(policy)
        if policy.apart is None and not policy.cut:
            if rows not in self._whole:
                self._whole[rows] = self.whole_walks([rows])
            return self._whole[rows]
        return self.walks_below(rows, policy.cut_nodes(self.tree))

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
        return Walks(lines, True, line, own, start, _sums(of, self.length[span], len(alive)), of, span)

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
        return Walks(lines, not flat.any(), head // spans, own, start, tokens, of, span)

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

    def times_us(self, walks: Walks, lines: Sequence[Line]) -> Floats:
        """Microseconds of the plans of every line of `walks`, by tile and split of `lines`."""
        count = walks.lines
        tiles = np.array([_tile_facts(line.tile, self.shape) for line in lines], np.int64)
        tokens, rows, flops, loaded, lanes = tiles.T
        splits = np.array([line.split for line in lines], np.int64)
        parts = -(-walks.tokens // splits[walks.line])
        item_tiles, item_line = self._tiles(walks, parts, splits, tokens)
        full, packed, most = item_tiles
        merging = self.merging(walks, parts)
        work = np.bincount(walks.line, parts, count)
        item_rows = np.bincount(walks.line, walks.rows * parts, count)
        partial = merging.partial_rows
        memory = item_rows * self.q_row + partial * self.partial_row + (item_rows - partial) * self.final_row
        alive: npt.NDArray[np.bool_] = work > 0
        items = {
            "turns": work * lanes,
            "full": np.bincount(item_line, full, count) * lanes,
            "packed": np.bincount(item_line, packed, count) * lanes,
            "longest_turns": alive * 1.0,
            "longest_full": _of_line(full, most, alive),
            "longest_packed": _of_line(packed, most, alive),
            "longest_merges": np.zeros(count),
            "tile_flops": flops.astype(np.float64),
            "tile_bytes": loaded.astype(np.float64),
            "tile_rows": rows.astype(np.float64),
            "memory_bytes": self.kv_bytes + memory,
        }
        merges = {
            "read_bytes": partial * float(self.partial_row),
            "written_bytes": merging.rows * float(self.final_row),
            "longest": merging.longest.astype(np.float64),
        }
        facts, merged = self.facts, merging.rows > 0
        launches = alive + merged.astype(np.int64)
        total = np.where(launches > 0, facts["launch_us"] + (launches - 1) * facts["next_launch_us"], 0.0)
        total += np.where(alive, ITEMS.values(SimpleNamespace(**items, **facts))["items_us"], 0.0)
        if merged.any():
            total += np.where(merged, MERGES.values(SimpleNamespace(**merges, **facts))["merge_us"], 0.0)
        return total

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
        # The first of the items with most tokens among those with most tiles.
        size = (full + packed) * INT32_MAX + _sums(item, length, items)
        longest = np.flatnonzero(size == highest(size, item_line, walks.lines)[item_line])
        most = np.zeros(walks.lines, np.int64)
        most[item_line[longest[::-1]]] = longest[::-1]
        return (full, packed, most), item_line

    def merging(self, walks: Walks, parts: Longs) -> Merging:
        """What is merged, where a cohort's rows have `parts` results each of what the cohort walks."""
        n, count = self.tree.num_rows, walks.lines
        rows = np.bincount(walks.line, walks.rows, count).astype(np.int64)
        if walks.whole:
            cut = parts > 1
            line, own, pieces = walks.line[cut], walks.rows[cut], parts[cut]
            longest = highest(pieces, line, count)
            merged = np.bincount(line, own, count).astype(np.int64) + n - rows
            return Merging(merged, longest, np.bincount(line, own * pieces, count).astype(np.int64))
        width = max(_MOST_CELLS // (n + 1), 1)
        if count > width:
            chunks = [np.arange(begin, min(begin + width, count)) for begin in range(0, count, width)]
            first = np.searchsorted(walks.line, np.arange(count + 1))
            done = [self.merging(walks.taken(chunk), parts[first[chunk[0]] : first[chunk[-1] + 1]]) for chunk in chunks]
            return Merging(*(np.concatenate(column) for column in zip(*done, strict=True)))
        begin = walks.line * (n + 1) + walks.lo
        end = begin + walks.rows
        cells = count * (n + 1)
        results = _covered(begin, end, parts, cells)
        several = offsets(results > 1)
        partial = several[end] > several[begin]
        covered = _covered(begin[partial], end[partial], np.ones(int(partial.sum())), cells) > 0
        grid = results.reshape(count, n + 1)[:, :n]
        is_merged = covered.reshape(count, n + 1)[:, :n]
        longest = np.where(is_merged, grid, 0).max(axis=1, initial=0).astype(np.int64)
        merged = (is_merged | (grid == 0)).sum(axis=1)
        own = np.bincount(walks.line[partial], (walks.rows * parts)[partial], count).astype(np.int64)
        return Merging(merged, longest, own)


@cache
def _tile_facts(tile: TileClass, shape: Shape) -> tuple[int, ...]:
    """Tokens and rows of a tile, the work of one, and how many tiles a cohort's rows take over all KV heads."""
    return tile.tokens, tile.rows, *tile_work(tile, shape), shape.num_kv_heads * -(-shape.group // tile.rows)


def _order(keys: Longs, below: int) -> Longs:
    """The stable order of non-negative keys; few different ones are sorted by their digits."""
    return np.argsort(keys.astype(np.uint16) if below <= 1 << 16 else keys, kind="stable")


def highest(values: Longs, line: Longs, lines: int) -> Longs:
    """The highest value of every line, 0 where a line has none; `line` ascends."""
    result = np.zeros(lines, np.int64)
    first = np.flatnonzero(np.append(True, line[1:] != line[:-1])[: len(line)])
    if len(first):
        result[line[first]] = np.maximum.reduceat(values, first)
    return result


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
