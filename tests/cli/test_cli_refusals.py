"""Command lines and files that were taken for something else: the error names what is wrong, and where."""

from pathlib import Path

import pytest

from treegen import cli

FEW_SHOT = "1,4/100,10"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", "reasoning", "--seed", "-1"], "--seed"),
        (["generate", "speculative", "--seed", "-1"], "--seed"),
        (["warm", FEW_SHOT, "--timeout", "-1", "--dry-run"], "timeout = -1.0: is not a positive number; give seconds"),
        (["warm", FEW_SHOT, "--timeout", "nan", "--dry-run"], "timeout = nan: is not a positive number"),
        (["tune", FEW_SHOT, "--timeout", "0"], "timeout = 0.0: is not a positive number"),
        (["warm", "lines.jsonl", "--dry-run"], "error: lines.jsonl:2: line = 1,4/10,10: is not JSON (Extra data"),
        (["warm", "lines.jsonl", "--dry-run"], 'in quotes, as "1,4/10,10"'),
        (["explain", "list.json"], "path = list.json: holds an empty list, and no trees"),
        (["explain", FEW_SHOT, "--strategy", ""], "strategy = : is not registered; use one of query,"),
        (["explain", FEW_SHOT, "--strategy", "", "--html", "page.html"], "strategy = : is not registered"),
        (["explain", "1,4/10,-1"], "expected a number of tokens, found '-' at position 7"),
        (["run", "grpo:samples=0"], "samples = 0: is not a positive integer"),
        (["run", "system-prompts:rules=0"], "rules = 0: is not a positive integer"),
        (["run", "few-shot:steps=0"], "steps = 0: is not a positive integer"),
    ],
)
def test_errors_name_the_cause(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str],
    expected: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.jsonl").write_text('"1,4/10,10"\n1,4/10,10\n')
    (tmp_path / "list.json").write_text("[]")
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert expected in printed.err
    assert printed.err.count("lines.jsonl") <= 1
