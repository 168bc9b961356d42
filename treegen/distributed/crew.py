"""The crew: processes that share tasks through a store, without a process group. Each shows that it lives.

    joined          number of processes that have joined so far
    rank/1          the process that is rank 1 now, and its host
    beat/1.4        counts up while process 1.4 (rank 1, the fourth to join) lives
    left/1.4        is set when it has left

A process that starts again for the same rank has another number, so its predecessor counts as dead at once. Clocks of
hosts are not compared: a process is dead when another one sees no new beat for a while.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import NamedTuple

from treegen.distributed.rank_place import RankPlace
from treegen.distributed.shared_store import SharedStore
from treegen.ir.errors import RankError

LEASE_S = 60.0
"""Seconds without a beat after which a process counts as dead."""
_BEATS = 10  # in these seconds
START_S = 120.0
"""Seconds that ranks wait for others to start."""
POLL_S = 0.2
_FINISHED, _REPEATED = "finished", "repeated"


class Member(NamedTuple):
    """A process of the crew, and its host."""

    process: str
    host: str


class Crew:
    """This process and all others that share tasks with it.

    Use it in a `with` statement, which waits at its beginning until all ranks have joined. Ranks that have not done so
    after `start_s` seconds are left out.

    Args:
        store: The store.
        place: The place of this process.
        serves: Whether this process serves the store; it then leaves last.
        lease_s, start_s: See LEASE_S and START_S.

    Attributes:
        on_progress: Called in another thread, now and then, with the number of finished tasks.
        process: The name of this process in the store.
    """

    def __init__(
        self,
        store: SharedStore,
        place: RankPlace,
        *,
        serves: bool = False,
        lease_s: float = LEASE_S,
        start_s: float = START_S,
    ) -> None:
        self.store, self.place, self.lease_s = store, place, lease_s
        self.on_progress: Callable[[int], None] | None = None
        self.process = ""
        self._serves, self._start_s = serves, start_s
        self._seen: dict[str, tuple[str, float]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._handler: object = None

    def __enter__(self) -> Crew:
        self.process = f"{self.place.rank}.{self.store.count('joined', 1)}"
        self.store.put(f"beat/{self.process}", "0")
        self.store.put(f"rank/{self.place.rank}", f"{self.process} {self.place.host}")
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, _end)
        self._thread.start()
        deadline = time.monotonic() + self._start_s
        while (self.store.count("joined") < self.place.ranks or self.missing()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._serves:
            self.stop_beating()  # before others know that they may leave, and the store with them
        with suppress(RankError):  # the store may be gone
            self.store.put(f"left/{self.process}", "yes")
            while self._serves and kind is None and self._others_live():
                time.sleep(POLL_S)
        self.stop_beating()
        if callable(self._handler) or isinstance(self._handler, signal.Handlers):
            signal.signal(signal.SIGTERM, self._handler)

    def agree(self, name: str, text: str) -> None:
        """Raises RankError where another rank gave another text. name: what the text describes."""
        first = self.store.swap(f"agreed/{name}", "", text)
        if first != text:
            raise RankError(name, text, f"differs from another rank's: {first}", "start all ranks alike")

    def members(self) -> list[Member]:
        """Lists the process of each rank that has joined, in order of ranks."""
        texts = (self.store.text(f"rank/{rank}") for rank in range(self.place.ranks))
        return [Member(*text.split(" ", 1)) for text in texts if text]

    def hosts(self) -> list[str]:
        """Lists the hosts of ranks that have joined, in order of ranks."""
        return list(dict.fromkeys(member.host for member in self.members()))

    def ranks_here(self) -> int:
        """Returns the number of ranks on this host."""
        return sum(member.host == self.place.host for member in self.members())

    def lives_on(self, host: str) -> bool:
        """Says whether a process on this host lives."""
        return any(member.host == host and not self.is_dead(member.process) for member in self.members())

    def is_dead(self, process: str) -> bool:
        """Says whether a process has left, was started again, or has not beaten for `lease_s` seconds."""
        rank = process.partition(".")[0]
        if self.store.text(f"left/{process}") or self.store.text(f"rank/{rank}").partition(" ")[0] != process:
            return True
        return self.unchanged_s(f"beat/{process}") > self.lease_s

    def unchanged_s(self, key: str) -> float:
        """Returns the seconds for which this process has seen the same text of a key."""
        text, now = self.store.text(key), time.monotonic()
        before = self._seen.get(key)
        if before is None or before[0] != text:
            self._seen[key] = before = text, now
        return now - before[1]

    def note_finished(self) -> None:
        """Counts a finished task."""
        self.store.count(_FINISHED, 1)

    def note_repeated(self) -> None:
        """Counts a task that is done again, because its process has died."""
        self.store.count(_REPEATED, 1)

    def repeated(self) -> int:
        """Returns the number of tasks that were done again."""
        return self.store.count(_REPEATED)

    def missing(self) -> list[int]:
        """Lists the ranks that have not joined."""
        there = {int(member.process.partition(".")[0]) for member in self.members()}
        return [rank for rank in range(self.place.ranks) if rank not in there]

    def stop_beating(self) -> None:
        """Shows no longer that this process lives."""
        self._stopped.set()
        self._thread.join()

    def _others_live(self) -> bool:
        others = (member.process for member in self.members() if member.process != self.process)
        return any(not self.is_dead(process) for process in others)

    def _beat(self) -> None:
        """Shows that this process lives, until it leaves or the store is gone."""
        beats = 0
        with suppress(RankError):
            while not self._stopped.wait(self.lease_s / _BEATS):
                beats += 1
                self.store.put(f"beat/{self.process}", str(beats))
                if self.on_progress is not None:
                    self.on_progress(self.store.count(_FINISHED))


def _end(number: int, frame: FrameType | None) -> None:
    """Ends this process by an exception, so that its measuring processes end with it; torchrun sends SIGTERM."""
    raise SystemExit(128 + number)
