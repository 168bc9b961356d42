"""Kernel keys: the choices that an emitted kernel is specialised for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScoreCode:
    """Triton code that changes and masks scores before the softmax, in a partial kernel.

    Attributes:
        before: Lines that run once, before the loops.
        lines: Lines in the loops; `score` and `mask` use their results.
        score: An expression for the new score; empty where scores stay as they are.
        mask: An expression that is true where a row sees a token; empty where no mask is added.
        captured: The type and the number of dimensions of each tensor that the code reads.
        positions: Whether the code needs the positions of rows and tokens.
        seen_below: An expression for the position of each row below which `mask` is true; empty where there is none.
    """

    before: tuple[str, ...]
    lines: tuple[str, ...]
    score: str
    mask: str
    captured: tuple[tuple[str, int], ...]
    positions: bool
    seen_below: str = ""


@dataclass(frozen=True, slots=True)
class KernelKey:
    """All choices that a partial kernel is specialised for. None of them depends on the tree.

    Attributes:
        dtype: "fp16", "bf16" or "fp32".
        kv_dtype: The same, or "e4m3" or "e5m2".
        head_dim: Elements of a query and of a key.
        head_dim_v: Elements of a value and of an output row.
        group: Query heads per KV head.
        page_size: Tokens of a page; 1 when the cache is addressed by slot.
        mask: How rows see runs: "none", "interval" or "bits".
        tile_rows: Query head rows of a thread block.
        tile_tokens: KV tokens of a tile.
        run_tokens: Tokens of the runs that are packed into a tile.
        work_list: Whether thread blocks work off lists of items.
        epilogue_merge: Whether items join partials of earlier rounds before they write.
        has_full_tiles: Whether full tiles have a loop of their own.
        num_warps: Triton's num_warps.
        num_stages: Triton's num_stages.
        shared_kv: Whether values are the first elements of keys.
        scaled: Whether keys and values have a scale for each KV head.
        emulate_e4m3: Whether e4m3 is read as bytes and converted by bit operations.
        packed_fp8: Whether four elements of a cache are read as one word.
        scoring: The code that changes or masks scores.
        sinks: Whether each head has a sink, which takes its share of the softmax.
        fused_merge: Whether some items wait for the partials of others in the same launch.
        guarded: Whether values that are not finite are kept from rows whose score hides the token.
        request_page: The page size of the engine's tables, from which step kernels list runs
            (treegen.backends.step_kernels); 0 where the schedule lists runs of slots.
        in_turns: Whether thread blocks take items in turn, with tables of a step kernel.
        recorded: Whether thread blocks record on which SM and when they ran (treegen.backends.recorded_program).
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
    run_tokens: int
    work_list: bool
    epilogue_merge: bool
    has_full_tiles: bool
    num_warps: int
    num_stages: int
    shared_kv: bool = False
    scaled: bool = False
    emulate_e4m3: bool = False
    packed_fp8: bool = False
    scoring: ScoreCode | None = None
    sinks: bool = False
    fused_merge: bool = False
    guarded: bool = False
    request_page: int = 0
    in_turns: bool = False
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class MergeKey:
    """All choices that a merge kernel is specialised for.

    Attributes:
        dtype: The type of the output.
        head_dim_v: Elements of an output row.
        heads: Heads of a thread block, a power of two.
        parts: Partials of each head that are loaded at a time, a power of two.
        several_rounds: Whether the kernel also merges into partial slots, which a later round reads.
        num_warps: Triton's num_warps.
        sinks: See KernelKey.
        recorded: See KernelKey.
        in_turns: Whether thread blocks take merges in turn, as partial kernels do with items.
        slices: Thread blocks that merge a head together, each a part of its elements. Kernels whose blocks take turns
            do so only where few rows are merged, and one has more than `parts` partials; each block then loads `parts`
            times `slices` partials at once.
    """

    dtype: str
    head_dim_v: int
    heads: int
    parts: int
    several_rounds: bool
    num_warps: int
    sinks: bool = False
    recorded: bool = False
    in_turns: bool = False
    slices: int = 1
