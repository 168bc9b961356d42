"""Trees as text: the level form `1,4/100,10`, the nested form `100(10*4)`, FastTree's node list, and a drawing.

TREE   = LEVELS | ROOTS
LEVELS = INT{","INT} ("/" | "_" | " ") INT{","INT}    nodes per level, tokens per node
ROOTS  = NODE{"+"NODE}
NODE   = INT ["(" NODE{","NODE} ")"] ["*" INT]        tokens, children, copies of the node with its subtree
INT    = the digits 0 to 9. Blanks may stand between all of these.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from treegen.ir.arrays import check_made
from treegen.ir.errors import FormatError
from treegen.ir.tree.build import Parts, from_levels

if TYPE_CHECKING:
    from treegen.ir.tree import Tree

_NUMBER, _BLANKS = re.compile("[0-9]+"), re.compile(r"\s*")
_SIGNED = re.compile("-?[0-9]{1,10}")
_LIST = r"[0-9]+(?:\s*,\s*[0-9]+)*"
_LEVELS = re.compile(rf"({_LIST})(?:\s*[/_]\s*|\s+)({_LIST})")
_WIDEST_NODE = 36  # columns that a node of a drawing needs, with its rows

Run: TypeAlias = tuple[int, int]
"""The first of equal neighbouring children, and how many there are."""


def parse(text: str) -> Parts:
    """Parents, tokens and default rows of a TREE text; raises FormatError with the place of the first mistake."""
    if not isinstance(text, str):
        raise FormatError("tree", text, "is not a text", "write levels 1,4/100,10 or nodes 100(10*4)")
    stripped = text.strip()
    levels = _LEVELS.fullmatch(stripped)
    if levels:
        counts, lengths = ([_integer(word, text) for word in _NUMBER.findall(part)] for part in levels.groups())
        check_made("tree", text, sum(counts), "nodes", FormatError)
        return from_levels(counts, lengths)
    return _parse_nested(stripped)


class _Reader:
    """What a nested text says, one word after another, with blanks between them left out."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._go_to(0)

    def _go_to(self, place: int) -> None:
        blanks = _BLANKS.match(self._text, place)
        assert blanks is not None
        self._place = blanks.end()

    @property
    def at_end(self) -> bool:
        """Whether the whole text is read."""
        return self._place == len(self._text)

    def take(self, symbol: str) -> bool:
        """Steps over `symbol` if it comes next."""
        found = self._text.startswith(symbol, self._place)
        if found:
            self._go_to(self._place + len(symbol))
        return found

    def number(self, what: str, low: int) -> int:
        """The number that comes next. Raises FormatError."""
        word = _NUMBER.match(self._text, self._place)
        if word is None or int(word[0][:11]) < low:
            raise self.expected(what)
        self._go_to(word.end())
        return _integer(word[0], self._text)

    def expected(self, what: str) -> FormatError:
        """The error for a text that goes on differently."""
        found = "the end" if self.at_end else f"{self._text[self._place]!r} at position {self._place}"
        fix = "write levels 1,4/100,10 or nodes 100(10*4)"
        return FormatError("tree", self._text, f"expected {what}, found {found}", fix)


class _Nodes:
    """Collects nodes in preorder: the tokens of each node, and its distance to its parent (0 for a root).

    Distances are equal in all copies of a subtree, except at their tops.
    """

    def __init__(self, text: str) -> None:
        self._tokens, self._above = array("q"), array("q")
        self._text = text

    def add(self, tokens: int, parent: int | None) -> int:
        """Adds a node, and returns its number."""
        node = len(self._tokens)
        check_made("tree", self._text, node + 1, "nodes", FormatError)
        self._tokens.append(tokens)
        self._above.append(0 if parent is None else node - parent)
        return node

    def repeat(self, node: int, copies: int) -> None:
        """Repeats the last subtree, with `node` at its top, until `copies` of it exist."""
        size, above = len(self._tokens) - node, self._above[node]
        check_made("tree", self._text, node + size * copies, "nodes", FormatError)
        if copies > 1:
            self._tokens.extend(self._tokens[node:] * (copies - 1))
            self._above.extend(self._above[node:] * (copies - 1))
            if above:
                self._above[node::size] = array("q", range(above, above + size * copies, size))

    def parts(self) -> Parts:
        """The tree of these nodes."""
        above = np.frombuffer(self._above, np.int64)
        parents = np.where(above > 0, np.arange(len(above)) - above, -1)
        return Parts(parents, np.frombuffer(self._tokens, np.int64), None)


