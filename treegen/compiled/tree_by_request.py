"""The tree of a running batch, made in C."""

from __future__ import annotations

import ctypes

import numpy as np

import treegen.compiled.c_library as c_library
from treegen.ir.arrays import frozen, largest
from treegen.ir.live_batch import LiveBatch
from treegen.ir.tree import Tree
from treegen.ir.tree.requests import OF_NODES, OF_ROWS, of_columns

_FACTS = ("unique_tokens", "levels", "path_tokens", "private_tokens")
_TreeFacts = ctypes.c_int64 * len(_FACTS)


def plans_are_compiled(tree: Tree) -> bool:
    """Says whether C makes plans of such trees: by request, with one query row for each."""
    return c_library.library() is not None and tree.requests is not None and tree.requests.queries is None


def tree_of(batch: LiveBatch, *, shared: bool = True) -> Tree:
    """Makes `batch.tree(shared=shared)`, in C where that is possible."""
    library, requests = c_library.library(), len(batch)
    if library is None or not requests or largest(batch.rows) > 1:
        return batch.tree(shared=shared)
    table, facts = batch.table, _TreeFacts()
    of_nodes, of_rows = np.empty(2 * requests * OF_NODES, np.int32), np.empty((OF_ROWS, requests), np.int32)
    nodes = library.tree_by_request(
        table.ctypes.data, table.shape[1], requests, shared, of_nodes.ctypes.data, of_rows.ctypes.data, facts
    )
    if nodes < 0:
        return batch.tree(shared=shared)
    columns = frozen(of_nodes[: OF_NODES * nodes].reshape(OF_NODES, nodes))
    known = dict(zip(_FACTS, facts, strict=True))
    parts, topology, by_request = of_columns(batch.page_size, columns, frozen(of_rows), known)
    return Tree(*parts, topology, by_request)
