"""Trees as text: the level form `1,4/100,10`, the nested form `100(10*4)`, FastTree's node list, and a drawing.

TREE   = LEVELS | ROOTS
LEVELS = INT{","INT} ("/" | "_" | " ") INT{","INT}    nodes per level, tokens per node
ROOTS  = NODE{"+"NODE}
NODE   = INT ["(" NODE{","NODE} ")"] ["*" INT]        tokens, children, copies of the node with its subtree
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from treegen.ir import build
from treegen.ir.arrays import Longs, offsets
from treegen.ir.errors import FormatError

if TYPE_CHECKING:
    from treegen.ir.tree import Tree

MOST_NODES = 10_000_000
_LEVELS = re.compile(r"(\d+(?:,\d+)*)[/_ ](\d+(?:,\d+)*)")
_TOKEN = re.compile(r"\d+|[(),*+]")

Block: TypeAlias = tuple[Longs, Longs]
"""Parents (-1: open) and tokens of a finished subtree, numbered from 0 in preorder."""
Shape: TypeAlias = tuple[int, tuple[int, ...], tuple[tuple[int, int], ...]]
"""A subtree up to identity: tokens, sees of its rows, and (shape id, copies) of its runs of equal children."""


def parse(text: str) -> build.Parts:
    """Parents, tokens and default rows of a TREE text; raises FormatError with the place of the first mistake."""
    if not isinstance(text, str):
        raise FormatError("tree", text, "is not a text", "write levels 1,4/100,10 or nodes 100(10*4)")
    stripped = text.strip()
    levels = _LEVELS.fullmatch(stripped)
    if levels:
        counts, lengths = ([_integer(number, text) for number in part.split(",")] for part in levels.groups())
        _check_size(sum(counts), text)
        return build.from_levels(counts, lengths)
    return _parse_nested(stripped)


class _Reader:
    """The tokens of a nested text, one after another."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [(match.group(), match.start()) for match in _TOKEN.finditer(text)]
        self._cursor = 0
        place = 0
        for word, start in self._tokens:
            if start != place:
                break
            place += len(word)
        # What lies behind the first foreign character is never reached: `expected` reports the character.
        self._tokens = [token for token in self._tokens if token[1] < place]
        self._end = place

    @property
    def at_end(self) -> bool:
        """Whether the whole text is read."""
        return self._cursor == len(self._tokens) and self._end == len(self._text)

    def take(self, symbol: str) -> bool:
        """Steps over `symbol` if it comes next."""
        found = self._cursor < len(self._tokens) and self._tokens[self._cursor][0] == symbol
        self._cursor += found
        return found

    def number(self, what: str, low: int) -> int:
        """The number that comes next. Raises FormatError."""
        word = self._tokens[self._cursor][0] if self._cursor < len(self._tokens) else ""
        if not word.isdigit() or int(word[:11]) < low:
            raise self.expected(what)
        self._cursor += 1
        return _integer(word, self._text)

    def expected(self, what: str) -> FormatError:
        """The error for a text that goes on differently."""
        place = self._tokens[self._cursor][1] if self._cursor < len(self._tokens) else self._end
        found = f"{self._text[place]!r} at position {place}" if place < len(self._text) else "the end"
        fix = "write levels 1,4/100,10 or nodes 100(10*4)"
        return FormatError("tree", self._text, f"expected {what}, found {found}", fix)


class _Siblings:
    """Siblings being read: the tokens of the current one, and the finished blocks of those before it."""

    def __init__(self) -> None:
        self.tokens = 0
        self.blocks: list[Block] = []
        self._nodes = 0

    def close(self, children: list[Block], copies: int, text: str) -> None:
        """Finishes the current sibling with these children and appends its copies to the blocks before it."""
        parents, tokens = _joined(children, 0, 1)
        block = (np.append(-1, parents), np.append(self.tokens, tokens))
        self._nodes += copies * len(block[0])
        _check_size(self._nodes, text)
        self.blocks += [block] * copies


def _parse_nested(text: str) -> build.Parts:
    reader = _Reader(text)
    stack = [_Siblings()]  # one entry per open parenthesis, the roots' first
    while True:
        stack[-1].tokens = reader.number("a number of tokens", low=0)
        if reader.take("("):
            stack.append(_Siblings())
            continue
        children: list[Block] = []
        # The node is complete, and with it every parent whose parenthesis closes behind it.
        while True:
            copies = reader.number("a positive number of copies", low=1) if reader.take("*") else 1
            stack[-1].close(children, copies, text)
            if len(stack) == 1 or not reader.take(")"):
                break
            children = stack.pop().blocks
        if len(stack) == 1 and reader.at_end:
            parents, tokens = _joined(stack[0].blocks, -1, 0)
            return build.Parts(parents, tokens, None)
        if not reader.take("+" if len(stack) == 1 else ","):
            raise reader.expected("'+' or the end" if len(stack) == 1 else "',' or ')'")


def _joined(blocks: list[Block], root: int, first: int) -> Block:
    """Blocks one after another from node number `first`, their roots under `root`."""
    nothing = np.empty(0, np.int64)
    shifts = first + offsets(np.array([len(parents) for parents, _ in blocks], np.int64))
    parents = [np.where(block[0] < 0, root, block[0] + shift) for block, shift in zip(blocks, shifts[:-1], strict=True)]
    return np.concatenate([nothing, *parents]), np.concatenate([nothing, *(block[1] for block in blocks)])


def _integer(digits: str, text: str) -> int:
    if len(digits) > 10:
        raise FormatError("tree", text, f"the number {digits[:12]}... is too large", "stay below 2^31")
    return int(digits)


def _check_size(nodes: int, text: str) -> None:
    if nodes > MOST_NODES:
        raise FormatError("tree", text, f"describes {nodes} nodes", f"stay at or below {MOST_NODES}")


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
        try:
            parent, node, length, degree = (int(word) for word in words)
        except ValueError:
            reason = f"line {number} is not four integers"
            raise FormatError("tree", " ".join(words), reason, "write 'parent id seqlen children'") from None
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
