"""Crews in tests: processes that share tasks through a FileStore, forked from one that has imported treegen."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from treegen.distributed.crew import Crew
from treegen.distributed.rank_place import RankPlace
from treegen.distributed.shared_store import SharedStore, connected
from treegen.distributed.tasks import Tasks
from treegen.ir.errors import RankError

LEASE_S = 2.0


def crew_in(folder: Path, rank: int, ranks: int, host: str = "0", lease_s: float = LEASE_S, **options: float) -> Crew:
    """The crew of a rank, with its store in a file of this folder."""
    store = SharedStore(dist.FileStore(str(folder / "store"), -1))  # type: ignore[attr-defined]
    return Crew(store, RankPlace(rank, ranks, rank, host), lease_s=lease_s, **options)


def forked(work: Callable[[], object]) -> int:
    """Runs a function in a fork of this process, and returns the id of that."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return child


def codes(children: list[int]) -> list[int]:
    """Waits for forks, and returns their exit codes; minus the signal for those that were killed."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def do_tasks(folder: Path, rank: int, ranks: int, count: int, deadly: tuple[int, ...] = ()) -> None:
    """Does tasks, each noted by a line in the file `done`. A rank kills itself with its first task, noted in `died`, if
    a file `kills-RANK` is there, and with a deadly task at any time. The others do tasks once the file `goes` is there.
    """
    with crew_in(folder, rank, ranks) as crew:
        tasks = Tasks(crew, "tasks", count)
        for task in tasks:
            if (folder / f"kills-{rank}").exists() or task in deadly:
                with (folder / "died").open("a") as file:
                    file.write(f"{task}\n")
                os.kill(os.getpid(), signal.SIGKILL)
            while not (folder / "goes").exists():
                time.sleep(0.02)
            with (folder / "done").open("a") as file:
                file.write(f"{task} {rank}\n")
            tasks.finish(task, f"result {task}")
        expected = {task: "lost" if task in deadly else f"result {task}" for task in range(count)}
        assert tasks.results == expected, tasks.results
        if rank == 0:
            print("repeated", crew.repeated(), flush=True)


def deaths(folder: str) -> None:
    """Rank 1 of 2 and of 4 dies with a task, or is started again; a task that kills all is given up."""

    def starts(name: str, rank: int, ranks: int, count: int, deadly: tuple[int, ...] = ()) -> int:
        return forked(lambda: do_tasks(Path(folder, name), rank, ranks, count, deadly))

    names = [(2, "two"), (4, "four"), (2, "again")]
    for _, name in names:
        Path(folder, name).mkdir()
        Path(folder, name, "kills-1").touch()
    running = {name: [starts(name, rank, ranks, 12) for rank in range(ranks)] for ranks, name in names}
    for ranks, name in names:
        assert codes(running[name][1:2]) == [-signal.SIGKILL]
        if name == "again":
            Path(folder, name, "kills-1").unlink()
            running[name][1] = starts(name, 1, ranks, 12)
        Path(folder, name, "goes").touch()
    for _, name in names:
        others = running[name] if name == "again" else [running[name][0], *running[name][2:]]
        assert codes(others) == [0] * len(others)
        check_done(Path(folder, name), 12)

    lose_store()
    deadly = Path(folder, "deadly")
    deadly.mkdir()
    (deadly / "goes").touch()
    assert sorted(codes([starts("deadly", rank, 4, 6, (2,)) for rank in range(4)])) == [*[-signal.SIGKILL] * 3, 0]
    assert (deadly / "died").read_text() == "2\n" * 3


def lose_store() -> None:
    """The process that serves a store dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def serve() -> None:
        store = connected("127.0.0.1", port, serves=True)
        time.sleep(600)
        store.text("")

    server = forked(serve)
    store = connected("127.0.0.1", port, serves=False)
    assert (store.text("a"), store.count("n", 2), store.swap("a", "", "x"), store.text("a")) == ("", 2, "x", "x")
    os.kill(server, signal.SIGKILL)
    codes([server])
    with pytest.raises(RankError, match=f"store = 127.0.0.1:{port}: answers no longer"):
        store.text("a")


def check_done(folder: Path, count: int) -> None:
    """Every task was done, and again at most the one with which a rank died."""
    done = sorted(int(line.split()[0]) for line in (folder / "done").read_text().splitlines())
    assert done == list(range(count)), done
