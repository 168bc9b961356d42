"""Kernel keys: what emitted kernels are specialised for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScoreCode:
    """What partial kernels do to scores before the softmax, as Triton: `before` the loops, and in them `lines` that end
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
    """Everything that a partial kernel is specialised for; nothing of the tree.

    dtype: "fp16", "bf16" or "fp32"; kv_dtype: the same, "e4m3" or "e5m2". group: query heads per KV head. page_size: 1
    when the cache is addressed by slot, else the tokens of a page. mask: how rows see runs, "none", "interval" or
    "bits". tile_rows: query head rows per thread block; tile_tokens: KV tokens per tile; block_tokens: granularity of
    the runs packed into one tile. dealt: whether thread blocks work off lists. merging: whether items join partials of
    earlier launches before they write. full: whether there are full tiles, in a loop of their own. shared_kv: whether
    values are the first piece of keys. scaled: whether keys and values have scales by KV head. by_bits: whether e4m3 is
    read as bytes and put together. words: whether four elements of caches are read as one word. scoring: what is done
    to scores. sinks: whether every head has a sink, which takes its share of the softmax. waiting: whether some items
    wait for the partials of others in the same launch. guarded: whether values that are not finite are kept from rows
    whose score hides the token. request_page: 0 where tables list runs of slots, else the page size of the engine's
    tables, from which a step kernel lists them (treegen.backends.step_kernels).
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
    request_page: int = 0


@dataclass(frozen=True, slots=True)
class MergeKey:
    """Everything that a merge kernel is specialised for. heads: heads per thread block, and parts: partials of each at
    a time, powers of two. staged: whether it also merges into partial slots, for a later merge to read. sinks: see
    KernelKey.
    """

    dtype: str
    head_dim_v: int
    heads: int
    parts: int
    staged: bool
    warps: int
    sinks: bool = False
