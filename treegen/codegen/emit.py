"""Emission: a kernel key becomes the text of a complete Triton module."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import jinja2

from treegen.codegen.kernel_signature import KernelSignature, Parameter, kernel_signature
from treegen.ir.arena import SURPLUS_MERGE, Capacity
from treegen.ir.keys import KernelKey, MergeKey, ScoreCode
from treegen.ir.schedule import POSITIONED_RUN_FIELDS, RUN_FIELDS, Schedule, TileClass
from treegen.ir.shape import FP8, Shape
from treegen.target.tile_config import MOST_UNROLLED, key_pieces, loads_once, padded, reads_words, rows_per_tile


@dataclass(frozen=True)
class Source:
    """An emitted module: its key, its text, the digest of its text without the digest line, and its kernel's name."""

    key: KernelKey | MergeKey
    kernel: str
    digest: str
    text: str

    @cached_property
    def signature(self) -> KernelSignature:
        """How launches order their arguments."""
        return KernelSignature.of(self.key)


class EntryLoad(NamedTuple):
    """How a captured tensor is read: instruction, register and type of what it loads, and the type it is used in."""

    instruction: str
    register: str
    loaded: str
    result: str


_LOADS = {
    "uint8": EntryLoad("u8", "r", "int32", "int32"),
    "int8": EntryLoad("s8", "r", "int32", "int32"),
    "int16": EntryLoad("s16", "r", "int32", "int32"),
    "int32": EntryLoad("b32", "r", "int32", "int32"),
    "int64": EntryLoad("b64", "l", "int64", "int32"),
    "float16": EntryLoad("b16", "h", "float16", "float32"),
    "bfloat16": EntryLoad("b16", "h", "bfloat16", "float32"),
    "float32": EntryLoad("b32", "r", "float32", "float32"),
}


@dataclass(frozen=True, slots=True)
class PartialContext:
    """What the stage-1 template reads: a kernel key with its consequences spelled out.

    dim, rest: padded sizes of the pieces of keys' head dim, the second 0 where there is one.
    """

    rows: int
    tokens: int
    block: int
    blocks_per_tile: int
    unrolled: bool
    full: bool
    run_width: int
    run_fields: tuple[tuple[str, int], ...]
    tile_slots: int
    tile_width: int
    gathered: bool
    tile_fields: tuple[tuple[str, int], ...]
    leaves_out: bool
    by_block: bool
    fields_by_token: tuple[str, ...]
    masked: bool
    bits: bool
    dealt: bool
    merging: bool
    waiting: bool
    chunk_rows: int
    chunk_dims: int
    paired: bool
    page_size: int
    group: int
    heads: int
    head_tiles: int
    head_dim: int
    head_dim_v: int
    dim: int
    rest: int
    dim_v: int
    dim_mask: bool
    rest_mask: bool
    dim_v_mask: bool
    shared_kv: bool
    fp8: bool
    e5m2: bool
    by_bits: bool
    words: bool
    scaled: bool
    precision: str
    scoring: ScoreCode | None
    loads: tuple[EntryLoad, ...]
    parameters: tuple[Parameter, ...]
    positions: bool
    sinks: bool
    guarded: bool
    values_first: bool


@dataclass(frozen=True, slots=True)
class MergeContext:
    """What the stage-2 template reads."""

    heads: int
    parts: int
    staged: bool
    surplus: int
    head_dim_v: int
    dim_v: int
    dim_v_mask: bool
    parameters: tuple[Parameter, ...]
    sinks: bool


def reads_bits(shape: Shape, capability: int) -> bool:
    """Whether GPUs of a compute capability (times ten) have to put e4m3 together out of bytes; so does the interpreter,
    whose capability is 0.
    """
    return shape.kv_dtype == "e4m3" and capability < _FIRST_WITH_E4M3


class KernelOptions(NamedTuple):
    """What is asked of stage-1 kernels besides a tile class, a shape and a page size.

    scoring, scaled, by_bits, sinks, guarded: see KernelKey. shared_kv: whether one load serves K and V; None where the
    shape decides it. words: whether tensors allow words to be read; the tile and the shape have to allow it, too, and
    guarded kernels read none. request_page: see KernelKey.
    """

    scoring: ScoreCode | None = None
    scaled: bool = False
    by_bits: bool = False
    sinks: bool = False
    guarded: bool = False
    shared_kv: bool | None = None
    words: bool = True
    request_page: int = 0


NO_OPTIONS = KernelOptions()


def kernel_key(tile: TileClass, shape: Shape, page_size: int = 1, options: KernelOptions = NO_OPTIONS) -> KernelKey:
    """The key of the stage-1 kernel for a tile class; `page_size` 1 addresses the cache by slot."""
    shared = loads_once(shape) if options.shared_kv is None else options.shared_kv
    allows_words = options.words and not shared and not options.guarded
    return KernelKey(
        dtype=shape.dtype,
        kv_dtype=shape.kv_dtype,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
        group=shape.group,
        page_size=page_size,
        mask=tile.mask,
        tile_rows=tile.rows,
        tile_tokens=tile.tokens,
        block_tokens=tile.block,
        dealt=tile.dealt,
        merging=tile.merging,
        full=tile.full,
        waiting=tile.waiting,
        warps=tile.warps,
        stages=tile.stages,
        scoring=options.scoring,
        sinks=options.sinks,
        shared_kv=shared,
        scaled=options.scaled,
        by_bits=options.by_bits,
        words=allows_words and reads_words(tile.rows, shape),
        guarded=options.guarded,
        request_page=options.request_page,
    )


