"""The store that ranks share: texts by key in a store of torch.distributed, with errors of one line."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from treegen.ir.errors import RankError

CONNECT_S = 60.0
"""Seconds in which a store has to answer."""
_RETRY_S = 0.2


class SharedStore:
    """Texts by key that all ranks read and write.

    Args:
        store: A store of torch.distributed: a TCPStore, or a FileStore.
        address: Its place, for errors.
    """

    def __init__(self, store: Any, address: str = "store") -> None:
        self._store = store
        self._address = address

    def text(self, key: str) -> str:
        """Returns the text of a key; empty where there is none. It does not wait."""
        with self._errors():
            return str(self._store.get(key), "utf-8") if self._store.check([key]) else ""

    def put(self, key: str, text: str) -> None:
        """Sets the text of a key."""
        with self._errors():
            self._store.set(key, text)

    def swap(self, key: str, old: str, new: str) -> str:
        """Sets the text of a key if it is `old` (empty: there is none), and returns the text that it has now."""
        with self._errors():
            return str(self._store.compare_set(key, old, new), "utf-8")

    def count(self, key: str, steps: int = 0) -> int:
        """Adds steps to a counter, which begins with 0, and returns it."""
        with self._errors():
            return int(self._store.add(key, steps))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as cause:  # dist.DistError, and errors of FileStore
            reason = f"answers no longer ({type(cause).__name__})"
            raise RankError("store", self._address, reason, "start all ranks again; they continue") from cause


def connected(address: str, port: int, *, serves: bool, seconds: float = CONNECT_S) -> SharedStore:
    """Returns the store of all ranks.

    Args:
        address: The name of the host that serves it.
        port: Its port.
        serves: Serves it from this process.
        seconds: How long to try.

    Raises:
        RankError: There is no such store, or the port is not free.
    """
    place = f"{address}:{port}"
    if not serves:
        _await_port(address, port, seconds)
    try:
        timeout = timedelta(seconds=seconds)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, ValueError) as cause:
        reason = "cannot be served (is the port free?)" if serves else "is no store of torch.distributed"
        raise RankError("MASTER_ADDR:MASTER_PORT", place, reason, "give all ranks the same free port") from cause
    return SharedStore(store, place)


def _await_port(address: str, port: int, seconds: float) -> None:
    """Waits until a port answers. TCPStore would print a page of C++ frames where none does."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), max(_RETRY_S, deadline - time.monotonic())).close()
            return
        except (OSError, OverflowError, UnicodeError) as cause:
            if time.monotonic() >= deadline:
                reason = f"does not answer for {seconds:g} s ({getattr(cause, 'strerror', None) or cause})"
                fix = "start rank 0, and open the port between the hosts"
                raise RankError("MASTER_ADDR:MASTER_PORT", f"{address}:{port}", reason, fix) from cause
        time.sleep(_RETRY_S)
