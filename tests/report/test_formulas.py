"""The formulas of the cost model, as explanations and its page show them."""

from __future__ import annotations

import pytest

from support.page_blocks import hold
from support.paths import ROOT
from treegen.report.estimate_text import fitted, model_lines
from treegen.target.targets import target_from


def test_the_page_has_the_formulas(request: pytest.FixtureRequest) -> None:
    _, *formulas = fitted(model_lines(target_from("h200"), "analytic"), width=100)
    hold(ROOT / "docs" / "cost_model.md", "formulas", "\n".join(line[2:] for line in formulas), request)