def tile_form(tokens: int, request_page: int, *, positions: bool) -> tuple[int, int]:
    """Slots that are listed for a full tile, and the width of its entry: a run, or by request, where it has several
    pages, their slots and the fields of a run from `lo` on.
    """
    fields = len(POSITIONED_RUN_FIELDS if positions else RUN_FIELDS)
    if not 0 < request_page < tokens:
        return 1, fields
    slots = tokens // request_page
    return slots, slots + fields - 2


class MergeForm(NamedTuple):
    """What a block of a stage-2 kernel takes at a time: heads of a row, and partials of each."""

    heads: int
    parts: int


_CHUNK = 8
"""Head rows and dims of a tile of results of which a warp has two each in every thread."""
_MOST_BY_BLOCK = 4
"""Runs packed into one tile up to which masks are made for each of them; what more take spills on Blackwell."""
_MOST_PAIRED_TOKENS = 64
"""Tokens of a tile up to which kernels that merge read partials into the registers of results; on Blackwell more spill.
"""
_FIRST_WITH_E4M3 = 89
_MERGED_BY_WARP = 4096
"""Values of partials that a warp has in registers at a time."""
# By the merged rows times heads up to which they serve. Measured on an H200: few rows want a block for every head, and
# all of a row's partials at a time, so that nobody waits for memory twice; a block of one warp is the fastest.
_MERGE_FORMS = {
    1024: (MergeForm(1, 4), MergeForm(1, 16), MergeForm(1, 32)),
    2048: (MergeForm(2, 2), MergeForm(2, 8)),
    math.inf: (MergeForm(4, 2), MergeForm(4, 4)),
}


_FIXED_FORM = MergeForm(2, 8)


def fixed_merge_key(shape: Shape, *, sinks: bool = False) -> MergeKey:
    """The key of the only stage-2 kernel of schedules with fixed merges."""
    return _merge_key(shape, False, _FIXED_FORM, sinks=sinks)


def merge_key(shape: Shape, *, staged: bool, rows: int, longest: int, sinks: bool = False) -> MergeKey:
    """The key of the stage-2 kernel for so many merged rows of at most `longest` partials."""
    forms = next(forms for most, forms in _MERGE_FORMS.items() if rows * shape.num_qo_heads <= most)
    form = next((form for form in forms if form.parts >= longest), forms[-1])
    return _merge_key(shape, staged, form, sinks=sinks)


def merge_keys(shape: Shape) -> list[MergeKey]:
    """Every key that `merge_key` gives for an attention shape."""
    forms = [form for some in _MERGE_FORMS.values() for form in some]
    return list(dict.fromkeys(_merge_key(shape, staged, form) for staged in (False, True) for form in forms))


