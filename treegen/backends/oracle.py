"""The oracle: tree attention in float64, one row at a time, straight from the tree's definition."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from treegen.backends.kv_views import token_major, tokens_at
from treegen.backends.softmax import LEAST_SCORE, softmax, unseen_as_zero, with_sinks
from treegen.ir.arrays import IntsLike, int32_array
from treegen.ir.errors import InputError
from treegen.ir.tree import Tree
from treegen.scoring.indices import ClampedIndices
from treegen.scoring.options import ScoreOptions


def reference(
    tree: Tree,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    sm_scale: float | None = None,
    rows: IntsLike | None = None,
    kv_layout: str = "NHD",
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    options: ScoreOptions | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every row over exactly the slots it sees; knows nothing of plans, ranks or runs.

    q [rows, num_qo_heads, head_dim]; caches `[slots, num_kv_heads, head_dim]` or with pages, in this layout; that of V
    may have another head dim. Returns float64 out [rows, num_qo_heads, head_dim_v] and natural-log lse [rows,
    num_qo_heads]; 0 and -inf for a row that sees nothing. rows: the caller's numbers of those to compute, by default
    all; the results then hold these alone, in the order given. k_scale, v_scale: what keys and values are multiplied
    by, a number or one for every KV head. options: what is done to scores, by functions that are called, and not
    traced. A value that is not finite reaches the rows alone that see its token, and a score below
    softmax.LEAST_SCORE hides its token. Raises InputError for a row that the tree does not have.
    """
    keys, values = token_major(k_cache, kv_layout), token_major(v_cache, kv_layout)
    heads, head_dim = q.shape[1:]
    chosen = range(len(q)) if rows is None else _chosen(rows, tree)
    kv_heads = keys.shape[-2]
    scale = 1 / math.sqrt(head_dim) if sm_scale is None else sm_scale
    out = torch.zeros(len(chosen), heads, values.shape[-1], dtype=torch.float64, device=q.device)
    lse = torch.full((len(chosen), heads), -math.inf, dtype=torch.float64, device=q.device)
    sinks = None if options is None else options.sinks
    for place, row in enumerate(chosen):
        slots = torch.from_numpy(tree.slots(row).astype("int64")).to(q.device)
        query = q[row].double().view(kv_heads, heads // kv_heads, head_dim)
        key, value = (_scaled(tokens_at(cache, slots), by) for cache, by in ((keys, k_scale), (values, v_scale)))
        products = torch.einsum("hgd,thd->hgt", query, key)
        scores = products * scale
        if options is not None and options.scores:
            scores = products = _scored(scores.flatten(0, 1), row, options).view_as(products)
        weights, log_sum = softmax(scores.masked_fill(products < LEAST_SCORE, -math.inf), -1)
        lse[place] = log_sum.flatten()
        out[place] = unseen_as_zero(_weighted(weights, value).flatten(0, 1), lse[place])
        if sinks is not None:
            out[place], lse[place] = with_sinks(out[place], lse[place], sinks)
    return out, lse


def _scored(scores: torch.Tensor, row: int, options: ScoreOptions) -> torch.Tensor:
    """Scores [heads, tokens] of a row over its path, as the options make them."""
    heads, tokens = scores.shape
    head = torch.arange(heads, device=scores.device)[:, None]
    position, row_number = torch.tensor(tokens - 1, device=scores.device), torch.tensor(row, device=scores.device)
    token = torch.arange(tokens, device=scores.device)[None, :]
    with ClampedIndices():
        scored = options.score(scores, row_number, head, position, token)
        seen = options.mask(row_number, head, position, token)
    scores = torch.as_tensor(scored).expand(heads, tokens).double()
    return scores if seen is None else torch.where(seen, scores, -math.inf)


def _weighted(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The sum [KV heads, group, dim] of values [tokens, KV heads, dim] by weights [KV heads, group, tokens].

    A weight of 0 keeps out a value that is not finite.
    """
    finite = value.isfinite().all(-1).all(-1)
    total = torch.einsum("hgt,thd->hgd", weights[..., finite], value[finite])
    own = weights[..., ~finite, None]
    return total + torch.where(own == 0, 0.0, own * value[~finite].transpose(0, 1)[:, None]).sum(2)


def _scaled(tokens: torch.Tensor, by: float | torch.Tensor | None) -> torch.Tensor:
    """Tokens [tokens, KV heads, dim] in float64, times their scale."""
    if by is None:
        return tokens.double()
    return tokens.double() * (by.double()[:, None] if isinstance(by, torch.Tensor) else by)


def _chosen(rows: IntsLike, tree: Tree) -> list[int]:
    numbers: list[int] = int32_array("rows", rows, low=0, high=tree.num_rows - 1, error=InputError).tolist()
    return numbers


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """`max |found - expected| / max |expected|`; infinite when either is not finite where the other is.

    Elements that are infinite in both in the same way agree (lse of a row that sees nothing).
    """
    found, expected = found.double(), expected.double()
    finite = expected.isfinite()
    if not torch.equal(found[~finite], expected[~finite]) or not bool(found[finite].isfinite().all()):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    largest = float(expected[finite].abs().max())
    difference = float((found[finite] - expected[finite]).abs().max())
    return difference / largest if largest > 0 else difference


TOLERANCE = {"fp16": 2e-3, "bf16": 1.5e-2, "fp32": 1e-5}
"""Largest acceptable error by type of q, for standard-normal inputs."""


@dataclass(frozen=True, slots=True)
class Verification:
    """A kernel's output measured against the float64 oracle: `max |out - ref| / max |ref|`, for out and for lse. True
    in a condition if both are within the tolerance, so that `assert kernel.verify(...)` tells.
    """

    out_error: float
    lse_error: float
    tolerance: float

    def __bool__(self) -> bool:
        return self.passed

    @property
    def passed(self) -> bool:
        """Whether both errors are within the tolerance of q's type."""
        return self.out_error <= self.tolerance and self.lse_error <= self.tolerance

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"{verdict}: out error {self.out_error:.2e}, lse error {self.lse_error:.2e}, tolerance {self.tolerance:.1e}"
        )
