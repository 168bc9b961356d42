"""Score options of a rank: the same scores as those of the whole attention, by the rank's own heads and positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from treegen.distributed.parallel import Parallel
from treegen.ir.errors import InputError
from treegen.ir.shape import Shape
from treegen.scoring.options import ScoreOptions


@dataclass(frozen=True)
class _LocalScores:
    """Score functions by a rank's numbers of heads and tokens; `positions` has the position of each query row."""

    given: ScoreOptions
    parallel: Parallel
    first_head: int
    positions: torch.Tensor | None

    def score(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """See treegen.compile's score_mod."""
        q_idx, kv_idx = self._places(b, q_idx, kv_idx)
        if self.positions is not None and self.given.alibi_slopes is not None:
            score = score + self.given.alibi_slopes[h] * (kv_idx - q_idx)
        if self.given.score_mod is None:
            return score
        return self.given.score_mod(score, b, h + self.first_head, q_idx, kv_idx)

    def mask(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """See treegen.compile's mask_mod."""
        q_idx, kv_idx = self._places(b, q_idx, kv_idx)
        given, window = self.given.mask_mod, self.given.window_left
        seen = None if given is None else given(b, h + self.first_head, q_idx, kv_idx)
        if self.positions is None or window < 0:
            return seen
        inside = q_idx - kv_idx <= window
        return inside if seen is None else inside & seen

    def _places(self, b: Any, q_idx: Any, kv_idx: Any) -> tuple[Any, Any]:
        """Returns the positions, on the whole path, of a row and of one of the rank's tokens."""
        if self.positions is None:
            return q_idx, kv_idx
        return self.positions[b], self.parallel.shard.position(kv_idx)


def needs_positions(options: ScoreOptions, parallel: Parallel) -> bool:
    """Says whether a rank's scores need the positions of query rows: where it does not hold all tokens."""
    reads = options.score_mod, options.mask_mod, options.alibi_slopes
    return parallel.shard.size > 1 and (options.window_left >= 0 or any(each is not None for each in reads))


def local_scores(
    options: ScoreOptions, shape: Shape, parallel: Parallel, positions: torch.Tensor | None
) -> dict[str, Any]:
    """Returns the score arguments of a rank's kernel.

    Args:
        options: The options of the whole attention.
        shape: Its shape.
        parallel: How it is divided.
        positions: Integers `[rows]`; the position of each query row on its path, where `needs_positions` says so.

    Raises:
        InputError: positions are missing, or options do not fit the shape.
    """
    options.check(shape)
    heads = parallel.query_heads(shape)
    slopes = None if options.alibi_slopes is None else parallel.of_heads(options.alibi_slopes, heads)
    sinks = None if options.sinks is None else parallel.of_heads(options.sinks, heads)
    if sinks is not None and parallel.shard.rank > 0:
        sinks = torch.full_like(sinks, -torch.inf)  # a sink counts once
    if not needs_positions(options, parallel):
        positions = None
    elif positions is None:
        fix = "give the position of each query row"
        raise InputError("positions", None, "are needed by scores that depend on positions", fix)
    of_rank = ScoreOptions(options.score_mod, options.mask_mod, None, slopes, options.window_left)
    local = _LocalScores(of_rank, parallel, heads.start, positions)
    shifts = heads.start > 0 or positions is not None
    functions: dict[str, Callable[..., Any] | None] = {"score_mod": options.score_mod, "mask_mod": options.mask_mod}
    if shifts and (options.score_mod is not None or (positions is not None and slopes is not None)):
        functions["score_mod"] = local.score
    if shifts and (options.mask_mod is not None or (positions is not None and options.window_left >= 0)):
        functions["mask_mod"] = local.mask
    return {
        **functions, "logits_soft_cap": options.logits_soft_cap, "sinks": sinks,
        "window_left": options.window_left if positions is None else parallel.shard.window(options.window_left),
        "alibi_slopes": slopes if positions is None else None,
    }  # fmt: skip
