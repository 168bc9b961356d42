"""Two of the three names for "same": the topology's signature and the kernel's key."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields

from treegen.ir.arrays import Ints
from treegen.ir.topology import Topology


def signature(parent: Ints, tokens: Ints, topology: Topology, row_sees: Ints) -> str:
    """A 128-bit digest of a forest's topology: a node is its tokens, its rows' sees and its children's sorted digests.

    Sibling order, row order and KV locations do not enter.
    """
    families: list[list[bytes]] = [[] for _ in range(len(parent) + 1)]
    ranked_sees = row_sees[topology.row_of_rank]
    begins, ends = topology.rank_lo.tolist(), topology.rank_own.tolist()
    above, lengths = parent.tolist(), tokens.tolist()
    for node in topology.nodes_in_preorder[::-1].tolist():
        digest = hashlib.blake2b(lengths[node].to_bytes(4, "little"), digest_size=16)
        own = ranked_sees[begins[node] : ends[node]]
        digest.update(len(own).to_bytes(4, "little") + own.astype("<i4").tobytes())
        digest.update(b"".join(sorted(families[node])))
        families[above[node]].append(digest.digest())
    return hashlib.blake2b(b"".join(sorted(families[-1])), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class KernelKey:
    """Everything that a stage-1 kernel is specialised for; nothing of the tree.

    dtype: "fp16", "bf16" or "fp32"; kv_dtype: the same, "e4m3" or "e5m2". group: query heads per KV head. page_size: 1
    when the cache is addressed by slot, else the tokens of a page. mask: how rows see runs, "none", "interval" or
    "bits". tile_rows: query head rows per block; tile_tokens: KV tokens per tile; block_tokens: granularity of the runs
    packed into one tile. dealt: whether thread blocks work off lists. merging: whether items join partials of earlier
    stages before they write. full: whether there are full tiles, in a loop of their own. shared_kv: whether values are
    the first piece of keys. scaled: whether keys and values have scales by KV head. by_bits: whether e4m3 is read as
    bytes and put together.
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

    def text(self) -> str:
        """Canonical JSON, as in the header of the emitted module; what few kernels have is left out of others."""
        plain = {field.name for field in fields(self) if getattr(self, field.name) == field.default}
        return json.dumps(
            {"kernel": "partial_attention", **{n: v for n, v in asdict(self).items() if n not in plain}}, sort_keys=True
        )


@dataclass(frozen=True, slots=True)
class MergeKey:
    """Everything that a stage-2 kernel is specialised for. heads: heads per block, and parts: partials of each at a
    time, powers of two. staged: whether it also merges into partial slots, for a later stage to read.
    """

    dtype: str
    head_dim_v: int
    heads: int
    parts: int
    staged: bool
    warps: int

    def text(self) -> str:
        """Canonical JSON, as in the header of the emitted module."""
        return json.dumps({"kernel": "merge", **asdict(self)}, sort_keys=True)
