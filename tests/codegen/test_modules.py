"""Emitted modules: complete readable files, named by digest; what else lies in the cache is never run."""

import hashlib
import importlib.util
import inspect
import marshal
import os
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import treegen
from support.paths import ROOT
from treegen import Shape
from treegen.autotune_cache import folders
from treegen.codegen import load
from treegen.codegen.emit import emit_merge, emit_partial
from treegen.codegen.key_table import key_table
from treegen.codegen.merge_forms import merge_key
from treegen.codegen.partial_keys import kernel_key
from treegen.ir.errors import CacheWarning
from treegen.ir.kernel_config import KernelConfig

SHAPE = Shape(12, 4, 80, dtype="bf16")
MERGE = emit_merge(merge_key(SHAPE, several_rounds=False, rows=512, longest=9))
MASKED = KernelConfig(64, 64, 16, "interval", 4, 3)
PARTIAL = {
    "partial": MASKED,
    "partial-bits": KernelConfig(64, 64, 32, "bits", 4, 3),
    "partial-dealt": KernelConfig(16, 32, 1, "none", 2, 3, work_list=True),
    "partial-merging": KernelConfig(64, 64, 16, "none", 4, 3, epilogue_merge=True),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a process that has loaded nothing yet."""
    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "loaded", {})
    return tmp_path / "cache"


@pytest.mark.parametrize("name", [*PARTIAL, "merge", "merge-several-rounds"])
def test_sources(name: str, golden) -> None:
    merging = merge_key(SHAPE, several_rounds=name == "merge-several-rounds", rows=512, longest=9)
    source = emit_partial(kernel_key(PARTIAL[name], SHAPE)) if name in PARTIAL else emit_merge(merging)
    golden(source.text)


def test_the_header_carries_key_and_digest() -> None:
    source = emit_partial(kernel_key(MASKED, SHAPE))
    table = "".join(f"    {line}\n" for line in key_table(source.key))
    assert f"\nKey:\n{table}\n" in source.text
    assert f"\nDigest: {source.digest}\n" in source.text
    undigested = source.text.replace(source.digest, "")
    assert hashlib.sha256(undigested.encode()).hexdigest()[:32] == source.digest


def test_nothing_of_a_tree_and_everything_of_a_key_enters_the_source() -> None:
    base = kernel_key(MASKED, SHAPE)
    others = [
        kernel_key(KernelConfig(64, 64, 16, False, 4, 3), SHAPE),
        kernel_key(KernelConfig(64, 64, 1, True, 4, 3), SHAPE),
        kernel_key(KernelConfig(16, 64, 16, True, 4, 3), SHAPE),
        kernel_key(replace(MASKED, epilogue_merge=True), SHAPE),
        kernel_key(MASKED, Shape(12, 4, 64)),
        kernel_key(MASKED, Shape(8, 4, 80)),
        kernel_key(MASKED, SHAPE, page_size=16),
    ]
    digests = {emit_partial(key).digest for key in (base, *others)}
    assert len(digests) == 1 + len(others)


def test_a_module_is_a_file_named_by_its_digest(cache: Path) -> None:
    module = load.load_module(MERGE)
    assert module.__file__ == str(cache / "kernels" / f"{MERGE.digest}.py")
    assert Path(module.__file__).read_text() == MERGE.text
    assert load.load_module(MERGE) is module


@pytest.mark.parametrize("damage", [b"", b"raise SystemExit", b"\xff\xfe"])
def test_a_damaged_file_is_rewritten_and_never_run(cache: Path, damage: bytes) -> None:
    path = cache / "kernels" / f"{MERGE.digest}.py"
    path.parent.mkdir(parents=True)
    path.write_bytes(damage)
    load.load_module(MERGE)
    assert path.read_text() == MERGE.text
    assert [file for file in path.parent.iterdir() if file.suffix != ".py" and file.is_file()] == []


def timestamp_pyc(source: Path, code: bytes) -> bytes:
    facts = source.stat()
    return importlib.util.MAGIC_NUMBER + struct.pack("<III", 0, int(facts.st_mtime), facts.st_size) + code


PLANTED: dict[str, Callable[[Path, bytes], bytes]] = {
    "unchecked hash": lambda source, code: importlib.util.MAGIC_NUMBER + struct.pack("<I", 1) + bytes(8) + code,
    "time and size of the source": timestamp_pyc,
    "truncated": lambda source, code: timestamp_pyc(source, code[:9]),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_bytecode_beside_a_module_is_neither_run_nor_written(cache: Path, kind: str) -> None:
    path = cache / "kernels" / f"{MERGE.digest}.py"
    bytecode = Path(importlib.util.cache_from_source(str(path)))
    bytecode.parent.mkdir(parents=True)
    path.write_text(MERGE.text)
    planted = PLANTED[kind](path, marshal.dumps(compile("raise SystemExit('planted')", str(path), "exec")))
    bytecode.write_bytes(planted)
    assert callable(getattr(load.load_module(MERGE), MERGE.kernel))
    assert bytecode.read_bytes() == planted
    assert list(bytecode.parent.iterdir()) == [bytecode]


@pytest.mark.parametrize("swapped", ["raise SystemExit('planted')\n", None])
def test_a_file_that_is_swapped_after_the_check_is_not_read(
    cache: Path, monkeypatch: pytest.MonkeyPatch, swapped: str | None
) -> None:
    written = load.write_text

    def write_and_swap(folder: str, name: str, text: str) -> Path:
        path = written(folder, name, text)
        path.unlink()
        if swapped is not None:
            path.write_text(swapped)
        return path

    monkeypatch.setattr(load, "write_text", write_and_swap)
    module = load.load_module(MERGE)
    kernel = getattr(module, MERGE.kernel)
    traceback.format_list(traceback.extract_stack())  # compares what is kept of files with what lies there
    assert "".join(inspect.getsourcelines(kernel.fn)[0]) in MERGE.text
    tree = treegen.Tree.parse("1,4/100,10")
    q, (k, v) = torch.randn(4, 12, 80), torch.randn(2, 140, 4, 80)
    assert treegen.compile(tree, strategy="deft-node", backend="triton").verify(q, k, v)


def test_what_triton_compiles_is_what_was_emitted(cache: Path) -> None:
    program = (
        "from pathlib import Path\n"
        "from treegen import Shape\n"
        "from treegen.codegen import load\n"
        "from treegen.codegen.emit import emit_merge\n"
        "from treegen.codegen.merge_forms import merge_key\n"
        "source = emit_merge(merge_key(Shape(12, 4, 80), several_rounds=False, rows=512, longest=9))\n"
        "write = load.write_text\n"
        "def swapped(*names):\n"
        "    path = write(*names)\n"
        "    path.write_text(source.text.replace('+', '-'))\n"
        "    return path\n"
        "load.write_text = swapped\n"
        "kernel = getattr(load.load_module(source), source.kernel)\n"
        "assert kernel.src in source.text, kernel.src\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_traceback_in_a_kernel_shows_its_lines(cache: Path) -> None:
    function: Any = getattr(load.load_module(MERGE), MERGE.kernel).fn
    with pytest.raises(Exception) as raised:  # noqa: PT011 (whatever the first line makes of None)
        function(*[None] * len(inspect.signature(function).parameters))
    (frame,) = [
        frame
        for frame in traceback.extract_tb(raised.value.__traceback__)
        if frame.filename == str(cache / "kernels" / f"{MERGE.digest}.py")
    ]
    assert frame.line
    assert frame.line in MERGE.text


def test_an_unwritable_cache_means_a_private_folder_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(blocked))
    monkeypatch.setattr(load, "loaded", {})
    monkeypatch.setattr(folders, "warned", set())
    with pytest.warns(CacheWarning, match="TREEGEN_CACHE_DIR"):
        module = load.load_module(MERGE)
    load.load_module(emit_partial(kernel_key(MASKED, SHAPE)))  # a second warning would be an error
    assert module.__file__ is not None
    assert not module.__file__.startswith(str(tmp_path))


def test_processes_that_emit_the_same_module_agree(cache: Path) -> None:
    program = (
        "from treegen import Shape\n"
        "from treegen.codegen import load\n"
        "from treegen.codegen.emit import emit_merge\n"
        "from treegen.codegen.merge_forms import merge_key\n"
        "key = merge_key(Shape(12, 4, 80), several_rounds=False, rows=512, longest=9)\n"
        "print(load.load_module(emit_merge(key)).__file__)\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    answers = {process.communicate(timeout=120)[0] for process in running}
    assert len(answers) == 1
    assert [process.returncode for process in running] == [0] * 4
    assert len(list((cache / "kernels").glob("*.py"))) == 1
