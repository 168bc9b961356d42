"""A kernel that draws next tokens from logits. A thread block reads a row several times, and writes its token alone."""

import triton
import triton.language as tl


@triton.jit
def _logits(row, first, count, TILE: tl.constexpr):
    """Returns the logits of the TILE tokens from `first` on; -inf for those that there are not."""
    token = first + tl.arange(0, TILE)
    return tl.load(row + token, mask=token < count, other=float("-inf")).to(tl.float32)


@triton.jit
def _weights(logits, least, largest, temperature):
    """Returns `exp((logit - largest) / temperature)`, and 0 for logits below least; NaN for NaN."""
    return tl.where(logits < least, 0.0, tl.exp((logits - largest) / temperature))


@triton.jit
def _weight_above(row, count, bound, least, largest, temperature, COUNTS: tl.constexpr, TILE: tl.constexpr):
    """Returns the sum of weights of a row whose logits are above a number; with COUNTS how many these are."""
    sums = tl.zeros([TILE], tl.float32)
    for first in range(0, count, TILE):
        logits = _logits(row, first, count, TILE)
        weights = 1.0 if COUNTS else _weights(logits, least, largest, temperature)
        sums += tl.where(logits > bound, weights, 0.0)
    return tl.sum(sums)


@triton.jit
def _key(number, SHIFT: tl.constexpr):
    """Returns an integer for an fp32 number. Keys compare as their numbers do, and leave out SHIFT bits that are 0."""
    bits = number.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT).to(tl.int64)


@triton.jit
def _number(key, SHIFT: tl.constexpr):
    """Returns the number of a key."""
    bits = key.to(tl.int32) << SHIFT
    bits = tl.where(bits < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _least_kept(
    row, count, least, largest, temperature, most, COUNTS: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr
):
    """Returns the least number above which there is less than `most` weight, or there are fewer logits."""
    low, high = _key(least, SHIFT), _key(largest, SHIFT)
    while low < high:
        middle = (low + high) >> 1
        above = _weight_above(row, count, _number(middle, SHIFT), least, largest, temperature, COUNTS, TILE)
        if above < most:
            high = middle
        else:
            low = middle + 1
    return _number(high, SHIFT)


@triton.jit(do_not_specialize=["top_k"])
def draw_tokens(
    logits, uniform, tokens, count, stride, temperature, top_k, top_p,
    KEEPS: tl.constexpr, NUCLEUS: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Draws tokens [rows] from logits [rows, count], whose rows lie stride elements apart, by uniform [rows] in fp64.

    A token is the first whose cumulated weight exceeds `uniform` times all weight. With KEEPS only the top_k largest
    logits have weight, with NUCLEUS the largest of these whose weights first sum up to top_p of all; equal logits stay
    or go together. The token is `count` where a weight is NaN. The last SHIFT bits of logits in fp32 are 0.
    """
    at = tl.program_id(0).to(tl.int64)
    row = logits + at * stride
    largest_of = tl.full([TILE], float("-inf"), tl.float32)
    for first in range(0, count, TILE):
        largest_of = tl.maximum(largest_of, _logits(row, first, count, TILE))
    largest, least = tl.max(largest_of), tl.full([], float("-inf"), tl.float32)
    if KEEPS:
        least = _least_kept(row, count, least, largest, temperature, top_k, True, SHIFT, TILE)
    if NUCLEUS:
        nucleus = top_p * _weight_above(row, count, float("-inf"), least, largest, temperature, False, TILE)
        least = _least_kept(row, count, least, largest, temperature, nucleus, False, SHIFT, TILE)
    total, below, found = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64), count
    for first in range(0, count, TILE):
        total += tl.sum(_weights(_logits(row, first, count, TILE), least, largest, temperature)).to(tl.float64)
    target = tl.load(uniform + at) * total
    for first in range(0, count, TILE):
        weights = _weights(_logits(row, first, count, TILE), least, largest, temperature)
        above = below + tl.sum(weights).to(tl.float64)
        if (found == count) & (above > target):
            token, cumulated = first + tl.arange(0, TILE), below + tl.cumsum(weights.to(tl.float64), 0)
            found = tl.min(tl.where((cumulated > target) & (weights > 0), token, count))
            if found == count:  # rounding: the weight of the tile is more than its last cumulated one
                found = tl.max(tl.where(weights > 0, token, 0))
        below = above
    tl.store(tokens + at, found.to(tl.int64))
