"""Kernels as operators of torch.compile: `treegen::attention` and `treegen::attention_out`.

A kernel is no tensor, so compiled code holds its handle, a number. The handle is looked up at run time: an update of
the kernel between calls shows in the next call, without compiling anew.
"""

from __future__ import annotations

import itertools
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from treegen.backends.check_inputs import refuse_gradients
from treegen.ir.errors import InputError


class Attention(Protocol):
    """What a handle stands for: Kernel.attend."""

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor | None,
        return_lse: bool,
        lse_base: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out, and the lse if asked for."""


_KERNELS: WeakValueDictionary[int, Attention] = WeakValueDictionary()
_numbers = itertools.count(1)


def handle_of(kernel: Attention) -> int:
    """A new handle of a kernel, which it does not keep alive. No handle is given twice."""
    handle = next(_numbers)
    _KERNELS[handle] = kernel
    return handle


def call(
    handle: int,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor | None,
    return_lse: bool,
    lse_base: str,
    gradients: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A kernel's attention as one operator; arguments as of Kernel.__call__. gradients: the name of a tensor that
    requires them, or "": compiled code then raises InputError when it runs, which it could not do while it is traced.
    """
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
    """out like q, and lse [rows, heads], or an empty one unless return_lse, of the kernel with this handle."""
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
    """As `attention`, into `out`; returns the lse."""
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
