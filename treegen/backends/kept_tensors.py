"""Tensors that are kept from call to call, and written again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def for_kept_tensors() -> Iterator[None]:
    """A context, or a decorator, in which tensors are made that later calls write.

    A tensor that was made in torch.inference_mode cannot be written outside of it, and callers may change the mode
    between calls. No gradients are recorded.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
