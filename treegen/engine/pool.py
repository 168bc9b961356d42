"""KVPool: the KV of all layers in pages, and how many branches hold each page.

On several ranks that divide tokens each rank has such a pool. A page of a branch then has the same number on all ranks,
and each holds its part of the page's tokens:

    tokens of page 7    0 1 2 3 4 5 6 7      two ranks, page_size 4: page_tokens 8
    page 7 of rank 0    0   2   4   6
    page 7 of rank 1      1   3   5   7
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from treegen.backends.check_inputs import TORCH_DTYPES
from treegen.backends.kept_tensors import for_kept_tensors
from treegen.backends.page_table import PAGE_SIZES
from treegen.ir.arrays import Longs, positive_int
from treegen.ir.errors import PoolError
from treegen.ir.shape import Shape
from treegen.ir.tree.shards import Shard

_COPIED = 512
"""Elements of a token, or of a page, that a thread block of a kernel copies at a time."""


class KVPool:
    """Pages of KV of all layers. A page holds the same tokens in every layer, and is free or held by branches.

        keys    [layers, pages + 1, page_size, num_kv_heads, head_dim]
        values  [layers, pages + 1, page_size, num_kv_heads, head_dim_v]

    The last page belongs to nobody: rows of a step that stand for no token write there.

    Steps and copies are launched on one stream, in the order of the calls, and so they read and write pages in this
    order. A page may therefore be released, and go to another branch, while a step that reads or writes it is under
    way: what the other branch writes there comes after that step. Use a pool from one thread and one stream.

    Args:
        shape: The attention shape of all layers; `page_size` and the types are the pool's.
        layers: The number of layers.
        num_pages: The number of pages.
        device: Where the tensors are.
        shard: The rank's share of the tokens of branches; by default all.

    Attributes:
        page_size: Tokens that a page has here.
        page_tokens: Tokens of a branch that a page stands for, on all ranks together.

    Raises:
        PoolError: A number is out of range, or the shape's layout or types are not the pool's.
    """

    @for_kept_tensors()
    def __init__(
        self, shape: Shape, layers: int, num_pages: int, device: torch.device | str = "cpu", shard: Shard | None = None
    ) -> None:
        if shape.page_size not in PAGE_SIZES:
            raise PoolError("page_size", shape.page_size, "is not a power of two up to 128", "give 16, for instance")
        layers = positive_int("layers", layers, PoolError)
        num_pages = positive_int("num_pages", num_pages, PoolError)
        if shape.kv_layout != "NHD" or shape.kv_dtype != shape.dtype or shape.shared_kv:
            reason = "has another layout, another type than q, or K and V in one tensor"
            raise PoolError("shape", str(shape), reason, "give a shape with NHD pages in q's type")
        self.shape, self.layers, self.num_pages, self.page_size = shape, layers, num_pages, shape.page_size
        self.shard = Shard(0, 1) if shard is None else shard
        self.page_tokens = self.page_size * self.shard.size
        if self.shard.size > 1 and self.page_size % self.shard.interleave:
            reason = f"does not divide page_size = {self.page_size}, so pages would end at other tokens on each rank"
            raise PoolError("interleave", self.shard.interleave, reason, "give 1, or another power of two")
        dims, dtype = (layers, num_pages + 1, shape.page_size, shape.num_kv_heads), TORCH_DTYPES[shape.dtype]
        self.keys = torch.zeros(*dims, shape.head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(*dims, shape.head_dim_v, dtype=dtype, device=device)
        self.holders = np.zeros(num_pages, np.int32)
        """`[num_pages]`; the branches that hold each page."""
        self.clear()

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.keys.device

    @property
    def spare_slot(self) -> int:
        """A place for tokens that nobody reads."""
        return self.num_pages * self.page_size

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Returns the number of pages that hold this many tokens of a branch."""
        return -(-tokens // self.page_tokens)

    def slots_for(self, pages: Longs, positions: Longs) -> Longs:
        """Returns where the KV of tokens goes: `page * page_size + offset`, or the spare slot for those of other ranks.

        Args:
            pages: The page of each token.
            positions: Its position in its branch.
        """
        shard, size = self.shard, self.page_size
        if shard.size == 1:
            return pages * size + positions % size
        return np.where(shard.holds(positions), pages * size + shard.count(positions) % size, self.spare_slot)

    def take(self, count: int) -> list[int]:
        """Takes free pages, each with one holder. Raises PoolError, and takes none, where there are fewer."""
        if count > len(self._free):
            reason = f"is more than the {len(self._free)} free pages of {self.num_pages}"
            raise PoolError("pages", count, reason, "drop branches, or make the pool larger")
        taken = [self._free.pop() for _ in range(count)]
        self.holders[taken] = 1
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a holder to each of these pages. Raises PoolError, and adds none, where a page is free."""
        self.holders[self._held(pages)] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes a holder from each of these pages; those without holders are free. Raises PoolError for free pages."""
        held = self._held(pages)
        self.holders[held] -= 1
        self._free += held[self.holders[held] == 0].tolist()

    def clear(self) -> None:
        """Makes all pages free, whoever holds them."""
        self.holders[:] = 0
        self._free = list(range(self.num_pages - 1, -1, -1))

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies pages to other pages, in all layers. No page may be a source and a target."""
        self._copied(self.keys, self.values, list(source), list(target), list(range(len(source) + 1)))

    def move(self, source: Sequence[int], target: Sequence[int], first: Sequence[int] | None = None) -> None:
        """Copies tokens from places to other places, `page * page_size + offset`, in all layers.

        Args:
            source: The places to read.
            target: The places to write.
            first: Divides both into lists: list n is `first[n]..first[n + 1]`; by default one list. A token of a list
                may be read from a place that a later one of the list writes. Lists do not touch one another's places.
        """
        caches = self.keys.flatten(1, 2), self.values.flatten(1, 2)
        self._copied(*caches, list(source), list(target), [0, len(source)] if first is None else list(first))

    def move_rows(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Does what `move` does, with lists that the host does not know; does not wait for the device.

        Args:
            source: int64 `[lists, places]` on the device; the places to read.
            target: int64 `[lists, places]`; the places to write. Tokens that go to their own places stay.
        """
        caches = self.keys.flatten(1, 2), self.values.flatten(1, 2)
        if self.device.type == "cpu":
            self._copied(*caches, source.flatten().tolist(), target.flatten().tolist(), [])
            return
        lists, places = source.shape
        first = torch.arange(lists + 1, device=source.device) * places
        launch_copies(*caches, torch.cat([source.flatten(), target.flatten(), first]), lists)

    def _copied(
        self, keys: torch.Tensor, values: torch.Tensor, source: list[int], target: list[int], first: list[int]
    ) -> None:
        if self.device.type != "cpu":
            copy_kv(keys, values, source, target, first)
            return
        places = torch.tensor([source, target], device="cpu")
        for cache in (keys, values):
            cache.index_copy_(1, places[1], cache.index_select(1, places[0]))

    def caches(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of a layer as kernels take them: in pages, or in slots where pages have one token."""
        keys, values = self.keys[layer], self.values[layer]
        return (keys.flatten(0, 1), values.flatten(0, 1)) if self.page_size == 1 else (keys, values)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes tokens of a layer.

        Args:
            layer: The layer.
            slots: int64 `[tokens]`; the place of each token, `page * page_size + offset`.
            keys: `[tokens, num_kv_heads, head_dim]`.
            values: `[tokens, num_kv_heads, head_dim_v]`.
        """
        k_cache, v_cache = self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1)
        if keys.device.type == "cpu":
            k_cache.index_copy_(0, slots, keys.to(k_cache.dtype))
            v_cache.index_copy_(0, slots, values.to(v_cache.dtype))
        else:
            write_kv(keys, values, slots, k_cache, v_cache)

    def check(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Raises PoolError unless each page is either held or free, and free only once.

        holders: a list of pages for each holder. A page then has to have one holder for each list that names it.
        """
        free = np.zeros(self.num_pages, np.int64)
        np.add.at(free, self._free, 1)
        wrong = ((free > 1) | (self.holders < 0) | ((free > 0) == (self.holders > 0))).nonzero()[0]
        if len(wrong):
            reason = f"is free {free[wrong[0]]} times and held {self.holders[wrong[0]]} times"
            raise PoolError("page", int(wrong[0]), reason, "report this as a bug of treegen")
        if holders is None:
            return
        held = np.zeros(self.num_pages, np.int64)
        for pages in holders:
            np.add.at(held, pages, 1)
        if (held != self.holders).any():
            page = int((held != self.holders).argmax())
            reason = f"is in {held[page]} branches and the cache, and has {self.holders[page]} holders"
            raise PoolError("page", page, reason, "report this as a bug of treegen")

    def _held(self, pages: Iterable[int]) -> Longs:
        """Returns the pages as an array. Raises PoolError for pages that are free, unknown or listed twice."""
        pages = list(pages)
        if len(set(pages)) < len(pages):
            raise PoolError("pages", pages, "lists a page twice", "list each page once")
        if pages and not 0 <= min(pages) <= max(pages) < self.num_pages:
            wrong = min(pages) if min(pages) < 0 else max(pages)
            raise PoolError("page", wrong, f"is not one of {self.num_pages} pages", "give pages that `take` returned")
        held = np.array(pages, np.int64)
        if not self.holders[held].all():
            page = pages[int((self.holders[held] == 0).argmax())]
            raise PoolError("page", page, "is free", "retain and release pages that are held")
        return held


def write_kv(
    keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    """Writes K and V of tokens in one launch, on a GPU or in Triton's interpreter.

    Args:
        keys: `[tokens, num_kv_heads, head_dim]`; the heads of a token lie side by side, as those of `values`.
        values: `[tokens, num_kv_heads, head_dim_v]`.
        slots: int64 `[tokens]`.
        k_cache: `[slots, num_kv_heads, head_dim]`, contiguous, as `v_cache`.
        v_cache: `[slots, num_kv_heads, head_dim_v]`.
    """
    from treegen.backends import write_kernels

    of_key, of_value = k_cache[0].numel(), v_cache[0].numel()
    grid = (len(slots), -(-max(of_key, of_value) // _COPIED))
    write_kernels.write_kv[grid](
        keys, values, slots, k_cache, v_cache, keys.stride(0), values.stride(0), of_key, of_value, _COPIED, num_warps=4
    )


def copy_kv(keys: torch.Tensor, values: torch.Tensor, source: list[int], target: list[int], first: list[int]) -> None:
    """Copies K and V from places to other places in one launch, on a GPU or in Triton's interpreter.

    Args:
        keys: `[layers, places, ...]`, contiguous, as `values`.
        values: `[layers, places, ...]`.
        source: The places to read.
        target: The places to write.
        first: See `KVPool.move`.
    """
    listed = torch.tensor([*source, *target, *first]).to(keys.device, non_blocking=True)
    launch_copies(keys, values, listed, len(first) - 1)


def launch_copies(keys: torch.Tensor, values: torch.Tensor, listed: torch.Tensor, lists: int) -> None:
    """Launches `copy_kv`; `listed` has the places to read and to write, and where each of the lists begins and ends."""
    from treegen.backends import write_kernels

    places = (len(listed) - lists - 1) // 2
    of_key, of_value = keys[0, 0].numel(), values[0, 0].numel()
    grid = (lists, len(keys), -(-max(of_key, of_value) // _COPIED))
    write_kernels.copy_kv[grid](
        listed, listed[2 * places :], keys, values, places, keys.stride(0), values.stride(0), of_key, of_value,
        _COPIED, num_warps=4,
    )  # fmt: skip
