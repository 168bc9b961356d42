"""Kernels that write K and V of new tokens into the caches of a layer, copy K and V in all layers, and fork rows."""

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


@triton.jit(do_not_specialize=["count", "stride"], do_not_specialize_on_alignment=["table_rows", "parents"])
def fork_rows(
    table_rows, parents, seq_lens, table, k_caches, v_caches, count, stride, k_layer, v_layer,
    P: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Makes row r of 0..count a fork of row parents[r], in all layers; a row that is its own parent stays as it is.

    Row r is row table_rows[r] of table, whose rows lie stride entries apart. It has seq_lens tokens, the last one of
    which is not written yet. It gets the parent's full pages, of P tokens on all ranks, and keeps its own last page, to
    which the tokens of the parent's last page are copied. Caches are k_caches [layers, pages, K] and v_caches
    [layers, pages, V]. A thread block copies BLOCK elements of K and of V in one layer.
    """
    row = tl.program_id(0)
    parent = tl.load(parents + row)
    if (parent == row) | (parent < 0) | (parent >= count):
        return
    own = tl.load(table_rows + row).to(tl.int64)
    stored = tl.load(seq_lens + own) - 1
    full = stored // P
    to_row, from_row = table + own * stride, table + tl.load(table_rows + parent).to(tl.int64) * stride
    if stored > full * P:
        source, target = tl.load(from_row + full).to(tl.int64), tl.load(to_row + full).to(tl.int64)
        layer, element = tl.program_id(1).to(tl.int64), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        keys, values = k_caches + layer * k_layer + element, v_caches + layer * v_layer + element
        tl.store(keys + target * K, tl.load(keys + source * K, mask=element < K), mask=element < K)
        tl.store(values + target * V, tl.load(values + source * V, mask=element < V), mask=element < V)
    if tl.program_id(1) + tl.program_id(2) == 0:
        page = tl.arange(0, BLOCK)
        for first in range(0, full, BLOCK):
            pages = tl.load(from_row + first + page, mask=first + page < full)
            tl.store(to_row + first + page, pages, mask=first + page < full)
