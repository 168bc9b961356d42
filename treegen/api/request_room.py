"""Room of batches by request: whether page tables of a size can be served by request, and how large buffers are."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from treegen.backends.devices import backend_for, resolve_target
from treegen.backends.page_table import PAGE_SIZES
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.runtime.batch_room import is_served
from treegen.scoring.options import ScoreOptions
from treegen.strategies import Strategy, strategy_from
from treegen.target.problem import Problem

Settings: TypeAlias = "tuple[Shape, float | None, ScoreOptions]"
"""What a wrapper's kernel is compiled for: the attention shape, the factor of scores, and the score options."""
LEAST_ROWS = 8
"""Requests that the wrapper's own buffers have room for from the beginning."""
_LEAST_PAGES = 1024
"""Pages, of all requests together, that the wrapper's own buffers have room for from the beginning."""
MOST_TABLES = 1 << 30
"""Bytes of tables that are allocated without `max_tokens`, counted as one for each row and token of the longest
request. That is about right for pages of 16 tokens; tables for pages of one token take about nine times as much.
"""


def obstacle(
    settings: Settings, strategy: str | Strategy, device: torch.device, rows: int, pages: int, max_tokens: int | None
) -> tuple[str, str] | None:
    """Returns why batches of this size cannot be served by request, and the fix; None where they can.

    rows: requests. pages: of all requests together. max_tokens: the most tokens of a request, where the caller gave it.
    """
    shape, _, _ = settings
    if shape.page_size not in PAGE_SIZES:
        return f"page_size {shape.page_size} is not a power of two up to 128", "use such pages"
    if device.type == "cuda" and backend_for(device, None) != "triton":
        return f"kernels cannot run on {device}", "give tables on the host"
    tokens = pages * shape.page_size
    if rows * (tokens if max_tokens is None else min(tokens, max_tokens)) > MOST_TABLES:
        reason = f"tables for {rows} requests of up to {tokens} tokens exceed 1 GB"
        return reason, "give max_tokens, the tokens of the longest request"
    chosen = strategy_from(strategy)
    if chosen.automatic:
        return None
    if chosen.batch_invariant:
        return f"{chosen} has no plans by request here", "use treegen.compile_batch, or another strategy"
    if not chosen.serves_any_tree or not is_served(_sample_plan(chosen, shape)):
        return f"{chosen} has no plans by request", "use auto, query or cohort"
    return None


def room_for(rows: int, pages: int) -> tuple[int, int]:
    """Rounds requests and pages up to the sizes of the wrapper's own buffers: powers of two."""
    return 1 << max(rows - 1, LEAST_ROWS - 1).bit_length(), 1 << max(pages - 1, _LEAST_PAGES - 1).bit_length()


def _sample_plan(strategy: Strategy, shape: Shape) -> Any:
    """Makes a strategy's plan for 12 requests that share pages on two levels."""
    page, many = shape.page_size, 12
    above = [-1, *([0] * (many - 1))]
    shared = [0, *([32 * page, 64 * page] * many)[: many - 1]]
    tree = Tree.from_requests([64 * page + 100] * many, above, shared, page_size=page)
    return strategy.plan(Problem(tree, shape, resolve_target(None)))
