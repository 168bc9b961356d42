"""Many processes that need one policy make it once, and one that is killed hinders nobody."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT
from support.policies import ENTRY, KEY, accept, file_of
from treegen.autotune_cache import lock
from treegen.autotune_cache.entry import Entry
from treegen.autotune_cache.policy_cache import PolicyCache
from treegen.ir.errors import CacheWarning, FormatError

POSIX = pytest.mark.skipif(os.name != "posix", reason="signals and links of POSIX")


DECIDE = """
import json, os, signal, sys, time
from pathlib import Path
from treegen.autotune_cache import store
from treegen.autotune_cache.entry import Entry
from treegen.autotune_cache.key import PolicyKey
from treegen.autotune_cache.policy_cache import PolicyCache

how, calls, ready, go = sys.argv[1:]
key = PolicyKey("rows 2^3", "32:8 heads", "h200", 1, 3, 2)

def make():
    with open(calls, "a") as file:
        file.write(f"{os.getpid()}\\n")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return Entry(key, {"process": os.getpid()}, 1.0)

if how == "dies in writing":
    os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
Path(ready, str(os.getpid())).touch()
while not os.path.exists(go):
    time.sleep(0.001)
found = PolicyCache(wait_s=60).decide(key, lambda policy: True, make)
print(json.dumps([found.entry.policy["process"], found.where]))
"""


def started(tmp_path: Path, count: int, how: str = "lives") -> list[subprocess.Popen[str]]:
    """Processes that decide on one key all at once."""
    ready, go = tmp_path / "ready", tmp_path / "go"
    ready.mkdir(exist_ok=True)
    go.unlink(missing_ok=True)
    before = len(list(ready.iterdir()))
    command = [sys.executable, "-W", "error", "-c", DECIDE, how, str(tmp_path / "calls"), str(ready), str(go)]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    deadline = time.monotonic() + 100
    while len(list(ready.iterdir())) < before + count and time.monotonic() < deadline:
        time.sleep(0.01)
    go.touch()
    return running


def answers(running: list[subprocess.Popen[str]]) -> list[Any]:
    result = [json.loads(process.communicate(timeout=120)[0]) for process in running]
    assert [process.returncode for process in running] == [0] * len(running)
    return result


def test_sixteen_processes_make_one_entry(policies_folder: Path, tmp_path: Path) -> None:
    given = answers(started(tmp_path, 16))
    calls = (tmp_path / "calls").read_text().split()
    assert len(calls) == 1
    assert {process for process, _ in given} == {int(calls[0])}
    assert sorted(where for _, where in given) == ["made"] + ["user"] * 15
    assert [path.name for path in policies_folder.iterdir()] == [f"{KEY.digest}.json"]  # no locks, no temporaries
    assert PolicyCache().lookup(KEY, accept).entry == Entry(KEY, {"process": int(calls[0])}, 1.0)


@POSIX
@pytest.mark.parametrize("how", ["dies", "dies in writing"])
def test_a_killed_maker_leaves_no_entry_and_no_lock_that_holds(policies_folder: Path, tmp_path: Path, how: str) -> None:
    (killed,) = started(tmp_path, 1, how)
    assert killed.communicate(timeout=120)[0] == ""
    assert killed.returncode == -signal.SIGKILL
    left = {path.name for path in policies_folder.iterdir()}
    assert f"{KEY.digest}.json" not in left
    assert f"{KEY.digest}.lock" in left
    assert len(left) == (2 if how == "dies in writing" else 1)
    assert PolicyCache().lookup(KEY, accept).entry is None  # without a warning: there is nothing
    first, second = answers(started(tmp_path, 2))
    assert first[0] == second[0]
    assert sorted((first[1], second[1])) == ["made", "user"]
    assert len((tmp_path / "calls").read_text().split()) == 2
    PolicyCache().clear()
    assert list(policies_folder.iterdir()) == []


def test_threads_make_one_entry(policy_cache: PolicyCache, policies_folder: Path) -> None:
    calls, found = [], []

    def make() -> Entry:
        calls.append(1)
        time.sleep(0.05)
        return ENTRY

    threads = [threading.Thread(target=lambda: found.append(policy_cache.decide(KEY, accept, make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert [each.entry for each in found] == [ENTRY] * 8


@pytest.fixture(params=[True, False], ids=["flock", "exclusive"])
def flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With the locks of the operating system, where it has them, and without."""
    monkeypatch.setattr(lock, "HAS_FLOCK", lock.HAS_FLOCK and request.param)
    return bool(request.param)


def test_a_lock_has_one_holder(tmp_path: Path, flock: bool) -> None:
    path = tmp_path / "lock"
    with lock.held(path, 0) as first, lock.held(path, 0.05) as second:
        assert (first, second) == (True, False)
    assert not path.exists()
    inside, most = [], []

    def enter() -> None:
        for _ in range(5):
            with lock.held(path, 60) as mine:
                assert mine
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 30
    assert not path.exists()


def test_a_lock_in_a_file_that_its_last_holder_removed_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    path, flock, calls = tmp_path / "lock", fcntl.flock, []

    def late(handle: int, how: int) -> None:
        if not calls:
            path.unlink()  # after this process opened it
        calls.append(handle)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock.held(path, 5) as first, lock.held(path, 0) as second:
        assert (first, second) == (True, False)
    assert len(calls) == 3


def test_an_abandoned_lock_without_flock(
    policy_cache: PolicyCache, policies_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "HAS_FLOCK", False)
    path = file_of(policies_folder).with_suffix(".lock")
    path.write_text("of a process that died")
    os.utime(path, (time.time() - lock.ABANDONED_S - 10,) * 2)
    assert policy_cache.decide(KEY, accept, lambda: ENTRY).where == "made"
    assert not path.exists()


def test_a_holder_that_hangs_stops_nobody_for_ever(policies_folder: Path, tmp_path: Path, flock: bool) -> None:
    policy_cache = PolicyCache(tmp_path / "shipped", wait_s=0.05)
    path = file_of(policies_folder).with_suffix(".lock")
    with lock.held(path, 0):
        with pytest.warns(CacheWarning, match="held by another process"):
            found = policy_cache.decide(KEY, accept, lambda: ENTRY)
        assert found.where == "made"
        assert policy_cache.clear() == 1
        assert path.exists()


def test_a_maker_that_raises_leaves_the_key_free(policy_cache: PolicyCache, policies_folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        policy_cache.decide(KEY, accept, lambda: 1 / 0)
    assert list(policies_folder.iterdir()) == []
    other = replace(ENTRY, key=replace(KEY, bucket="other"))
    with pytest.raises(FormatError, match="another key"):
        policy_cache.decide(KEY, accept, lambda: other)
    assert policy_cache.decide(KEY, accept, lambda: ENTRY).where == "made"
