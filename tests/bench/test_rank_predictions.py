"""Predictions for several GPUs: the page has what the benchmark prints."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from support.paths import ROOT


@pytest.fixture
def rank_predictions() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import rank_predictions

    yield rank_predictions
    sys.path.remove(str(ROOT / "benchmarks"))


def test_the_page_has_the_predictions_of_the_model(rank_predictions: ModuleType) -> None:
    page = (ROOT / "docs" / "several_gpus.md").read_text("utf-8")
    tables = rank_predictions.tables()
    assert len(tables) == 4
    for title, table in tables.items():
        assert table in page, f"{title}: python benchmarks/rank_predictions.py prints\n{table}"
