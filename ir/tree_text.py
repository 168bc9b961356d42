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
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from treegen.ir import build
from treegen.ir.arrays import check_made
from treegen.ir.errors import FormatError

if TYPE_CHECKING:
    from treegen.ir.tree import Tree

_NUMBER, _BLANKS = re.compile("[0-9]+"), re.compile(r"\s*")
_SIGNED = re.compile("-?[0-9]{1,10}")
_LIST = r"[0-9]+(?:\s*,\s*[0-9]+)*"
_LEVELS = re.compile(rf"({_LIST})(?:\s*[/_]\s*|\s+)({_LIST})")

Shape: TypeAlias = tuple[int, tuple[int, ...], tuple[tuple[int, int], ...]]
"""A subtree up to identity: tokens, sees of its rows, and (shape id, copies) of its runs of equal children."""


def parse(text: str) -> build.Parts:
    """Parents, tokens and default rows of a TREE text; raises FormatError with the place of the first mistake."""
    if not isinstance(text, str):
        raise FormatError("tree", text, "is not a text", "write levels 1,4/100,10 or nodes 100(10*4)")
    stripped = text.strip()
    levels = _LEVELS.fullmatch(stripped)
    if levels:
        counts, lengths = ([_integer(word, text) for word in _NUMBER.findall(part)] for part in levels.groups())
        check_made("tree", text, sum(counts), "nodes", FormatError)
        return build.from_levels(counts, lengths)
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
    """Nodes as they are read, in preorder. Of each its tokens, and how many nodes before it its parent is, 0 for a
    root: the same in all copies of a subtree, but for the one at its top.
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
        """Copies the last subtree, with `node` at its top, until there are so many."""
        size, above = len(self._tokens) - node, self._above[node]
        check_made("tree", self._text, node + size * copies, "nodes", FormatError)
        if copies > 1:
            self._tokens.extend(self._tokens[node:] * (copies - 1))
            self._above.extend(self._above[node:] * (copies - 1))
            if above:
                self._above[node::size] = array("q", range(above, above + size * copies, size))

    def parts(self) -> build.Parts:
        """The tree of these nodes."""
        above = np.frombuffer(self._above, np.int64)
        parents = np.where(above > 0, np.arange(len(above)) - above, -1)
        return build.Parts(parents, np.frombuffer(self._tokens, np.int64), None)


def _parse_nested(text: str) -> build.Parts:
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


def parse_node_list(text: str) -> build.Parts:
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
    return build.Parts(parents, tokens, None)


def write(tree: Tree) -> str | None:
    """The level form if it gives exactly this tree, else the nested form; None when rows are not the default."""
    leaves = np.setdiff1d(np.arange(len(tree.parent)), tree.parent)
    if sorted(zip(tree.row_node.tolist(), tree.row_sees.tolist(), strict=True)) != sorted(
        zip(leaves.tolist(), tree.tokens[leaves].tolist(), strict=True)
    ):
        return None
    return _write_levels(tree) or _write_nested(tree)


def _write_levels(tree: Tree) -> str | None:
    depth = tree.topology.depth
    counts = np.bincount(depth)
    first = np.searchsorted(depth, np.arange(len(counts)))
    if (np.diff(depth) < 0).any():
        return None
    lengths = tree.tokens[first]
    parts = build.from_levels(counts, lengths)
    if not np.array_equal(parts.parents, tree.parent) or not np.array_equal(parts.tokens, tree.tokens):
        return None
    return ",".join(map(str, counts)) + "/" + ",".join(map(str, lengths))


def _write_nested(tree: Tree) -> str:
    roots, shapes = interned(tree)
    pieces: list[str] = []
    pending: list[str | tuple[int, int]] = _listed(roots, "+")
    while pending:
        entry = pending.pop()
        if isinstance(entry, str):
            pieces.append(entry)
            continue
        shape, copies = entry
        tokens, _, children = shapes[shape]
        pieces.append(str(tokens))
        if copies > 1:
            pending.append(f"*{copies}")
        if children:
            pending += [")", *_listed(children, ","), "("]
    return "".join(pieces)


def _listed(runs: tuple[tuple[int, int], ...], separator: str) -> list[str | tuple[int, int]]:
    """Runs with separators between them, reversed for a stack."""
    result: list[str | tuple[int, int]] = []
    for run in reversed(runs):
        result += [run, separator]
    return result[:-1]


def interned(tree: Tree) -> tuple[tuple[tuple[int, int], ...], list[Shape]]:
    """The roots as runs of equal subtrees, and the distinct subtree shapes they refer to."""
    topology = tree.topology
    numbers: dict[Shape, int] = {}
    families: list[list[int]] = [[] for _ in range(len(tree.parent) + 1)]
    for node in topology.nodes_in_preorder[::-1].tolist():
        ranks = slice(topology.rank_lo[node], topology.rank_own[node])
        sees = tuple(tree.row_sees[topology.row_of_rank[ranks]].tolist())
        shape = (int(tree.tokens[node]), sees, _runs(families[node]))
        families[tree.parent[node]].append(numbers.setdefault(shape, len(numbers)))
    return _runs(families[-1]), list(numbers)


def _runs(backwards: list[int]) -> tuple[tuple[int, int], ...]:
    """Shape ids, collected last sibling first, as (id, copies) runs in sibling order."""
    runs: list[tuple[int, int]] = []
    for shape in reversed(backwards):
        if runs and runs[-1][0] == shape:
            runs[-1] = (shape, runs[-1][1] + 1)
        else:
            runs.append((shape, 1))
    return tuple(runs)


def draw(tree: Tree, most_lines: int = 40) -> str:
    """The tree as indented lines, equal neighbouring subtrees drawn once with their number of copies."""
    roots, shapes = interned(tree)
    lines: list[str] = []
    pending = [(run, "", "") for run in reversed(roots)]
    while pending:
        (shape, copies), lead, rest = pending.pop()
        if len(lines) == most_lines:
            lines.append(f"{rest}... {len(pending) + 1} more branches")
            break
        tokens, sees, children = shapes[shape]
        times = f" x{copies}" if copies > 1 else ""
        unit = "token" if tokens == 1 else "tokens"
        lines.append(f"{lead}{tokens} {unit}{times}{_rows_label(sees, tokens)}")
        for index in reversed(range(len(children))):
            last = index == len(children) - 1
            pending.append((children[index], rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  ")))
    return "\n".join(lines)


def _rows_label(sees: tuple[int, ...], tokens: int) -> str:
    if not sees:
        return ""
    if all(count == tokens for count in sees):
        return ", 1 row" if len(sees) == 1 else f", {len(sees)} rows"
    shown = ", ".join(map(str, sees[:4])) + (", ..." if len(sees) > 4 else "")
    return f", {len(sees)} {'row sees' if len(sees) == 1 else 'rows see'} {shown}"
