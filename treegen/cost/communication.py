"""The cost of merging attention states across ranks: collectives, bytes and time, per rank and layer.

A rank of context parallelism holds the state of all rows over its own tokens. Three ways lead to the merged states:

    direct      each rank writes its states into the memory of the others ──▶ combine; one launch
    exchange    pack ──▶ all-to-all, or all-gather where each rank wants all heads ──▶ combine
    gather      all-gather of lse ──▶ rescale out in fp32 ──▶ reduce-scatter, or all-reduce where each wants all heads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from treegen.ir.errors import InputError
from treegen.ir.scalars import is_finite
from treegen.ir.shape import DTYPE_BYTES, Shape

Mode = Literal["direct", "exchange", "gather"]
Wanted = Literal["all", "own"]
"""The heads that each rank gets: all of them, or its own part."""
MODES: tuple[Mode, ...] = ("direct", "exchange", "gather")
MOST_DIRECT_RANKS = 8
"""The most ranks of a direct merge: the GPUs of a host."""
MOST_DIRECT_BYTES = 1 << 26
"""The most bytes of a rank's buffers for a direct merge that is chosen; their room is then a power of two of states."""
_ALIGNED = 16
_LOCAL_US = 2.5
"""Time of a small kernel that packs, rescales or combines, beside the time for its bytes."""


@dataclass(frozen=True, slots=True)
class Link:
    """What connects ranks, in a model of a few numbers.

    A collective takes `latency_us + hop_us * (messages - 1) + sent / gigabytes`. A direct merge, in which ranks write
    into each other's memory, takes `direct_us + sent / direct_gigabytes`, its launch included. The model assumes that
    all ranks send and receive at the same time at this rate, whatever the number of ranks, and that a rank's messages
    follow one another. It leaves out what some networks do better: trees, sums in switches, and messages to several
    ranks at once.

    Args:
        name: Its name in texts.
        latency_us: Time of the smallest collective of one message.
        hop_us: Time that each further message adds, beside that of its bytes.
        gigabytes: What a rank sends in a second, in units of 1e9 bytes; it receives as much at the same time.
        direct_us: Time of the smallest direct merge; None where ranks cannot write into each other's memory.
        direct_gigabytes: What a rank writes in a second, in units of 1e9 bytes; by default gigabytes.

    Raises:
        InputError: A number is negative, or a rate is 0.
    """

    name: str
    latency_us: float
    hop_us: float
    gigabytes: float
    direct_us: float | None = None
    direct_gigabytes: float | None = None

    def __post_init__(self) -> None:
        for field in ("latency_us", "hop_us", "gigabytes", "direct_us", "direct_gigabytes"):
            value = getattr(self, field)
            if field.startswith("direct") and value is None:
                continue
            if not (is_finite(value) and value >= 0) or (field.endswith("gigabytes") and not value):
                raise InputError(field, value, "is not a number above 0", "measure it with treegen.distributed")

    def direct_merge_us(self, sent: int) -> float:
        """Returns the time of a direct merge for which each rank writes this many bytes."""
        return (self.direct_us or 0.0) + sent / ((self.direct_gigabytes or self.gigabytes) * 1e3)

    def time_us(self, collective: Collective) -> float:
        """Returns the time of a collective."""
        hops = self.hop_us * max(collective.messages - 1, 0)
        return self.latency_us + hops + collective.sent / (self.gigabytes * 1e3)


class Collective(NamedTuple):
    """A collective operation, or "writes" into the memory of the other ranks.

    sent: bytes that each rank sends, and receives. messages: the number that carry them.
    """

    name: str
    sent: int
    messages: int


def all_gather(own: int, ranks: int) -> Collective:
    """Returns the cost of gathering `own` bytes of each rank: they go once to each other rank, as in a ring."""
    return Collective("all-gather", own * (ranks - 1), ranks - 1)


def all_to_all(chunk: int, ranks: int) -> Collective:
    """Returns the cost of sending another chunk of bytes to each other rank."""
    return Collective("all-to-all", chunk * (ranks - 1), ranks - 1)


def reduce_scatter(summed: int, ranks: int) -> Collective:
    """Returns the cost of a reduce-scatter in a ring. summed: bytes of each rank."""
    return Collective("reduce-scatter", _scattered(summed, ranks), ranks - 1)


def all_reduce(summed: int, ranks: int) -> Collective:
    """Returns the cost of a sum of `summed` bytes of each rank: a reduce-scatter, and an all-gather of its parts."""
    return Collective("all-reduce", 2 * _scattered(summed, ranks), 2 * (ranks - 1))


