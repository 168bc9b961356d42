"""Constants and functions that emitted kernels share.

Emission copies those that a kernel uses into the kernel's module, word for word and with the comments
above them (treegen.codegen.function_source). What varies with a kernel's key is in the templates.

INTERPRETED says whether Triton's interpreter runs the kernel.
"""

import triton
import triton.language as tl

# The maximum of a row before its first score. Scores below it are hidden, as -inf is.
LEAST_SCORE = tl.constexpr(-1.0e24)
# The score of a token that a row does not see: its weight is 0 against every maximum.
HIDDEN = tl.constexpr(-1.0e25)
# The maximum of a row before its first partial.
LEAST_LSE = tl.constexpr(-1.0e29)
# The least scale of scores: with 0, hidden scores would count as much as others.
LEAST_SCALE = tl.constexpr(1.0e-20)
# The row of thread blocks of the merge kernel that fill a grid larger than the tree's.
SURPLUS = tl.constexpr(-(2**31))
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
# The flag that a producer sets when its partials are visible: memory does not hold it by chance.
READY = tl.constexpr(0x5D1F83A6C4E9720B)


@triton.jit
def slices_of(merge_indptr, most, head_blocks, PARTS: tl.constexpr, SLICES: tl.constexpr):
    """Says among how many thread blocks the elements of a head are divided: SLICES, or 1.

    They are divided where a merge has more than PARTS partials, and thread blocks need no further
    turns for it. most: the most merges of the list, which ends with a negative end.
    """
    i = tl.arange(0, 64)
    begin = tl.load(merge_indptr + i, mask=i < most, other=0)
    end = tl.load(merge_indptr + i + 1, mask=i < most, other=-1)
    count = tl.sum((end >= 0).to(tl.int32), 0)
    few = (count < 64) & (count * head_blocks * SLICES <= tl.num_programs(0))
    return tl.where(few & (tl.max(end - begin, 0) > PARTS), SLICES, 1)


@triton.jit
def dot(a, b, INTERPRETED: tl.constexpr):
    """Multiplies matrices into fp32.

    The interpreter gets operands in fp32: of 16-bit types it would multiply the bit patterns.
    """
    if INTERPRETED or a.dtype == tl.float32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def e4m3_from_bits(byte):
    """Converts the bytes of e4m3 numbers to fp16, exactly.

    Their exponents have a bias of 7, and fp16's one of 15, so that bits in place make a number 256
    times smaller. Codes with all bits set but the sign are NaN.
    """
    byte = byte.to(tl.uint16)
    number = (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def e4m3_planes_from_bits(word):
    """Converts words of four e4m3 elements to four planes in fp16, by e4m3_from_bits."""
    word = word.to(tl.uint32, bitcast=True)
    return (
        e4m3_from_bits(word & 0xFF),
        e4m3_from_bits((word >> 8) & 0xFF),
        e4m3_from_bits((word >> 16) & 0xFF),
        e4m3_from_bits(word >> 24),
    )


@triton.jit
def e5m2_planes(word):
    """Converts words of four e5m2 elements to four planes in fp16: e5m2 is fp16's upper byte."""
    word = word.to(tl.uint32, bitcast=True)
    byte_0 = (word << 8).to(tl.uint16) & 0xFF00
    byte_1 = word.to(tl.uint16) & 0xFF00
    byte_2 = (word >> 8).to(tl.uint16) & 0xFF00
    byte_3 = (word >> 16).to(tl.uint16) & 0xFF00
    return (
        byte_0.to(tl.float16, bitcast=True),
        byte_1.to(tl.float16, bitcast=True),
        byte_2.to(tl.float16, bitcast=True),
        byte_3.to(tl.float16, bitcast=True),
    )


@triton.jit
def finite_part(v_tile):
    """Replaces values [N, DV] that are not finite by 0, and says which tokens had any, as 0 and 1.

    In a product, such a value would turn a weight of 0 into NaN.
    """
    finite = tl.abs(v_tile.to(tl.float32)) < float("inf")
    return tl.where(finite, v_tile, 0.0).to(v_tile.dtype), tl.max(tl.where(finite, 0, 1), 1)


@triton.jit
def softmax_step(acc, m_i, l_i, qk, qk_scale, shift, m_new, v_tile, INTERPRETED: tl.constexpr):
    """Takes a step of the online softmax: scores [M, N] and values [N, DV] go into running sums.

    Scaled scores are measured against `shift`, and the sums so far against m_new from now on.
    """
    p = tl.exp2(qk * qk_scale - shift[:, None])
    alpha = tl.exp2((m_i - m_new) * qk_scale)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + dot(p.to(v_tile.dtype), v_tile, INTERPRETED)
    return acc, m_new, l_i


@triton.jit
def guarded_softmax_step(
    acc,
    m_i,
    l_i,
    spoiled,
    qk,
    qk_scale,
    shift,
    m_new,
    v_tile,
    spoils,
    INTERPRETED: tl.constexpr,
):
    """Takes a softmax_step in which rows that give a weight to a token that spoils are spoiled."""
    p = tl.exp2(qk * qk_scale - shift[:, None])
    alpha = tl.exp2((m_i - m_new) * qk_scale)
    l_i = l_i * alpha + tl.sum(p, 1)
    spoiled = tl.maximum(spoiled, tl.max(tl.where(p > 0, spoils[None, :], 0), 1))
    acc = acc * alpha[:, None] + dot(p.to(v_tile.dtype), v_tile, INTERPRETED)
    return acc, m_new, l_i, spoiled


@triton.jit
def softmax_step_in_planes(
    acc_0,
    acc_1,
    acc_2,
    acc_3,
    m_i,
    l_i,
    qk,
    qk_scale,
    shift,
    m_new,
    v_tile,
    dtype: tl.constexpr,
    planes: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Takes a softmax_step with values in words, which `planes` converts, for sums by plane."""
    p = tl.exp2(qk * qk_scale - shift[:, None])
    alpha = tl.exp2((m_i - m_new) * qk_scale)
    l_i = l_i * alpha + tl.sum(p, 1)
    p = p.to(dtype)
    v_0, v_1, v_2, v_3 = planes(v_tile)
    acc_0 = acc_0 * alpha[:, None] + dot(p, v_0.to(dtype), INTERPRETED)
    acc_1 = acc_1 * alpha[:, None] + dot(p, v_1.to(dtype), INTERPRETED)
    acc_2 = acc_2 * alpha[:, None] + dot(p, v_2.to(dtype), INTERPRETED)
    acc_3 = acc_3 * alpha[:, None] + dot(p, v_3.to(dtype), INTERPRETED)
    return acc_0, acc_1, acc_2, acc_3, m_new, l_i
