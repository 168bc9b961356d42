"""The kernel of direct merges: ranks write their states into each other's memory, and combine what they received.

Each rank has a buffer that all ranks of its group can write to:

    out    [2, ranks, capacity, D]         states of each rank, of calls with even and with odd numbers
    lse    [2, ranks, capacity]
    flags  [ranks, blocks]                 the number of the last call whose states a rank has written, by thread block

A thread block writes its STATES states of a call to each rank and then its flag there, waits for the flags of the same
thread block of all other ranks, and combines. Halves take turns, so a rank may write the states of a call while others
still read those of the call before; those of two calls before have been read, since a rank sets its flags of a call
only after the kernel of the call before has ended. Thread blocks wait for ones of the same number alone. So they
may be more than the GPU holds at a time, since GPUs start them in their order.
"""

import triton
import triton.language as tl

from treegen.backends.state_kernels import combine_block


@triton.jit
def set_flag(place, call, INTERPRETED: tl.constexpr):
    """Sets a flag, perhaps of another GPU; who reads it there can read all that this thread block wrote before."""
    if INTERPRETED:
        tl.atomic_xchg(place, call)
    else:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.u32 [$1], $2;
            mov.b32 $0, 0;
            }
            """,
            "=r,l,r",  # $0: nothing; $1: the address; $2: the number
            [place.to(tl.int64), call],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def wait_for(place, call, limit_ns, INTERPRETED: tl.constexpr):
    """Lets the first thread wait until a flag has the number of a call or a later one; after limit_ns the kernel fails.

    Numbers go round in 32 bits.
    """
    if INTERPRETED:
        while tl.atomic_add(place, 0) - call < 0:
            pass
    else:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred p;
            .reg .b64 begin, now;
            .reg .b32 seen, thread;
            mov.u32 thread, %tid.x;
            setp.ne.u32 p, thread, 0;
            @p bra arrived;
            mov.u64 begin, %globaltimer;
            waiting:
            ld.acquire.sys.global.u32 seen, [$1];
            sub.s32 seen, seen, $2;
            setp.ge.s32 p, seen, 0;
            @p bra arrived;
            mov.u64 now, %globaltimer;
            sub.s64 now, now, begin;
            setp.le.s64 p, now, $3;
            @p bra waiting;
            trap;
            arrived:
            mov.b32 $0, 0;
            }
            """,
            "=r,l,r,l",  # $0: nothing; $1: the address; $2: the number; $3: nanoseconds
            [place.to(tl.int64), call, tl.cast(limit_ns, tl.int64)],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["states", "heads", "part_heads", "own_heads", "rank"])
def merge_directly(
    out, lse, merged, merged_lse, places, calls, states, heads, part_heads, own_heads, blocks, capacity, rank,
    lse_scale, limit_ns, ranks: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, STATES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Merges the states of all ranks: out [rows, heads, D] and lse [rows, heads], both contiguous.

    merged [rows, part_heads, D] and merged_lse [rows, part_heads] get the results: of all heads, or of the rank-th
    part_heads of them with own_heads = part_heads, which is 0 for all heads. places [3, ranks]: the addresses of out,
    lse and flags in the buffer of each rank. calls [blocks]: the number of the last call, by thread block. states: rows
    x part_heads, at most capacity. limit_ns: how long a thread block waits for another rank.
    """
    block = tl.program_id(0)
    call = tl.load(calls + block) + 1
    half = (call & 1) * ranks
    state = block * STATES + tl.arange(0, STATES)
    element = tl.arange(0, BLOCK_D)
    there = state < states
    inside = there[:, None] & (element[None, :] < D)
    row, head = state // part_heads, state % part_heads
    chunk = capacity.to(tl.int64) * D
    to = state.to(tl.int64)[:, None] * D + element[None, :]
    for other in range(ranks):
        peer = (rank + 1 + other) % ranks
        source = row * heads + peer * own_heads + head
        values = tl.load(out + source.to(tl.int64)[:, None] * D + element[None, :], mask=inside)
        sums = tl.load(lse + source, mask=there)
        outs = tl.multiple_of(tl.load(places + peer).to(tl.pointer_type(out.dtype.element_ty)), 16)
        lses = tl.load(places + ranks + peer).to(tl.pointer_type(tl.float32))
        tl.store(outs + (half + rank) * chunk + to, values, mask=inside)
        tl.store(lses + (half + rank) * capacity + state, sums, mask=there)
    tl.debug_barrier()
    for other in range(ranks - 1):
        flags = tl.load(places + 2 * ranks + (rank + 1 + other) % ranks).to(tl.pointer_type(tl.int32))
        set_flag(flags + rank * blocks + block, call, INTERPRETED)
    flags = tl.load(places + 2 * ranks + rank).to(tl.pointer_type(tl.int32))
    for other in range(ranks - 1):
        wait_for(flags + (rank + 1 + other) % ranks * blocks + block, call, limit_ns, INTERPRETED)
    tl.debug_barrier()
    outs = tl.multiple_of(tl.load(places + rank).to(tl.pointer_type(out.dtype.element_ty)), 16)
    lses = tl.load(places + ranks + rank).to(tl.pointer_type(tl.float32))
    combine_block(
        outs + half * chunk, lses + half * capacity, merged, merged_lse, block, states, chunk, capacity, ranks,
        lse_scale, D, BLOCK_D, STATES,
    )  # fmt: skip
    tl.store(calls + block, call)
