"""Two of the three names for "same": the topology's signature and the kernel's key."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields

import numpy as np

from treegen.ir.arrays import Ints
from treegen.ir.topology import Topology

_NONE: list[bytes] = []


def signature(parent: Ints, tokens: Ints, topology: Topology, row_sees: Ints) -> str:
    """A 128-bit digest of a forest's topology: a node is its tokens, its rows' sees and its children's sorted digests.

    Sibling order, row order and KV locations do not enter.
    """
    families: list[list[bytes]] = [[] for _ in range(len(parent) + 1)]  # a node's children, until it has a digest
    order = topology.nodes_in_preorder[::-1]
    # A node and what is its own: tokens, rows, and what these see, 4 bytes each.
    begin, own = topology.rank_lo[order], (topology.rank_own - topology.rank_lo)[order]
    lengths, counts = tokens[order].astype("<i4").tobytes(), own.astype("<i4").tobytes()
    sees = row_sees[topology.row_of_rank].astype("<i4").tobytes()
    place = 0
    for node, above, first, rows in zip(
        order.tolist(), parent[order].tolist(), (4 * begin.astype(np.int64)).tolist(), own.tolist(), strict=True
    ):
        text = lengths[place : place + 4] + counts[place : place + 4] + sees[first : first + 4 * rows]
        place += 4
        below = families[node]
        if below:
            families[node] = _NONE
            below.sort()
            text += b"".join(below)
        families[above].append(hashlib.blake2b(text, digest_size=16).digest())
    return hashlib.blake2b(b"".join(sorted(families[-1])), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class ScoreCode:
    """What stage-1 kernels do to scores before the softmax, as Triton: `before` the loops, and in them `lines` that end
    in the new `score` and in whether it is seen (`mask`), each empty where it stays as it is.

    captured: of every tensor that is read, its type and its dimensions. positions: whether rows and tokens
    need theirs.
    """

    before: tuple[str, ...]
    lines: tuple[str, ...]
    score: str
    mask: str
    captured: tuple[tuple[str, int], ...]
    positions: bool


@dataclass(frozen=True, slots=True)
class KernelKey:
    """Everything that a stage-1 kernel is specialised for; nothing of the tree.

    dtype: "fp16", "bf16" or "fp32"; kv_dtype: the same, "e4m3" or "e5m2". group: query heads per KV head. page_size: 1
    when the cache is addressed by slot, else the tokens of a page. mask: how rows see runs, "none", "interval" or
    "bits". tile_rows: query head rows per block; tile_tokens: KV tokens per tile; block_tokens: granularity of the runs
    packed into one tile. dealt: whether thread blocks work off lists. merging: whether items join partials of earlier
    stages before they write. full: whether there are full tiles, in a loop of their own. shared_kv: whether values are
    the first piece of keys. scaled: whether keys and values have scales by KV head. by_bits: whether e4m3 is read as
    bytes and put together. words: whether four elements of caches are read as one word. scoring: what is done to
    scores. sinks: whether every head has a sink, which takes its share of the softmax. waiting: whether some items wait
    for the partials of others in the same launch. guarded: whether values that are not finite are kept from rows whose
    score hides the token.
    """

    dtype: str
    kv_dtype: str
    head_dim: int
    head_dim_v: int
    group: int
    page_size: int
    mask: str
    tile_rows: int
    tile_tokens: int
    block_tokens: int
    dealt: bool
    merging: bool
    full: bool
    warps: int
    stages: int
    shared_kv: bool = False
    scaled: bool = False
    by_bits: bool = False
    words: bool = False
    scoring: ScoreCode | None = None
    sinks: bool = False
    waiting: bool = False
    guarded: bool = False

    def text(self) -> str:
        """Canonical JSON, as in the header of the emitted module; what few kernels have is left out of others."""
        return _text("partial_attention", self)


@dataclass(frozen=True, slots=True)
class MergeKey:
    """Everything that a stage-2 kernel is specialised for. heads: heads per block, and parts: partials of each at a
    time, powers of two. staged: whether it also merges into partial slots, for a later stage to read. sinks: see
    KernelKey.
    """

    dtype: str
    head_dim_v: int
    heads: int
    parts: int
    staged: bool
    warps: int
    sinks: bool = False

    def text(self) -> str:
        """Canonical JSON, as in the header of the emitted module."""
        return _text("merge", self)


def _text(kernel: str, key: KernelKey | MergeKey) -> str:
    """A key as JSON, without what is left at its default."""
    given = {f.name: getattr(key, f.name) for f in fields(key) if getattr(key, f.name) != f.default}
    values = {name: asdict(value) if isinstance(value, ScoreCode) else value for name, value in given.items()}
    return json.dumps({"kernel": kernel, **values}, sort_keys=True)
