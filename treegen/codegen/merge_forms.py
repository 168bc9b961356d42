"""The keys of merge kernels: how many heads and partials a thread block takes at a time, by what there is to merge."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from treegen.ir.arena import ArenaSizes
from treegen.ir.keys import MergeKey
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.target.tile_config import padded


class MergeForm(NamedTuple):
    """What a thread block of a merge kernel takes at a time.

    heads: heads of a row. parts: partials of each. slices: the number of thread blocks that share a head's elements.
    """

    heads: int
    parts: int
    slices: int = 1


_MERGED_BY_WARP = 4096
"""Values of partials that a warp has in registers at a time."""
_SLICES = 4
_LEAST_SLICE = 16
"""The fewest elements of a slice: 64 bytes of partials in fp32."""
# By the merged rows times heads up to which they serve. Measured on an H200: one warp is the fastest, with all partials
# of a row at a time, so that nobody waits for memory twice. Where rows are few, slices make room for them: with the
# launch, 64 partials of a row of 8 heads take 2.0 us in four slices and 3.2 in one, 16 take 2.0 in two and 2.3 in one.
_MERGE_FORMS = {
    1024: (MergeForm(1, 4), MergeForm(2, 16, 2), MergeForm(1, 64, 4)),
    2048: (MergeForm(2, 2), MergeForm(2, 8)),
    math.inf: (MergeForm(4, 2), MergeForm(4, 4)),
}
_FIXED_FORM = MergeForm(2, 8)
# The same for launches of a fixed capacity, where lists of any length may come: of 16 running batches on an H200, ten
# take 0.90 to 0.97 of the time with (2, 8) or (4, 4), and the others 0.97 to 1.02.
_CAPACITY_FORMS = {4096: MergeForm(2, 16), math.inf: MergeForm(4, 8)}


def invariant_merge_key(shape: Shape, *, sinks: bool = False) -> MergeKey:
    """Makes the key of the only merge kernel of schedules with fixed merges."""
    return _merge_key(shape, False, _FIXED_FORM, sinks=sinks)


def merge_key(shape: Shape, *, several_rounds: bool, rows: int, longest: int, sinks: bool = False) -> MergeKey:
    """Makes the key of the merge kernel for this many merged rows of at most `longest` partials."""
    forms = next(forms for most, forms in _MERGE_FORMS.items() if rows * shape.num_qo_heads <= most)
    form = next((form for form in forms if form.parts >= longest), forms[-1])
    return _merge_key(shape, several_rounds, form, sinks=sinks)


def merge_keys(shape: Shape) -> list[MergeKey]:
    """Lists every key that `merge_key` and, for launches of a fixed capacity, `merge_key_of` make for a shape."""
    forms = [*(form for some in _MERGE_FORMS.values() for form in some), *_CAPACITY_FORMS.values()]
    return list(
        dict.fromkeys(_merge_key(shape, several_rounds, form) for several_rounds in (False, True) for form in forms)
    )


def merge_key_of(
    schedule: Schedule, shape: Shape, round_number: int, capacity: ArenaSizes | None = None, *, sinks: bool = False
) -> MergeKey:
    """Makes the key of the kernel that merges at the end of one round of a schedule's launches.

    Args:
        schedule: The schedule.
        shape: The attention shape.
        round_number: Which of the schedule's rounds, from 0 on.
        capacity: That of launches that do not follow the schedule; lists of any length then may come.
        sinks: Whether heads have sinks.

    Returns:
        The key.
    """
    if schedule.fixed:
        return invariant_merge_key(shape, sinks=sinks)
    several_rounds = schedule.num_rounds > 1
    if capacity is not None:
        merged = capacity.merges[round_number] * shape.num_qo_heads
        form = next(form for most, form in _CAPACITY_FORMS.items() if merged <= most)
        return _merge_key(shape, several_rounds, form, sinks=sinks)
    first, last = schedule.merge_round_indptr[round_number : round_number + 2]
    bounds = schedule.merge_indptr[first : last + 1]
    longest = int((bounds[1:] - bounds[:-1]).max(initial=0))
    return merge_key(shape, several_rounds=several_rounds, rows=len(bounds) - 1, longest=longest, sinks=sinks)


def merge_key_in_turns(key: MergeKey, *, fixed: bool) -> MergeKey:
    """Makes the key of the kernel whose thread blocks take merges in turn. fixed: whether merges are fixed."""
    divisible = not fixed and padded(key.head_dim_v) >= _SLICES * _LEAST_SLICE
    return replace(key, in_turns=True, slices=_SLICES if divisible else 1)


def _merge_key(shape: Shape, several_rounds: bool, form: MergeForm, *, sinks: bool = False) -> MergeKey:
    heads, elements = min(form.heads, 1 << (shape.num_qo_heads - 1).bit_length()), padded(shape.head_dim_v)
    slices = min(form.slices, max(1, elements // _LEAST_SLICE))
    warps = max(1, heads * form.parts * elements // slices // _MERGED_BY_WARP)
    return MergeKey(
        shape.dtype, shape.head_dim_v, heads, form.parts, several_rounds, warps, sinks, slices=slices
    )  # fmt: skip
