"""Copies to a device that nobody waits for."""

from __future__ import annotations

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
