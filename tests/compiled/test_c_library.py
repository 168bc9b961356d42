"""The C code where there is a compiler, where there is none, where it fails, and where its file in the cache is bad."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from support.differences import check
from support.planned_batches import kernel_for, late_plan
from support.random_batches import change, random_batch
from treegen import LiveBatch
from treegen.compiled import c_library
from treegen.ir.errors import CacheWarning, InputError
from treegen.runtime import compiled_requests
from treegen.runtime.batch_kernel import BatchKernel
from treegen.runtime.compiled_requests import CompiledRequests
from treegen.runtime.planned_requests import PlannedRequests

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
    content = good.read_bytes()
    for number, damaged in enumerate((content[:100], content[:20000], content[:8192].ljust(len(content), b"\0"))):
        monkeypatch.setenv("TREEGEN_CACHE_DIR", str(tmp_path / f"other{number}"))
        bad = tmp_path / f"other{number}" / "compiled" / good.name
        bad.parent.mkdir(parents=True)
        bad.write_bytes(damaged)
        assert load() is not None
        assert content in [path.read_bytes() for path in bad.parent.iterdir()]


def test_a_folder_that_others_may_write_is_not_used(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.warns(CacheWarning, match="other users may write"):
        assert load() is not None
    assert not [*folder.iterdir()]


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
@pytest.mark.usefixtures("folder")
def test_kernels_know_the_same_without_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert c_library.library() is not None
    with_it = served(kernel_for(256), seed)
    monkeypatch.setattr(c_library, "library", lambda: None)
    without = served(kernel_for(256), seed)
    assert with_it.planned is not None
    assert without.planned is not None
    check(with_it.planned.schedule, without.planned.schedule)
    check(with_it.planned.plan, without.planned.plan)
    check(with_it.program.running, without.program.running)
    assert with_it.choice == without.choice
    assert with_it.replanning.plans == without.replanning.plans


@pytest.mark.usefixtures("folder")
def test_a_batch_that_outgrows_its_seats_may_be_stopped_at_any_line() -> None:
    """The next call goes on as if nothing had happened."""
    lines, stopped = 0, True
    while stopped:
        lines, stopped, left = lines + 1, False, lines
        kernel, batch = kernel_for(256), LiveBatch(page_size=16, max_seats=4)
        for _ in range(4):
            batch.add(300)
        kernel.prepare(batch)
        batch.add(400)

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal stopped, left
            if event == "line" and frame.f_code.co_filename == compiled_requests.__file__:
                left -= 1
                if left < 0 and not stopped:
                    stopped = True
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            kernel.prepare(batch)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        batch.finish(2)
        kernel.prepare(batch)
        assert kernel.planned is not None
        known = PlannedRequests(kernel.planned.schedule)
        running = known.running(batch, known.inherit(batch))
        assert kernel.program.running[:, :8].tolist() == running.tolist()
    assert lines > 10


@pytest.mark.usefixtures("folder")
def test_requests_are_not_copied_and_serve_no_smaller_batch() -> None:
    kernel, batch = kernel_for(256), LiveBatch(page_size=16, max_seats=8)
    for _ in range(3):
        batch.add(300)
    kernel.prepare(batch)
    requests = late_plan(kernel).requests
    assert isinstance(requests, CompiledRequests)
    with pytest.raises(InputError, match="cannot be copied"):
        copy.copy(requests)
    smaller = LiveBatch(page_size=16, max_seats=1)
    smaller.add(300)
    with pytest.raises(InputError, match="fewer than the batch"):
        requests.served(smaller)
