"""The command run: a table of time and memory for each strategy, from any tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from treegen import cli


def test_a_tree_is_run_with_each_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "40(6*3)", "--compare", "auto,query,none,flashinfer", "--page-size", "4"]) == 0
    first, missing, titles, *rows = capsys.readouterr().out.splitlines()
    assert first == "40(6*3): 40 prompt tokens, model tiny, cpu"
    assert missing.startswith("flashinfer: ")
    assert titles.startswith("provider  ms a token  ms a step  attention")
    assert [row.split()[0] for row in rows] == ["auto", "query", "none"]
    for row in rows:
        shares = re.findall(r"([0-9]+)%", row)
        assert len(shares) == 4
        assert 97 <= sum(map(int, shares)) <= 103


@pytest.mark.parametrize(
    ("workload", "first"),
    [
        ("grpo:prompts=2,samples=3", "2 prompts of up to 10 prompt tokens"),
        ("system-prompts:requests=1", "32 prompts of up to 33 prompt tokens"),
        ("beams:width=3,prompt=2000,tokens=400", "20 prompt tokens"),
    ],
)
def test_workloads_are_scaled(workload: str, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", workload, "--scale", "0.01", "--compare", "auto,sdpa"]) == 0
    line, titles, *rows = capsys.readouterr().out.splitlines()
    assert line == f"{workload}: {first}, model tiny, cpu"
    assert re.split("  +", titles)[-4:] == ["KV held", "unshared", "KV read", "unshared reads"]
    assert [row.split()[0] for row in rows] == ["auto", "sdpa"]


def test_recorded_trees_are_in_the_data_folder(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "reasoning-keyword:5", "--data", str(data_dir), "--scale", "0.01", "--compare", "query"]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.startswith("reasoning-keyword:5: 14 prompt tokens")


def test_recorded_drafts_are_in_the_data_folder(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "speculative-32:prompts=2", "--data", str(data_dir), "--scale", "0.01"]
    assert cli.main([*arguments, "--compare", "auto,query,flashinfer,none", "--page-size", "4"]) == 0
    first, missing, titles, *rows = capsys.readouterr().out.splitlines()
    assert first == "speculative-32:prompts=2: 2 prompts of up to 10 prompt tokens, model tiny, cpu"
    assert missing.startswith("flashinfer: ")
    assert [row.split()[0] for row in rows] == ["auto", "query", "none"]
    steps = re.split("  +", titles).index("steps")
    assert {re.split("  +", row)[steps] for row in rows} == {"4"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["5+6"], "has a prompt without tokens, or without tokens below it"),
        (["reasoning-sorting"], "no folder is given; name the folder of recorded trees with --data"),
        (["reasoning-sorting", "--data", "no/such"], "data = no/such: has no deft/reasoning_sorting128.json; name"),
        (["grpo", "--scale", "2"], "scale = 2.0: is not above 0 and at most 1"),
        (["40(6*3)", "--compare", "fastest"], "fastest"),
        (["40(6*3)", "--model", "no/such/folder/here"], "; name a folder or a model of Transformers"),
        (["40(6*3)", "--page-size", "3"], "power of two"),
        (["40(6*3)", "--tensor-parallel"], "--tensor-parallel = True: needs several ranks: "),
        (["40(6*3)", "--context-parallel"], "start it with torchrun --nproc-per-node 2 -m treegen run"),
        (["40(6*3)", "--tensor-parallel", "--context-parallel"], "does not go with --tensor-parallel; give one"),
    ],
)
def test_what_is_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("TREEGEN_DATA", raising=False)
    assert cli.main(["run", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert len(error.splitlines()) == 1
