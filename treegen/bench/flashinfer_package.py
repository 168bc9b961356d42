"""The package flashinfer (flashinfer-python 0.7.2): its import, and the attention shapes that its kernels take."""

from __future__ import annotations

import importlib
from typing import Any

from treegen.bench.providers import UnavailableError
from treegen.ir.shape import Shape

_HEAD_DIMS = (64, 128, 256)


def flashinfer_package() -> Any:
    """Imports flashinfer. Raises UnavailableError where that fails."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError as cause:
        if isinstance(cause, ModuleNotFoundError) and cause.name == "flashinfer":
            raise UnavailableError("flashinfer is not installed") from cause
        raise UnavailableError(f"flashinfer cannot be imported: {cause}") from cause


def check_served(shape: Shape) -> None:
    """Raises UnavailableError for element types and head dims that FlashInfer's kernels do not take."""
    if shape.dtype not in ("fp16", "bf16"):
        raise UnavailableError(f"FlashInfer takes fp16 and bf16, not {shape.dtype}")
    if shape.head_dim not in _HEAD_DIMS:
        raise UnavailableError(f"FlashInfer takes head dims {_HEAD_DIMS}, not {shape.head_dim}")
