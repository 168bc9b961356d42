"""Devices: the backend that serves each, and GPUs as targets."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from treegen.ir.errors import BackendError
from treegen.ir.scalars import is_one_of
from treegen.target.targets import Target, target_from, targets

BACKENDS = ("triton", "torch")
_LOWEST_CAPABILITY = 80


def default_device() -> torch.device:
    """Returns the current CUDA device, or the CPU without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def backend_for(device: torch.device, wanted: str | None) -> str:
    """Returns the backend for tensors on a device: "triton" on CUDA from compute capability 8.0, else "torch".

    Returns `wanted` where that is given. Raises BackendError if it is unknown, or cannot run on the device.
    """
    if wanted is not None and not is_one_of(wanted, BACKENDS):
        raise BackendError("backend", wanted, "is unknown", f"use one of {', '.join(BACKENDS)}")
    obstacle = obstacle_to_triton(device)
    if wanted == "triton" and obstacle:
        raise BackendError("backend", wanted, obstacle, "use backend='torch'")
    return wanted or ("torch" if obstacle or device.type != "cuda" else "triton")


def obstacle_to_triton(device: torch.device) -> str | None:
    """Says why the triton backend cannot serve tensors on a device; None if it can."""
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
    """Says whether the current stream of a tensor's device is being captured into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one, on whose stream Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def capability_of(device: torch.device) -> int:
    """Returns the compute capability of a CUDA device, times ten."""
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def kernel_capability(device: torch.device) -> int:
    """Returns the compute capability, times ten, that kernels for a device run on; 0 where no GPU runs them."""
    return capability_of(device) if device.type == "cuda" and not interpreted() else 0


def interpreted() -> bool:
    """Says whether Triton's interpreter replaces its compiler (TRITON_INTERPRET=1)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def current_target() -> Target:
    """Returns the current CUDA device as a target; the h200 without a GPU."""
    return target_of_device(torch.cuda.current_device()) if torch.cuda.is_available() else target_from(None)


def devices_of(target: Target) -> list[int]:
    """Lists the indices of all CUDA devices that are this target."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [index for index in range(count) if target_of_device(index) == target]


def target_of_device(index: int) -> Target:
    """Finds the shipped target of a CUDA device, or makes one from the device's properties."""
    properties = torch.cuda.get_device_properties(index)
    name = properties.name.lower().replace(" ", "")
    sms = properties.multi_processor_count
    capability = properties.major * 10 + properties.minor
    known = next((target for key, target in targets().items() if key in name and target.sms == sms), None)
    if known is not None:
        return known
    # All other properties are those of the shipped target with the nearest lower compute capability.
    nearest = max((target for target in targets().values()), key=lambda t: (t.capability <= capability, t.capability))
    return replace(nearest, name=properties.name, capability=capability, sms=sms, grid=None)


def resolve_target(target: str | Target | None) -> Target:
    """Finds a target by name; None and "current" are the current device. Raises BackendError."""
    return current_target() if target is None or is_one_of(target, ("current",)) else target_from(target)
