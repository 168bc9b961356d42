"""What the templates of merge kernels read: a merge key with its consequences spelled out."""

from __future__ import annotations

from dataclasses import dataclass

from treegen.codegen.kernel_signature import Parameter, kernel_signature, unspecialized
from treegen.ir.keys import MergeKey
from treegen.target.tile_config import padded

_NOT_PASSED_ON = ("merge_rows", "merge_indptr", "first_merges", "second_merges", "times", "INTERPRETED")
"""Parameters that say which merges there are, and those of recording."""


@dataclass(frozen=True, slots=True)
class MergeContext:
    """The context of a merge kernel.

    heads, parts: what a thread block takes at a time, see MergeKey. to_partials: whether some results go to partial
    slots, for a later merge to read. padded_v: padded head dim of results; mask_v: whether that is more than the
    head dim. recorded, in_turns, slices: see MergeKey. unspecialized: parameters whose values machine code is not made
    for. call_parameters: those that the kernel passes on for each merge, as declared, without those of recording;
    call_arguments: their names.
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
    slices: int
    unspecialized: tuple[str, ...]
    call_parameters: tuple[str, ...]
    call_arguments: tuple[str, ...]

    @classmethod
    def of(cls, key: MergeKey) -> MergeContext:
        """Spells out a key."""
        parameters = kernel_signature(key)
        passed_on = [parameter for parameter in parameters if parameter.name not in _NOT_PASSED_ON]
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
            slices=key.slices,
            unspecialized=unspecialized(parameters),
            call_parameters=tuple(parameter.declaration for parameter in passed_on),
            call_arguments=tuple(parameter.name for parameter in passed_on),
        )
