"""Trees by request of running batches: as columns, which C makes and reads, and as a Tree for all others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from copy import copy
from functools import cached_property
from typing import NamedTuple

import numpy as np

import treegen.compiled.c_library as c_library
from treegen.ir.arrays import Ints, frozen, largest
from treegen.ir.live_batch import LiveBatch
from treegen.ir.positions import windowed_requests
from treegen.ir.tree import Tree
from treegen.ir.tree.less_sharing import without_sharing, without_small_shares
from treegen.ir.tree.requests import OF_NODES, OF_REQUESTS, OF_ROWS, OF_SPANS, of_columns


class TreeCounts(NamedTuple):
    """What is counted of a tree.

    rows: its rows. unique_tokens: the tokens that some row sees. levels: the most nodes of a path. path_tokens: the
    tokens of all rows' paths together. private_tokens: those that exactly one row sees.
    """

    rows: int
    unique_tokens: int
    levels: int
    path_tokens: int
    private_tokens: int


_OF_TOPOLOGY = TreeCounts._fields[1:]
_Counts = ctypes.c_int64 * (len(_OF_TOPOLOGY) + 1)  # and spans


class _Columns(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("requests", "rows", "nodes", "spans")),
        *((name, ctypes.c_void_p) for name in ("words", "queries", "least")),
    )


class TreeColumns:
    """The columns of a tree by request.

    words: the columns of rows, of requests and of nodes, as `of_columns` takes them; where requests have several rows,
    then those of spans. sizes: how many requests, rows, nodes and spans there are. queries, least: those of RequestKV.
    address: that of a structure which tells C all of this.
    """

    def __init__(
        self,
        words: Ints,
        sizes: tuple[int, int, int, int],
        queries: Ints | None = None,
        least: Ints | None = None,
    ) -> None:
        self.requests, self.rows, self.nodes, self.spans = self.sizes = sizes
        self.words, self.queries, self.least = words, queries, least
        of_queries = None if queries is None else c_library.address_of(queries)
        of_least = None if least is None else c_library.address_of(least)
        self._columns = _Columns(*sizes, c_library.address_of(words), of_queries, of_least)
        self.address = ctypes.addressof(self._columns)

    @property
    def nodes_at(self) -> int:
        """The place of the columns of nodes in the words."""
        return OF_ROWS * self.rows + OF_REQUESTS * self.requests

    @property
    def spans_at(self) -> int:
        """The same for spans: nodes are spans where each request has one row."""
        return self.nodes_at if self.queries is None else self.nodes_at + OF_NODES * self.nodes


class BatchTree:
    """The tree by request of a running batch. The Tree is made when somebody asks for it.

    columns: its columns; None where NumPy plans for it.

    Args:
        columns: The columns.
        batch: The batch that they were made of; without it, the caller sets `tree`.
    """

    def __init__(self, columns: TreeColumns | None, batch: LiveBatch | None = None) -> None:
        self.columns, self._batch = columns, batch

    @classmethod
    def of_batch(cls, batch: LiveBatch, *, shared: bool = True) -> BatchTree:
        """Makes the tree that `batch.tree(shared=shared)` makes. The batch stays as it is from then on.

        Raises TreeError as that does.
        """
        library, requests = c_library.library(), len(batch)
        if library is None or not requests:
            return cls.of_tree(batch.tree(shared=shared))
        table, counts, queries, rows = batch.table, _Counts(), None, requests
        seats, length = table.shape[1], (OF_ROWS + OF_REQUESTS + 2 * OF_NODES) * requests
        if largest(batch.rows) > 1:
            queries = frozen(batch.rows.compress(batch.row >= 0))
            rows = int(np.add.reduce(queries, dtype=np.int64))
            length += OF_ROWS * (rows - requests) + OF_SPANS * (2 * requests + rows)
        words = np.empty(length, np.int32)
        at_queries = None if queries is None else c_library.address_of(queries)
        numbers = c_library.address_of(table), seats, requests, rows, batch.page_size, shared, at_queries
        nodes = library.tree_by_request(*numbers, c_library.address_of(words), ctypes.addressof(counts))
        if nodes < 0:
            return cls.of_tree(batch.tree(shared=shared))
        *facts, spans = counts
        columns = TreeColumns(words, (requests, rows, nodes, spans), queries)
        words.setflags(False)  # type: ignore[call-arg]  # see treegen.ir.arrays.frozen
        made = cls(columns, batch)
        made.__dict__["counts"] = TreeCounts(rows, *facts)
        return made

    @classmethod
    def of_tree(cls, tree: Tree) -> BatchTree:
        """Takes a tree by request."""
        made = cls(_columns_of(tree) if c_library.library() else None)
        made.__dict__["tree"] = tree
        return made

    def __reduce__(self) -> tuple[Callable[[Tree], BatchTree], tuple[Tree]]:
        return BatchTree.of_tree, (self.tree,)

    @cached_property
    def tree(self) -> Tree:
        """The tree."""
        columns, batch = self.columns, self._batch
        assert columns is not None
        assert batch is not None
        of_rows = _table(columns.words, OF_ROWS, columns.rows)
        of_requests = _table(columns.words[of_rows.size :], OF_REQUESTS, columns.requests)
        of_nodes = _table(columns.words[columns.nodes_at :], OF_NODES, columns.nodes)
        known, spans = dict(zip(_OF_TOPOLOGY, self.counts[1:], strict=True)), None
        if columns.queries is not None:
            spans = _table(columns.words[columns.spans_at :], OF_SPANS, columns.spans)
        made = of_columns(batch.page_size, of_nodes, of_rows, of_requests, known, columns.queries, spans)
        return Tree(*made[0], *made[1:])

    @cached_property
    def counts(self) -> TreeCounts:
        """What is counted of the tree."""
        topology = self.tree.topology
        return TreeCounts(self.tree.num_rows, *(getattr(topology, name) for name in _OF_TOPOLOGY))

    def alone(self) -> BatchTree | None:
        """Makes the tree in which requests share nothing, which have one row each; None where it is the same."""
        if self._batch is not None:
            return BatchTree.of_batch(self._batch, shared=False) if self.shares_tokens else None
        assert self.tree.requests is not None
        made = without_sharing(self.tree.requests)
        if made is None:
            return None
        parts, topology, alone = made
        return BatchTree.of_tree(Tree(*parts, topology, alone))

    def sharing_less(self, most: int) -> tuple[BatchTree, int] | None:
        """Makes the tree in which requests, which have one row each, read by themselves what sharing saves least on.

        Args:
            most: The most tokens that are read in addition.

        Returns:
            The tree, and the tokens that are read in addition; None where it is the same.
        """
        library = c_library.library()
        if library is not None and self.columns is not None and self._batch is not None:
            then = copy(self._batch)
            table = then.table
            again = library.share_less(self.columns.address, most, c_library.address_of(table), table.shape[1])
            if again >= 0:
                return (BatchTree.of_batch(then), again) if again else None
        requests = self.tree.requests
        assert requests is not None
        less = without_small_shares(self.tree.row_node, self.tree.topology, requests, most)
        if less is None:
            return None
        parts, topology, sharing = less
        again = int(requests.shared_tokens.sum() - sharing.shared_tokens.sum())
        return BatchTree.of_tree(Tree(*parts, topology, sharing)), again

    def within_windows(self, window_left: int, unit: int) -> BatchTree:
        """Makes the tree that `windowed_requests` makes, without tokens that no row's window reaches.

        Returns this tree where windows reach all tokens.
        """
        library, columns, nodes = c_library.library(), self.columns, -1
        if library is not None and columns is not None:
            words, least, counts = np.empty_like(columns.words), np.empty(columns.requests, np.int32), _Counts()
            to = c_library.address_of(words), c_library.address_of(least), ctypes.addressof(counts)
            nodes = library.windowed_tree(columns.address, window_left, unit, *to)
        if columns is None or nodes < 0:
            seen = windowed_requests(self.tree, window_left, unit)
            return self if seen is self.tree else BatchTree.of_tree(seen)
        if not nodes:
            return self
        *facts, spans = counts
        sizes = columns.requests, columns.rows, nodes, spans
        made = _WindowedTree(TreeColumns(words, sizes, columns.queries, least), self, window_left, unit)
        for array in (words, least):
            array.setflags(False)  # type: ignore[call-arg]  # see treegen.ir.arrays.frozen
        made.__dict__["counts"] = TreeCounts(columns.rows, *facts)
        return made

    @property
    def has_queries(self) -> bool:
        """Whether requests have several query rows."""
        if self.columns is not None:
            return self.columns.queries is not None
        return self.tree.requests is not None and self.tree.requests.queries is not None

    @property
    def has_rows_inside(self) -> bool:
        """Whether rows of a node see different parts of it."""
        if self.columns is not None:
            return self.columns.spans > self.columns.nodes
        return self.tree.topology.has_rows_inside

    @property
    def shares_tokens(self) -> bool:
        """Whether some request shares tokens with another one."""
        return self.counts.path_tokens > self.counts.unique_tokens


class _WindowedTree(BatchTree):
    """A tree that `within_windows` made of the tree `whole`."""

    def __init__(self, columns: TreeColumns, whole: BatchTree, window_left: int, unit: int) -> None:
        super().__init__(columns)
        self._whole, self._window = whole, (window_left, unit)

    @cached_property
    def tree(self) -> Tree:
        """The tree."""
        return windowed_requests(self._whole.tree, *self._window)


def _table(words: Ints, columns: int, length: int) -> Ints:
    return words[: columns * length].reshape(columns, length)


def _columns_of(tree: Tree) -> TreeColumns | None:
    """Returns the columns of a tree by request; None if it is none, or if some node has no tokens."""
    topology, requests, nodes = tree.topology, tree.requests, len(tree.parent)
    if requests is None or not nodes or np.count_nonzero(tree.tokens) < nodes:
        return None
    spans, rows = topology.spans, (tree.row_node, tree.row_sees, topology.row_of_rank)
    of_nodes = topology.preorder, np.zeros(nodes, np.int32), tree.tokens, topology.rank_lo, topology.rank_hi
    by_request = *requests.of_requests, *of_nodes, *requests.of_nodes, tree.parent, topology.rank_own, tree.kv.start
    of_spans = () if requests.queries is None else tuple(spans.table)
    if requests.queries is None and len(spans) != nodes:
        return None
    sizes = len(requests.seat), tree.num_rows, nodes, len(spans)
    return TreeColumns(frozen(np.concatenate([*rows, *by_request, *of_spans])), sizes, requests.queries, requests.least)
