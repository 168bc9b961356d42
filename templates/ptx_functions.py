"""Functions of emitted kernels that are inline PTX, one operand a line.

Emission copies them as it copies treegen.templates.kernel_functions. The interpreter knows no PTX.
"""

import triton
import triton.language as tl


@triton.jit
def flag_at(place, INTERPRETED: tl.constexpr):
    """Reads a flag, and with it everything that was written before the flag."""
    if INTERPRETED:
        return tl.load(place)
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b64 $0, [$1];",
        "=l,"  # $0: the flag
        "l",  # $1: its address
        [place],
        tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def to_l2(places, INTERPRETED: tl.constexpr):
    """Asks for the lines of memory at these places to come to L2."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            """
            prefetch.global.L2 [$1];
            mov.b32 $0, 0;
            """,
            "=&r,"  # $0: nothing; instructions have to return something
            "l",  # $1: the place
            [places.to(tl.int64)],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def part_at(places, live, like, PAIRED: tl.constexpr):
    """Reads partial results, and 0 where not live.

    PAIRED reads two neighbours at a time into the registers that `like` is in, without an exchange
    between threads.
    """
    if not PAIRED:
        return tl.load(places, mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        setp.ne.s32 p, $4, 0;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        @p ld.global.cg.v2.f32 {$0, $1}, [$2];
        }
        """,
        "=&f,=&f,"  # $0, $1: the results
        "l,l,"  # $2, $3: their addresses
        "r,r,"  # $4, $5: whether they are live
        "f,f",  # $6, $7: `like`
        [places.to(tl.int64), live.to(tl.int32), like],
        tl.float32,
        is_pure=False,
        pack=2,
    )


@triton.jit
def put_part(places, part, live, PAIRED: tl.constexpr):
    """Writes partial results where live; PAIRED as in part_at."""
    if PAIRED:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred p;
            setp.ne.s32 p, $6, 0;
            @p st.global.v2.f32 [$2], {$4, $5};
            mov.b32 $0, 0;
            mov.b32 $1, 0;
            }
            """,
            "=&r,=&r,"  # $0, $1: nothing; instructions have to return something
            "l,l,"  # $2, $3: addresses
            "f,f,"  # $4, $5: the results
            "r,r",  # $6, $7: whether they are live
            [places.to(tl.int64), part, live.to(tl.int32)],
            tl.int32,
            is_pure=False,
            pack=2,
        )
    else:
        tl.store(places, part, mask=live)


@triton.jit
def e4m3_planes(word):
    """Converts words of four e4m3 elements to four planes in fp16.

    It takes two words at a time, as matrix instructions take pairs: elements of both words lie side
    by side and are converted together.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high;
        .reg .b16 a, b, c, d;
        prmt.b32 low, $4, $5, 0x5140;
        prmt.b32 high, $4, $5, 0x7362;
        mov.b32 {a, b}, low;
        mov.b32 {c, d}, high;
        cvt.rn.f16x2.e4m3x2 $0, a;
        cvt.rn.f16x2.e4m3x2 $1, b;
        cvt.rn.f16x2.e4m3x2 $2, c;
        cvt.rn.f16x2.e4m3x2 $3, d;
        }
        """,
        "=r,=r,=r,=r,"  # $0 to $3: both words' elements of each plane
        "r,r",  # $4, $5: the words
        [word],
        (tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


# A record of one piece of work: the SM, nanoseconds and clock cycles at its start, both at its end.
RECORD_FIELDS = tl.constexpr(5)


@triton.jit
def place_and_time(INTERPRETED: tl.constexpr):
    """Reads the number of the SM, the device's nanoseconds, and the SM's clock cycles."""
    if INTERPRETED:
        return tl.full([], 0, tl.int32), tl.full([], 1, tl.int64), tl.full([], 1, tl.int64)
    return tl.inline_asm_elementwise(
        """
        {
        mov.u32 $0, %smid;
        mov.u64 $1, %globaltimer;
        mov.u64 $2, %clock64;
        }
        """,
        "=r,"  # $0: the SM
        "=l,=l",  # $1, $2: nanoseconds, cycles
        [],
        (tl.int32, tl.int64, tl.int64),
        is_pure=False,
        pack=1,
    )


@triton.jit
def record_start(record, INTERPRETED: tl.constexpr):
    """Writes the SM and the time at which a thread block starts a piece of work."""
    sm, nanoseconds, cycles = place_and_time(INTERPRETED)
    tl.store(record, sm.to(tl.int64))
    tl.store(record + 1, nanoseconds)
    tl.store(record + 2, cycles)


@triton.jit
def record_end(record, INTERPRETED: tl.constexpr):
    """Writes the time at which all warps of a thread block have ended a piece of work."""
    tl.debug_barrier()
    _, nanoseconds, cycles = place_and_time(INTERPRETED)
    tl.store(record + 3, nanoseconds)
    tl.store(record + 4, cycles)
