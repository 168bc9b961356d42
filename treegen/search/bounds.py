"""Lower bounds of the cost model: what no plan of a kind can be faster than, so that most plans are never counted.

Row tiles bound the work of full SMs, since a token of a row tile takes the same time in tiles of any length; launches
that follow one another take no less than one launch with the sums of their counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import INT32_MAX, Longs, frozen
from treegen.ir.plan import Merge
from treegen.ir.schedule import UNFUSED_LAUNCHES, TileClass
from treegen.ir.shape import Shape
from treegen.search.policy_costs import PolicyCosts
from treegen.search.walks import Lines, Walks, highest
from treegen.strategies.cohort import Cohort, seen_below_and_above
from treegen.strategies.deft import BLOCK
from treegen.strategies.registry import GroupKind
from treegen.target.cost_terms import ITEMS, MERGES, facts_of
from treegen.target.targets import Target
from treegen.target.tile_config import SMALL_ROWS, lanes_of, rows_per_tile, tile_class, tile_work, wanted_class

Floats = npt.NDArray[np.float64]
_STEPS = 16  # mixtures of walked and cut edges for which a FastTree plan is bounded


class Bounds:
    """Lower bounds in microseconds for one tree, shape and target."""

    def __init__(self, costs: PolicyCosts) -> None:
        self._costs, self._facts = costs, costs.facts
        shape, target, tree = costs.shape, costs.target, costs.tree
        self._classes = _classes_of(shape, target)
        self._usual = self._classes.usual
        self._prefix = tree.topology.prefix[tree.topology.spans.node]
        self._rows = costs.rows
        self._bytes = costs.kv_bytes + self._rows * (costs.q_row + min(costs.final_row, costs.partial_row))
        self._row_us = min(c.block_us / c.rows for c in self._usual)
        self._seen = costs.hi - costs.lo
        self._span_us = costs.length * self._token_us(self._seen)
        self._least_us = float(self._span_us.sum())
        self.any_plan = float(self._of_plan(0.0, 0))

    @cached_property
    def _alone_us(self) -> list[float]:
        """Microseconds for all spans, each for all rows that see it, in each of the usual classes."""
        return [float((self._costs.length * -(-self._seen // c.rows)).sum()) * c.token_us for c in self._usual]

    def _token_us(self, rows: Longs) -> Floats:
        """Microseconds of the device for a token that so many rows see together, in the class that suits them."""
        us: Floats = np.minimum(*(-(-rows // c.rows) * c.token_us for c in self._usual))
        return us

    def _joined(self, *times: Any) -> Any:
        sharpness = self._facts["sharpness"]
        return sum(time**sharpness for time in times) ** (1 / sharpness)

    def _traffic_us(self, memory_bytes: Any) -> Any:
        return memory_bytes / (self._facts["memory_bytes_per_us"] * self._facts["memory_fraction"])

    def _of_plan(self, more_us: Any, merged_rows: Any, merge: Merge = "reduce") -> Any:
        """Any plan whose tiles take `more_us` more than the least, and that merges two partials of so many rows.

        Under "final" merge one of the two may be the result of the item that merges: then the partial is read in that
        item's launch, else in one of merges; it counts as the faster of both.
        """
        costs, facts = self._costs, self._facts
        if not costs.unique:
            return 0.0 * np.add(more_us, merged_rows)
        blocks_us = (self._rows + merged_rows) * self._row_us
        partials = costs.partial_row * 1.0 * merged_rows
        if merge == "final":
            reading_us = partials / (
                facts["memory_bytes_per_us"] * max(facts["memory_fraction"], facts["merge_fraction"])
            )
            traffic_us = self._traffic_us(self._bytes + partials + merged_rows * costs.q_row) + reading_us
            merging = facts["next_launch_us"]
        else:
            more = 2 * partials + merged_rows * (costs.q_row - min(costs.final_row, costs.partial_row))
            traffic_us = self._traffic_us(self._bytes + more)
            counts = {"read_bytes": 2 * partials, "written_bytes": costs.final_row * 1.0 * merged_rows, "longest": 2.0}
            merging = MERGES.values(SimpleNamespace(**counts, **facts))["merge_us"] + facts["next_launch_us"]
        items = self._joined(self._least_us + more_us + blocks_us, traffic_us)
        return facts["launch_us"] + items + np.greater(merged_rows, 0) * merging

    def of_walks(self, walks: Walks, lines: Lines, chain: bool = True) -> Floats:
        """The plans of every line of `walks`, by tile and split of `lines`.

        chain: whether a cohort's part of its walk is one work item. Infinite where a split cuts nothing.
        """
        costs, facts, count = self._costs, self._facts, walks.lines
        splits = lines.split
        parts = -(-walks.tokens // splits[walks.line])
        merging = costs.merging(walks, parts)
        token_us, block_us, lone_us = self._rates(lines)
        items, rows = np.bincount(walks.line, parts, count), np.bincount(walks.line, walks.rows * parts, count)
        throughput = items * block_us + np.bincount(walks.line, walks.tokens, count) * token_us
        partial = merging.written
        traffic = rows * costs.q_row + partial * costs.partial_row + (rows - partial) * costs.final_row
        longest = np.zeros(count, np.int64)
        if chain:
            longest = highest(np.minimum(walks.tokens, splits[walks.line]), walks.line, count)
        items_us = self._joined(longest * lone_us, throughput, self._traffic_us(costs.kv_bytes + traffic))
        counts = {
            "read_bytes": partial * float(costs.partial_row),
            "written_bytes": merging.rows * float(costs.final_row),
            "longest": merging.longest.astype(np.float64),
        }
        merging_us = MERGES.values(SimpleNamespace(**counts, **facts))["merge_us"] + facts["next_launch_us"]
        alive = items > 0
        bound = np.where(alive, facts["launch_us"] + items_us + np.where(merging.rows > 0, merging_us, 0.0), 0.0)
        cuts = np.zeros(count, bool)
        cuts[walks.line[parts > 1]] = True
        return np.where(cuts | (splits >= walks.tokens.max(initial=0)), bound, np.inf)

    def of_two_launches(self, walks: Walks, lines: Lines, merged: int = 0) -> Floats:
        """Plans of two launches of every line of `walks`, by tile of `lines`, whatever is split and however it is
        merged. merged: partials of some row that a launch of merges reads.
        """
        costs, facts, count = self._costs, self._facts, walks.lines
        token_us, block_us, _ = self._rates(lines)
        throughput = np.bincount(walks.line, minlength=count) * block_us
        throughput += np.bincount(walks.line, walks.tokens, count) * token_us
        rows = np.bincount(walks.line, walks.rows, count)
        traffic = costs.kv_bytes + rows * (costs.q_row + min(costs.final_row, costs.partial_row))
        merging = facts["next_launch_us"] + merged * facts["merge_step_us"]
        bound: Floats = facts["launch_us"] + self._joined(throughput, self._traffic_us(traffic)) + merging
        return bound

    def of_splits(self, walks: Walks, lines: Lines) -> Floats:
        """Plans of every way of `walks`, by tile and split of `lines`, without regard to who merges what.

        Infinite where of two stages one is empty: such a plan is one of "reduce" merge. Both launches' counts are added
        up as if they were one's.
        """
        costs, facts, count, stages = self._costs, self._facts, walks.lines, walks.stages
        token_us, block_us, lone_us = self._rates(lines)
        splits = np.repeat(lines.split, stages)
        least_row = min(costs.final_row, costs.partial_row)
        if stages > 1:
            splits[1::2] = INT32_MAX
        of_item = splits[walks.line]
        parts = -(-walks.tokens // of_item)
        items, tokens, rows = (
            np.bincount(walks.line, weights, count).reshape(-1, stages)
            for weights in (parts, walks.tokens, walks.rows * parts)
        )
        longest = highest(np.minimum(walks.tokens, of_item), walks.line, count).reshape(-1, stages)
        traffic = rows.sum(1) * (costs.q_row + least_row)
        if stages > 1:
            traffic += rows[:, 1] * (costs.final_row - least_row) + costs.kv_bytes_of(walks).reshape(-1, 2).sum(1)
            launching = np.where((items > 0).all(1), facts["next_launch_us"], np.inf)
        else:
            traffic += costs.kv_bytes
            merging = facts["next_launch_us"] + 2 * facts["merge_step_us"]
            launching = (rows[:, 0] > costs.tree.num_rows) * merging  # some row has two results
        throughput = items.sum(1) * block_us + tokens.sum(1) * token_us
        items_us = self._joined(longest.sum(1) * lone_us, throughput, self._traffic_us(traffic))
        bound: Floats = np.where(items.any(1), facts["launch_us"] + items_us, 0.0) + launching
        return bound

    def _rates(self, lines: Lines) -> Floats:
        """Per line microseconds of the device for a token of a row tile and a work item, and of a token alone."""
        classes = [self._classes.of(tile) for tile in lines.classes]
        rates: Floats = np.array([(c.token_us, c.block_us, c.lone_token_us) for c in classes])[lines.tile].T
        return rates

    def merged_at(self, thresholds: Sequence[int]) -> Longs:
        """Rows that policies with these values of `apart` merge, at least; a row that is cut twice counts twice."""
        topology = self._costs.tree.topology
        visible = np.zeros(len(topology.depth), bool)
        visible[topology.spans.node] = True
        seen = np.where(visible & (topology.prefix > 0), topology.rank_hi.astype(np.int64) - topology.rank_lo, 0)
        below, above = seen_below_and_above(self._costs.tree)
        apart = np.array(thresholds, np.int64)[:, None]
        merged: Longs = ((above >= apart) & (below < apart)).astype(np.int64) @ seen
        return merged

    def of_thresholds(self, policies: Sequence[Cohort], merged_rows: Longs, merge: Merge = "reduce") -> Floats:
        """Per policy: with values of `apart` for which so many rows are merged, in this way."""
        more_us = [max(self._tiles_us(policy) - self._least_us, 0.0) for policy in policies]
        bounds: Floats = self._of_plan(np.array(more_us)[:, None], merged_rows, merge)
        return bounds

    def _tiles_us(self, policy: Cohort) -> float:
        """Microseconds of the device for all spans, in cohorts of all rows that see them, wherever paths are cut."""
        costs = self._costs
        widest = int(self._seen.max(initial=0)) * costs.shape.group
        if policy.tile is not None:
            token_us = self._classes.wanted(policy.tile).token_us
        elif policy.head_rows > SMALL_ROWS and widest > SMALL_ROWS:
            # The cohort of some of these rows is too high for the small class.
            token_us = self._usual[1].token_us
        else:
            token_us = min(c.token_us for c in self._usual)
        return float((costs.length * -(-self._seen // costs.rows_of(policy))).sum()) * token_us

    def of_groups(self, groups: GroupKind, enough: float = np.inf) -> float:
        """A plan of a strategy with default options, by what its groups read. Where a first bound is at least `enough`,
        no better one is looked for.
        """
        costs, facts = self._costs, self._facts
        if not costs.unique:
            return 0.0
        if groups == "whole tree at once":
            launching = facts["launch_us"] + (UNFUSED_LAUNCHES - 1) * facts["next_launch_us"]
            scores = 8 * self._rows * costs.unique * costs.shape.num_qo_heads * costs.shape.dtype_bytes
            return float(launching + self._traffic_us(costs.kv_bytes + scores))
        if groups == "whole tree per row":
            everything = float(self._rows * costs.unique) * min(c.token_us for c in self._usual)
            return float(self._of_plan(everything - self._least_us, 0))
        if groups == "any" or self.any_plan >= enough:
            return self.any_plan
        if groups == "joined nodes":
            return self._of_joined_nodes()
        if groups == "blocks of the tree":
            return float(self._of_plan(0.0, self._rows_in_several(BLOCK)))
        if self._of_cut_nodes >= enough:
            return self._of_cut_nodes
        return self._by_node[groups == "nodes"]

    @cached_property
    def _of_cut_nodes(self) -> float:
        """Every node for itself, without knowing its tiles: a row has a work item for each node that it sees."""
        below = self._prefix > 0
        merged = self._costs.rows_in(self._costs.lo[below], self._costs.hi[below])
        node = self._costs.tree.topology.spans.node
        opens = np.append(True, node[1:] != node[:-1])[: len(node)]  # the first span of a node has all its rows
        more = int(self._seen[opens].sum()) - self._rows - merged
        return float(self._of_plan(more * self._row_us, merged))

    @cached_property
    def _by_node(self) -> tuple[float, float]:
        """Every node with all rows that see it, in row tiles; without and with the longest one alone."""
        costs, policy = self._costs, Cohort()
        every = frozen(np.arange(len(costs.tree.parent)))
        walks = costs.walks_below(costs.rows_of(policy), every)
        lines = costs.lines_of([policy], walks)
        return float(self.of_walks(walks, lines, chain=False)[0]), float(self.of_walks(walks, lines)[0])

    def _of_joined_nodes(self) -> float:
        """FastTree's groups: of every node's own rows, either their path's tokens are read for them alone, or they have
        two partial results at least.

        The nodes that save most tiles per row are cut first; in between lie mixtures.
        """
        topology = self._costs.tree.topology
        own = topology.rank_own.astype(np.int64) - topology.rank_lo
        below = (own > 0) & (topology.prefix > 0)
        own, above = own[below], topology.prefix[below]
        if not len(own):
            return self.any_plan
        walked = above * self._token_us(own)
        # What the least already holds for these rows: their share of tiles with all other rows, at most.
        order = np.argsort(-walked / own, kind="stable")
        cut_rows = np.append(0, np.cumsum(own[order]))
        walked_us = np.append(np.cumsum(walked[order][::-1])[::-1], 0.0) - self._shared_us()
        steps = _steps(len(own))
        # Between two steps no less is cut than at the first, and no less is walked than at the second.
        more_us, rows = np.maximum(np.append(walked_us[steps[1:]], walked_us[-1]), 0.0), cut_rows[steps]
        # Groups take one of two tile sizes, or all the same; both together are two launches, without merges.
        alone = [np.maximum(us - self._least_us, more_us) for us in self._alone_us]
        bounds = self._of_plan(np.stack([more_us, *alone]), rows)
        bounds[0] += np.where(rows > 0, self._facts["next_launch_us"], 0.0)
        return float(bounds.min())

    def _shared_us(self) -> float:
        """What the least plan takes for tokens that lie above nodes with rows."""
        topology = self._costs.tree.topology
        shared = self._costs.hi > topology.rank_own[topology.spans.node]
        return float(self._span_us[shared].sum())

    def _rows_in_several(self, block: int) -> int:
        """Rows that certainly see tokens of two blocks of the tokens in depth-first order."""
        costs = self._costs
        end = np.cumsum(costs.length)
        begin = end - costs.length
        top = np.maximum.accumulate(np.where(self._prefix == 0, begin, 0))  # where the paths of a tree's rows begin
        several = top // block != (end - 1) // block
        return self._costs.rows_in(costs.lo[several], costs.hi[several])


@cache
def _steps(count: int) -> Longs:
    """At most _STEPS + 1 numbers from 0 to `count`, evenly spread."""
    return np.unique(np.linspace(0, count, _STEPS + 1).astype(np.int64))


class _BoundClasses:
    """What tile classes take for a shape on a target; `usual`: the one for few rows and the one for many."""

    def __init__(self, shape: Shape, target: Target) -> None:
        self._shape, self._target, self._facts = shape, target, facts_of(target)
        self._made: dict[TileClass, _Class] = {}
        self._wanted: dict[tuple[int, int], _Class] = {}
        self.usual = [self.of(tile_class(shape, target, rows)) for rows in (1, SMALL_ROWS + 1)]

    def of(self, tile: TileClass) -> _Class:
        """What the class takes."""
        if tile not in self._made:
            self._made[tile] = _Class(tile, self._shape, self._facts)
        return self._made[tile]

    def wanted(self, tile: tuple[int, int]) -> _Class:
        """What the class of a policy's `tile` takes."""
        if tile not in self._wanted:
            self._wanted[tile] = self.of(wanted_class(*tile, self._shape, self._target))
        return self._wanted[tile]


@cache
def _classes_of(shape: Shape, target: Target) -> _BoundClasses:
    return _BoundClasses(shape, target)


class _Class:
    """What a tile class takes of a device that is full of its tiles.

    rows: query rows of a tile; over all KV heads, token_us: microseconds for a token per row tile, block_us: for
    starting and ending a work item; lone_token_us: for a token in a thread block alone.
    """

    def __init__(self, tile: TileClass, shape: Shape, facts: Mapping[str, float]) -> None:
        flops, loaded = tile_work(tile, shape)
        counts = dict.fromkeys(ITEMS.counts, 1.0) | {"tile_flops": float(flops), "tile_bytes": float(loaded)}
        of_tile = ITEMS.values(SimpleNamespace(**counts, **facts))
        lanes = lanes_of(tile, shape)
        self.rows = rows_per_tile(tile.rows, shape.group)
        self.token_us = float(of_tile["full_tile"] / tile.tokens * lanes / facts["sms"])
        self.lone_token_us = float(of_tile["lone_tile"] / tile.tokens)
        self.block_us = float(lanes * (facts["full_block_us"] + tile.rows * facts["full_row_us"]) / facts["sms"])
