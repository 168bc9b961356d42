"""Limits of kernels of fixed capacity: what their trees may need at most, declared or derived from page tables."""

from __future__ import annotations

from dataclasses import dataclass

from treegen.ir.arrays import positive_int
from treegen.ir.errors import InputError
from treegen.ir.schedule import TileClass
from treegen.ir.shape import Shape
from treegen.strategies import Strategy
from treegen.target.tile_config import rows_per_tile


@dataclass(frozen=True, slots=True)
class Limits:
    """What the trees of a kernel of fixed capacity may need at most. max_rows: query rows; max_items: work items of one
    launch; max_slots: slots of partial results (each `num_qo_heads * (head_dim_v + 1)` floats of device memory).
    """

    max_rows: int
    max_items: int
    max_slots: int


@dataclass(frozen=True, slots=True)
class PageBounds:
    """Page tables of so many requests at most, with so many pages of `page_size` tokens in all: a page that several
    requests share counts for each of them.
    """

    requests: int
    pages: int
    page_size: int

    @property
    def tokens(self) -> int:
        """Tokens of all requests: what all work items of a launch read, if every token they read is seen by some row
        of theirs.
        """
        return self.pages * self.page_size

    def limits(self, strategy: Strategy, classes: tuple[TileClass, ...], shape: Shape) -> Limits:
        """What a strategy's plans of such page tables need in these tile classes.

        `cohort` has a group for every so many requests, with `apart` another for each at most, and with `split` one
        more for every so many of all tokens, since no group reads what none of its rows sees; `query` has one for each
        request in place of the first. A group is cut into tiles of rows, and has a partial for every row. Of other
        strategies without partial results, every item has rows of its own. Of the rest it is expected that an item's
        row sees at least a page there: pieces that are shorter may exceed these limits.
        """
        alone = strategy.traffic is not None and strategy.traffic.partials == "none"
        if strategy.name not in ("cohort", "query"):
            most = self.requests if alone else self.requests + self.pages
            return Limits(self.requests, most, most)
        split, head_rows, apart = (strategy.options.get(name) for name in ("split", "head_rows", "apart"))
        rows = rows_per_tile(head_rows, shape.group) if isinstance(head_rows, int) else 1
        tiles = -(-rows // min(rows_per_tile(tile.rows, shape.group) for tile in classes))
        further = self.requests if apart else 0
        pieces = self.tokens // split if isinstance(split, int) else 0
        items = (-(-self.requests // rows) + further + pieces) * tiles
        return Limits(self.requests, items, self.requests + further + pieces * rows)

    def entries(self, classes: tuple[TileClass, ...], max_items: int) -> tuple[int, int]:
        """Full tiles, and entries of packed runs, that so many items of these classes need for such page tables.

        Every item may cut a run of pages in two, and every request's end in the middle of a page the runs of all items
        that read this page; an item's last tile of packed runs is filled up.
        """
        runs = min(self.pages + self.requests * min(self.requests, max_items), self.tokens) + max_items
        filling = max(tile.blocks_per_tile for tile in classes)
        tiles = self.tokens // min(tile.tokens for tile in classes)
        return tiles, self.tokens // min(tile.block for tile in classes) + runs + filling * max_items


@dataclass(frozen=True, slots=True)
class WantedLimits:
    """The limits that a caller declares; None for what follows from the page tables' bounds, or without these from the
    first tree.
    """

    max_rows: int | None
    max_items: int | None
    max_slots: int | None
    pages: PageBounds | None = None

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_items", "max_slots"):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name), InputError)

    @property
    def any(self) -> bool:
        """Whether the caller declares any."""
        return any(getattr(self, name) is not None for name in self.__slots__)
