"""Batches that have some rows in common: the same queries, keys and values, among other rows, in other trees.

A token is a number; what K and V it has, and what a row's query is, depends on that number or the row alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch

from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.ir.tree.kv import KVRuns

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Probes:
    """Rows whose bits are compared: the tokens of each one's path. They share `lengths[0] // 2` first tokens."""

    shape: Shape
    lengths: tuple[int, ...]

    @property
    def paths(self) -> list[list[int]]:
        """The tokens that each row sees."""
        common = list(range(self.lengths[0] // 2))
        rows = []
        for number, length in enumerate(self.lengths):
            own = range((number + 1) * 100_000, (number + 1) * 100_000 + length)
            rows.append([*common, *own][:length])
        return rows


@dataclass(frozen=True)
class Composition:
    """A batch, and which of its rows are the probes, in their order."""

    tree: Tree
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    rows: list[int]


def composition(probes: Probes, seed: int, most_others: int = 6, page: int = 1) -> Composition:
    """Some of the probes, at least one, among other rows that share any part of their paths, or none, with KV in random
    order. Seed 0: all probes, and nothing else. page: tokens of pages, which are shared as a whole.
    """
    source, shape, paths = random.Random(seed), probes.shape, probes.paths
    kept = source.sample(range(len(paths)), source.randint(1, len(paths))) if seed else range(len(paths))
    batch = [(paths[number], number) for number in kept]
    fresh = 10_000_000
    for _ in range(source.randint(0, most_others) if seed else 0):
        like = source.choice(batch)[0]
        shared = source.choice((0, len(like), source.randint(0, len(like))))
        more = source.choice((0, 1, source.randint(0, 40), source.randint(0, 160)))
        batch.append(([*like[:shared], *range(fresh, fresh + more)], -1))
        fresh += more
    source.shuffle(batch)
    tree = _tree_of([path for path, _ in batch], page)
    pages = -(-tree.tokens // page)
    order = np.random.default_rng(seed).permutation(int(pages.sum()) + 3)
    tree = tree.with_kv(KVRuns.from_pages(tree.tokens, np.split(order, np.cumsum(pages))[:-1], page))
    caches = torch.randn(2, len(order) * page, shape.num_kv_heads, shape.head_dim, generator=_generator(seed))
    for row, (path, _) in enumerate(batch):
        for token, slot in zip(path, tree.slots(row).tolist(), strict=True):
            caches[:, slot] = _values(token, shape)
    q = torch.stack([_query(50 + row if number < 0 else number, shape) for row, (_, number) in enumerate(batch)])
    dtype = DTYPES[shape.dtype]
    place = {number: row for row, (_, number) in enumerate(batch)}
    rows = [place.get(number, -1) for number in range(len(paths))]
    return Composition(tree, q.to(dtype), *caches.to(dtype), rows)


def _tree_of(paths: list[list[int]], page: int) -> Tree:
    """The tree of paths in pages; the page that a path ends in is its own unless it is whole."""
    if page == 1:
        return Tree.from_paths(paths)
    by_page = Tree.from_paths([[tuple(path[i : i + page]) for i in range(0, len(path), page)] for path in paths])
    tokens, sees = by_page.tokens * page, by_page.row_sees * page
    missing = [-len(path) % page for path in paths]
    short = np.zeros_like(tokens)
    np.maximum.at(short, by_page.row_node, missing)
    tokens -= short
    rows = zip(by_page.row_node.tolist(), (sees - missing).tolist(), strict=True)
    return Tree.from_parents(by_page.parent, tokens, rows)


_VALUES: dict[tuple[int, Shape], torch.Tensor] = {}


def _values(token: int, shape: Shape) -> torch.Tensor:
    made = _VALUES.get((token, shape))
    if made is None:
        made = torch.randn(2, shape.num_kv_heads, shape.head_dim, generator=_generator(token))
        if token % 29 == 0:
            made[0] *= 6  # peaks that come late
        _VALUES[token, shape] = made
    return made


def _query(number: int, shape: Shape) -> torch.Tensor:
    return torch.randn(shape.num_qo_heads, shape.head_dim, generator=_generator(-1 - number))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed + 1_000_000_000)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers, so that 0 and -0 differ and NaN is itself."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
