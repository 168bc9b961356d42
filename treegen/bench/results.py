"""Results of runs: what was measured, without what measures it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["right", "wrong", "unavailable", "failed"]


@dataclass(frozen=True, slots=True)
class ProviderOutcome:
    """A provider on a case. error: `max |out - ref| / max |ref|`; times: medians in microseconds on a cold L2 without
    the host's launch time, called as it is and replayed as a CUDA graph; detail: why there is none.
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
        """The faster of both ways to call it, if it is right."""
        times = [time for time in (self.eager_us, self.graph_us) if time is not None]
        return min(times, default=None) if self.status == "right" else None


@dataclass(frozen=True, slots=True)
class Result:
    """A case with the outcomes of all providers. floor_us: microseconds that no attention over the tree falls far
    below, from the copy bandwidth measured in the same run.
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


def geometric_mean(values: Sequence[float]) -> float:
    """NaN for none."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan
