"""Attention states as ranks send them: packed into bytes, a chunk for each part of the heads, and combined again.

On a GPU each direction is one kernel; on other devices operations of PyTorch do the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from treegen.backends.devices import interpreted, on_device
from treegen.backends.merge_state import merge_states
from treegen.cost.communication import packed_bytes

STATES = 16
"""States that a thread block moves at a time."""


@dataclass(frozen=True)
class StateForm:
    """The sizes of the states of a chunk: `rows` x `heads` results of `dim` elements."""

    rows: int
    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def states(self) -> int:
        """The number of states."""
        return self.rows * self.heads

    @property
    def chunk(self) -> int:
        """Bytes of a chunk."""
        return packed_bytes(self.rows, self.heads, self.dim, self.dtype.itemsize)

    def views(self, chunks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns out `[chunks, rows, heads, dim]` and lse `[chunks, rows, heads]` in bytes `[chunks, chunk]`."""
        size = self.states * self.dim * self.dtype.itemsize
        first_lse = -(-size // 4) * 4
        out = chunks[:, :size].view(self.dtype)
        lse = chunks[:, first_lse : first_lse + 4 * self.states].view(torch.float32)
        sizes = len(chunks), self.rows, self.heads
        return out.view(*sizes, self.dim), lse.view(*sizes)


def pack(out: torch.Tensor, lse: torch.Tensor, parts: int) -> torch.Tensor:
    """Packs states into a chunk for each part of the heads.

    Args:
        out: `[rows, heads, dim]`, contiguous.
        lse: `[rows, heads]` in float32, contiguous.
        parts: The number of parts, which divides heads.

    Returns:
        Bytes `[parts, chunk]`.
    """
    rows, heads, dim = out.shape
    form = StateForm(rows, heads // parts, dim, out.dtype)
    packed = torch.empty(parts, form.chunk, dtype=torch.uint8, device=out.device)
    to_out, to_lse = form.views(packed)
    if not _by_kernels(out):
        to_out.copy_(out.view(rows, parts, form.heads, dim).transpose(0, 1))
        to_lse.copy_(lse.view(rows, parts, form.heads).transpose(0, 1))
    elif out.numel():
        from treegen.backends import state_kernels

        strides = form.chunk // out.element_size(), form.chunk // 4
        with on_device(out.device):
            state_kernels.pack_states[_grid(rows * heads)](
                out, lse, to_out, to_lse, rows * heads, heads, form.heads, *strides, *tile_of(dim), num_warps=4
            )
    return packed


def combine(chunks: torch.Tensor, form: StateForm, lse_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the states of all ranks, in the order of the ranks and in fp32.

    Args:
        chunks: Bytes `[ranks, chunk]`, a chunk of each rank.
        form: The sizes of a chunk's states.
        lse_scale: What the natural logarithm is multiplied by in lse.

    Returns:
        out `[rows, heads, dim]` and lse `[rows, heads]`.
    """
    outs, lses = form.views(chunks)
    if not _by_kernels(chunks):
        base = "ln" if lse_scale == 1 else "log2"
        return merge_states(outs.transpose(0, 1), lses.transpose(0, 1), lse_base=base)
    out, lse = empty_states(form, chunks.device)
    if out.numel():
        from treegen.backends import state_kernels

        strides = form.chunk // out.element_size(), form.chunk // 4
        with on_device(chunks.device):
            state_kernels.combine_states[_grid(form.states)](
                outs, lses, out, lse, form.states, *strides, len(chunks), lse_scale, *tile_of(form.dim), num_warps=4
            )
    return out, lse


def rescale(
    out: torch.Tensor, lses: torch.Tensor, own: int, parts: int, lse_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiplies a rank's results by their share of the merged softmax.

    Args:
        out: `[rows, heads, dim]`, contiguous; the rank's results.
        lses: `[ranks, rows, heads]`; the lse of all ranks.
        own: The rank.
        parts: The number of parts of the heads.
        lse_scale: What the natural logarithm is multiplied by in lse.

    Returns:
        float32 `[parts, rows, heads / parts, dim]`, whose sum over ranks is the merged out; and the merged lse `[rows,
        heads]`.
    """
    rows, heads, dim = out.shape
    if not _by_kernels(out):
        natural = lses / lse_scale
        largest = natural.amax(0)
        weights = (natural - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
        total = weights.sum(0)
        share = (weights[own] / total.masked_fill(total == 0, 1.0))[..., None]
        scaled = torch.where(share == 0, 0.0, share * out.float())
        parted = scaled.view(rows, parts, heads // parts, dim).transpose(0, 1).contiguous()
        return parted, (largest + total.log()) * lse_scale
    rescaled = torch.empty(parts, rows, heads // parts, dim, dtype=torch.float32, device=out.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=out.device)
    if out.numel():
        from treegen.backends import state_kernels

        with on_device(out.device):
            state_kernels.rescale_states[_grid(rows * heads)](
                out, lses, rescaled, lse, rows * heads, heads, heads // parts, own, len(lses), lse_scale, *tile_of(dim),
                num_warps=4,
            )  # fmt: skip
    return rescaled, lse


def empty_states(form: StateForm, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates out `[rows, heads, dim]` and lse `[rows, heads]`."""
    out = torch.empty(form.rows, form.heads, form.dim, dtype=form.dtype, device=device)
    return out, torch.empty(form.rows, form.heads, dtype=torch.float32, device=device)


def _by_kernels(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda or interpreted()


def _grid(states: int) -> tuple[int]:
    return (-(-states // STATES),)


def tile_of(dim: int) -> tuple[int, int, int]:
    """Returns D, BLOCK_D and STATES of the kernels."""
    return dim, 1 << (dim - 1).bit_length(), STATES
