"""The torch backend: executes a schedule in plain PyTorch on any device.

It reads the same tables as the Triton kernels, so it tests schedules without a GPU. Items of similar length are
computed together: each such batch is one gather and two matrix products over all its items and KV heads.

Matrix products and sums of other sizes give other bits. In a fixed schedule (of a batch-invariant plan) each row of
each item is therefore a batch of its own, with the tokens that it sees, and is merged alone: all sizes follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from treegen.backends.check_inputs import TORCH_DTYPES
from treegen.backends.kv_scales import Scales, placed
from treegen.backends.kv_views import token_major, tokens_at
from treegen.backends.softmax import least_score, softmax, unseen_as_zero, with_sinks
from treegen.backends.unfused import unfused_parts
from treegen.ir.arrays import Longs, offsets, ragged, ragged_ranges
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.ir.work_items import ITEM_FIELDS
from treegen.scoring.options import Scoring

_OF_ROWS = ("row", "live", "slot", "position", "sees", "earlier")
_BATCH_ELEMENTS = 1 << 22
"""The most elements of gathered keys in a batch. A longer item is a batch of its own."""


class TorchProgram:
    """A schedule prepared for execution on one device."""

    def __init__(
        self,
        schedule: Schedule,
        shape: Shape,
        device: torch.device,
        scales: Scales | None = None,
        scoring: Scoring | None = None,
    ) -> None:
        self._shape = shape
        self._scoring = scoring
        self._device = device
        self._scales = placed(scales, device, shape.num_kv_heads)
        self.load(schedule)

    def load(self, schedule: Schedule) -> None:
        """Takes another schedule, which later calls execute."""
        self._schedule = schedule
        self._unfused = unfused_parts(schedule, self._shape, self._device, self._scales, self._scoring)
        self._rounds = [
            ([batch for c in configs for batch in self._batches(c)], *self._merges(merges))
            for configs, merges in schedule.rounds
        ]
        if schedule.fixed:
            (batches, merge_rows, table), *_ = self._rounds
            counts = np.diff(schedule.merge_indptr).tolist()
            self._rounds = [(batches, merge_rows[:0], table[:0])]
            self._rounds += [([], merge_rows[i : i + 1], table[i : i + 1, :n]) for i, n in enumerate(counts)]

    @property
    def schedule(self) -> Schedule:
        """The schedule that calls execute."""
        return self._schedule

    def _batches(self, c: int) -> Iterator[dict[str, torch.Tensor]]:
        schedule, config = self._schedule, self._schedule.configs[c]
        if config.fused:
            for items in self._in_order(c):
                batches = _batches(schedule, config, items, self._shape)
                if schedule.fixed:
                    batches = [row for batch in batches for row in _rows_alone(batch)]
                yield from map(self._tensors, batches)

    def _in_order(self, c: int) -> list[range]:
        """Lists the items of a kernel config, with items that wait for others after these."""
        begin, end = self._schedule.config_indptr[c : c + 2].tolist()
        if not self._schedule.configs[c].fused_merge:
            return [range(begin, end)]
        border = begin + int(np.count_nonzero(self._schedule.column("partial0")[begin:end] >= 0))
        return [range(begin, border), range(border, end)]

    def _merges(self, merges: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the merged rows of a round, and a table of their partial slots.

        Rows with fewer partials are padded with slot `num_partials`, whose lse is -inf.
        """
        schedule = self._schedule
        bounds = schedule.merge_indptr[merges.start : merges.stop + 1]
        counts = np.diff(bounds)
        listed = np.arange(counts.max(initial=0))[None, :] < counts[:, None]
        table = np.full(listed.shape, schedule.num_partials)
        table[listed] = schedule.merge_partials[bounds[0] : bounds[-1]]
        return self._tensor(schedule.merge_rows[merges]), self._tensor(table)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        kind = array.dtype if array.dtype == np.bool_ else np.int64
        return torch.from_numpy(array.astype(kind)).to(self._device)

    def _tensors(self, batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        return {name: self._tensor(array) for name, array in batch.items()}

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        sm_scale: float,
        lse_scale: float,
    ) -> None:
        """Fills out [rows, heads, head_dim_v] and lse [rows, heads] (natural log times `lse_scale`)."""
        shape = self._shape
        keys, values = (token_major(cache, shape.kv_layout) for cache in (k_cache, v_cache))
        slots, heads = self._schedule.num_partials + 1, shape.num_qo_heads
        dtype = TORCH_DTYPES[shape.partial_dtype]
        part_out = torch.zeros(slots, heads, shape.head_dim_v, dtype=dtype, device=q.device)
        part_lse = torch.full((slots, heads), -math.inf, dtype=torch.float32, device=q.device)
        for part in self._unfused:
            part(q, k_cache, v_cache, out, lse, sm_scale, lse_scale)
        for batches, merge_rows, merge_table in self._rounds:
            for batch in batches:
                result, log_sum = self._attend(batch, q, keys, values, sm_scale)
                row, slot = batch["row"][batch["live"]], batch["slot"][batch["live"]]
                result, log_sum = result[batch["live"]], log_sum[batch["live"]]
                earlier = batch["earlier"][batch["live"]]
                if earlier.shape[1]:
                    results = torch.cat([result[:, None], part_out[earlier].float()], 1)
                    result, log_sum = _merged(results, torch.cat([log_sum[:, None], part_lse[earlier]], 1))
                final = slot < 0
                self._write(row[final], result[final], log_sum[final], out, lse, lse_scale)
                part_out[slot[~final]] = result[~final].to(dtype)
                part_lse[slot[~final]] = log_sum[~final]
            if len(merge_rows):
                merged, total = _merged(part_out[merge_table].float(), part_lse[merge_table])
                final = merge_rows >= 0
                self._write(merge_rows[final], merged[final], total[final], out, lse, lse_scale)
                part_out[-1 - merge_rows[~final]] = merged[~final].to(dtype)
                part_lse[-1 - merge_rows[~final]] = total[~final]

    def _write(
        self,
        rows: torch.Tensor,
        result: torch.Tensor,
        log_sum: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        lse_scale: float,
    ) -> None:
        """Writes the final output of rows, with sinks."""
        if self._scoring is not None and self._scoring.sinks is not None:
            result, log_sum = with_sinks(result, log_sum, self._scoring.sinks)
        out[rows] = result.to(out.dtype)
        lse[rows] = log_sum * lse_scale

    def _attend(
        self, batch: dict[str, torch.Tensor], q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sm_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes out [items, rows, heads, dim] and natural-log lse [items, rows, heads] of a batch, in float32."""
        group, kv_heads = self._shape.group, self._shape.num_kv_heads
        items, rows = batch["row"].shape
        query = q[batch["row"]].float().view(items, rows, kv_heads, group, -1)
        key, value = (tokens_at(cache, batch["kv"]).float() for cache in (keys, values))
        scores = torch.einsum("irhgd,ithd->ihrgt", query, key) * sm_scale
        if self._scales:
            scores = scores * self._scales.k[:, None, None, None]
        if self._scoring is not None:
            head = torch.arange(kv_heads * group, device=q.device).view(1, kv_heads, 1, group, 1)
            row, position = (batch[name][:, None, :, None, None] for name in ("row", "position"))
            scores = self._scoring.scores(scores, row, head, position, batch["depth"][:, None, None, None, :])
        scores = scores.masked_fill(~batch["sees"][:, None, :, None, :], -math.inf)
        weights, log_sum = softmax(scores, -1, least_score(self._scoring, sm_scale, self._scales))
        guarded = self._scoring is not None and self._scoring.guarded
        result = _guarded_product(weights, value) if guarded else torch.einsum("ihrgt,ithd->irhgd", weights, value)
        if self._scales:
            result = result * self._scales.v[:, None, None]
        log_sum = log_sum.permute(0, 2, 1, 3).flatten(2, 3)
        return unseen_as_zero(result.flatten(2, 3), log_sum), log_sum


def _guarded_product(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Multiplies weights [items, KV heads, rows, group, tokens] by values [items, tokens, KV heads, dim].

    A value that is not finite makes NaN of the rows that give its token a weight, and is left out for all others.
    """
    finite = value.isfinite()
    spoils = (~finite.all(-1)).to(weights.dtype)
    spoiled = torch.einsum("ihrgt,ith->irhg", (weights > 0).to(weights.dtype), spoils) > 0
    result = torch.einsum("ihrgt,ithd->irhgd", weights, value.masked_fill(~finite, 0.0))
    return result.masked_fill(spoiled[..., None], math.nan)


def _merged(partials: torch.Tensor, log_sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges partials [rows, most partials, heads, dim] and their lse; returns out [rows, heads, dim] and lse."""
    weights, total = softmax(log_sums, 1)
    return unseen_as_zero(torch.einsum("rph,rphd->rhd", weights, partials), total), total


def _batches(schedule: Schedule, config: KernelConfig, items: range, shape: Shape) -> list[dict[str, np.ndarray]]:
    """Makes the index arrays of batches of items.

    row, live, slot, position: [items, rows]. kv, depth: [items, tokens]. sees: [items, rows, tokens]. earlier: [items,
    rows, most partials], the partial slots to merge before the result is written, padded as in `_merges`.
    """
    table = schedule.items[items.start : items.stop].astype(np.int64)
    row0, rows, tile0, tiles, run0, packed_tiles, partial0, _ = (table[:, i] for i in range(len(ITEM_FIELDS)))
    entries = tiles + packed_tiles * config.runs_per_tile
    tokens = (tiles + packed_tiles) * config.tokens
    order = np.argsort(tokens, kind="stable")
    per_token = shape.num_kv_heads * max(shape.head_dim, shape.head_dim_v)
    result = []
    begin = 0
    while begin < len(order):
        shortest = tokens[order[begin]]
        end = begin + 1
        while end < len(order) and tokens[order[end]] <= 2 * shortest:
            if (end + 1 - begin) * tokens[order[end]] * per_token > _BATCH_ELEMENTS:
                break
            end += 1
        chosen, begin = order[begin:end], end
        runs = _runs(schedule, chosen, tile0, tiles, run0, packed_tiles * config.runs_per_tile)
        result.append(_batch(schedule, runs, entries[chosen], row0[chosen], rows[chosen], partial0[chosen], config))
    return result


def _runs(schedule: Schedule, chosen: Longs, tile0: Longs, tiles: Longs, run0: Longs, packed: Longs) -> np.ndarray:
    """Lists the runs of the chosen items, each item's full tiles before its packed runs."""
    both = np.concatenate([schedule.tiles, schedule.packed_runs])
    starts = np.stack([tile0[chosen], len(schedule.tiles) + run0[chosen]], axis=1).ravel()
    lengths = np.stack([tiles[chosen], packed[chosen]], axis=1).ravel()
    return both[ragged_ranges(starts, lengths)].astype(np.int64)


def _batch(
    schedule: Schedule, runs: Longs, entries: Longs, row0: Longs, rows: Longs, partial0: Longs, config: KernelConfig
) -> dict[str, np.ndarray]:
    slot, length, lo, hi = (runs[:, column] for column in range(4))
    depth = runs[:, 4] if runs.shape[1] > 4 else slot
    owner = np.repeat(np.arange(len(entries)), entries)
    run, step = ragged(length)
    counts = np.bincount(owner, length, len(entries)).astype(np.int64)
    item = owner[run]
    place = np.arange(len(item)) - offsets(counts)[item]
    width, height = int(counts.max(initial=0)), int(rows.max(initial=0))
    kv, depths, lowest, highest = (np.zeros((len(entries), width), np.int64) for _ in range(4))
    kv[item, place], depths[item, place] = slot[run] + step, depth[run] + step
    lowest[item, place], highest[item, place] = lo[run], hi[run]
    # No row sees the padding of shorter items, but 0 times NaN is NaN, so padding repeats a token that the item reads.
    kv = np.where(np.arange(width) < counts[:, None], kv, kv[:, :1])
    number = np.arange(height)
    entry = np.minimum(row0[:, None] + number[None, :], len(schedule.rows) - 1)
    row = schedule.rows[entry]
    live = (number[None, :] < rows[:, None]) & (row >= 0)
    numbers, lowest, highest = number[None, :, None], lowest[:, None, :], highest[:, None, :]
    if config.mask == "bits":
        sees = (np.where(numbers < 32, lowest, highest) >> (numbers % 32)) & 1 != 0
    else:
        sees = (numbers >= lowest) & (numbers < highest)
    final = live & (partial0[:, None] < 0)
    return {
        "row": row,
        "live": live,
        "slot": np.where(partial0[:, None] < 0, -1, partial0[:, None] + number[None, :]),
        "position": schedule.row_positions[row] if len(schedule.row_positions) else row,
        "kv": kv,
        "depth": depths,
        "sees": sees,
        "earlier": _earlier(schedule, entry, final & (config.epilogue_merge or config.fused_merge)),
    }


def _rows_alone(batch: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Makes a batch of each row of a batch's items, with only the tokens that the row sees."""
    for item, row in zip(*np.nonzero(batch["live"]), strict=True):
        own = {name: batch[name][item : item + 1, row : row + 1] for name in _OF_ROWS}
        seen = own["sees"][0, 0]
        of_tokens = {name: batch[name][item : item + 1, seen] for name in ("kv", "depth")}
        yield {**own, **of_tokens, "sees": own["sees"][:, :, seen]}


def _earlier(schedule: Schedule, entry: Longs, merging: np.ndarray) -> np.ndarray:
    """Lists the partial slots that are merged into row-table entries, where `merging`, along a new last axis.

    Entries with fewer slots are padded with `num_partials`.
    """
    counts = np.zeros(entry.shape, np.int64)
    begins = schedule.epilogue_indptr[entry[merging]]
    counts[merging] = schedule.epilogue_indptr[entry[merging] + 1] - begins
    listed = np.arange(counts.max(initial=0)) < counts[..., None]
    table = np.full(listed.shape, schedule.num_partials)
    table[listed] = schedule.epilogue_partials[ragged_ranges(begins, counts[merging])]
    return table
