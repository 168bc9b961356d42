"""PrefixCache: pages of branches that have ended, found again by their tokens.

    root ── [5 17 3 8] page 4 ── [2 7 1 8] page 9 ── [2 8 1 8] page 3
                              └─ [6 6 6 6] page 7

An edge is a whole page of tokens, so each page stands for all tokens from the first on (as in SGLang's radix cache,
with pages for edges).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from treegen.engine.pool import KVPool
from treegen.ir.errors import PoolError

Edge = tuple[int, ...]
"""The tokens of a page."""


@dataclass(slots=True, eq=False)
class _Node:
    """A page in the cache. depth: the number of pages before it. used: when it was last matched or inserted, by the
    cache's clock; `PrefixCache.evict` raises it to the times of the pages below.
    """

    page: int
    parent: _Node | None
    edge: Edge
    depth: int = 0
    used: int = 0
    below: dict[Edge, _Node] = field(default_factory=dict)


class PrefixCache:
    """Holds pages beside the branches, until somebody needs their room.

    Args:
        pool: The pool of the pages.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._root = _Node(-1, None, (), -1)
        self._pages: dict[int, _Node] = {}
        self._has = np.zeros(pool.num_pages, np.bool_)
        self._clock = 0
        self._oldest: list[tuple[_Node, int]] = []  # what `_by_use` returned, without those that are gone

    def __len__(self) -> int:
        """The number of pages that the cache holds."""
        return len(self._pages)

    @property
    def pages(self) -> list[int]:
        """The pages that the cache holds."""
        return list(self._pages)

    @property
    def evictable(self) -> int:
        """The number of pages that only the cache holds."""
        return int(np.count_nonzero(self._has & (self.pool.holders == 1)))

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Returns the pages of the longest known prefix of these tokens, in whole pages."""
        return [node.page for node in self._path(tokens, self._root, len(tokens) // self.pool.page_tokens)]

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Holds full pages, but for tokens that the cache has pages of already. tokens: at least those of the pages."""
        node = self._last_held(pages)
        for below in self._path(tokens, node, len(pages)):
            node = below
        begin, size = node.depth + 1, self.pool.page_tokens
        if begin >= len(pages):
            return
        self.pool.retain(pages[begin:])
        for place, page in enumerate(pages[begin:], begin):
            edge = tuple(tokens[place * size : (place + 1) * size])
            node.below[edge] = _Node(page, node, edge, place, self._clock)
            node = self._pages[page] = node.below[edge]
            self._has[page] = True

    def evict(self, count: int) -> int:
        """Frees up to this many pages that only the cache holds, those used longest ago first; returns their number."""
        freed = 0
        for anew in (False, True):
            if anew and freed < count:
                self._oldest = self._by_use()
            while self._oldest and freed < count:
                node, used = self._oldest.pop()
                if self._pages.get(node.page) is not node or node.used != used or self.pool.holders[node.page] > 1:
                    continue
                if node.below and not anew:  # what is below may have been used since
                    self._oldest.clear()
                    break
                freed += 1
                self._forget(node)
        return freed

    def check(self) -> None:
        """Raises PoolError unless the cache finds each page that it holds by its tokens."""
        for page, node in self._pages.items():
            above = node.parent
            if above is None or above.below.get(node.edge) is not node or not self._has[page]:
                raise PoolError(
                    "page", page, "of the cache is not found by its tokens", "report this as a bug of treegen"
                )

    def _by_use(self) -> list[tuple[_Node, int]]:
        """Returns the nodes whose pages only the cache holds, with their times of use, those used longest ago last.

        Nodes that are used, or whose pages are released, from then on were used later than all of these.
        """
        for node in sorted(self._pages.values(), key=lambda each: -each.depth):
            if node.parent is not None:  # a node is used whenever one below it is
                node.parent.used = max(node.parent.used, node.used)
        able = [node for node in self._pages.values() if self.pool.holders[node.page] == 1]
        return [(node, node.used) for node in sorted(able, key=lambda each: (-each.used, each.depth))]

    def _forget(self, node: _Node) -> None:
        """Takes a node and those below it, whose pages branches hold as well, out of the cache."""
        if node.parent is not None:
            del node.parent.below[node.edge]
        gone = [node]
        for each in gone:  # grows while it is read
            gone += each.below.values()
            del self._pages[each.page]
            self._has[each.page] = False
        self.pool.release([each.page for each in gone])

    def _last_held(self, pages: Sequence[int]) -> _Node:
        """Returns the node of the last of these pages that the cache holds, and notes that it is used.

        A branch that shares a page shares all pages before it, so there is no need to compare their tokens.
        """
        found = next((self._pages[page] for page in reversed(pages) if page in self._pages), self._root)
        found.used = self._clock + 1
        return found

    def _path(self, tokens: Sequence[int], node: _Node, pages: int) -> Iterator[_Node]:
        """Yields the nodes below `node` of the longest known prefix, of at most `pages` pages; notes their use."""
        self._clock += 1
        size = self.pool.page_tokens
        for place in range(node.depth + 1, pages):
            following = node.below.get(tuple(tokens[place * size : (place + 1) * size]))
            if following is None:
                return
            node = following
            node.used = self._clock
            yield node


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the number of first tokens that two sequences have in common."""
    least, most = 0, min(len(first), len(second))
    while least < most:  # by halves, because slices are compared much faster than token by token
        middle = (least + most + 1) // 2
        if first[least:middle] == second[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
