"""The choice of a wrapper's plan: by request, where page tables stay on the device, or on the host."""

from __future__ import annotations

from typing import Any

from treegen.api.request_batches import RequestBatches
from treegen.api.request_room import Settings
from treegen.api.wrapper_arguments import length_of
from treegen.api.wrapper_options import WrapperOptions
from treegen.backends.devices import default_device
from treegen.backends.page_buffers import PageBuffers
from treegen.ir.errors import InputError, PerformanceWarning, warn


def choose_requests(
    table: tuple[Any, Any, Any],
    settings: Settings,
    options: WrapperOptions,
    present: RequestBatches | None,
    planned: Settings | None,
) -> RequestBatches | None:
    """Returns the batches by request that serve a page table; None where it is planned on the host.

    present: the batches by request of the latest plan; None where that was made on the host. planned: the settings of
    the latest plan. Raises InputError for a batch that captured graphs or `by_request=True` cannot serve.
    """
    if options.graphed and planned is not None and present is None:
        return None  # graphs are captured for a kernel that the host plans for
    on_gpu = [part for part in table if getattr(part, "is_cuda", False)]
    wanted = bool(on_gpu) if options.by_request is None else options.by_request
    if not (wanted or (present is not None and options.graphed)):
        return None
    rows, pages = max(length_of(table[0]) - 1, 0), length_of(table[1])
    options.check_graph(rows, pages, settings, planned)
    if present is not None and present.settings == settings and (options.graphed or present.holds(rows, pages)):
        return present
    device = on_gpu[0].device if on_gpu else default_device()
    buffers = None if options.buffers is None else PageBuffers.of_tensors(options.buffers)
    if buffers is not None:
        device = buffers.indices.device
    why_not = options.obstacle(settings, device, buffers, rows, pages)
    if why_not is not None and options.by_request:
        raise InputError("by_request", True, *why_not)
    if why_not is not None:
        warn(PerformanceWarning, f"the page table is copied to the host, which waits for the copy: {why_not[0]}")
        return None
    if present is not None and present.settings == settings and present.device == device:
        return present
    return RequestBatches(settings, options.strategy, device, buffers, options.max_tokens)
