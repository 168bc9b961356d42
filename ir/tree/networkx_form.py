"""Trees as graphs of networkx, which is imported only for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treegen.ir.arrays import listed
from treegen.ir.errors import TreeError
from treegen.ir.tree.build import Parts

if TYPE_CHECKING:
    import networkx

    from treegen.ir.tree import Tree


def read(graph: networkx.DiGraph[Any]) -> Parts:
    """Returns the parents, tokens and rows of a directed forest. See Tree.from_networkx."""
    import networkx

    if not isinstance(graph, networkx.DiGraph):
        raise TreeError("graph", type(graph).__name__, "is not directed", "give a networkx.DiGraph, parent to child")
    names = list(graph.nodes)
    number = {name: index for index, name in enumerate(names)}
    parents = []
    for name in names:
        above = list(graph.predecessors(name))
        if len(above) > 1:
            raise TreeError(f"graph node {name!r}", above, "has several parents", "give each node at most one parent")
        parents.append(number[above[0]] if above else -1)
    for name in names:
        if "tokens" not in graph.nodes[name]:
            raise TreeError(
                f"graph node {name!r}", graph.nodes[name], "has no 'tokens' attribute", "set tokens on every node"
            )
    tokens = [graph.nodes[name]["tokens"] for name in names]
    if not any("rows" in graph.nodes[name] for name in names):
        return Parts(parents, tokens, None)
    rows = [
        (number[name], sees)
        for name in names
        for sees in listed(f"graph node {name!r}", graph.nodes[name].get("rows", ()), "give the sees of its rows")
    ]
    return Parts(parents, tokens, rows)


def write(tree: Tree) -> networkx.DiGraph[int]:
    """Returns the graph of a tree. The order of rows across nodes is lost."""
    import networkx

    graph: networkx.DiGraph[int] = networkx.DiGraph()
    for node in tree.nodes:
        graph.add_node(node.index, tokens=node.tokens, rows=[sees for _, sees in node.rows])
    graph.add_edges_from((int(p), v) for v, p in enumerate(tree.parent) if p >= 0)
    return graph
