"""The benchmarks of features and of verification: options are right on the torch backend, and told so."""

import sys
from pathlib import Path

import pytest

from support.paths import ROOT

try:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import features
    import verification
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


def test_verification_is_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tree.json").write_text('{"paths": [[0], [1], [0, 0], [0, 0, 0]]}')
    without_flex = (verification.PROVIDERS[0], *verification.PROVIDERS[2:])  # which compiles for seconds
    monkeypatch.setattr(verification, "PROVIDERS", without_flex)
    verification.main([str(tmp_path / "tree.json"), "--prefixes", "10,200", "--heads", "4:2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": auto: right")[0] for line in lines] == ["5 tokens over 10", "5 tokens over 200"]
    assert all("flashinfer-prefill: " in line for line in lines)
