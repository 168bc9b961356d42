"""Trees as text: the level form `1,4/100,10`, the nested form `100(10*4)`, and FastTree's node list.

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
from typing import TYPE_CHECKING

import numpy as np

from treegen.ir.arrays import check_made
from treegen.ir.errors import FormatError
from treegen.ir.tree.build import Parts, from_levels
from treegen.ir.tree.families import Families, Run

if TYPE_CHECKING:
    from treegen.ir.tree import Tree

_NUMBER, _BLANKS = re.compile("[0-9]+"), re.compile(r"\s*")
_SIGNED = re.compile("-?[0-9]{1,10}")
_LIST = r"[0-9]+(?:\s*,\s*[0-9]+)*"
_LEVELS = re.compile(rf"({_LIST})(?:\s*[/_]\s*|\s+)({_LIST})")


def parse(text: str) -> Parts:
    """Returns the parts of the tree of a TREE text. Raises FormatError with the place of the first mistake."""
    if not isinstance(text, str):
        raise FormatError("tree", text, "is not a text", "write levels 1,4/100,10 or nodes 100(10*4)")
    stripped = text.strip()
    levels = _LEVELS.fullmatch(stripped)
    if levels:
        counts, lengths = ([_integer(word, text) for word in _NUMBER.findall(part)] for part in levels.groups())
        check_made("tree", text, sum(counts), "nodes", FormatError)
        return from_levels(counts, lengths)
    if "/" in stripped or "_" in stripped:
        raise _misread_levels(stripped)
    return _parse_nested(stripped)


class _Reader:
    """Reads a nested text word by word, leaving out blanks."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._go_to(0)

    def _go_to(self, place: int) -> None:
        blanks = _BLANKS.match(self._text, place)
        assert blanks is not None
        self._place = blanks.end()

    @property
    def at_end(self) -> bool:
        """Whether the whole text has been read."""
        return self._place == len(self._text)

    def take(self, symbol: str) -> bool:
        """Steps over `symbol` if it comes next, and tells whether it did."""
        found = self._text.startswith(symbol, self._place)
        if found:
            self._go_to(self._place + len(symbol))
        return found

    def number(self, what: str, low: int) -> int:
        """Returns the number that comes next. Raises FormatError for anything else. what: its name in the message."""
        word = _NUMBER.match(self._text, self._place)
        if word is None or int(word[0][:11]) < low:
            raise self.expected(what)
        self._go_to(word.end())
        return _integer(word[0], self._text)

    def expected(self, what: str) -> FormatError:
        """Returns the error for a text that goes on differently."""
        found = "the end" if self.at_end else f"{self._text[self._place]!r} at position {self._place}"
        fix = "write levels 1,4/100,10 or nodes 100(10*4)"
        return FormatError("tree", self._text, f"expected {what}, found {found}", fix)


def _misread_levels(text: str) -> FormatError:
    """Returns the error, with the place of the first mistake, for a text that is nearly in the level form."""
    reader = _Reader(text)
    reader.number("a number of nodes", low=0)
    while reader.take(","):
        reader.number("a number of nodes", low=0)
    if not (reader.take("/") or reader.take("_")):
        return reader.expected("',' or '/'")
    reader.number("a number of tokens", low=0)
    while reader.take(","):
        reader.number("a number of tokens", low=0)
    return reader.expected("',' or the end")


class _Nodes:
    """Collects nodes in preorder: the tokens of each node, and its distance to its parent (0 for a root).

    A subtree is copied by copying its distances: only those of its top differ between copies.

        5(3,2)*2   tokens   5 3 2 5 3 2
        below 9    distance 1 1 2 4 1 2      the tops are 1 and 4 places after their parent, the 9
    """

    def __init__(self, text: str) -> None:
        self._tokens, self._above = array("q"), array("q")
        self._text = text

    def add(self, tokens: int, parent: int | None) -> int:
        """Adds a node and returns its number."""
        node = len(self._tokens)
        check_made("tree", self._text, node + 1, "nodes", FormatError)
        self._tokens.append(tokens)
        self._above.append(0 if parent is None else node - parent)
        return node

    def repeat(self, node: int, copies: int) -> None:
        """Repeats the last subtree, which begins with `node`, until there are `copies` of it."""
        size, above = len(self._tokens) - node, self._above[node]
        check_made("tree", self._text, node + size * copies, "nodes", FormatError)
        if copies > 1:
            self._tokens.extend(self._tokens[node:] * (copies - 1))
            self._above.extend(self._above[node:] * (copies - 1))
            if above:
                self._above[node::size] = array("q", range(above, above + size * copies, size))

    def parts(self) -> Parts:
        """Returns the tree of these nodes."""
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
        # The node is complete, and so is every parent whose parenthesis closes after it.
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
    """Returns the tree of FastTree's text: the number of nodes, then a line `parent id seqlen children` per node."""
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
    """Returns the level form if it gives exactly this tree, else the nested form; None if rows are not the default."""
    if not _has_default_rows(tree):
        return None
    return _write_levels(tree) or "".join(_nested_parts(tree))


def beginning(tree: Tree, characters: int) -> str | None:
    """Returns the text of a tree, cut soon after this number of characters; None if rows are not the default."""
    if not _has_default_rows(tree):
        return None
    levels = _write_levels(tree)
    if levels:
        return levels
    text = ""
    for part in _nested_parts(tree):
        text += part
        if len(text) > characters:
            break
    return text


def _has_default_rows(tree: Tree) -> bool:
    """Tells whether every leaf has one row, which sees all of it, and no other node has any."""
    inner = np.zeros(len(tree.parent) + 1, bool)
    inner[tree.parent] = True  # the parent of roots, -1, is the last entry
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


def _nested_parts(tree: Tree) -> Iterator[str]:
    """Yields the nested form part by part."""
    families = Families(tree)
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
    """Returns the runs with separators between them, reversed for a stack."""
    result: list[str | Run] = []
    for run in reversed(runs):
        result += [run, separator]
    return result[:-1]
