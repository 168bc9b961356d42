"""Options of a wrapper for its whole life: how it plans, and which batches captured graphs can serve."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from treegen.api.request_room import Settings, obstacle, room_for
from treegen.backends.page_buffers import PageBuffers
from treegen.ir.errors import InputError
from treegen.ir.scalars import is_one_of, plain_number
from treegen.ir.shape import KV_LAYOUTS
from treegen.runtime.limits import PageBounds, WantedLimits
from treegen.strategies import Strategy


@dataclass(frozen=True, slots=True)
class WrapperOptions:
    """The checked arguments of a wrapper that hold for all its plans.

    buffers: for indptr, indices and last_page_len, with use_cuda_graph. sizes: the requests, and the pages of all of
    them, that these buffers have room for. The other fields are the arguments of the same names.
    """

    layout: str
    strategy: str | Strategy
    isolated: bool
    by_request: bool | None
    max_tokens: int | None
    limits: WantedLimits
    buffers: tuple[torch.Tensor | None, ...] | None
    sizes: tuple[int, int] | None

    def __post_init__(self) -> None:
        if not is_one_of(self.layout, KV_LAYOUTS):
            raise InputError("kv_layout", self.layout, "is unknown", f"use one of {', '.join(KV_LAYOUTS)}")
        if not isinstance(self.isolated, bool):
            raise InputError("isolated", self.isolated, "is not a bool", "give True or False")
        if self.by_request is not None and not isinstance(self.by_request, bool):
            raise InputError("by_request", self.by_request, "is not a bool", "give True, False or None")
        object.__setattr__(self, "max_tokens", plain_number(self.max_tokens))
        if self.max_tokens is not None and (type(self.max_tokens) is not int or self.max_tokens < 1):
            fix = "give the tokens of the longest request"
            raise InputError("max_tokens", self.max_tokens, "is not a positive number of tokens", fix)

    @property
    def graphed(self) -> bool:
        """Whether graphs are captured from `run`."""
        return self.sizes is not None

    def with_own_buffers(self) -> WrapperOptions:
        """Returns these options with copies of the buffers."""
        if self.buffers is None:
            return self
        return replace(self, buffers=tuple(None if buffer is None else buffer.clone() for buffer in self.buffers))

    def limits_of(self, page_size: int) -> WantedLimits | None:
        """Returns the limits of a kernel that serves every page table in the buffers; None without CUDA graphs."""
        return None if self.sizes is None else replace(self.limits, pages=PageBounds(*self.sizes, page_size))

    def check_graph(self, requests: int, pages: int, settings: Settings, first: Settings | None) -> None:
        """Raises InputError for a batch that captured graphs cannot serve. first: the settings of the first plan."""
        if self.sizes is None:
            return
        if requests != self.sizes[0]:
            reason = f"do not match the {self.sizes[0]} requests of the buffers, which graphs are captured for"
            raise InputError("kv_indptr", f"{requests} requests", reason, "add requests without pages")
        if pages > self.sizes[1]:
            reason = f"exceed the {self.sizes[1]} entries of paged_kv_indices_buffer"
            raise InputError("kv_indices", f"{pages} pages", reason, "make another wrapper with a larger buffer")
        if first not in (None, settings):
            reason = "differ from those of the first plan, which graphs are captured for"
            raise InputError("shape, sm_scale, scores", settings, reason, "make another wrapper")

    def obstacle(
        self, settings: Settings, device: torch.device, buffers: PageBuffers | None, rows: int, pages: int
    ) -> tuple[str, str] | None:
        """Returns why a batch cannot be served by request, and the fix; None where it can.

        buffers: the caller's, where they can be used. rows, pages: of the batch.
        """
        if self.isolated:
            return "isolated plans are made by page ids", "leave isolated out"
        if self.limits.max_items is not None or self.limits.max_slots is not None:
            return "max_items and max_slots are limits of plans by page ids", "leave them out"
        if self.buffers is not None and buffers is None:
            reason = "buffers are not contiguous int32 tensors on one device"
            return reason, "allocate contiguous int32 buffers on the GPU"
        room = room_for(rows, pages) if buffers is None else (buffers.rows, buffers.pages)
        return obstacle(settings, self.strategy, device, *room, self.max_tokens)
