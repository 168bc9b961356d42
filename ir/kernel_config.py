"""Kernel configs: what the kernel of a launch is made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

MOST_BIT_ROWS = 64
"""The most rows of an item in a config with bit masks."""
TileMask: TypeAlias = Literal["none", "interval", "bits", "dense"]


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """One kernel specialisation.

    A config with a dense mask stands for unfused PyTorch operations; its num_warps and num_stages are 0.

    Attributes:
        rows: Query head rows of a thread block.
        tokens: KV tokens of a tile.
        run_tokens: Tokens of the runs that are packed into a tile.
        mask: How rows see runs.
        num_warps: Triton's num_warps.
        num_stages: Triton's num_stages.
        work_list: Whether thread blocks work off lists of items.
        epilogue_merge: Whether items join their rows' partials of earlier rounds before they write final output.
        has_full_tiles: Whether items may have full tiles.
        fused_merge: Whether final items wait for the partials of others in the same launch
            (treegen.schedule.passes.fuse_merge).
    """

    rows: int
    tokens: int
    run_tokens: int
    mask: TileMask
    num_warps: int
    num_stages: int
    work_list: bool = False
    epilogue_merge: bool = False
    has_full_tiles: bool = True
    fused_merge: bool = False

    @property
    def runs_per_tile(self) -> int:
        """Runs that are packed into one tile."""
        return self.tokens // self.run_tokens

    @property
    def fused(self) -> bool:
        """Whether a kernel runs the config."""
        return self.mask != "dense"

    def __str__(self) -> str:
        if not self.fused:
            return f"{self.rows} head rows, unfused"
        mask = "no mask" if self.mask == "none" else f"{self.mask} mask"
        told = ((self.work_list, "work lists"), (self.epilogue_merge, "merge in the epilogue"),
                (self.fused_merge, "fused merge"), (not self.has_full_tiles, "single loop"))  # fmt: skip
        further = "".join(f", {text}" for holds, text in told if holds)
        sizes = f"{self.rows}x{self.tokens}/{self.run_tokens}"
        return f"{sizes} {mask}, {self.num_warps} warps, {self.num_stages} stages{further}"
