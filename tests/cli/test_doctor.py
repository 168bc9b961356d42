"""`treegen doctor`: what it says of this machine, of one with GPUs, and of one without torch."""

import json
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.cache_entries import ENTRY
from support.paths import ROOT
from treegen import cli
from treegen.autotune_cache.key import target_text
from treegen.autotune_cache.policy_cache import POLICY_CACHE
from treegen.target.targets import target_from
from treegen.version import VERSION


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no variables but those of every test."""
    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TREEGEN_DATA", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["doctor", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(run(capsys, "--json"))


def with_gpus(monkeypatch: pytest.MonkeyPatch, *devices: tuple[str, int, int, int]) -> None:
    """Makes torch tell of these GPUs: name, compute capability and SMs."""
    properties = [
        SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=sms, total_memory=2**37)
        for name, major, minor, sms in devices
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: len(devices) - 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: devices[device.index][1:3])
    monkeypatch.setattr("treegen.cli.doctor.c_compiler", lambda: "/usr/bin/gcc")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13010, raising=False)


def test_on_a_machine_without_gpu(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "triton" / "some").mkdir(parents=True)
    (folder / "triton" / "some" / "kernel").write_bytes(bytes(2**20))
    text, found = run(capsys), report(capsys)
    assert found["versions"]["treegen"].startswith(VERSION)
    assert found["versions"]["python"].startswith(platform.python_version())
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert (found["GPUs"], found["target"], found["backend"]["name"]) == ([], "h200", "torch")
    assert found["environment"]["TREEGEN_CACHE_DIR"] == str(folder / "cache")
    assert found["environment"]["TRITON_INTERPRET"] == "1"
    assert found["notes"] == ["no CUDA device: kernels run on the torch backend, plans are made for h200"]
    for line in (
        f"  treegen: {found['versions']['treegen']}",
        "GPUs: none",
        "target: h200",
        f"  kernels: {folder / 'cache' / 'kernels'}, does not exist yet, writable",
        f"  Triton: {folder / 'triton'}, 1 files, 1.0 MiB, writable",
        "  user: none",
        "  TRITON_INTERPRET: 1",
    ):
        assert line in text.splitlines()


def test_policies_that_are_usable_or_not(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, ("NVIDIA H200", 9, 0, 132))
    here = replace(ENTRY.key, target=target_text(target_from("h200")))
    for number, key in enumerate((ENTRY.key, here, replace(here, kernels=0, space=0), replace(here, space=0))):
        POLICY_CACHE.store(replace(ENTRY, key=replace(key, bucket=f"bucket {number}")))
    found = report(capsys)
    assert found["policies"]["user"] == {
        "usable": 1,
        "of another target": 1,
        "stale: other kernels, space": 1,
        "stale: other space": 1,
    }
    assert found["notes"] == []
    POLICY_CACHE.store(replace(ENTRY, key=here, made_with={"triton": "1.0"}))
    (note,) = report(capsys)["notes"]
    assert note.startswith("1 policies were measured with triton 1.0, here 3.")


def test_on_a_machine_with_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, ("Tesla V100", 7, 0, 80), ("NVIDIA H200", 9, 0, 132))
    found = report(capsys)
    assert [(gpu["index"], gpu["name"], gpu["target"]) for gpu in found["GPUs"]] == [
        (1, "NVIDIA H200", "h200"),
        (0, "Tesla V100", "Tesla V100"),
    ]
    assert (found["target"], found["backend"]["name"]) == ("h200", "triton")
    assert "CUDA up to 13.1" in found["versions"]["NVIDIA driver"]
    below, untuned = found["notes"]
    assert below.startswith("GPU 0 is below compute capability 8.0")
    assert "auto uses the cost model" in untuned
    text = run(capsys)
    assert "  1: NVIDIA H200, compute capability 9.0, 132 SMs, 128.0 GiB; target h200\n" in text
    assert "target Tesla V100, cost model scaled from h200" in text


def test_a_torch_that_does_not_tell_the_driver(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpus(monkeypatch, ("NVIDIA H200", 9, 0, 132))
    monkeypatch.delattr(torch._C, "_cuda_getDriverVersion")
    assert "CUDA up to" not in (report(capsys)["versions"]["NVIDIA driver"] or "")


def test_what_is_amiss(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "file").write_text("in the way")
    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(folder / "file" / "cache"))
    monkeypatch.setenv("TREEGEN_CACHE", "/tmp")
    found = report(capsys)
    assert [cache["writable"] for cache in found["caches"]] == [False, False, False, True]
    assert sum("cannot be written: set TREEGEN_CACHE_DIR" in note for note in found["notes"]) == 3
    assert any(note.startswith("TREEGEN_CACHE is not a variable of treegen") for note in found["notes"])
    assert "NOT WRITABLE" in run(capsys)


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_without_torch(arguments: tuple[str, ...]) -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from treegen.cli import main\n"
        f"sys.exit(main(['doctor', *{arguments!r}]))\n"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    if arguments:
        found = json.loads(done.stdout)
        assert found["versions"]["torch"] is found["versions"]["triton"] is found["backend"]["name"] is None
        assert "torch is not installed" in found["backend"]["why"]
        assert "torch is not installed: install it to run kernels" in found["notes"]
    else:
        assert "  torch: not installed\n" in done.stdout


def test_a_broken_torch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(
        "treegen.cli.doctor.importlib", SimpleNamespace(**{**vars(__import__("importlib")), "import_module": fail})
    )
    found = report(capsys)
    assert "libcudart.so.13" in found["notes"][0]
    assert found["backend"]["name"] is None