def _scattered(summed: int, ranks: int) -> int:
    """Returns the bytes that a rank sends for the parts of all other ranks."""
    return -(-summed * (ranks - 1) // ranks)


class Communication(NamedTuple):
    """Merging of the states of one layer.

    mode: the way. collectives: its operations. link_us: their time. local_us: the time of kernels before and after; a
    direct merge is one kernel, whose reads overlap with what it sends, so link_us is all of it.
    """

    mode: Mode
    collectives: tuple[Collective, ...]
    link_us: float
    local_us: float

    @property
    def sent(self) -> int:
        """Bytes that each rank sends in a layer."""
        return sum(each.sent for each in self.collectives)

    @property
    def time_us(self) -> float:
        """The time of merging a layer."""
        return self.link_us + self.local_us


def packed_bytes(rows: int, heads: int, head_dim: int, element_bytes: int) -> int:
    """Returns the bytes of packed states: out, up to a whole word, then lse, up to a whole number of 16 bytes."""
    lse = DTYPE_BYTES["fp32"]
    size = -(-rows * heads * head_dim * element_bytes // lse) * lse + rows * heads * lse
    return -(-size // _ALIGNED) * _ALIGNED


def merge_modes(wanted: Wanted, rows: int, shape: Shape, ranks: int, link: Link) -> tuple[Mode, ...]:
    """Returns the ways to choose from; arguments as of `merge_cost`.

    Direct merges are among them where the link has them, for up to MOST_DIRECT_RANKS ranks and MOST_DIRECT_BYTES.
    """
    states = rows * shape.num_qo_heads // (1 if wanted == "all" else ranks)
    buffers = 2 * ranks * states * (shape.head_dim_v * shape.dtype_bytes + DTYPE_BYTES["fp32"])
    direct = link.direct_us is not None and ranks <= MOST_DIRECT_RANKS and buffers <= MOST_DIRECT_BYTES
    return MODES if direct else tuple(mode for mode in MODES if mode != "direct")


def merge_cost(
    mode: Mode, wanted: Wanted, rows: int, shape: Shape, ranks: int, link: Link, copy_gigabytes: float
) -> Communication:
    """Returns the cost of merging the states of a layer.

    Args:
        mode: The way.
        wanted: The heads that each rank gets.
        rows: Query rows.
        shape: The shape of the states: its query heads are those that each rank attends with.
        ranks: The number of ranks.
        link: What connects them.
        copy_gigabytes: What the device's memory copies in a second, read and written, in units of 1e9 bytes.
    """
    heads, dim, element = shape.num_qo_heads, shape.head_dim_v, shape.dtype_bytes
    states, parts = rows * heads, 1 if wanted == "all" else ranks
    if mode == "direct":
        sent = states // parts * (dim * element + DTYPE_BYTES["fp32"]) * (ranks - 1)
        writes = Collective("writes", sent, ranks - 1)
        return Communication(mode, (writes,), link.direct_merge_us(sent), 0.0)
    if mode == "exchange":
        chunk = packed_bytes(rows, heads // parts, dim, element)
        collectives: tuple[Collective, ...] = ((all_gather if wanted == "all" else all_to_all)(chunk, ranks),)
        moved = chunk * (2 * parts + ranks)
    else:
        sums = all_reduce if wanted == "all" else reduce_scatter
        lse = states * DTYPE_BYTES["fp32"]
        collectives = all_gather(lse, ranks), sums(lse * dim, ranks)
        moved = states * dim * (2 * element + 2 * DTYPE_BYTES["fp32"]) + ranks * lse
    link_us = sum(map(link.time_us, collectives))
    return Communication(mode, collectives, link_us, 2 * _LOCAL_US + moved / (copy_gigabytes * 1e3))


def best_merge(
    wanted: Wanted, rows: int, shape: Shape, ranks: int, link: Link, copy_gigabytes: float,
    modes: Sequence[Mode] | None = None,
) -> Communication:  # fmt: skip
    """Returns the cost of the fastest of some ways, by default of `merge_modes`; other arguments as of `merge_cost`."""
    ways = merge_modes(wanted, rows, shape, ranks, link) if modes is None else modes
    costs = [merge_cost(mode, wanted, rows, shape, ranks, link, copy_gigabytes) for mode in ways]
    return min(costs, key=lambda cost: cost.time_us)
