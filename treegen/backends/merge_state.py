"""Merging of attention states: attention over two sets of tokens becomes attention over both.

An attention state is the result of attention over some tokens: `out`, the average of their values under the softmax,
and `lse`, the log-sum-exp of their scores. The states of two disjoint sets give that of their union exactly
(FlashInfer, "Cascade Inference", 2024), so several calls may serve a row's tokens: of kernels here, or of other
libraries.
"""

from __future__ import annotations

import torch

from treegen.backends.check_inputs import TORCH_DTYPES, lse_scale
from treegen.ir.errors import InputError


def merge_state(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, *, lse_base: str = "ln"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two attention states of the same rows. See merge_states for empty and broken states.

    Args:
        out_a: `[rows, heads, head_dim]` in fp16, bf16 or fp32.
        lse_a: `[rows, heads]` in float32.
        out_b: The out of the second state, like out_a.
        lse_b: The lse of the second state, like lse_a.
        lse_base: The base of all lse: "ln" (natural, as a kernel's call returns by default) or "log2" (FlashInfer's).

    Returns:
        out, like out_a, and lse, like lse_a: the state of all tokens. The sets of tokens have to be disjoint.

    Raises:
        InputError: The tensors are no two states of the same rows.
    """
    for name, tensor, other in (("out_b", out_b, out_a), ("lse_b", lse_b, lse_a)):
        _check_tensors((name, tensor), (f"{name[:3]}_a", other))
        if tensor.shape != other.shape or tensor.dtype != other.dtype or tensor.device != other.device:
            found = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            reason = f"differs from {name[:3]}_a's {tuple(other.shape)} {other.dtype} on {other.device}"
            raise InputError(name, found, reason, "give two states of the same rows")
    _check_states("out_a", out_a, "lse_a", lse_a, 3, "[rows, heads, head_dim]")
    return _merged(torch.stack([out_a, out_b], 1), torch.stack([lse_a, lse_b], 1), lse_base)


def merge_states(outs: torch.Tensor, lses: torch.Tensor, *, lse_base: str = "ln") -> tuple[torch.Tensor, torch.Tensor]:
    """Merges several attention states of the same rows.

    A state whose lse is -inf saw no token and counts for nothing, whatever its out holds. Where no state saw a token,
    the result is 0 and -inf. A state whose lse is NaN is broken: out and lse are then NaN for its row and head. The
    result is computed in float32 by operations of PyTorch, on any device, also under CUDA graphs and torch.compile.

    Args:
        outs: `[rows, states, heads, head_dim]` in fp16, bf16 or fp32.
        lses: `[rows, states, heads]` in float32.
        lse_base: The base of all lse: "ln" (natural, as a kernel's call returns by default) or "log2" (FlashInfer's).

    Returns:
        out `[rows, heads, head_dim]` of outs' type, and lse `[rows, heads]` in float32: the state of all tokens. The
        sets of tokens have to be disjoint.

    Raises:
        InputError: The tensors are no states of the same rows.
    """
    _check_tensors(("outs", outs), ("lses", lses))
    _check_states("outs", outs, "lses", lses, 4, "[rows, states, heads, head_dim]")
    if outs.shape[1] == 0:
        raise InputError("outs", f"shape {tuple(outs.shape)}", "has no states", "give at least one")
    return _merged(outs, lses, lse_base)


def _merged(outs: torch.Tensor, lses: torch.Tensor, lse_base: str) -> tuple[torch.Tensor, torch.Tensor]:
    scale = lse_scale(lse_base)
    natural = lses / scale
    largest = natural.amax(1, keepdim=True)
    # Subtracting -inf from itself would give NaN; with 0 in its place all weights are exp(-inf), which is 0.
    weights = (natural - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
    total = weights.sum(1)
    shares = (weights / total.masked_fill(total == 0, 1.0)[:, None])[..., None]
    out = torch.where(shares == 0, 0.0, shares * outs.float()).sum(1)
    return out.to(outs.dtype), (largest[:, 0] + total.log()) * scale


def _check_tensors(*named: tuple[str, object]) -> None:
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise InputError(name, type(tensor).__name__, "is not a tensor", "give a torch.Tensor")


def _check_states(out_name: str, out: torch.Tensor, lse_name: str, lse: torch.Tensor, dims: int, form: str) -> None:
    if out.dim() != dims:
        raise InputError(out_name, f"shape {tuple(out.shape)}", f"has {out.dim()} dimensions", f"give {form}")
    if out.dtype not in TORCH_DTYPES.values():
        raise InputError(out_name, out.dtype, "is not supported", "use fp16, bf16 or fp32")
    if lse.dtype != torch.float32:
        raise InputError(lse_name, lse.dtype, "is not float32", "give the lse that attention returned")
    if lse.shape != out.shape[:-1]:
        reason = f"does not match {out_name}'s shape {tuple(out.shape)}"
        raise InputError(lse_name, f"shape {tuple(lse.shape)}", reason, f"give {tuple(out.shape[:-1])}")
    if lse.device != out.device:
        raise InputError(lse_name, str(lse.device), f"is not on {out_name}'s device {out.device}", "move it there")
