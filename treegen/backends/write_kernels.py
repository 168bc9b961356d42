"""Kernels that write K and V of new tokens into the caches of a layer, and copy K and V in all layers."""

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


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["places", "first"])
def copy_kv(
    places, first, k_caches, v_caches, count, k_layer, v_layer,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies rows places[i] of k_caches [layers, places, K] and v_caches [layers, places, V] to rows places[count + i],
    for each i of 0..count.

    Layers lie k_layer and v_layer elements apart. A thread block copies BLOCK elements of K and of V of each i of
    first[n]..first[n + 1], in this order, in one layer; n is its number.
    """
    layer = tl.program_id(1).to(tl.int64)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    keys, values = k_caches + layer * k_layer + element, v_caches + layer * v_layer + element
    for i in range(tl.load(first + tl.program_id(0)), tl.load(first + tl.program_id(0) + 1)):
        source, target = tl.load(places + i), tl.load(places + count + i)
        tl.store(keys + target * K, tl.load(keys + source * K, mask=element < K), mask=element < K)
        tl.store(values + target * V, tl.load(values + source * V, mask=element < V), mask=element < V)
        tl.debug_barrier()  # the next source may be this target
