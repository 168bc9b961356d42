"""Trees drawn as indented lines.

100 tokens
├─ 10 tokens x3, 1 row
└─ 20 tokens, 2 rows
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treegen.ir.tree.families import Families

if TYPE_CHECKING:
    from treegen.ir.tree import Tree

_WIDEST_NODE = 36  # columns that a node of a drawing needs, with its rows


def draw(tree: Tree, most_lines: int = 40, width: int | None = None) -> str:
    """Draws a tree with a line per node; equal neighbouring subtrees are drawn once, with their number of copies.

    Args:
        tree: The tree.
        most_lines: The most lines of the drawing.
        width: The columns of the drawing. Nodes that are too deep for it are counted instead of drawn. By default there
            is no limit.
    """
    families, subtree = Families(tree), tree.topology.subtree
    lines: list[str] = []
    pending = [(run, "", "") for run in reversed(families.below(-1))]
    while pending:
        (node, copies), lead, rest = pending.pop()
        if len(lines) == most_lines:
            lines.append(f"{rest}... {len(pending) + 1} more branches")
            break
        if width is not None and len(rest) > width - _WIDEST_NODE:
            lines.append(f"{lead}... {subtree[node]} more {'node' if subtree[node] == 1 else 'nodes'}{_times(copies)}")
            continue
        tokens = int(families.tokens[node])
        unit = "token" if tokens == 1 else "tokens"
        lines.append(f"{lead}{tokens} {unit}{_times(copies)}{_rows_label(families.sees(node), tokens)}")
        children = families.below(node)
        for index in reversed(range(len(children))):
            last = index == len(children) - 1
            pending.append((children[index], rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  ")))
    return "\n".join(lines)


def _times(copies: int) -> str:
    return f" x{copies}" if copies > 1 else ""


def _rows_label(sees: list[int], tokens: int) -> str:
    if not sees:
        return ""
    if all(count == tokens for count in sees):
        return ", 1 row" if len(sees) == 1 else f", {len(sees)} rows"
    shown = ", ".join(map(str, sees[:4])) + (", ..." if len(sees) > 4 else "")
    return f", {len(sees)} {'row sees' if len(sees) == 1 else 'rows see'} {shown}"
