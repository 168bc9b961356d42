"""Recorded decodings: templates of reasoning trees, and token trees of speculative decoding, with their JSON files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treegen.ir.arrays import INT32_MAX, MOST_MADE, Ints, frozen, int32_array
from treegen.ir.errors import FormatError, TreeError
from treegen.ir.tree import Tree
from treegen.text_files import inside, parsed_json, read_text, shown

_TEMPLATE_FIELDS = ("parent", "tokens", "start", "end")
_DRAFT_FIELDS = frozenset({"paths", "accepted"})


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """The whole course of a decoding tree (DeFT, section 4: templates from Graph-of-Thoughts runs).

    Node v gains one token in every step `start[v]..end[v]`, both included, and its query row is alive in exactly these
    steps. The prompt is a root that grows in the steps up to 0. Decoding begins with step 1 and has at most 10,000,000
    steps. A node without tokens ends at `start - 1`.

    Args:
        parent: `[nodes]`: the parent of each node, -1 for a root; parents come before their children.
        start: `[nodes]`: the step in which each node gets its first token.
        end: `[nodes]`: the step in which each node gets its last token.

    Raises:
        FormatError: The arrays describe no decoding.
    """

    parent: Ints
    start: Ints
    end: Ints

    def __post_init__(self) -> None:
        nodes = len(self.parent)
        for name, low, high in (("parent", -1, nodes - 1), ("start", -INT32_MAX, INT32_MAX), ("end", 0, MOST_MADE)):
            object.__setattr__(
                self, name, int32_array(name, getattr(self, name), low=low, high=high, error=FormatError)
            )
            if len(getattr(self, name)) != nodes or nodes == 0:
                reason = f"does not match {nodes} nodes" if nodes else "a template needs at least one node"
                raise FormatError(name, f"{len(getattr(self, name))} entries", reason, "give one entry per node")
        if (self.end < self.start).all():
            raise FormatError("end", f"{nodes} entries", "leaves every node without tokens", "give one node a token")
        above = np.maximum(self.parent, 0)
        later = self.parent >= np.arange(nodes)
        self._reject("parent", later, "does not come before the node", "number parents before their children")
        empty = self.end.astype(np.int64) < self.start.astype(np.int64) - 1
        self._reject("end", empty, "lies before the node's start", "end a node that has no tokens at start - 1")
        late = (self.parent >= 0) & (self.start <= self.end[above])
        self._reject("start", late, "is not after its parent's end", "start a node when its parent is complete")

    def _reject(self, name: str, wrong: np.ndarray[Any, np.dtype[np.bool_]], reason: str, fix: str) -> None:
        if wrong.any():
            node = int(wrong.argmax())
            raise FormatError(f"{name}[{node}]", int(getattr(self, name)[node]), reason, fix)

    @property
    def steps(self) -> range:
        """The decoding steps from first to last; step 0 alone for a template with only a prompt."""
        last = int(self.end.max())
        return range(min(max(1, int(self.start[self.end > 0].min(initial=last))), last), last + 1)

    @property
    def middle(self) -> int:
        """The middle of `steps`, or the next step with an alive row."""
        step = (self.steps[0] + self.steps[-1]) // 2
        return max(step, int(self.start[(self.end >= step) & (self.end >= self.start)].min()))

    def nodes_at(self, step: int) -> Ints:
        """Lists the template's nodes that become nodes 0, 1, ... of `at(step)`: nodes with an alive row, and ancestors.

        Raises TreeError when no row is alive.
        """
        kept = self._alive(step)
        if not kept.any():
            first, last = self.steps[0], self.steps[-1]
            raise TreeError("step", step, "has no row that is alive", f"choose a step of {first}..{last}")
        above = self.parent[kept]
        while len(above := np.unique(above[above >= 0])):
            above = above[~kept[above]]
            kept[above] = True
            above = self.parent[above]
        return frozen(np.flatnonzero(kept))

    def at(self, step: int) -> Tree:
        """Makes the tree at a step.

        It has the alive nodes with their tokens up to this step, a row at the end of each, and their complete
        ancestors. Branches without an alive row are pruned; the others keep their order. Rows are in node order.

        Raises:
            TreeError: No row is alive at this step.
        """
        kept = self.nodes_at(step)
        number = np.full(len(self.parent) + 1, -1)  # one more, so that a root's parent -1 stays -1
        number[kept] = np.arange(len(kept))
        tokens = (np.minimum(self.end, step).astype(np.int64) - self.start + 1)[kept]
        # Alive nodes have no children yet, and their ancestors do: the default rows, one per leaf, are the right ones.
        return Tree.from_parents(number[self.parent[kept]], tokens)

    def _alive(self, step: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        alive: np.ndarray[Any, np.dtype[np.bool_]] = (self.start <= step) & (step <= self.end)
        return alive


def load_templates(path: str | Path) -> list[Template]:
    """Reads templates from a JSON file.

    Args:
        path: A file with an object that has lists `parent`, `tokens`, `start` and `end`, with one entry per node; or
            with a list of such objects.

    Raises:
        FormatError: The file cannot be read, or holds something else.
    """
    return templates_in(parsed_json(read_text(path), path), path)


@dataclass(frozen=True, slots=True)
class Draft:
    """A recorded speculative decoding.

    Args:
        paths: The paths of the token tree (see Tree.from_token_tree).
        accepted: The number of accepted tokens of each step.
    """

    paths: tuple[tuple[int, ...], ...]
    accepted: tuple[int, ...]


def load_course(path: str | Path) -> list[Template] | Draft:
    """Reads a recorded decoding.

    Args:
        path: A file of templates, as `load_templates` reads them, or a JSON object with `paths` and `accepted`.
            `accepted` may also be a list of equal lists, one for each run.

    Raises:
        FormatError: The file cannot be read, or holds something else.
    """
    value = parsed_json(read_text(path), path)
    if isinstance(value, dict) and _DRAFT_FIELDS & set(value):
        with inside(path):
            return _draft(value)
    return templates_in(value, path)


def templates_in(value: Any, path: str | Path) -> list[Template]:
    """Makes the templates in the JSON value of a file. Raises FormatError, which names the file."""
    listed = value if isinstance(value, list) else [value]
    if not listed:
        raise FormatError("path", shown(path), "holds an empty list, and no trees", "name another file")
    result = []
    for index, entry in enumerate(listed):
        with inside(f"{path}#{index}"):
            result.append(_template(entry))
    return result


def _template(entry: Any) -> Template:
    if not isinstance(entry, dict):
        fields = ", ".join(_TEMPLATE_FIELDS)
        raise FormatError("template", entry, "is not a JSON object", f"give an object with {fields}")
    for name in (*_TEMPLATE_FIELDS, *entry):
        if name not in entry:
            raise FormatError(name, None, "is missing", f"give all of {', '.join(_TEMPLATE_FIELDS)}")
        if name not in _TEMPLATE_FIELDS:
            raise FormatError(name, entry[name], "is an unknown field", f"use {', '.join(_TEMPLATE_FIELDS)}")
        if not isinstance(entry[name], list):
            raise FormatError(name, entry[name], "is not a list", "give one integer per node")
    template = Template(entry["parent"], entry["start"], entry["end"])
    tokens = int32_array("tokens", entry["tokens"], low=0, error=FormatError)
    expected = template.end.astype(np.int64) - template.start + 1
    if len(tokens) != len(expected):
        raise FormatError("tokens", f"{len(tokens)} entries", f"does not match {len(expected)} nodes", "complete it")
    wrong = np.flatnonzero(tokens != expected)
    if len(wrong):
        node = int(wrong[0])
        reason = f"differs from end - start + 1 = {expected[node]}"
        raise FormatError(f"tokens[{node}]", int(tokens[node]), reason, "correct the node")
    return template


def _draft(entry: dict[str, Any]) -> Draft:
    for name in (*sorted(_DRAFT_FIELDS), *entry):
        if name not in entry or not isinstance(entry[name], list):
            raise FormatError(name, entry.get(name), "is missing or not a list", "give lists paths and accepted")
        if name not in _DRAFT_FIELDS:
            raise FormatError(name, "a list", "is an unknown field", "use paths and accepted")
    paths = [
        tuple(int32_array(f"paths[{index}]", path, low=0, error=FormatError).tolist())
        for index, path in enumerate(entry["paths"])
    ]
    runs = entry["accepted"] if entry["accepted"] and isinstance(entry["accepted"][0], list) else [entry["accepted"]]
    for index, run in enumerate(runs):
        if run != runs[0]:
            raise FormatError(f"accepted[{index}]", "a list", "differs from the first", "keep one list")
    accepted = int32_array("accepted", runs[0], low=0, error=FormatError)
    if len(accepted) == 0:
        raise FormatError("accepted", [], "has no steps", "give the accepted length of every step")
    return Draft(tuple(paths), tuple(accepted.tolist()))
