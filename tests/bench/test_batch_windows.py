"""Batches whose rows see a sliding window, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.small_batches import BATCH, CPU, DRAFTS, case_of, settings
from treegen.bench.batch_case import BatchShapes
from treegen.bench.batch_providers import TreegenBatches, TreegenExact
from treegen.bench.batch_runs import measure_batch, run_batches


def test_windows() -> None:
    """Providers and the reference see the last tokens alone, and the floor counts those that some row sees."""
    providers = [TreegenBatches(), TreegenExact("query"), TreegenBatches(batch_invariant=True)]
    measured = replace(settings(), window_left=7)
    (result,) = run_batches([BATCH], BatchShapes(["4:2"], 16, "fp32"), providers, measured, CPU, gbps=1000.0)
    assert [outcome.status for outcome in result.outcomes] == ["right"] * 3
    assert result.heads == "4:2 x16 fp32 window_left 7"
    case = case_of(BATCH, steps=0, window_left=7)
    pages = case.start.pages(BATCH)
    seen = {slot for row in pages.rows.tolist() for slot in case.slots(pages, row, 0).tolist()}
    assert result.floor_us == pytest.approx((len(seen) * 2 * 2 * 16 * 4 + 5 * 4 * 32 * 4) / 1e6)


def test_drafts_have_no_windows() -> None:
    found = measure_batch(TreegenBatches(), case_of(DRAFTS, steps=2, window_left=7), settings())
    assert found.status == "unavailable"
    assert "windows" in found.detail
