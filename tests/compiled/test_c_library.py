"""The C code where there is a compiler, where there is none, where it fails, and where its file in the cache is bad."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from support.differences import check
from support.planned_batches import kernel_for
from support.random_batches import change, random_batch
from treegen.compiled import c_library
from treegen.runtime.batch_kernel import BatchKernel

load: Callable[[], object] = c_library.library.__wrapped__


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, on a machine with a compiler."""
    if c_library.c_compiler() is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compiled"


def test_it_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load() is not None
    (made,) = folder.iterdir()
    monkeypatch.setattr("subprocess.run", None)
    assert load() is not None
    assert [*folder.iterdir()] == [made]


def test_a_bad_file_in_the_cache_is_replaced(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load() is not None
    (good,) = folder.iterdir()
    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(tmp_path / "other"))
    bad = tmp_path / "other" / "compiled" / good.name
    bad.parent.mkdir(parents=True)
    bad.write_bytes(good.read_bytes()[:100])
    assert load() is not None
    assert bad.stat().st_size == good.stat().st_size


def test_a_folder_that_cannot_be_made(folder: Path) -> None:
    folder.parent.write_text("a file in its place")
    assert load() is not None


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_compiler_that_works_there_is_none(
    compiler: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert load() is None


def served(kernel: BatchKernel, seed: int) -> BatchKernel:
    """Serves the same requests for some steps."""
    source = random.Random(seed)
    batch = random_batch(source, page_size=16)
    for _ in range(20):
        kernel.prepare(batch)
        kernel.refresh(batch)
        change(source, batch)
    kernel.update(batch)
    return kernel


@pytest.mark.parametrize("seed", range(6))
def test_kernels_know_the_same_without_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = served(kernel_for(256), seed)
    monkeypatch.setattr(c_library, "library", lambda: None)
    without = served(kernel_for(256), seed)
    assert with_it.planned is not None
    assert without.planned is not None
    check(with_it.planned.schedule, without.planned.schedule)
    check(with_it.planned.plan, without.planned.plan)
    check(with_it.program.seats, without.program.seats)
    assert with_it.choice == without.choice
    assert with_it.replanning.plans == without.replanning.plans
