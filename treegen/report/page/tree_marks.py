"""The drawing of a tree as data: marks of nodes, with their parents, tokens and rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Longs, distinct, offsets
from treegen.ir.plan import Plan
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.report.page.drawn_marks import Boxes, Folding, fold

MOST_MARKS = 12_000
"""The most marks of a tree's drawing."""


@dataclass(frozen=True, slots=True, eq=False)
class TreeMarks:
    """The marks that a tree is drawn with: its spans, folded where there are very many.

    Args:
        tree: The tree.
        boxes: A box for each span, with tokens counted from the root.
        folding: The marks of the spans.
    """

    tree: Tree
    boxes: Boxes
    folding: Folding

    @classmethod
    def of(cls, tree: Tree) -> TreeMarks:
        """Makes the marks of a tree."""
        spans, prefix = tree.topology.spans, tree.topology.prefix
        above = prefix[spans.node].astype(np.int64)
        boxes = Boxes(above + spans.start, above + spans.stop, spans.lo.astype(np.int64), spans.hi.astype(np.int64))
        return cls(tree, boxes, fold(boxes, MOST_MARKS))

    def to_object(self, shape: Shape) -> dict[str, Any]:
        """Returns the drawing for JSON forms.

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
        tree, spans, first = self.tree, self.tree.topology.spans, self.folding.first
        columns = {
            "node": spans.node[first],
            "nodes": np.maximum(self._sums(_begins_node(spans.node)), 1),
            "parent": self._parents(),
            **self.folding.bounds._asdict(),
            "tokens": self._sums(spans.lengths),
        }
        return {
            "tokens": int(self.boxes.stop.max(initial=0)),
            "rows": tree.num_rows,
            "kv_token_bytes": shape.kv_token_bytes,
            "hidden_tokens": int(tree.tokens.sum(dtype=np.int64)) - tree.unique_tokens,
            "marks": {name: column.tolist() for name, column in columns.items()},
        }

    def reads_object(self, plan: Plan) -> dict[str, Any]:
        """Returns how often a plan's groups read each mark, for JSON forms.

        - times: how often a token of the mark is read, on average over its tokens;
        - groups: the number of groups that read its nodes.
        """
        spans, nodes = self.tree.topology.spans, len(self.tree.parent)
        times = self._sums(_tokens_read(plan, self.tree)) / np.maximum(self._sums(spans.lengths), 1)
        pairs = distinct(plan.node.astype(np.int64) * max(len(plan), 1) + plan.segment_group)
        groups = np.bincount(pairs // max(len(plan), 1), minlength=nodes)[spans.node]
        # A folded mark counts the groups of each of its nodes; a node that is cut has the same ones in all its marks.
        counted = np.where(self.folding.boxes > 1, self._sums(groups * _begins_node(spans.node)), 0)
        return {
            "times": times.round(3).tolist(),
            "groups": np.where(counted > 0, counted, groups[self.folding.first]).tolist(),
        }

    def counts_of(self, nodes: Longs) -> list[int]:
        """Returns how many of these nodes are in each mark; a node that is cut counts in each of its marks."""
        node = self.tree.topology.spans.node
        chosen = np.zeros(len(self.tree.parent), np.int64)
        chosen[nodes] = 1
        counted: list[int] = np.where(
            self.folding.boxes > 1, self._sums(chosen[node] * _begins_node(node)), chosen[node[self.folding.first]]
        ).tolist()
        return counted

    def _sums(self, of_spans: npt.NDArray[Any]) -> Longs:
        """Sums numbers of spans over the spans of each mark."""
        return np.bincount(self.folding.mark, of_spans, len(self.folding.first)).astype(np.int64)

    def _parents(self) -> Longs:
        """Returns the mark that each mark's first span extends; -1 where it begins at a root."""
        tree, spans, first = self.tree, self.tree.topology.spans, self.folding.first
        nodes = len(tree.parent)
        last_span = np.full(nodes + 1, -1, np.int64)
        last_span[spans.node] = np.arange(len(spans))  # the last one is kept
        # Nodes without spans, which have no tokens that rows see, are skipped; node `nodes` is above the roots.
        parent = np.where(tree.parent < 0, nodes, tree.parent).astype(np.int64)
        seen = np.append(np.where(last_span[:-1] >= 0, np.arange(nodes), parent), nodes)
        while not np.array_equal(seen, further := seen[seen]):
            seen = further
        begins = _begins_node(spans.node)[first] > 0
        above = np.where(begins, last_span[seen[parent[spans.node[first]]]], first - 1)
        return np.where(above >= 0, self.folding.mark[above], -1)


def _begins_node(node: npt.NDArray[Any]) -> Longs:
    """Returns 1 for each span that is the first of its node, else 0."""
    begins = np.ones(len(node), np.int64)
    begins[1:] = node[1:] != node[:-1]
    return begins


def _tokens_read(plan: Plan, tree: Tree) -> Longs:
    """Returns the tokens that segments read of each span, `[spans]`: its tokens times how often each is read."""
    spans = tree.topology.spans
    ends = offsets(spans.lengths)
    first = np.zeros(len(tree.parent), np.int64)
    first[spans.node[::-1]] = np.arange(len(spans))[::-1]
    visible = np.bincount(spans.node, spans.lengths, len(tree.parent)).astype(np.int64)
    begin, end = (ends[first[plan.node]] + np.minimum(token, visible[plan.node]) for token in (plan.start, plan.stop))
    return np.diff(_sum_below(begin, ends) - _sum_below(end, ends))


def _sum_below(points: Longs, bounds: Longs) -> Longs:
    """Returns for each bound the sum of its distances from the points below it."""
    points = np.sort(points)
    count = np.searchsorted(points, bounds)
    return bounds * count - offsets(points)[count]
