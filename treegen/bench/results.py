"""Results of runs as plain data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Status: TypeAlias = Literal["right", "wrong", "unavailable", "failed"]


@dataclass(frozen=True, slots=True)
class ProviderOutcome:
    """The outcome of a provider on a case.

    Args:
        provider: The provider's name.
        status: Whether its output is right; only then times are taken.
        error: `max |out - ref| / max |ref|`.
        eager_us: Microseconds of a call: the median on a cold L2, without the host's launch time.
        graph_us: The same of the call's replay as a CUDA graph.
        repeatable: Whether two calls give the same bits.
        detail: Why something is missing.
    """

    provider: str
    status: Status
    error: float | None = None
    eager_us: float | None = None
    graph_us: float | None = None
    repeatable: bool | None = None
    detail: str = ""

    @property
    def best_us(self) -> float | None:
        """The smaller of both times; None unless the output is right."""
        times = [time for time in (self.eager_us, self.graph_us) if time is not None]
        return min(times, default=None) if self.status == "right" else None


@dataclass(frozen=True, slots=True)
class Result:
    """The outcomes of all providers on a case.

    Args:
        tree: The name of the tree.
        heads: "query heads/KV heads".
        head_dim, dtype, page_size: The rest of the attention shape.
        rows: Query rows of the tree.
        unique_tokens: Tokens that some row sees.
        floor_us: A lower bound of the time in microseconds, from the copy rate measured in the same run.
        outcomes: One outcome for each provider.
        measured_on: The rank and the GPU, where several ranks share the cases.
    """

    tree: str
    heads: str
    head_dim: int
    dtype: str
    page_size: int
    rows: int
    unique_tokens: int
    floor_us: float
    outcomes: tuple[ProviderOutcome, ...]
    measured_on: str = ""

    @classmethod
    def from_object(cls, entry: dict[str, Any]) -> Result:
        """Returns the result of a JSON object with its fields. Raises TypeError or KeyError for any other."""
        return cls(**{**entry, "outcomes": tuple(ProviderOutcome(**outcome) for outcome in entry["outcomes"])})


def geometric_mean(values: Sequence[float]) -> float:
    """Returns the geometric mean; NaN for no values."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan
