"""Tasks: numbered pieces of work, dealt one by one to the processes of a crew.

    deal/NAME           number of tasks that were dealt so far
    owner/NAME/7        the process that does task 7, and how many have tried
    result/NAME/7       its result

A process takes the next task when it has finished the one before. Tasks of a process that died are dealt again, once
all others have been dealt. The first result of a task counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from treegen.distributed.crew import POLL_S, Crew

MOST_TRIES = 3
"""Processes that may die with a task before it is given up."""


class Tasks:
    """The tasks of one name, each with a number from 0 and a text as its result.

    Args:
        crew: The processes that share them.
        name: Tells these tasks from others in the store. All processes give the same name and count.
        count: The number of tasks.
        lost: Makes the result of a task with which `MOST_TRIES` processes died.
    """

    def __init__(self, crew: Crew, name: str, count: int, lost: Callable[[int], str] = lambda task: "lost") -> None:
        self._crew, self._store, self._name, self._lost = crew, crew.store, name, lost
        self._open = dict.fromkeys(range(count))
        self._count = count
        self._all_dealt = False
        self.results: dict[int, str] = {}
        """The results that this process knows, by task."""

    def __iter__(self) -> Iterator[int]:
        """Yields tasks for this process to do and finish, until all tasks are finished by some process."""
        while (task := self.next_task()) is not None:
            yield task

    def next_dealt(self) -> int | None:
        """Takes the next task that was not dealt yet, without waiting; None if there is none."""
        while not self._all_dealt:
            task = self._store.count(f"deal/{self._name}", 1) - 1
            self._all_dealt = task >= self._count
            if not self._all_dealt and self._takes(task, ""):
                return task
        return None

    def next_task(self) -> int | None:
        """Takes a task, waiting for one if all are dealt; None when all are finished."""
        task = self.next_dealt()
        while task is None and self.look():
            task = next((task for task in self._open if self._is_free(task)), None)
            if task is None:
                time.sleep(POLL_S)
        return task

    def finish(self, task: int, result: str) -> None:
        """Sets the result of a task, unless it has one."""
        key = f"result/{self._name}/{task}"
        if not self._store.text(key) and self._store.swap(key, "", result) == result:
            self._crew.note_finished()

    def look(self) -> int:
        """Reads new results, and returns the number of tasks that are not finished."""
        for task in list(self._open):
            if text := self._store.text(f"result/{self._name}/{task}"):
                self.results[task] = text
                del self._open[task]
        return len(self._open)

    def wait_while(self, there: Callable[[], bool]) -> None:
        """Waits until all tasks are finished by others, or none of these is there."""
        while self.look() and there():
            time.sleep(POLL_S)
        self.look()

    def _is_free(self, task: int) -> bool:
        """Takes an open task if its process is dead, and returns whether this process does it now."""
        key = f"owner/{self._name}/{task}"
        owner = self._store.text(key)
        process, _, tries = owner.partition(" ")
        if not (self._crew.is_dead(process) if owner else self._crew.unchanged_s(key) > self._crew.lease_s):
            return False
        if owner and int(tries) >= MOST_TRIES:
            self.finish(task, self._lost(task))
            return False
        if not self._takes(task, owner):
            return False
        self._crew.note_repeated()
        return True

    def _takes(self, task: int, owner: str) -> bool:
        """Takes a task from its owner (empty: it has none), and returns whether that worked."""
        if self._store.text(f"result/{self._name}/{task}"):
            return False
        taken = f"{self._crew.process} {int(owner.partition(' ')[2] or 0) + 1}"
        return self._store.swap(f"owner/{self._name}/{task}", owner, taken) == taken
