"""Tasks: each is done once, or again after its process has died; nobody waits for the dead."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from support.crews import crew_in
from support.processes import run_function
from treegen import cli
from treegen.distributed.crew import Crew
from treegen.distributed.rank_place import RankPlace
from treegen.distributed.shared_store import connected
from treegen.distributed.tasks import Tasks
from treegen.ir.errors import RankError

RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_tasks_of_killed_ranks_are_done_by_others(tmp_path: Path) -> None:
    printed = run_function(f"support.crews:deaths({str(tmp_path)!r})")
    assert printed.splitlines()[:3] == ["repeated 1"] * 3


def share(crew: Crew, count: int, dies_at: int | None, done: list[int], results: list[dict[int, str]]) -> None:
    """Does tasks in a thread. One that dies stops without a word with its task under way: its heart stops."""
    crew.__enter__()
    tasks = Tasks(crew, "tasks", count)
    for number, task in enumerate(tasks):
        if number == dies_at:
            crew.stop_beating()
            return
        time.sleep(0.001)
        done.append(task)
        tasks.finish(task, f"{crew.process} did {task}")
    results.append(tasks.results)
    crew.__exit__(None, None, None)


@pytest.mark.parametrize("seed", range(3))
def test_whoever_dies_all_survivors_know_the_same_results(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    ranks, count = source.randint(2, 6), source.randint(0, 20)
    dies = [None, *(source.choice([None, 0, 1, 3]) for _ in range(ranks - 1))]
    done: list[int] = []
    results: list[dict[int, str]] = []
    threads = [
        threading.Thread(target=share, args=(crew_in(tmp_path, rank, ranks, lease_s=1.0), count, at, done, results))
        for rank, at in enumerate(dies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(done) == set(range(count))
    assert results
    assert all(each == results[0] for each in results)
    assert results[0].keys() == set(range(count))


def test_tasks_of_a_rank_that_leaves_are_dealt_again_at_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with crew_in(tmp_path, 0, 2, lease_s=600, start_s=0.0) as crew:
        other = crew_in(tmp_path, 1, 2, lease_s=600)
        with other:
            assert Tasks(other, "tasks", 2).next_task() == 0
        tasks = Tasks(crew, "tasks", 2)
        for task in tasks:
            tasks.finish(task, "done")
        assert tasks.results == {0: "done", 1: "done"}
        assert crew.repeated() == 1
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_that_starts_again_is_another_process(tmp_path: Path) -> None:
    with crew_in(tmp_path, 0, 1, lease_s=600) as first:
        assert Tasks(first, "tasks", 1).next_task() == 0
        with crew_in(tmp_path, 0, 1, lease_s=600) as second:
            assert Tasks(second, "tasks", 1).next_task() == 0
            assert first.is_dead(first.process)


def test_ranks_with_other_work_are_refused(tmp_path: Path) -> None:
    with crew_in(tmp_path, 0, 2, start_s=0.0) as crew:
        crew.agree("work", "3 kernels")
        crew.agree("work", "3 kernels")
        with pytest.raises(RankError, match="work = 4 kernels: differs from another rank's: 3 kernels; start"):
            crew.agree("work", "4 kernels")


def test_ranks_that_never_start_are_left_out(tmp_path: Path) -> None:
    begin = time.monotonic()
    with crew_in(tmp_path, 0, 3, start_s=0.3) as crew:
        assert 0.2 < time.monotonic() - begin < 5
        assert crew.missing() == [1, 2]
        assert (crew.hosts(), crew.ranks_here()) == (["0"], 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"MASTER_ADDR": None},
            "MASTER_ADDR = None: is not set, but RANK is; start ranks with torchrun, or unset RANK",
        ),
        ({"MASTER_PORT": None}, "MASTER_PORT = None: is not set"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT = 65536: is out of range: from 1 to 65535"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE = None: is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = two: is not a whole number"),
        ({"RANK": "2"}, "RANK = 2: is out of range: from 0 to 1"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK = None: is not set"),
    ],
)
def test_bad_variables(
    changed: dict[str, str | None],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in {**RANK, **changed}.items():
        monkeypatch.delenv(name, raising=False) if text is None else monkeypatch.setenv(name, text)
    for arguments in (["warm", "1,4/50,5"], ["bench", "1,4/50,5"]):
        assert cli.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"treegen: error: {message}")
        assert error.count("\n") == 1


def test_places() -> None:
    assert RankPlace.of_environment({}) is None
    assert RankPlace.of_environment({"RANK": "0", "WORLD_SIZE": "1"}) is None
    place = RankPlace.of_environment({**RANK, "GROUP_RANK": "3"})
    assert place == RankPlace(1, 2, 1, f"3 ({socket.gethostname()})")
    assert not place.serves(RANK)
    first = RankPlace(0, 2, 0, "here")
    assert first.serves({})
    assert not first.serves({"TORCHELASTIC_USE_AGENT_STORE": "True"})


def test_a_store_that_does_not_answer() -> None:
    place = RankPlace.of_environment(RANK)
    assert place is not None
    reason = "127.0.0.1:1: does not answer for 0.1 s .Connection refused.; start rank 0, and open the port"
    with pytest.raises(RankError, match=f"MASTER_ADDR:MASTER_PORT = {reason}"):
        place.store(RANK, seconds=0.1)
    with pytest.raises(RankError, match="does not answer"):
        connected("no.such.host.invalid", 1, serves=False, seconds=0.1)


def test_commands_without_their_store(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in RANK.items():
        monkeypatch.setenv(name, text)
    store = RankPlace.store
    monkeypatch.setattr(RankPlace, "store", lambda place: store(place, seconds=0.1))
    monkeypatch.setattr("treegen.backends.devices.devices_of", lambda target: [0, 1])
    assert cli.main(["warm", "1,4/50,5"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("treegen: error: MASTER_ADDR:MASTER_PORT = 127.0.0.1:1: does not answer for 0.1 s")
    assert error.count("\n") == 1
