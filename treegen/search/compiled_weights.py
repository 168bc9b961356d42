"""Policies for running batches, weighed in C: treegen.search.weigh does the same in NumPy, and for any tree.

The terms of the cost model (treegen.target.cost_terms) are linear in the counts of a policy, but for soft maxima. C
gets the microseconds of one item, tile or byte.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

import treegen.compiled.c_library as c_library
from treegen.compiled.batch_tree import BatchTree
from treegen.compiled.share_rules import SHARE_RULES, ShareRules
from treegen.cost.launch_counts import FP32_BYTES
from treegen.ir.arrays import Floats, largest
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.shape import Shape
from treegen.schedule.pack_runs import MOST_SPREAD
from treegen.search.cohort_sums import BINS
from treegen.search.path_cuts import MOST_CUTS
from treegen.search.split_estimates import BATCH_BLOCKS_PER_SM, CUT_TILES
from treegen.search.walk_layout import WHOLE, walk_fields
from treegen.search.weighed_policies import WeighedPolicies
from treegen.strategies.cohort import Cohort
from treegen.target.cost_terms import ITEMS, MERGES, facts_of
from treegen.target.targets import Target
from treegen.target.tile_config import RUN_TOKENS, is_latent

_SPLITS, _WALKS = 2 + len(BATCH_BLOCKS_PER_SM), len(WHOLE) + MOST_CUTS
_PLACES = _SPLITS * _WALKS
_BYTES = "kv_bytes", "q_bytes", "partial_bytes", "final_bytes"
_RATES = (
    *("spread", "lanes", "sms", "shares", "lone_us", "full_us"),
    *("item_us", "full_tile_us", "packed_tile_us", "byte_us", "merged_byte_us"),
    *("launch_us", "next_launch_us", "idle_merge_us", "sharpness", "item_tiles", "cut_tiles"),
)


# The structures of batch_weights.h.
class _SpannedTree(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "spans", "nodes", "unique_tokens")),
        *((name, ctypes.c_void_p) for name in ("of_spans", "parent", "rank_lo", "rank_hi")),
    )


class _WalkFacts(ctypes.Structure):
    _fields_ = (
        ("whole", ctypes.c_int64),
        ("walk_rows", ctypes.c_int64 * _WALKS),
        *((name, ctypes.c_int64) for name in ("tile_tokens", "run_tokens", "is_latent")),
        ("blocks_per_sm", ctypes.c_int64 * len(BATCH_BLOCKS_PER_SM)),
        *((name, ctypes.c_double) for name in _RATES),
        *((name, ctypes.c_int64) for name in _BYTES),
        ("rules", ShareRules),
    )


class _Bins(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int64), *((name, ctypes.c_double * BINS) for name in ("number", "rows", "tokens")))


class Weighed(ctypes.Structure):
    """The structure of that name in batch_weights.h."""

    _fields_ = (
        *((name, ctypes.c_double * _PLACES) for name in ("splits", "times_us", "busy_us", "rest_us")),
        *((name, ctypes.c_int64) for name in ("walks", "cuts")),
        ("thresholds", ctypes.c_int64 * MOST_CUTS),
        ("below", ctypes.c_double * MOST_CUTS),
        ("first", ctypes.c_int64 * (_WALKS + 1)),
        ("cohorts", ctypes.c_void_p),
        ("totals", ctypes.c_double * (6 * _WALKS)),
        ("bins", _Bins * (_WALKS + MOST_CUTS)),
    )


class BatchWalks:
    """What weighing for batches of about equal numbers of rows has in common. Makes CompiledWeights.

    Args:
        shape: The attention shape.
        target: The GPU.
        config: The kernel config of all launches.
        rows: The rows of a tree, at most those of a tile.
    """

    def __init__(self, shape: Shape, target: Target, config: KernelConfig, rows: int) -> None:
        fields = walk_fields(shape, target, rows, config.rows, MOST_CUTS, config)
        self.walks, rows_of, tiles = fields[:3]
        lanes, held, tile_rows, lone_us, full_us = (
            float(column[0]) for column in (tiles.lanes, tiles.held, tiles.rows, tiles.lone_us, tiles.full_us)
        )
        facts, batches = facts_of(target), target.batch_constants

        def throughput(**count: float) -> float:
            counts = {"pieces": 0.0, "full": 0.0, "packed": 0.0} | count
            of = SimpleNamespace(**counts, unevenness=1.0, tile_rows=tile_rows, full_tile=full_us, **facts)
            return float(batches.blocks_factor * lanes * ITEMS.terms["throughput"](of))

        of_byte = SimpleNamespace(memory_bytes=1.0, unevenness=1.0, read_bytes=1.0, written_bytes=0.0, **facts)
        rates = (
            *(MOST_SPREAD, lanes, target.sms, held * target.sms / lanes, lone_us, full_us),
            *(throughput(pieces=1.0), throughput(full=1.0), throughput(packed=1.0)),
            *(ITEMS.terms["traffic"](of_byte), batches.merge_factor * MERGES.terms["merge_traffic"](of_byte)),
            *(facts["launch_us"], facts["next_launch_us"], batches.idle_merge_us, facts["sharpness"]),
            *(batches.item_tiles, CUT_TILES),
        )
        heads = shape.num_qo_heads
        self.whole, self.shares = len(self.walks) - MOST_CUTS, rates[_RATES.index("shares")]
        self._rows_of, self._facts = rows_of, _WalkFacts(
            *(self.whole, (ctypes.c_int64 * _WALKS)(*rows_of), config.tokens, RUN_TOKENS, is_latent(shape)),
            *((ctypes.c_int64 * len(BATCH_BLOCKS_PER_SM))(*BATCH_BLOCKS_PER_SM), *rates),
            *(shape.kv_token_bytes, heads * shape.head_dim * shape.dtype_bytes, shape.partial_bytes),
            heads * (shape.head_dim_v * shape.dtype_bytes + FP32_BYTES),
            SHARE_RULES,
        )  # fmt: skip
        self.address = ctypes.addressof(self._facts)

    def weights(self, tree: BatchTree) -> CompiledWeights | None:
        """Weighs all policies for a tree with tokens; None where C cannot do so."""
        library = c_library.library()
        spanned = None if library is None else _spanned(tree)
        if library is None or spanned is None:
            return None
        rows = tree.counts.rows
        cohorts = np.empty(sum(-(-rows // each) for each in self._rows_of) + MOST_CUTS * rows, np.int64)
        words, (known, _kept) = np.empty(ctypes.sizeof(Weighed) // 8), spanned
        at = c_library.address_of(words)
        walks = library.weigh_policies(ctypes.addressof(known), self.address, at, c_library.address_of(cohorts))
        return None if walks < 0 else CompiledWeights(self, words, at, cohorts, walks)


class CompiledWeights(WeighedPolicies):
    """See BatchWalks."""

    names_shares = True

    def __init__(self, of: BatchWalks, words: Floats, address: int, cohorts: Any, walks: int) -> None:
        self._library: Any = c_library.library()
        self._of, self._at = of, address
        self._kept = words, cohorts  # C reads these
        splits, times_us = words[: 2 * _PLACES].reshape(2, _SPLITS, _WALKS)
        self.splits, self.times_us = splits[:, :walks], times_us[:, :walks]

    @cached_property
    def walks(self) -> tuple[Cohort, ...]:  # type: ignore[override]  # made when it is asked for
        """See WeighedPolicies."""
        whole, number = self._of.whole, self.splits.shape[1]
        at = Weighed.thresholds.offset // 8
        thresholds = self._kept[0][at:].view(np.int64)[: number - whole].tolist()
        cut = self._of.walks[whole:number]
        found = [replace(walk, split_shared_rows=rows) for walk, rows in zip(cut, thresholds, strict=True)]
        return (*self._of.walks[:whole], *found)

    def shares_of(self, walk: int) -> float:
        """See WeighedPolicies."""
        return self._of.shares

    def items(self, place: tuple[int, int]) -> int:
        """See WeighedPolicies."""
        return int(self._library.policy_items(self._at, *place))

    def time_us(self, place: tuple[int, int]) -> float:
        """See WeighedPolicies."""
        found = ctypes.c_double()
        self._done(self._library.policy_time(self._of.address, self._at, *place, ctypes.addressof(found)))
        return found.value

    def best(self, most_items: int | None = None) -> tuple[int, int]:
        """See WeighedPolicies."""
        place = (ctypes.c_int64 * 2)()
        most = np.iinfo(np.int64).max if most_items is None else most_items
        self._done(self._library.best_policy(self._of.address, self._at, most, ctypes.addressof(place)))
        return place[0], place[1]

    def _done(self, result: int) -> None:
        if result < 0:
            raise MemoryError("policies cannot be weighed")


def _spanned(tree: BatchTree) -> tuple[_SpannedTree, Any] | None:
    """Returns a tree as C reads it, with the arrays that it points to; None where nodes have several runs of KV."""
    counts, columns = tree.counts, tree.columns
    if columns is not None:
        nodes, at = columns.nodes, c_library.address_of(columns.words)
        lo, hi, parent = (at + 4 * (columns.nodes_at + nodes * column) for column in (3, 4, 8))
        sizes = counts.rows, columns.spans, nodes, counts.unique_tokens
        return _SpannedTree(*sizes, at + 4 * columns.spans_at, parent, lo, hi), columns.words
    topology, indptr = tree.tree.topology, tree.tree.kv.indptr
    if largest(indptr[1:] - indptr[:-1]) > 1:
        return None
    read = topology.spans.table, tree.tree.parent, topology.rank_lo, topology.rank_hi
    arrays = [np.ascontiguousarray(column, np.int32) for column in read]
    lengths = counts.rows, len(topology.spans), len(tree.tree.parent), counts.unique_tokens
    return _SpannedTree(*lengths, *map(c_library.address_of, arrays)), arrays
