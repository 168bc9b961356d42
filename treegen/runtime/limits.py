"""Limits of kernels of fixed capacity, declared by callers or derived from page tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

from treegen.ir.arrays import set_positive_ints
from treegen.ir.errors import InputError
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.shape import Shape
from treegen.strategies import Strategy
from treegen.target.tile_config import rows_per_tile


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The most that trees of a kernel of fixed capacity may need.

    max_rows: query rows. max_items: work items of one launch. max_slots: partial slots, each of `num_qo_heads *
    (head_dim_v + 1)` floats of device memory.
    """

    max_rows: int
    max_items: int
    max_slots: int


@dataclass(frozen=True, slots=True)
class PageBounds:
    """The most requests and pages of a page table, with pages of `page_size` tokens.

    A page that several requests share counts once for each of them.
    """

    requests: int
    pages: int
    page_size: int

    @property
    def tokens(self) -> int:
        """The most tokens of all requests, which work items that read only visible tokens cannot exceed either."""
        return self.pages * self.page_size

    def limits(self, strategy: Strategy, configs: tuple[KernelConfig, ...], shape: Shape) -> GraphLimits:
        """Derives the limits of a strategy's plans of such page tables, in these kernel configs.

        `cohort` has one group for each `head_rows` query head rows; with `split_shared_rows` at most one more for each
        request; and with `split` one more for each `split` of all tokens, because no group reads tokens that none of
        its rows sees, or `shares` more. `query` has one group for each request instead of the first kind. A group is
        cut into tiles of rows, and has a partial for each row. Other strategies without partial results have items with
        rows of their own. For all other strategies a row of an item is expected to see at least a page there; shorter
        parts may exceed these limits.
        """
        alone = strategy.traffic is not None and strategy.traffic.partials == "none"
        if strategy.name not in ("cohort", "query"):
            most = self.requests if alone else self.requests + self.pages
            return GraphLimits(self.requests, most, most)
        names = ("split", "shares", "head_rows", "split_shared_rows")
        split, shares, head_rows, split_shared_rows = (strategy.options.get(name) for name in names)
        rows = rows_per_tile(head_rows, shape.group) if isinstance(head_rows, int) else 1
        tiles = -(-rows // min(rows_per_tile(config.rows, shape.group) for config in configs))
        further = self.requests if split_shared_rows else 0
        parts = self.tokens // split if isinstance(split, int) else 0
        if isinstance(shares, int | float):
            parts = math.ceil(shares)
        items = (-(-self.requests // rows) + further + parts) * tiles
        return GraphLimits(self.requests, items, self.requests + further + parts * rows)

    def entries(self, configs: tuple[KernelConfig, ...], max_items: int) -> tuple[int, int]:
        """Counts the full tiles and packed runs that `max_items` items need, in these kernel configs.

        Each item may cut a run of pages in two. The end of a request in the middle of a page may cut the runs of all
        items that read this page. The last tile of an item's packed runs is filled up.
        """
        runs = min(self.pages + self.requests * min(self.requests, max_items), self.tokens) + max_items
        filling = max(config.runs_per_tile for config in configs)
        tiles = self.tokens // min(config.tokens for config in configs)
        return tiles, self.tokens // min(config.run_tokens for config in configs) + runs + filling * max_items


@dataclass(frozen=True, slots=True)
class WantedLimits:
    """The limits that a caller declares; None for limits that follow from page tables, or else from the first tree."""

    max_rows: int | None
    max_items: int | None
    max_slots: int | None
    pages: PageBounds | None = None

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_items", "max_slots"):
            if getattr(self, name) is not None:
                set_positive_ints(self, [name], InputError)

    @property
    def any(self) -> bool:
        """Whether the caller declares any of them."""
        return any(getattr(self, name) is not None for name in self.__slots__)
