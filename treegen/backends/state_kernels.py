"""Kernels for attention states of several ranks: they pack states to be sent, rescale them, and combine received ones.

treegen.backends.direct_kernels sends and combines states in one launch.

States are out [rows, heads, D] and lse [rows, heads]. Packed, they lie in one chunk for each part of the heads:

    chunk of part p    [ out: rows x (heads / parts) x D | lse: rows x (heads / parts), fp32 | up to 16 bytes ]
"""

import triton
import triton.language as tl


@triton.jit
def pack_states(
    out, lse, packed_out, packed_lse, states, heads, part_heads, out_chunk, lse_chunk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Copies out and lse, both contiguous, into chunks.

    packed_out and packed_lse point to the first chunk's out and lse; chunks lie out_chunk elements of out, and
    lse_chunk of lse apart. part_heads: the heads of a part. states: rows x heads.
    """
    state = tl.program_id(0) * STATES + tl.arange(0, STATES)
    element = tl.arange(0, BLOCK_D)
    there = state < states
    row, head = state // heads, state % heads
    part = head // part_heads
    place = row * part_heads + head % part_heads
    inside = there[:, None] & (element[None, :] < D)
    values = tl.load(out + state.to(tl.int64)[:, None] * D + element[None, :], mask=inside)
    to = part.to(tl.int64) * out_chunk + place.to(tl.int64) * D
    tl.store(packed_out + to[:, None] + element[None, :], values, mask=inside)
    sums = tl.load(lse + state, mask=there)
    tl.store(packed_lse + part.to(tl.int64) * lse_chunk + place, sums, mask=there)


@triton.jit
def largest_of_ranks(lses, stride, state, there, ranks, lse_scale, STATES: tl.constexpr):
    """Returns the largest natural lse of each state over all ranks; the same with 0 where no rank saw a token; and the
    NaN of ranks whose lse is NaN, 0 without any. lses: those of a rank lie stride apart from those of the next one.
    """
    largest = tl.full([STATES], -float("inf"), tl.float32)
    broken = tl.zeros([STATES], tl.float32)
    for rank in range(ranks):
        place = lses + rank * stride + state
        sums = tl.load(place, mask=there, other=-float("inf"), cache_modifier=".cg") / lse_scale
        broken += tl.where(sums != sums, sums, 0.0)
        largest = tl.maximum(largest, sums)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    return largest, base, broken


@triton.jit
def combine_block(
    packed_out, packed_lse, out, lse, block, states, out_chunk, lse_chunk, ranks, lse_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Merges a block of STATES states of all ranks, in their order and in fp32, into out and lse.

    Each rank's chunk has the same states. A state whose lse is -inf counts for nothing, whatever its out holds. A NaN
    in an lse makes its state NaN. lse_scale: lse is that times the natural logarithm. Chunks are read from L2, as other
    GPUs may have written them.
    """
    state = block * STATES + tl.arange(0, STATES)
    element = tl.arange(0, BLOCK_D)
    there = state < states
    inside = there[:, None] & (element[None, :] < D)
    chunk = tl.cast(out_chunk, tl.int64)
    largest, base, broken = largest_of_ranks(packed_lse, lse_chunk, state, there, ranks, lse_scale, STATES)
    total = tl.zeros([STATES], tl.float32)
    merged = tl.zeros([STATES, BLOCK_D], tl.float32)
    at = state.to(tl.int64)[:, None] * D + element[None, :]
    for rank in range(ranks):
        place = packed_lse + rank * lse_chunk + state
        sums = tl.load(place, mask=there, other=-float("inf"), cache_modifier=".cg") / lse_scale
        weight = tl.exp(sums - base)
        values = tl.load(packed_out + rank * chunk + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        merged += tl.where(weight[:, None] == 0.0, 0.0, weight[:, None] * values)
        total += weight
    whole = tl.where(total == 0.0, 1.0, total)
    merged = merged / whole[:, None] + broken[:, None]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + state, (largest + tl.log(whole) + broken) * lse_scale, mask=there)


@triton.jit
def combine_states(
    packed_out, packed_lse, out, lse, states, out_chunk, lse_chunk, ranks, lse_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Merges the states of all ranks into out and lse, a block of them in each thread block."""
    combine_block(
        packed_out, packed_lse, out, lse, tl.program_id(0), states, out_chunk, lse_chunk, ranks, lse_scale,
        D, BLOCK_D, STATES,
    )  # fmt: skip


@triton.jit
def rescale_states(
    out, lses, rescaled, lse, states, heads, part_heads, own, ranks, lse_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Multiplies out by its share of the merged softmax, in fp32, and writes the merged lse.

    lses [ranks, rows, heads] has the lse of all ranks; out is that of rank `own`. rescaled [parts, rows, part_heads, D]
    has the heads of each part together. The sum of all ranks' rescaled states is the merged state.
    """
    state = tl.program_id(0) * STATES + tl.arange(0, STATES)
    element = tl.arange(0, BLOCK_D)
    there = state < states
    inside = there[:, None] & (element[None, :] < D)
    largest, base, broken = largest_of_ranks(lses, states, state, there, ranks, lse_scale, STATES)
    total = tl.zeros([STATES], tl.float32)
    for rank in range(ranks):
        sums = tl.load(lses + rank * states + state, mask=there, other=-float("inf")) / lse_scale
        total += tl.exp(sums - base)
    sums = tl.load(lses + own * states + state, mask=there, other=-float("inf")) / lse_scale
    whole = tl.where(total == 0.0, 1.0, total)
    share = tl.exp(sums - base) / whole
    values = tl.load(out + state.to(tl.int64)[:, None] * D + element[None, :], mask=inside, other=0.0).to(tl.float32)
    values = tl.where(share[:, None] == 0.0, 0.0, share[:, None] * values) + broken[:, None]
    row, head = state // heads, state % heads
    place = (head // part_heads) * (states // heads) * part_heads + row * part_heads + head % part_heads
    tl.store(rescaled + place.to(tl.int64)[:, None] * D + element[None, :], values, mask=inside)
    tl.store(lse + state, (largest + tl.log(whole) + broken) * lse_scale, mask=there)
