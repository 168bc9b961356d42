"""Parallel: how attention is divided among ranks. Heads (tensor parallel) and KV (context parallel) compose.

mesh of 4 ranks          cp 0             cp 1
tp 0                     rank 0           rank 1        heads of the first half
tp 1                     rank 2           rank 3        heads of the second half
                         even positions   odd positions, with interleave=1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from treegen.ir.errors import InputError
from treegen.ir.shape import Shape
from treegen.ir.tree.shards import Number, Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class Parallel:
    """How attention is divided among ranks.

    Args:
        tensor: The ranks among which heads are divided; None where each rank has all heads.
        context: The ranks among which the tokens of every path are divided; None where each rank holds all tokens.
        interleave: Neighbouring positions of a path that one rank of `context` holds. 1 gives all ranks equal parts.
        replicate_kv: Whether a KV head may be held by several ranks of `tensor`, where there are more ranks than KV
            heads.

    Raises:
        InputError: A group is none.
        TreeError: interleave is out of range.
    """

    tensor: ProcessGroup | None = None
    context: ProcessGroup | None = None
    interleave: int = 1
    replicate_kv: bool = False

    def __post_init__(self) -> None:
        for name, group in (("tensor", self.tensor), ("context", self.context)):
            if group is not None:
                check_group(name, group)
        _ = self.shard  # its other checks

    @classmethod
    def over(
        cls,
        mesh: DeviceMesh,
        *,
        tensor: str | None = None,
        context: str | None = None,
        interleave: int = 1,
        replicate_kv: bool = False,
    ) -> Parallel:
        """Divides attention among the ranks of a device mesh.

        Args:
            mesh: The mesh.
            tensor: Its dimension for heads.
            context: Its dimension for KV.
            interleave, replicate_kv: As of Parallel.

        Raises:
            InputError: The mesh has no dimension of such a name, or both names are one.
        """
        if not hasattr(mesh, "mesh_dim_names"):
            raise InputError("mesh", type(mesh).__name__, "is no DeviceMesh", "give that of init_device_mesh(...)")
        names = mesh.mesh_dim_names or ()
        for argument, name in (("tensor", tensor), ("context", context)):
            if name is not None and name not in names:
                known = ", ".join(map(repr, names)) or "none with a name"
                raise InputError(argument, name, f"is no dimension of the mesh, which has {known}", "give one of these")
        if tensor is not None and tensor == context:
            raise InputError("context", context, "divides heads already", "give another dimension of the mesh")
        heads, tokens = (None if name is None else mesh.get_group(name) for name in (tensor, context))
        return cls(heads, tokens, interleave, replicate_kv)

    @property
    def shard(self) -> Shard:
        """The share of the positions of every path that this rank holds."""
        group = self.context
        return Shard(0, 1, self.interleave) if group is None else Shard(group.rank(), group.size(), self.interleave)

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """The groups that are given."""
        return tuple(group for group in (self.tensor, self.context) if group is not None)

    @property
    def tensor_place(self) -> tuple[int, int]:
        """This rank among those that divide heads, and their number."""
        return (0, 1) if self.tensor is None else (self.tensor.rank(), self.tensor.size())

    def tokens(self, tokens: Number) -> Number:
        """Returns how many of the first `tokens` tokens of a sequence this rank holds: an int, an array or a tensor."""
        return self.shard.count(tokens)

    def local_shape(self, shape: Shape) -> Shape:
        """Returns the shape of this rank's attention: with its part of the heads.

        Args:
            shape: The shape of the whole model.

        Raises:
            ShapeError: The ranks do not divide the query heads or the KV heads; without `replicate_kv`.
        """
        return shape.divided(self.tensor_place[1], replicate_kv=self.replicate_kv)

    def query_heads(self, shape: Shape) -> slice:
        """Returns this rank's query heads among those of the whole model. Raises ShapeError as `local_shape`."""
        heads = self.local_shape(shape).num_qo_heads
        return slice(self.tensor_place[0] * heads, (self.tensor_place[0] + 1) * heads)

    def kv_heads(self, shape: Shape) -> slice:
        """Returns this rank's KV heads among those of the whole model. Raises ShapeError as `local_shape`."""
        first = self.query_heads(shape).start // shape.group
        return slice(first, first + self.local_shape(shape).num_kv_heads)

    def of_heads(self, values: torch.Tensor, heads: slice) -> torch.Tensor:
        """Returns a view of the entries of these heads; raises no error, so that checks of sizes see what was given."""
        return values[heads] if values.dim() == 1 and len(values) >= heads.stop else values


def check_group(name: str, group: object) -> None:
    """Raises InputError, with this name, unless this is a process group."""
    if not (callable(getattr(group, "rank", None)) and callable(getattr(group, "size", None))):
        fix = "give one of torch.distributed, as mesh.get_group(name)"
        raise InputError(name, type(group).__name__, "is no process group", fix)
