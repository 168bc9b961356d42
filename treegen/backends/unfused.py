"""Unfused attention: runs kernel configs with dense masks in plain PyTorch, with scores and weights in memory.

Medusa's tree attention works so (DeFT, section 2 and table 4). Both backends use it.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from treegen.backends.kv_scales import HeadScales
from treegen.backends.kv_views import token_major, tokens_at
from treegen.backends.softmax import least_score, softmax, unseen_as_zero, with_sinks
from treegen.ir.arrays import ragged, ragged_ranges
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.ir.work_items import WorkItem
from treegen.scoring.options import Scoring

MOST_SCORES = 1 << 30
"""The most scores in memory at a time, unless one KV head alone has more."""


class UnfusedPart:
    """One work item on one device: its rows, its KV slots, and the mask of both."""

    def __init__(
        self,
        schedule: Schedule,
        config: KernelConfig,
        item: WorkItem,
        shape: Shape,
        device: torch.device,
        scales: HeadScales | None,
        scoring: Scoring | None,
    ) -> None:
        packed_runs = schedule.packed_runs[item.run0 :][: item.packed_tiles * config.runs_per_tile]
        runs = np.concatenate([schedule.tiles[item.tile0 : item.tile0 + item.tiles], packed_runs]).astype(np.int64)
        owner, _ = ragged(runs[:, 1])
        numbers = np.arange(item.rows)[:, None]
        # A row that sees no run is left out of the mask, as its result would be 0 / 0.
        sees = (runs[owner, 2] <= numbers) & (numbers < runs[owner, 3])
        seeing = sees.any(1)
        rows = schedule.rows[item.row0 : item.row0 + item.rows].astype(np.int64)
        self._shape, self._scales = shape, scales
        self._rows, self._blind = (torch.from_numpy(chosen).to(device) for chosen in (rows[seeing], rows[~seeing]))
        self._slots = torch.from_numpy(ragged_ranges(runs[:, 0], runs[:, 1])).to(device)
        self._hidden = torch.from_numpy(~sees[seeing]).to(device)
        self._scoring = scoring
        if scoring is not None and scoring.positions:
            depths = ragged_ranges(runs[:, 4], runs[:, 1]), schedule.row_positions[rows[seeing]].astype(np.int64)
            self._token_positions, self._row_positions = (torch.from_numpy(each).to(device) for each in depths)
        else:
            self._token_positions, self._row_positions = self._slots, self._rows

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
        """Fills its rows of out [rows, heads, head_dim_v] and lse [rows, heads] (natural log times `lse_scale`)."""
        keys, values = (token_major(cache, self._shape.kv_layout) for cache in (k_cache, v_cache))
        nothing = torch.full((len(self._blind), q.shape[1]), -math.inf, dtype=torch.float32, device=lse.device)
        self._write(self._blind, slice(None), q.new_zeros(1, 1, 1).float(), nothing, out, lse, lse_scale)
        group, heads = self._shape.group, self._shape.num_kv_heads
        at_once = max(1, MOST_SCORES // max(1, group * self._hidden.numel()))
        for head in range(0, heads, at_once):
            chosen = slice(head, min(head + at_once, heads))
            of_heads = slice(chosen.start * group, chosen.stop * group)
            query = q[self._rows, of_heads].float().view(len(self._rows), -1, group, q.shape[2])
            scores = torch.einsum("rhgd,thd->hgrt", query, tokens_at(keys[..., chosen, :], self._slots).float())
            scores = scores * sm_scale
            if self._scales:
                scores = scores * self._scales.k[chosen, None, None, None]
            if self._scoring is not None:
                scores = self._scored(scores, of_heads)
            scores = scores.masked_fill(self._hidden, -math.inf)
            least = least_score(self._scoring, sm_scale, self._scales)
            weights, log_sum = softmax(scores, -1, least if isinstance(least, float) else least[chosen])
            result = torch.einsum("hgrt,thd->rhgd", weights, tokens_at(values[..., chosen, :], self._slots).float())
            if self._scales:
                result = result * self._scales.v[chosen, None, None]
            log_sum = log_sum.flatten(0, 1).T
            result = unseen_as_zero(result.flatten(1, 2), log_sum)
            self._write(self._rows, of_heads, result, log_sum, out, lse, lse_scale)

    def _write(
        self,
        rows: torch.Tensor,
        heads: slice,
        result: torch.Tensor,
        log_sum: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        lse_scale: float,
    ) -> None:
        """Writes the final output of rows, with sinks, for some query heads."""
        if self._scoring is not None and self._scoring.sinks is not None:
            result, log_sum = with_sinks(result, log_sum, self._scoring.sinks[heads])
        out[rows, heads] = result.to(out.dtype)
        lse[rows, heads] = log_sum * lse_scale

    def _scored(self, scores: torch.Tensor, of_heads: slice) -> torch.Tensor:
        """Applies score options to the scores [KV heads, group, rows, tokens] of some query heads."""
        assert self._scoring is not None
        head = torch.arange(of_heads.start, of_heads.stop, device=scores.device).view(*scores.shape[:2], 1, 1)
        rows, positions = self._rows[:, None], self._row_positions[:, None]
        return self._scoring.scores(scores, rows, head, positions, self._token_positions)


def unfused_parts(
    schedule: Schedule,
    shape: Shape,
    device: torch.device,
    scales: HeadScales | None = None,
    scoring: Scoring | None = None,
) -> list[UnfusedPart]:
    """Prepares all items with dense masks. They write final output, so they may run before anything else."""
    return [
        UnfusedPart(schedule, config, schedule.work_items[index], shape, device, scales, scoring)
        for c, config in enumerate(schedule.configs)
        if not config.fused
        for index in range(schedule.config_indptr[c], schedule.config_indptr[c + 1])
    ]
