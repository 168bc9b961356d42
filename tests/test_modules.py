"""Emitted modules: complete readable files, named by digest, safe against damage, races and unwritable folders."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from treegen import Shape, modules
from treegen.autotune_cache import store
from treegen.emit import emit_merge, emit_partial, kernel_key, merge_key
from treegen.ir.errors import CacheWarning
from treegen.ir.schedule import TileClass

SHAPE = Shape(12, 4, 80, dtype="bf16")
MASKED = TileClass(64, 64, 16, "interval", 4, 3)
PARTIAL = {
    "partial": MASKED,
    "partial-bits": TileClass(64, 64, 32, "bits", 4, 3),
    "partial-dealt": TileClass(16, 32, 1, "none", 2, 3, dealt=True),
    "partial-merging": TileClass(64, 64, 16, "none", 4, 3, merging=True),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a process that has loaded nothing yet."""
    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(modules, "_loaded", {})
    return tmp_path / "cache"


@pytest.mark.parametrize("name", [*PARTIAL, "merge", "merge-staged"])
def test_sources(name: str, golden) -> None:
    merging = merge_key(SHAPE, staged=name == "merge-staged", rows=512, longest=9)
    source = emit_partial(kernel_key(PARTIAL[name], SHAPE)) if name in PARTIAL else emit_merge(merging)
    golden(source.text)


def test_the_header_carries_key_and_digest() -> None:
    source = emit_partial(kernel_key(MASKED, SHAPE))
    assert f"key: {source.key.text()}\n" in source.text
    assert f"digest: {source.digest}\n" in source.text
    undigested = source.text.replace(source.digest, "")
    assert hashlib.sha256(undigested.encode()).hexdigest()[:32] == source.digest


def test_nothing_of_a_tree_and_everything_of_a_key_enters_the_source() -> None:
    base = kernel_key(MASKED, SHAPE)
    others = [
        kernel_key(TileClass(64, 64, 16, False, 4, 3), SHAPE),
        kernel_key(TileClass(64, 64, 1, True, 4, 3), SHAPE),
        kernel_key(TileClass(16, 64, 16, True, 4, 3), SHAPE),
        kernel_key(replace(MASKED, merging=True), SHAPE),
        kernel_key(MASKED, Shape(12, 4, 64)),
        kernel_key(MASKED, Shape(8, 4, 80)),
        kernel_key(MASKED, SHAPE, page_size=16),
    ]
    digests = {emit_partial(key).digest for key in (base, *others)}
    assert len(digests) == 1 + len(others)


def test_a_module_is_a_file_named_by_its_digest(cache: Path) -> None:
    source = emit_merge(merge_key(SHAPE, staged=False, rows=512, longest=9))
    module = modules.load_module(source)
    assert module.__file__ == str(cache / "kernels" / f"{source.digest}.py")
    assert Path(module.__file__).read_text() == source.text
    assert modules.load_module(source) is module


@pytest.mark.parametrize("damage", [b"", b"raise SystemExit", b"\xff\xfe"])
def test_a_damaged_file_is_rewritten_and_never_run(cache: Path, damage: bytes) -> None:
    source = emit_merge(merge_key(SHAPE, staged=False, rows=512, longest=9))
    path = cache / "kernels" / f"{source.digest}.py"
    path.parent.mkdir(parents=True)
    path.write_bytes(damage)
    modules.load_module(source)
    assert path.read_text() == source.text
    assert [file for file in path.parent.iterdir() if file.suffix != ".py" and file.is_file()] == []


def test_an_unwritable_cache_means_a_private_folder_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(blocked))
    monkeypatch.setattr(modules, "_loaded", {})
    store._warn_unwritable.cache_clear()
    with pytest.warns(CacheWarning, match="TREEGEN_CACHE_DIR"):
        module = modules.load_module(emit_merge(merge_key(SHAPE, staged=False, rows=512, longest=9)))
    modules.load_module(emit_partial(kernel_key(MASKED, SHAPE)))  # a second warning would be an error
    assert module.__file__ is not None
    assert not module.__file__.startswith(str(tmp_path))


def test_processes_that_emit_the_same_module_agree(cache: Path) -> None:
    program = (
        "from treegen import Shape, modules\n"
        "from treegen.emit import emit_merge, merge_key\n"
        "key = merge_key(Shape(12, 4, 80), staged=False, rows=512, longest=9)\n"
        "print(modules.load_module(emit_merge(key)).__file__)\n"
    )
    root = Path(__file__).parent.parent
    running = [
        subprocess.Popen([sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    answers = {process.communicate(timeout=120)[0] for process in running}
    assert len(answers) == 1
    assert [process.returncode for process in running] == [0] * 4
    assert len(list((cache / "kernels").glob("*.py"))) == 1
