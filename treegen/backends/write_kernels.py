"""A kernel that writes K and V of new tokens into the caches of a layer, in one launch."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_kv(
    keys, values, slots, k_cache, v_cache, k_stride, v_stride,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies keys [tokens, K] and values [tokens, V], whose rows lie k_stride and v_stride elements apart, to rows
    slots [tokens] of k_cache [slots, K] and v_cache [slots, V].

    A thread block copies BLOCK elements of K and of V of a token.
    """
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + token)
    key = tl.load(keys + token * k_stride + element, mask=element < K)
    tl.store(k_cache + slot * K + element, key, mask=element < K)
    value = tl.load(values + token * v_stride + element, mask=element < V)
    tl.store(v_cache + slot * V + element, value, mask=element < V)