def _merge_key(shape: Shape, staged: bool, form: MergeForm, *, sinks: bool = False) -> MergeKey:
    heads = min(form.heads, 1 << (shape.num_qo_heads - 1).bit_length())
    warps = max(1, heads * form.parts * padded(shape.head_dim_v) // _MERGED_BY_WARP)
    return MergeKey(shape.dtype, shape.head_dim_v, heads, form.parts, staged, warps, sinks)


def emit(
    schedule: Schedule,
    shape: Shape,
    page_size: int = 1,
    capacity: Capacity | None = None,
    options: KernelOptions = NO_OPTIONS,
) -> list[Source]:
    """The modules of a schedule as it is launched, each once, in launch order; `page_size` 1 addresses the cache by
    slot.

    A class that runs unfused has none. capacity: see merge_key_of.
    """
    fused = [tile for tile in schedule.classes if tile.fused]
    keys = (kernel_key(tile, shape, page_size, options) for tile in fused)
    emitted = [emit_partial(key) for key in dict.fromkeys(keys)]
    rows = (capacity or schedule.size).merges
    merges = (
        merge_key_of(schedule, shape, stage, capacity, sinks=options.sinks)
        for stage, merged in enumerate(rows)
        if merged
    )
    return [*emitted, *map(emit_merge, dict.fromkeys(merges))]


def merge_key_of(
    schedule: Schedule, shape: Shape, stage: int, capacity: Capacity | None = None, *, sinks: bool = False
) -> MergeKey:
    """The key of the kernel that merges behind a stage of a schedule. capacity: of launches that do not follow the
    schedule; lists of any length then may come.
    """
    if schedule.fixed:
        return fixed_merge_key(shape, sinks=sinks)
    staged = schedule.num_stages > 1
    if capacity is not None:
        rows, longest = capacity.merges[stage], capacity.merge_slots
        return merge_key(shape, staged=staged, rows=rows, longest=longest, sinks=sinks)
    bounds = schedule.merge_indptr[schedule.merge_stage_indptr[stage] : schedule.merge_stage_indptr[stage + 1] + 1]
    longest = int((bounds[1:] - bounds[:-1]).max(initial=0))
    return merge_key(shape, staged=staged, rows=len(bounds) - 1, longest=longest, sinks=sinks)


@cache
def emit_partial(key: KernelKey) -> Source:
    """The stage-1 module for a key."""
    heads = min(key.group, key.tile_rows)
    dim, rest = (*key_pieces(key.head_dim, key.head_dim_v), 0)[:2]
    blocks_per_tile = key.tile_tokens // key.block_tokens
    positions = key.scoring is not None and key.scoring.positions
    run_fields = POSITIONED_RUN_FIELDS if positions else RUN_FIELDS
    unread = ("lo", "hi") if key.mask == "none" else ()
    read = tuple((name, column) for column, name in enumerate(run_fields) if name not in unread)
    tile_slots, tile_width = tile_form(key.tile_tokens, key.request_page, positions=positions)
    gathered = tile_slots > MOST_UNROLLED
    slots = ("slot",) if tile_slots == 1 else tuple(f"slot_{page}" for page in range(tile_slots))
    of_tile = (*slots, *run_fields[1 if tile_slots == 1 else 2 :])
    unread_of_tile = ("length", *unread, *(slots if gathered else ()))
    by_block = blocks_per_tile <= _MOST_BY_BLOCK
    has_room = key.waiting or key.tile_tokens <= _MOST_PAIRED_TOKENS
    context = PartialContext(
        rows=key.tile_rows,
        tokens=key.tile_tokens,
        block=key.block_tokens,
        blocks_per_tile=blocks_per_tile,
        unrolled=blocks_per_tile <= MOST_UNROLLED,
        full=key.full,
        run_width=len(run_fields),
        run_fields=read,
        tile_slots=tile_slots,
        tile_width=tile_width,
        gathered=gathered,
        tile_fields=tuple((name, column) for column, name in enumerate(of_tile) if name not in unread_of_tile),
        leaves_out=key.request_page > 0,
        by_block=by_block,
        fields_by_token=tuple(name for name, _ in read if not by_block or name not in ("lo", "hi")),
        masked=key.mask != "none",
        bits=key.mask == "bits",
        dealt=key.dealt,
        merging=key.merging,
        waiting=key.waiting,
        chunk_rows=math.gcd(key.group, _CHUNK),
        chunk_dims=_CHUNK,
        paired=has_room and key.dtype != "fp32" and not key.words,
        page_size=key.page_size,
        group=key.group,
        heads=heads,
        head_tiles=-(-key.group // heads),
        head_dim=key.head_dim,
        head_dim_v=key.head_dim_v,
        dim=dim,
        rest=rest,
        dim_v=padded(key.head_dim_v),
        dim_mask=not rest and dim != key.head_dim,
        rest_mask=rest > 0 and dim + rest != key.head_dim,
        dim_v_mask=padded(key.head_dim_v) != key.head_dim_v,
        shared_kv=key.shared_kv,
        fp8=key.kv_dtype in FP8,
        e5m2=key.kv_dtype == "e5m2",
        by_bits=key.by_bits,
        words=key.words,
        scaled=key.scaled,
        precision=', input_precision="ieee"' if key.dtype == "fp32" else "",
        scoring=key.scoring,
        loads=() if key.scoring is None else tuple(_LOADS[kind] for kind, _ in key.scoring.captured),
        parameters=kernel_signature(key),
        positions=positions,
        sinks=key.sinks,
        guarded=key.guarded,
        values_first=key.guarded and not key.shared_kv,
    )
    assert rows_per_tile(key.tile_rows, key.group) * heads <= key.tile_rows
    return _render("partial_attention", key, context)


@cache
def emit_merge(key: MergeKey) -> Source:
    """The stage-2 module for a key."""
    dim_v = padded(key.head_dim_v)
    context = MergeContext(
        heads=key.heads,
        parts=key.parts,
        staged=key.staged,
        surplus=SURPLUS_MERGE,
        head_dim_v=key.head_dim_v,
        dim_v=dim_v,
        dim_v_mask=dim_v != key.head_dim_v,
        parameters=kernel_signature(key),
        sinks=key.sinks,
    )
    return _render("merge", key, context)


def _render(kernel: str, key: KernelKey | MergeKey, context: PartialContext | MergeContext) -> Source:
    template = _environment().get_template(f"{kernel}.py.jinja")
    blank = template.render(c=context, key=key.text(), digest="")
    digest = hashlib.sha256(blank.encode()).hexdigest()[:32]
    return Source(key, kernel, digest, template.render(c=context, key=key.text(), digest=digest))


def compile_templates() -> None:
    """Compiles the templates, which the first emission does otherwise: it takes tens of milliseconds, once."""
    for name in _environment().list_templates(extensions=["jinja"]):
        _environment().get_template(name)


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("treegen.templates", "."),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
