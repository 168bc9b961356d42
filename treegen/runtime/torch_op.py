"""Operators of torch.compile: `treegen::attention` and `treegen::attention_out` call kernels.

A kernel is no tensor, so compiled code holds its handle, which is a number. The handle is looked up at run time, so the
next call finds an updated kernel without compiling anew.
"""

from __future__ import annotations

import itertools
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from treegen.backends.check_inputs import refuse_gradients
from treegen.ir.errors import InputError


class Attention(Protocol):
    """The calls that a handle stands for (prepared_calls.PreparedCalls)."""

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor | None,
        return_lse: bool,
        lse_base: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns out, and the lse or None."""


_KERNELS: WeakValueDictionary[int, Attention] = WeakValueDictionary()
_numbers = itertools.count(1)


def handle_of(kernel: Attention) -> int:
    """Makes a new handle of a kernel's calls, which it does not keep alive. No handle is used twice."""
    handle = next(_numbers)
    _KERNELS[handle] = kernel
    return handle


def call(
    handle: int,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    return_lse: bool,
    lse_base: str,
    gradients: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Calls a kernel as one operator.

    Args:
        handle: The kernel's handle.
        tensors: q, k_cache, v_cache and out, as of Kernel.__call__.
        return_lse: Whether to return the lse as well.
        lse_base: The base of the lse.
        gradients: The name of a tensor that requires gradients, or "". With a name, compiled code raises InputError
            when it runs, because it cannot raise while it is traced.
    """
    q, k_cache, v_cache, out = tensors
    if gradients:
        q, k_cache, v_cache = q.detach(), k_cache.detach(), v_cache.detach()
        out = None if out is None else out.detach()
    if out is None:
        out, lse = attention(q, k_cache, v_cache, handle, return_lse, lse_base, gradients)
    else:
        lse = attention_out(q, k_cache, v_cache, out, handle, return_lse, lse_base, gradients)
    return out, lse if return_lse else None


@torch.library.custom_op("treegen::attention", mutates_args=())
def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kernel: int,
    return_lse: bool,
    lse_base: str,
    gradients: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls the kernel with this handle; returns out like q, and lse [rows, heads], empty unless return_lse."""
    refuse_gradients(gradients)
    out, lse = _alive(kernel).attend(q, k_cache, v_cache, None, return_lse, lse_base)
    return out, _no_lse(q) if lse is None else lse


@torch.library.custom_op("treegen::attention_out", mutates_args=("out",))
def attention_out(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    kernel: int,
    return_lse: bool,
    lse_base: str,
    gradients: str = "",
) -> torch.Tensor:
    """Calls the kernel as `attention` does, with its result in `out`; returns the lse."""
    refuse_gradients(gradients)
    _, lse = _alive(kernel).attend(q, k_cache, v_cache, out, return_lse, lse_base)
    return _no_lse(q) if lse is None else lse


@attention.register_fake
def _(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kernel: int,
    return_lse: bool,
    lse_base: str,
    gradients: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty((*q.shape[:2], v_cache.shape[-1])), _fake_lse(q, return_lse)


@attention_out.register_fake
def _(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    kernel: int,
    return_lse: bool,
    lse_base: str,
    gradients: str = "",
) -> torch.Tensor:
    return _fake_lse(q, return_lse)


def _fake_lse(q: torch.Tensor, return_lse: bool) -> torch.Tensor:
    return q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else _no_lse(q)


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(0, dtype=torch.float32)


def _alive(handle: int) -> Attention:
    kernel = _KERNELS.get(handle)
    if kernel is None:
        raise InputError(
            "kernel", handle, "is no longer alive", "keep the Kernel for as long as compiled code calls it"
        )
    return kernel
