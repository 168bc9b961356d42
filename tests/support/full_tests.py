"""Parameters that `make test` and `make test-full` share out among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def others_full(values: Iterable[Any], every: int = 2) -> Sequence[Any]:
    """Marks all values but each `every`-th one, from the first on, as those of full tests."""
    return [
        value if place % every == 0 else pytest.param(value, marks=pytest.mark.full)
        for place, value in enumerate(values)
    ]
