"""A kernel's key as a table for the head of its module: one field a line, with what it means."""

from __future__ import annotations

from dataclasses import fields

from treegen.ir.keys import KernelKey, MergeKey, ScoreCode

_MEANINGS = {
    "dtype": "type of queries and results",
    "kv_dtype": "type of keys and values",
    "head_dim": "dims of a query head and a key",
    "head_dim_v": "dims of a value and a result",
    "group": "query heads per KV head",
    "page_size": "tokens of a page; 1 where the cache is addressed by slot",
    "mask": "how rows see runs: none (all rows see all), interval or bits",
    "tile_rows": "head rows of a tile",
    "tile_tokens": "KV tokens of a tile",
    "run_tokens": "KV tokens of a packed run, at most",
    "work_list": "whether thread blocks work off lists of work",
    "epilogue_merge": "whether final items join partials of earlier launches",
    "has_full_tiles": "whether full tiles have a loop of their own",
    "num_warps": "num_warps of launches",
    "num_stages": "num_stages of launches",
    "shared_kv": "whether values are the first piece of keys",
    "scaled": "whether keys and values have scales by KV head",
    "emulate_e4m3": "whether e4m3 is put together out of bytes",
    "packed_fp8": "whether four elements of caches are read as one word",
    "scoring": "whether the kernel has code that changes or hides scores",
    "sinks": "whether every head has a sink",
    "fused_merge": "whether final items wait for partials of the same launch",
    "guarded": "whether values that are not finite stay with rows that see them",
    "request_page": "page size of the tables that a step kernel lists tiles from",
    "recorded": "whether thread blocks record where and when they ran",
    "heads": "query heads that a thread block merges at a time",
    "parts": "partials of a row that it merges at a time",
    "several_rounds": "whether some results go to partial slots",
    "in_turns": "whether thread blocks take items or merges in turn",
    "slices": "thread blocks that share the elements of a head",
}


def key_table(key: KernelKey | MergeKey) -> list[str]:
    """Returns a line for every field: its name, its value, and what it means.

    Fields with defaults, which few kernels set, are left out where they are at their default.
    """
    given = [(each.name, getattr(key, each.name)) for each in fields(key) if getattr(key, each.name) != each.default]
    rows = [(name, _text(value), _MEANINGS[name]) for name, value in given]
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{name:{names}}  {value:{values}}  {meaning}" for name, value, meaning in rows]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "yes" if isinstance(value, ScoreCode) else str(value)