def _parse_nested(text: str) -> Parts:
    reader, nodes = _Reader(text), _Nodes(text)
    opened: list[int] = []  # the node of every parenthesis that is open
    while True:
        node = nodes.add(reader.number("a number of tokens", low=0), opened[-1] if opened else None)
        if reader.take("("):
            opened.append(node)
            continue
        # The node is complete, and with it every parent whose parenthesis closes behind it.
        while True:
            if reader.take("*"):
                nodes.repeat(node, reader.number("a positive number of copies", low=1))
            if not opened or not reader.take(")"):
                break
            node = opened.pop()
        if not opened and reader.at_end:
            return nodes.parts()
        if not reader.take(",") if opened else not reader.take("+"):
            raise reader.expected("',' or ')'" if opened else "'+' or the end")


def _integer(digits: str, text: str) -> int:
    if len(digits) > 10:
        raise FormatError("tree", text, f"the number {digits[:12]}... is too large", "stay below 2^31")
    return int(digits)


def parse_node_list(text: str) -> Parts:
    """FastTree's text: the node count, then one line `parent id seqlen children` per node."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if not lines or len(lines[0]) != 1 or not re.fullmatch(r"[0-9]{1,9}", lines[0][0]):
        raise FormatError("tree", text[:40], "does not begin with a node count", "give the count on the first line")
    count, body = int(lines[0][0]), lines[1:]
    if count != len(body):
        raise FormatError("tree", f"{len(body)} node lines", f"the first line promises {count}", "complete the file")
    parents, tokens, children = [-1] * count, [-1] * count, [0] * count
    for number, words in enumerate(body, start=2):
        if len(words) != 4 or not all(map(_SIGNED.fullmatch, words)):
            reason = f"line {number} is not four integers"
            raise FormatError("tree", " ".join(words), reason, "write 'parent id seqlen children'")
        parent, node, length, degree = map(int, words)
        if not 0 <= node < count or tokens[node] >= 0 or length < 0:
            reason = f"line {number} repeats a node, or its id or length is out of range"
            raise FormatError("tree", " ".join(words), reason, f"use each id of 0..{count - 1} once")
        parents[node], tokens[node], children[node] = parent, length, degree
    found = np.bincount([parent for parent in parents if 0 <= parent < count], minlength=count).tolist()
    if found != children:
        node = next(v for v in range(count) if found[v] != children[v])
        reason = f"node {node} has {found[node]} children, its line says {children[node]}"
        raise FormatError("tree", f"{count} nodes", reason, "correct the count or the parents")
    return Parts(parents, tokens, None)


def write(tree: Tree) -> str | None:
    """The level form if it gives exactly this tree, else the nested form; None when rows are not the default."""
    if not _has_default_rows(tree):
        return None
    return _write_levels(tree) or "".join(_nested_pieces(tree))


def beginning(tree: Tree, characters: int) -> str | None:
    """The text of a tree, cut soon after this number of characters; None when rows are not the default."""
    if not _has_default_rows(tree):
        return None
    levels = _write_levels(tree)
    if levels:
        return levels
    text = ""
    for piece in _nested_pieces(tree):
        text += piece
        if len(text) > characters:
            break
    return text


def _has_default_rows(tree: Tree) -> bool:
    """Whether every leaf has one row, which sees the whole of it, and no other node has any."""
    inner = np.zeros(len(tree.parent) + 1, bool)
    inner[tree.parent] = True  # the last one stands for what is above roots
    own = np.bincount(tree.row_node, minlength=len(tree.parent))
    return bool((own == ~inner[:-1]).all() and (tree.row_sees == tree.tokens[tree.row_node]).all())


def _write_levels(tree: Tree) -> str | None:
    depth = tree.topology.depth
    counts = np.bincount(depth)
    first = np.searchsorted(depth, np.arange(len(counts)))
    if (np.diff(depth) < 0).any():
        return None
    lengths = tree.tokens[first]
    parts = from_levels(counts, lengths)
    if not np.array_equal(parts.parents, tree.parent) or not np.array_equal(parts.tokens, tree.tokens):
        return None
    return ",".join(map(str, counts)) + "/" + ",".join(map(str, lengths))


def _nested_pieces(tree: Tree) -> Iterator[str]:
    """The nested form, piece by piece."""
    families = _Families(tree)
    pending: list[str | Run] = _listed(families.below(-1), "+")
    while pending:
        entry = pending.pop()
        if isinstance(entry, str):
            yield entry
            continue
        node, copies = entry
        yield str(families.tokens[node])
        if copies > 1:
            pending.append(f"*{copies}")
        children = families.below(node)
        if children:
            pending += [")", *_listed(children, ","), "("]


def _listed(runs: list[Run], separator: str) -> list[str | Run]:
    """Runs with separators between them, reversed for a stack."""
    result: list[str | Run] = []
    for run in reversed(runs):
        result += [run, separator]
    return result[:-1]


class _Families:
    """Children of nodes, where equal neighbours, with all that is below them, are one run. Subtrees are compared only
    when they are asked for: each as the stretch of nodes that it is in depth-first order.
    """

    def __init__(self, tree: Tree) -> None:
        topology = tree.topology
        self._preorder = topology.preorder
        self._order = order = topology.nodes_in_preorder
        self._subtree = topology.subtree
        # Of the nodes in depth-first order: how deep they are, their tokens, and their rows.
        self._columns = topology.depth[order], tree.tokens[order], (topology.rank_own - topology.rank_lo)[order]
        self._sees = tree.row_sees[topology.row_of_rank]
        self._rank_lo, self._rank_own, self._rank_hi = topology.rank_lo, topology.rank_own, topology.rank_hi
        self.tokens = tree.tokens

    def sees(self, node: int) -> list[int]:
        """What the rows of a node see of it."""
        own: list[int] = self._sees[self._rank_lo[node] : self._rank_own[node]].tolist()
        return own

    def below(self, node: int) -> list[Run]:
        """The runs of a node's children, or for -1 of the roots: the first of every run, and its copies."""
        if node < 0:
            place, end = 0, len(self._order)
        else:
            place = int(self._preorder[node])
            place, end = place + 1, place + int(self._subtree[node])
        runs: list[Run] = []
        while place < end:
            child = int(self._order[place])
            if runs and self._are_equal(runs[-1][0], child):
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((child, 1))
            place += int(self._subtree[child])
        return runs

    def _are_equal(self, one: int, other: int) -> bool:
        """Whether siblings have equal subtrees."""
        size = int(self._subtree[one])
        if size != self._subtree[other] or self.tokens[one] != self.tokens[other]:
            return False
        begin, second = int(self._preorder[one]), int(self._preorder[other])
        sees, others = (self._sees[self._rank_lo[node] : self._rank_hi[node]] for node in (one, other))
        return np.array_equal(sees, others) and all(
            np.array_equal(column[begin : begin + size], column[second : second + size]) for column in self._columns
        )


def draw(tree: Tree, most_lines: int = 40, width: int | None = None) -> str:
    """The tree as indented lines, equal neighbouring subtrees drawn once with their number of copies; what is too deep
    to be drawn in `width` columns, if these are given, is counted.
    """
    families, subtree = _Families(tree), tree.topology.subtree
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
