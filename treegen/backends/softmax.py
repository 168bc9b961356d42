"""The softmax of the PyTorch code, and the score below which a token is hidden."""

from __future__ import annotations

import math

import torch

from treegen.backends.kv_scales import HeadScales
from treegen.scoring.options import Scoring

LEAST_SCORE = -1.0e24
"""A score below it hides its token, as -inf does. So finfo.min of float32 and bfloat16 masks a token.

With score options, their result is compared; without, the product of query and key, before sm_scale and k_scale.
Kernels compare with the same number: a row's running maximum begins there (UNSEEN in
templates/partial_attention.py.jinja). A sink below it takes no part either.
"""


def least_score(scoring: Scoring | None, sm_scale: float, scales: HeadScales | None) -> float | torch.Tensor:
    """Returns LEAST_SCORE in the unit of scaled scores: one number, or one for each KV head [KV heads, 1, 1]."""
    if scoring is not None and scoring.code is not None:
        return LEAST_SCORE
    return LEAST_SCORE * sm_scale * (1.0 if scales is None else scales.k[:, None, None])


def softmax(
    scores: torch.Tensor, dim: int, least: float | torch.Tensor = -math.inf
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the weights of scores along a dimension, which sum to 1, and their natural log-sum-exp.

    least: LEAST_SCORE in the unit of `scores`. Where all scores are below it, the log-sum-exp is -inf and the weights
    mean nothing; `unseen_as_zero` makes the results of such rows. A NaN makes all weights and the log-sum-exp NaN.
    """
    log_sum = torch.logsumexp(scores, dim)
    return torch.softmax(scores, dim), log_sum.masked_fill(log_sum < least, -math.inf)


def unseen_as_zero(out: torch.Tensor, log_sum: torch.Tensor) -> torch.Tensor:
    """Sets out [..., dim] to 0 where log_sum [...] is -inf, which is the result of rows that see nothing."""
    return out.masked_fill((log_sum == -math.inf)[..., None], 0.0)


def with_sinks(out: torch.Tensor, log_sum: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds sinks [heads] to the softmaxes that gave out [rows, heads, dim] and natural log_sum [rows, heads].

    A sink of -inf changes nothing, so a row that sees nothing then keeps 0 and -inf.
    """
    sinks = sinks.to(log_sum.dtype)
    sinks = sinks.masked_fill(sinks < LEAST_SCORE, -math.inf).expand_as(log_sum)
    # exp(log_sum - total) would lose the difference to the rounding of the total where both are large.
    share = torch.sigmoid(log_sum - sinks)
    total = torch.logaddexp(log_sum, sinks)
    return unseen_as_zero(out * share[..., None], total), total
