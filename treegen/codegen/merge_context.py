"""What the templates of merge kernels read: a merge key with its consequences spelled out."""

from __future__ import annotations

from dataclasses import dataclass

from treegen.codegen.kernel_signature import Parameter, kernel_signature, unspecialized
from treegen.ir.keys import MergeKey
from treegen.target.tile_config import padded


@dataclass(frozen=True, slots=True)
class MergeContext:
    """The context of a merge kernel.

    heads, parts: what a thread block takes at a time, see MergeKey. to_partials: whether some results go to partial
    slots, for a later merge to read. padded_v: padded head dim of results; mask_v: whether that is more than the
    head dim. recorded, in_turns: see MergeKey. unspecialized: parameters whose values machine code is not made for.
    indent: further spaces of the kernel's body.
    """

    heads: int
    parts: int
    to_partials: bool
    head_dim_v: int
    padded_v: int
    mask_v: bool
    parameters: tuple[Parameter, ...]
    sinks: bool
    recorded: bool
    in_turns: bool
    unspecialized: tuple[str, ...]
    indent: int

    @classmethod
    def of(cls, key: MergeKey) -> MergeContext:
        """Spells out a key."""
        parameters = kernel_signature(key)
        return cls(
            heads=key.heads,
            parts=key.parts,
            to_partials=key.several_rounds,
            head_dim_v=key.head_dim_v,
            padded_v=padded(key.head_dim_v),
            mask_v=padded(key.head_dim_v) != key.head_dim_v,
            parameters=parameters,
            sinks=key.sinks,
            recorded=key.recorded,
            in_turns=key.in_turns,
            unspecialized=unspecialized(parameters),
            indent=4 if key.in_turns else 0,
        )
