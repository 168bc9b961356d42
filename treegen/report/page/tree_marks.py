"""The drawing of a tree as data: marks of nodes, with their parents, tokens and rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from treegen.ir.arrays import Longs
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.report.page.drawn_marks import Boxes, Folding, fold

MOST_MARKS = 12_000
"""The most marks of a tree's drawing."""


def drawing_json(tree: Tree, shape: Shape) -> dict[str, Any]:
    """Returns the drawing of a tree for JSON forms.

    `marks` has a column for each field, with an entry for each mark in depth-first order:

    - node: the first node of the mark;
    - nodes: the number of nodes that it stands for, 1 in trees that are not too large to draw;
    - parent: the mark that it extends, -1 for a root;
    - start, stop: tokens, counted from the root;
    - lo, hi: the rows that see it, in depth-first order;
    - tokens: the tokens of all its nodes.

    `tokens` and `rows` are the extent of the drawing, `kv_token_bytes` the bytes of a token's keys and values, and
    `hidden_tokens` the tokens of the tree that no row sees.
    """
    spans = tree.topology.spans
    boxes = node_boxes(tree)
    folding = fold(boxes, MOST_MARKS)
    marks = len(folding.first)
    new_node = np.ones(len(spans), np.int64)
    new_node[1:] = spans.node[1:] != spans.node[:-1]
    columns = {
        "node": spans.node[folding.first],
        "nodes": np.maximum(np.bincount(folding.mark, new_node, marks).astype(np.int64), 1),
        "parent": _parents(tree, folding),
        **folding.bounds._asdict(),
        "tokens": np.bincount(folding.mark, spans.lengths, marks).astype(np.int64),
    }
    return {
        "tokens": int(boxes.stop.max(initial=0)),
        "rows": tree.num_rows,
        "kv_token_bytes": shape.kv_token_bytes,
        "hidden_tokens": int(tree.tokens.sum(dtype=np.int64)) - tree.unique_tokens,
        "marks": {name: column.tolist() for name, column in columns.items()},
    }


def node_boxes(tree: Tree) -> Boxes:
    """Returns a box for each span of a tree, with tokens counted from the root."""
    spans, prefix = tree.topology.spans, tree.topology.prefix
    above = prefix[spans.node].astype(np.int64)
    return Boxes(above + spans.start, above + spans.stop, spans.lo.astype(np.int64), spans.hi.astype(np.int64))


def _parents(tree: Tree, folding: Folding) -> Longs:
    """Returns the mark that each mark's first span extends; -1 where it begins at a root."""
    spans, nodes = tree.topology.spans, len(tree.parent)
    last_span = np.full(nodes + 1, -1, np.int64)
    last_span[spans.node] = np.arange(len(spans))  # the last one is kept
    # Nodes without spans, which have no tokens that rows see, are skipped; node `nodes` is above the roots.
    parent = np.where(tree.parent < 0, nodes, tree.parent).astype(np.int64)
    seen = np.append(np.where(last_span[:-1] >= 0, np.arange(nodes), parent), nodes)
    while not np.array_equal(seen, further := seen[seen]):
        seen = further
    first = folding.first
    inside = np.zeros(len(first), bool)
    inside[:] = (first > 0) & (spans.node[first] == spans.node[np.maximum(first - 1, 0)])
    above = np.where(inside, first - 1, last_span[seen[parent[spans.node[first]]]])
    return np.where(above >= 0, folding.mark[above], -1)
