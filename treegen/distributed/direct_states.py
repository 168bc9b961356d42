"""Direct merges: ranks of one host write attention states into each other's memory, and combine them in one launch.

The memory is torch.distributed's symmetric memory. Where ranks do not reach it, merges go by collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from treegen.backends.devices import interpreted, on_device
from treegen.distributed.packed_states import STATES, StateForm, empty_states, tile_of

_WARPS = 8
_ALIGNED = 128


@dataclass(frozen=True)
class BufferForm:
    """The sizes of a buffer: for `ranks` ranks, and calls of up to `capacity` states of `dim` elements.

    capacity is a multiple of STATES.
    """

    ranks: int
    capacity: int
    dim: int
    dtype: torch.dtype

    @classmethod
    def for_states(cls, ranks: int, states: int, dim: int, dtype: torch.dtype) -> BufferForm:
        """Returns the form with room for this number of states, rounded up to a power of two."""
        return cls(ranks, max(STATES, 1 << (states - 1).bit_length()), dim, dtype)

    @property
    def blocks(self) -> int:
        """The most thread blocks of a call."""
        return self.capacity // STATES

    @property
    def parts(self) -> tuple[int, int, int]:
        """Where in a buffer out, lse and flags begin, in bytes."""
        lse = _aligned(2 * self.ranks * self.capacity * self.dim * self.dtype.itemsize)
        return 0, lse, lse + _aligned(2 * self.ranks * self.capacity * 4)

    @property
    def bytes(self) -> int:
        """The size of a buffer, in bytes."""
        return self.parts[-1] + _aligned(self.ranks * self.blocks * 4)


class Buffers:
    """A buffer of each rank of a group, which all of these ranks can write to.

    Merges follow one another on the device, as the collectives of a group do.

    Args:
        form: Their sizes.
        rank: This rank.
        addresses: Where this process finds the buffer of each rank. All buffers have to begin with zeros, and to stay.
        device: The device of this rank.
        limit_ns: How long a merge waits for other ranks before it fails.
    """

    def __init__(
        self, form: BufferForm, rank: int, addresses: Sequence[int], device: torch.device, limit_ns: int
    ) -> None:
        self.form, self.rank, self._limit_ns = form, rank, limit_ns
        places = [[address + part for address in addresses] for part in form.parts]
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        self.calls = torch.zeros(form.blocks, dtype=torch.int32, device=device)

    def merge(
        self, out: torch.Tensor, lse: torch.Tensor, own: bool, lse_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merges the states of all ranks, in the order of the ranks and in fp32; all ranks call it.

        Args:
            out: `[rows, heads, dim]`, contiguous.
            lse: `[rows, heads]` in float32, contiguous.
            own: Whether the rank gets its own part of the heads, or all of them.
            lse_scale: What the natural logarithm is multiplied by in lse.

        Returns:
            out `[rows, heads, dim]` and lse `[rows, heads]`, or those of the rank's own heads.
        """
        from treegen.backends import direct_kernels

        (rows, heads), ranks = lse.shape, self.form.ranks
        part = heads // ranks if own else heads
        form = StateForm(rows, part, self.form.dim, out.dtype)
        merged, merged_lse = empty_states(form, out.device)
        with on_device(out.device):
            direct_kernels.merge_directly[(-(-form.states // STATES),)](
                out, lse, merged, merged_lse, self._places, self.calls, form.states, heads, part, part if own else 0,
                self.form.blocks, self.form.capacity, self.rank, lse_scale, self._limit_ns, ranks,
                *tile_of(form.dim), interpreted(), num_warps=_WARPS,
            )  # fmt: skip
        return merged, merged_lse


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
