"""`treegen cache`: what it lists, explains, removes and moves."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from support.cache_entries import ENTRY, KEY, TREE
from support.paths import ROOT
from treegen import cli
from treegen.autotune_cache.policy_cache import POLICY_CACHE

OPTIONS = ["--heads", "16:2", "--head-dim", "64", "--dtype", "fp16", "--page-size", "16", "--target", "a100"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The policies' folder of an empty cache."""
    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "policies"


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli.main(["cache", *arguments]) == code
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def test_ls(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert str(folder) in run(capsys, "ls")
    POLICY_CACHE.store(ENTRY)
    POLICY_CACHE.store(replace(ENTRY, key=replace(KEY, kernels=0, space=0), measured_us=None))
    (folder / ("f" * 64 + ".json")).write_text("[" * 100_000)
    title, *lines = run(capsys, "ls").splitlines()
    assert title.split() == ["entry", "where", "bucket", "shape", "target", "time", "policy", "state"]
    valid, outdated, damaged = sorted(lines, key=lambda line: (line.startswith("f" * 12), not line.endswith("valid")))
    for part in (KEY.digest[:12], "user", KEY.bucket, KEY.shape, "a100", "12.5 us", "head_rows=16 tile=16,64"):
        assert part in valid
    assert outdated.endswith("not used: other kernels, space")
    assert "not measured" in outdated
    assert "nested too deeply" in damaged


def test_why(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    told = run(capsys, "why", TREE, *OPTIONS)
    assert f"key {KEY.digest}\n  bucket: {KEY.bucket}\n  shape: {KEY.shape}\n" in told
    assert "miss: no entry" in told
    POLICY_CACHE.store(ENTRY)
    assert "hit (memory): strategy=cohort head_rows=16 tile=16,64, 12.5 us\n  source: a100" in run(
        capsys, "why", TREE, *OPTIONS
    )
    told = run(capsys, "why", TREE)
    assert f"user entry {KEY.digest[:12]} differs in 2 of 6 fields" in told
    assert f"  shape: 32:8 heads, head_dim 128, bf16; the entry: {KEY.shape}\n" in told


def test_why_of_a_damaged_entry(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / f"{KEY.digest}.json").write_text("{}")
    assert "miss: the user entry is not valid" in run(capsys, "why", TREE, *OPTIONS)


def test_clear_asks(capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    POLICY_CACHE.store(ENTRY)
    (folder / "notes.txt").write_text("mine")
    for answer in ("n\n", ""):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert cli.main(["cache", "clear"]) == 1
        printed = capsys.readouterr()
        assert "nothing removed" in printed.out
        assert str(folder) in printed.err
        assert len(list(folder.iterdir())) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert cli.main(["cache", "clear"]) == 0
    assert "removed 1 entries" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    POLICY_CACHE.store(ENTRY)
    assert "removed 1 entries" in run(capsys, "clear", "--yes")


def test_export_and_import(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    POLICY_CACHE.store(ENTRY)
    file = tmp_path / "policies.json"
    assert run(capsys, "export", str(file)) == "exported 1 entries\n"
    assert json.loads(file.read_text())["entries"] == [ENTRY.to_object()]
    assert "refused entry 0: " in run(capsys, "import", str(file))
    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(tmp_path / "second"))
    told = run(capsys, "import", str(file))
    assert told == f"imported 1 entries into {tmp_path / 'second' / 'policies'}\n"
    assert "hit (user)" in run(capsys, "why", TREE, *OPTIONS)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["why", "1,4/100"], "tokens_per_node = "),
        (["why", TREE, "--heads", "32"], "heads = 32: is not a pair"),
        (["why", TREE, "--target", "h2000"], "target = h2000: is not known"),
        (["why"], "Missing argument 'TREE'"),
        (["import", "absent.json"], "path = absent.json: cannot be read"),
        (["import", "."], "path = .: is not a regular file"),
        (["import", "README.md"], "path = README.md: is not JSON"),
        (["import", "treegen/target/targets.json"], "path = treegen/target/targets.json: "),
        (["export", "absent/policies.json"], "path = absent/policies.json: cannot be written"),
        (["export"], "Missing argument 'FILE'"),
        (["absent"], "No such command 'absent'"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["cache", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("treegen: error: ")
    assert printed.err.count("\n") == 1
    assert expected in printed.err


def test_import_into_a_folder_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    POLICY_CACHE.store(ENTRY)
    POLICY_CACHE.export_to(tmp_path / "in.json")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(tmp_path / "file"))
    assert cli.main(["cache", "import", str(tmp_path / "in.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
