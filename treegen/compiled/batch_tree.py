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
from treegen.ir.tree import Tree
from treegen.ir.tree.less_sharing import without_sharing, without_small_shares
from treegen.ir.tree.requests import OF_NODES, OF_ROWS, of_columns


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
_Counts = ctypes.c_int64 * len(_OF_TOPOLOGY)


class _Columns(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("requests", "nodes")),
        *((name, ctypes.c_void_p) for name in ("words", "least")),
    )


class TreeColumns:
    """The columns of a tree in which each request has one row, and each node is one span.

    words: the columns of rows, and then those of nodes, in the order in which `of_columns` takes them. least: that of
    RequestKV. address: that of a structure which tells C all of this.
    """

    def __init__(self, words: Ints, requests: int, nodes: int, least: Ints | None = None) -> None:
        self.words, self.requests, self.nodes, self.least = words, requests, nodes, least
        of_least = None if least is None else c_library.address_of(least)
        self._columns = _Columns(requests, nodes, c_library.address_of(words), of_least)
        self.address = ctypes.addressof(self._columns)


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
        if library is None or not requests or largest(batch.rows) > 1:
            return cls.of_tree(batch.tree(shared=shared))
        table, counts = batch.table, _Counts()
        words = np.empty(requests * (OF_ROWS + 2 * OF_NODES), np.int32)
        at, seats = c_library.address_of(table), table.shape[1]
        nodes = library.tree_by_request(
            at, seats, requests, shared, c_library.address_of(words), ctypes.addressof(counts)
        )
        if nodes < 0:
            return cls.of_tree(batch.tree(shared=shared))
        columns = TreeColumns(words, requests, nodes)
        words.setflags(False)  # type: ignore[call-arg]  # see treegen.ir.arrays.frozen
        made = cls(columns, batch)
        made.__dict__["counts"] = TreeCounts(requests, *counts)
        return made

    @classmethod
    def of_tree(cls, tree: Tree) -> BatchTree:
        """Takes a tree by request."""
        topology, requests, columns = tree.topology, tree.requests, None
        nodes, spans = len(tree.parent), topology.spans
        if requests is not None and requests.queries is None and 0 < nodes == len(spans) and c_library.library():
            of_rows = tree.row_node, tree.row_sees, topology.row_of_rank, *requests.of_requests
            of_nodes = *spans.table, *requests.of_nodes, tree.parent, topology.rank_own, tree.kv.start
            words = frozen(np.concatenate([*of_rows, *of_nodes]))
            columns = TreeColumns(words, len(tree.row_node), nodes, requests.least)
        made = cls(columns)
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
        end = OF_ROWS * columns.requests
        of_rows = columns.words[:end].reshape(OF_ROWS, columns.requests)
        of_nodes = columns.words[end:][: OF_NODES * columns.nodes].reshape(OF_NODES, columns.nodes)
        known = dict(zip(_OF_TOPOLOGY, self.counts[1:], strict=True))
        parts, topology, by_request = of_columns(batch.page_size, of_nodes, of_rows, known)
        return Tree(*parts, topology, by_request)

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

    @property
    def has_queries(self) -> bool:
        """Whether requests have several query rows."""
        return self.columns is None and self.tree.requests is not None and self.tree.requests.queries is not None

    @property
    def shares_tokens(self) -> bool:
        """Whether some request shares tokens with another one."""
        return self.counts.path_tokens > self.counts.unique_tokens
