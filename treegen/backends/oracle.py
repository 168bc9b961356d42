"""The oracle: computes tree attention in float64, one row at a time, straight from the tree's definition."""

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


@dataclass(frozen=True, slots=True, eq=False)
class OracleOptions:
    """The options of attention that tensors do not show.

    sm_scale: the factor of scores, by default `1 / sqrt(head_dim)`. kv_layout: the layout of paged caches, "NHD" or
    "HND". k_scale, v_scale: factors of keys and values, a number or one for each KV head. scores: the score options,
    whose functions are called, not traced.
    """

    sm_scale: float | None = None
    kv_layout: str = "NHD"
    k_scale: float | torch.Tensor | None = None
    v_scale: float | torch.Tensor | None = None
    scores: ScoreOptions | None = None


def reference(
    tree: Tree,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    options: OracleOptions | None = None,
    rows: IntsLike | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of each row over exactly the KV slots that it sees, without plans, ranks or runs.

    A value that is not finite reaches only the rows that see its token. A score below softmax.LEAST_SCORE hides its
    token.

    Args:
        tree: The tree.
        q: `[rows, num_qo_heads, head_dim]`.
        k_cache: `[slots, num_kv_heads, head_dim]`, or with pages.
        v_cache: The same with head_dim_v.
        options: Scales, layout and score options; by default plain attention.
        rows: The rows to compute, in this order; by default all rows of q.

    Returns:
        out `[rows, num_qo_heads, head_dim_v]` and natural-log lse `[rows, num_qo_heads]`, in float64. A row that sees
        nothing gives 0 and -inf.

    Raises:
        InputError: The tree does not have one of the rows.
    """
    given = options or OracleOptions()
    keys, values = token_major(k_cache, given.kv_layout), token_major(v_cache, given.kv_layout)
    heads, head_dim = q.shape[1:]
    chosen = range(len(q)) if rows is None else _chosen(rows, tree)
    kv_heads = keys.shape[-2]
    scale = 1 / math.sqrt(head_dim) if given.sm_scale is None else given.sm_scale
    scales, scoring = ((keys, given.k_scale), (values, given.v_scale)), given.scores
    out = torch.zeros(len(chosen), heads, values.shape[-1], dtype=torch.float64, device=q.device)
    lse = torch.full((len(chosen), heads), -math.inf, dtype=torch.float64, device=q.device)
    for place, row in enumerate(chosen):
        slots = torch.from_numpy(tree.slots(row).astype("int64")).to(q.device)
        query = q[row].double().view(kv_heads, heads // kv_heads, head_dim)
        key, value = (_scaled(tokens_at(cache, slots), by) for cache, by in scales)
        products = torch.einsum("hgd,thd->hgt", query, key)
        scores = products * scale
        if scoring is not None and scoring.scores:
            scores = products = _scored(scores.flatten(0, 1), row, scoring).view_as(products)
        weights, log_sum = softmax(scores.masked_fill(products < LEAST_SCORE, -math.inf), -1)
        lse[place] = log_sum.flatten()
        out[place] = unseen_as_zero(_weighted(weights, value).flatten(0, 1), lse[place])
        if scoring is not None and scoring.sinks is not None:
            out[place], lse[place] = with_sinks(out[place], lse[place], scoring.sinks)
    return out, lse


def _scored(scores: torch.Tensor, row: int, options: ScoreOptions) -> torch.Tensor:
    """Applies score options to the scores [heads, tokens] of a row over its path."""
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
    """Sums values [tokens, KV heads, dim] by weights [KV heads, group, tokens] to [KV heads, group, dim].

    A weight of 0 leaves out its value, also a value that is not finite.
    """
    finite = value.isfinite().all(-1).all(-1)
    total = torch.einsum("hgt,thd->hgd", weights[..., finite], value[finite])
    own = weights[..., ~finite, None]
    return total + torch.where(own == 0, 0.0, own * value[~finite].transpose(0, 1)[:, None]).sum(2)


def _scaled(tokens: torch.Tensor, by: float | torch.Tensor | None) -> torch.Tensor:
    """Multiplies tokens [tokens, KV heads, dim] by their scale, in float64."""
    if by is None:
        return tokens.double()
    return tokens.double() * (by.double()[:, None] if isinstance(by, torch.Tensor) else by)


def _chosen(rows: IntsLike, tree: Tree) -> list[int]:
    numbers: list[int] = int32_array("rows", rows, low=0, high=tree.num_rows - 1, error=InputError).tolist()
    return numbers


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns `max |found - expected| / max |expected|`; infinity where only one of them is finite.

    Equal infinities agree, as in the lse of rows that see nothing.
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
"""The largest acceptable error by q's type, for standard-normal inputs."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The errors of a kernel's output against the float64 oracle: `max |out - ref| / max |ref|`, for out and for lse.

    It is true if both errors are within the tolerance, so that `assert kernel.verify(...)` works.
    """

    out_error: float
    lse_error: float
    tolerance: float

    @classmethod
    def of(cls, found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], dtype: str) -> Verification:
        """Compares out and lse with the oracle's, which may have fewer rows. dtype: q's type."""
        out_error, lse_error = (error(a[: len(b)], b) for a, b in zip(found, expected, strict=True))
        return cls(out_error, lse_error, TOLERANCE[dtype])

    def __bool__(self) -> bool:
        return self.passed

    @property
    def passed(self) -> bool:
        """Whether both errors are within the tolerance."""
        return self.out_error <= self.tolerance and self.lse_error <= self.tolerance

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"{verdict}: out error {self.out_error:.2e}, lse error {self.lse_error:.2e}, tolerance {self.tolerance:.1e}"
        )
