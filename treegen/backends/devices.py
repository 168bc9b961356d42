"""What this machine can run: its default backend, and its GPU as a target."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import torch

from treegen.ir.errors import BackendError
from treegen.ir.scalars import is_one_of
from treegen.target.targets import Target, target_from, targets

BACKENDS = ("triton", "torch")
_LOWEST_CAPABILITY = 80


def default_device() -> torch.device:
    """The current CUDA device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def backend_for(device: torch.device, wanted: str | None) -> str:
    """The backend that serves tensors on `device`: the wanted one, else triton on CUDA from compute capability 8.0,
    else torch.

    Raises BackendError when the wanted backend is unknown or cannot run there.
    """
    if wanted is not None and not is_one_of(wanted, BACKENDS):
        raise BackendError("backend", wanted, "is unknown", f"use one of {', '.join(BACKENDS)}")
    obstacle = obstacle_to_triton(device)
    if wanted == "triton" and obstacle:
        raise BackendError("backend", wanted, obstacle, "use backend='torch'")
    return wanted or ("torch" if obstacle or device.type != "cuda" else "triton")


def obstacle_to_triton(device: torch.device) -> str | None:
    """Why the triton backend cannot serve tensors on `device`; None when it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if interpreted():
        return None
    if device.type != "cuda":
        return f"tensors are on {device.type} and TRITON_INTERPRET is not set"
    capability = capability_of(device)
    if capability < _LOWEST_CAPABILITY:
        return f"compute capability {capability // 10}.{capability % 10} is below 8.0"
    return None


def captures(tensor: torch.Tensor) -> bool:
    """Whether work on a tensor goes into a CUDA graph now: its device's current stream is being captured."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def capability_of(device: torch.device) -> int:
    """The compute capability of a CUDA device, times ten."""
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for its compiler (TRITON_INTERPRET=1)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def current_target() -> Target:
    """The current CUDA device as a target: a shipped one by name, else made from its properties; h200 without a GPU."""
    return target_of_device(torch.cuda.current_device()) if torch.cuda.is_available() else target_from(None)


def devices_of(target: Target) -> list[int]:
    """The indices of all CUDA devices that are this target."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [index for index in range(count) if target_of_device(index) == target]


def target_of_device(index: int) -> Target:
    """A CUDA device as a target: a shipped one, else one made from its properties."""
    properties = torch.cuda.get_device_properties(index)
    name = properties.name.lower().replace(" ", "")
    sms = properties.multi_processor_count
    capability = properties.major * 10 + properties.minor
    known = next((target for key, target in targets().items() if key in name and target.sms == sms), None)
    if known is not None:
        return known
    # A device that is not shipped: the rest is that of the shipped target with the nearest lower capability.
    nearest = max((target for target in targets().values()), key=lambda t: (t.capability <= capability, t.capability))
    return replace(nearest, name=properties.name, capability=capability, sms=sms, grid=None)


def resolve_target(target: str | Target | None) -> Target:
    """A target by name, `current` or None (the current device), or as an object. Raises BackendError."""
    return current_target() if target is None or is_one_of(target, ("current",)) else target_from(target)
