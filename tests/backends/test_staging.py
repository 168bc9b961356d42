"""Copies to a device that nobody waits for."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
import torch

from treegen.backends.staging import Upload

WORDS = 1 << 15  # 128 KiB, which are pinned on a GPU
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("words", [10, WORDS])
def test_each_copy_has_what_was_written_for_it(words: int) -> None:
    part = torch.zeros(words, dtype=torch.int32, device=DEVICE)
    upload, copies = Upload(part), []
    for number in range(1, 9):
        if number % 2:
            upload.words()[:] = number
            upload.send()
        else:
            sent = np.full(words, number, np.int32)
            upload.send_words(sent)
            sent[:] = -1
        copies.append(part.clone())
    assert [copy.unique().tolist() for copy in copies] == [[number] for number in range(1, 9)]


def test_threads_may_make_uploads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks for buffers that others have left, and finds the same ones."""
    failed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    interval = sys.getswitchinterval()

    def work() -> None:
        for number in range(1500):
            upload = Upload(torch.zeros(4, dtype=torch.int32))
            upload.words()[:] = number
            upload.send()

    threads = [threading.Thread(target=work) for _ in range(4)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed, failed[0].exc_value


@needs_gpu
def test_memory_is_kept_until_copies_are_done() -> None:
    """Also when the Upload is gone by then."""
    part, large = torch.zeros(WORDS, dtype=torch.int32, device=DEVICE), torch.zeros(1 << 28, device=DEVICE)

    def copied(launches: int) -> torch.Tensor:
        uploads = Upload(part), Upload(part)
        for _ in range(launches):
            large.add_(1)
        for number, upload in enumerate(uploads):
            upload.words()[:] = number
            upload.send()
        return part.clone()

    copied(1)
    torch.cuda.synchronize()
    made = copied(200)
    others = [torch.full((WORDS,), 9, dtype=torch.int32, pin_memory=True) for _ in range(4)]
    torch.cuda.synchronize()
    assert made.unique().tolist() == [1]
    assert len(others) == 4
