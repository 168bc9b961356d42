"""The features benchmark: every option is right on the torch backend, and told so."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
try:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import features
finally:
    sys.path.remove(str(ROOT / "benchmarks"))


def test_every_feature_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    features.main(["--rows", "2", "30(9,600)"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(features.FEATURES)
    for feature, line in zip(features.FEATURES, lines, strict=True):
        assert line.startswith(feature.name)
        assert "right, error" in line


def test_a_wrong_result_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "options_of", lambda feature, device: {"logits_soft_cap": 1.0})
    monkeypatch.setattr(features, "FEATURES", features.FEATURES[:1])
    monkeypatch.setattr(features, "ScoreOptions", lambda **options: None)
    features.main(["--rows", "2", "30(9,60)"])
    assert "WRONG" in capsys.readouterr().out
