"""Emission: a kernel key becomes the text of a complete Triton module."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from treegen.codegen.kernel_signature import KernelSignature
from treegen.codegen.merge_context import MergeContext
from treegen.codegen.merge_forms import merge_key_of
from treegen.codegen.module_text import module_text
from treegen.codegen.partial_context import PartialContext
from treegen.codegen.partial_keys import NO_OPTIONS, KernelOptions, kernel_key
from treegen.ir.arena import ArenaSizes
from treegen.ir.keys import KernelKey, MergeKey
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape


@dataclass(frozen=True)
class Source:
    """An emitted module: its key, its kernel's name, the digest of its text without the digest itself, and its text."""

    key: KernelKey | MergeKey
    kernel: str
    digest: str
    text: str

    @cached_property
    def signature(self) -> KernelSignature:
        """How launches order their arguments."""
        return KernelSignature.of(self.key)


def emit(
    schedule: Schedule,
    shape: Shape,
    page_size: int = 1,
    capacity: ArenaSizes | None = None,
    options: KernelOptions = NO_OPTIONS,
) -> list[Source]:
    """Emits the modules of a schedule as it is launched.

    Args:
        schedule: The schedule. A kernel config that runs unfused has no module.
        shape: The attention shape.
        page_size: Tokens of a page, or 1 to address the cache by slot.
        capacity: See merge_key_of.
        options: What is asked of partial kernels besides.

    Returns:
        Each module once, in launch order.
    """
    fused = [config for config in schedule.configs if config.fused]
    keys = (kernel_key(config, shape, page_size, options) for config in fused)
    emitted = [emit_partial(key) for key in dict.fromkeys(keys)]
    rows = (capacity or schedule.size).merges
    merges = (
        merge_key_of(schedule, shape, number, capacity, sinks=options.sinks)
        for number, merged in enumerate(rows)
        if merged
    )
    return [*emitted, *map(emit_merge, dict.fromkeys(merges))]


@cache
def emit_partial(key: KernelKey) -> Source:
    """Emits the module of a partial kernel."""
    rendered = module_text("partial_attention", key, PartialContext.of(key))
    return Source(key, "partial_attention", rendered.digest, rendered.text)


@cache
def emit_merge(key: MergeKey) -> Source:
    """Emits the module of a merge kernel."""
    rendered = module_text("merge", key, MergeContext.of(key))
    return Source(key, "merge", rendered.digest, rendered.text)
