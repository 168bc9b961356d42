"""Several trees joined to one forest, and stored one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from treegen.ir.arrays import frozen
from treegen.ir.errors import TreeError
from treegen.ir.tree.edits import Edited
from treegen.ir.tree.kv import KVRuns
from treegen.ir.tree.page_tables import TreeParts
from treegen.ir.tree.topology import derive

if TYPE_CHECKING:
    from treegen.ir.tree import Tree


def joined(trees: Sequence[Tree]) -> Edited:
    """See Tree.joined."""
    if not trees:
        raise TreeError("trees", [], "is empty", "give at least one tree")
    nodes = np.array([len(tree.tokens) for tree in trees])
    before = np.cumsum(nodes) - nodes
    parent = np.concatenate([tree.parent for tree in trees])
    parent = frozen(np.where(parent >= 0, parent + np.repeat(before, nodes), -1))
    tokens = frozen(np.concatenate([tree.tokens for tree in trees]))
    rows = np.repeat(before, [tree.num_rows for tree in trees])
    row_node = frozen(np.concatenate([tree.row_node for tree in trees]) + rows)
    row_sees = frozen(np.concatenate([tree.row_sees for tree in trees]))
    parts = TreeParts(parent, tokens, row_node, row_sees, KVRuns.contiguous(tokens))
    return parts, derive(*parts[:4])
