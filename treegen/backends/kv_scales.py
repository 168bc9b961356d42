"""Scales: factors of keys and values, for caches in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from treegen.ir.errors import InputError
from treegen.ir.scalars import is_finite

Scale: TypeAlias = "float | torch.Tensor"


class HeadScales(NamedTuple):
    """The factors of keys and values as float32 tensors [num_kv_heads] on one device."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Scales:
    """The factor k of keys and v of values: a number, or a float32 tensor [num_kv_heads] that every launch reads.

    `of` makes them. Both are above 0, because kernels compare scores before they scale them.
    """

    k: Scale
    v: Scale

    @classmethod
    def of(cls, k_scale: Scale | None, v_scale: Scale | None) -> Scales | None:
        """Checks the scales of a caller. One that is missing is 1; None if both are.

        Waits for the device of tensors, to read their values once. Raises InputError.
        """
        if k_scale is None and v_scale is None:
            return None
        return cls(_checked("k_scale", k_scale), _checked("v_scale", v_scale))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The scales that are tensors, by the names of their arguments."""
        named = {"k_scale": self.k, "v_scale": self.v}
        return {name: scale for name, scale in named.items() if isinstance(scale, torch.Tensor)}

    def on(self, device: torch.device, kv_heads: int) -> HeadScales:
        """Returns the scales of each KV head on a device.

        Raises InputError for tensors on another device, or with another number of heads.
        """
        return HeadScales(_placed("k_scale", self.k, device, kv_heads), _placed("v_scale", self.v, device, kv_heads))


def placed(scales: Scales | None, device: torch.device, kv_heads: int) -> HeadScales | None:
    """Returns `scales.on(device, kv_heads)`, or None without scales."""
    return None if scales is None else scales.on(device, kv_heads)


def _checked(name: str, scale: Scale | None) -> Scale:
    fix = "give a number above 0, or a contiguous float32 tensor [num_kv_heads] of such numbers"
    if scale is None:
        return 1.0
    if isinstance(scale, torch.Tensor):
        if scale.is_meta or scale.dim() != 1 or scale.dtype != torch.float32 or not scale.is_contiguous():
            raise InputError(name, f"{tuple(scale.shape)} {scale.dtype}", "is not a float32 tensor [num_kv_heads]", fix)
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise InputError(name, scale.tolist(), "are not finite numbers above 0", fix)
        return scale
    if not is_finite(scale) or scale <= 0:
        raise InputError(name, scale, "is not a finite number above 0", fix)
    return float(scale)


def _placed(name: str, scale: Scale, device: torch.device, kv_heads: int) -> torch.Tensor:
    if not isinstance(scale, torch.Tensor):
        return torch.full((kv_heads,), scale, dtype=torch.float32, device=device)
    if len(scale) != kv_heads:
        raise InputError(name, f"{len(scale)} numbers", f"there are {kv_heads} KV heads", "give one for every KV head")
    if scale.device != device:
        raise InputError(name, str(scale.device), f"is not on the tensors' device {device}", "move it there")
    return scale
