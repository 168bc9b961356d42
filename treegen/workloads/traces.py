"""Workloads: named decodings. Each is a sequence of segments in which nodes only grow."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from treegen.ir.arrays import Ints, Longs, frozen, offsets
from treegen.ir.errors import FormatError, TreeError
from treegen.ir.tree import Tree
from treegen.workloads import generate
from treegen.workloads.generate import check_positive
from treegen.workloads.recorded_decodings import Draft, Template, load_course

_OPTIONS = {
    "few-shot": {"prompt": 4000, "width": 20, "steps": 400},
    "reasoning": {"seed": 0, "depth": 5, "width": 10, "prompt": 1000, "thought": 300},
    "speculative": {"seed": 0, "tokens": 32, "prompt": 1000, "steps": 400, "accepted": 3},
}
_RECORDED_DRAFT = {"prompt": 1000}
_KIND = re.compile(rf"({'|'.join(_OPTIONS)})(?::(.*))?", re.DOTALL)
_FILE = re.compile(r"(?P<path>.+?)(?:#(?P<index>[0-9]{1,9}))?(?::(?P<options>\w+=[^/]*))?", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False)
class CourseSegment:
    """The steps of a decoding between two events, in which nodes grow and nothing else changes.

    Every row sees all of its node.

    Args:
        first: The first step.
        tree: The tree at the first step.
        growing: The nodes that grow.
        grown: `grown[i]` is the number of tokens that each of these nodes has gained by step `first + i`: one per step
            in plain decoding, the accepted tokens in speculative decoding.
    """

    first: int
    tree: Tree
    growing: Ints
    grown: Longs

    @property
    def last(self) -> int:
        """The last step."""
        return self.first + len(self.grown) - 1

    def at(self, step: int) -> Tree:
        """Makes the tree at a step. Raises TreeError outside first..last."""
        if not self.first <= step <= self.last:
            raise TreeError("step", step, "is outside the segment", f"choose a step of {self.first}..{self.last}")
        if step == self.first:
            return self.tree
        tokens = self.tree.tokens.astype(np.int64)
        tokens[self.growing] += self.grown[step - self.first]
        return self.tree.lengthened(tokens)


@dataclass(frozen=True, slots=True)
class Decode:
    """One decoding from its first to its last step; each call of `segments()` starts from the first segment."""

    name: str
    segments: Callable[[], Iterator[CourseSegment]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Decodings whose IO is counted together."""

    name: str
    decodes: tuple[Decode, ...]


def few_shot(prompt: int = 4000, width: int = 20, steps: int = 400) -> Decode:
    """Makes the decoding of `width` branches over one prompt, each with t tokens at step t (DeFT, table 6).

    Args:
        prompt: Tokens of the prompt.
        width: Number of branches.
        steps: Number of decoding steps.

    Raises:
        TreeError: An argument is not a positive integer.
    """
    tree = generate.few_shot(prompt, width, 1)
    check_positive(steps=steps)
    segment = CourseSegment(1, tree, frozen(np.arange(1, 1 + width)), np.arange(steps))
    return Decode("few-shot", lambda: iter((segment,)))


def replay(template: Template, name: str = "reasoning") -> Decode:
    """Makes the decoding of a template, in segments between steps where a node begins or ends.

    Steps without a row are left out.
    """

    def segments() -> Iterator[CourseSegment]:
        alive = template.end >= template.start
        events = np.concatenate([template.start[alive], template.end[alive].astype(np.int64) + 1])
        first, end = template.steps[0], template.steps[-1] + 1
        borders = np.unique(np.append(events[(events > first) & (events < end)], (first, end))).tolist()
        for begin, until in pairwise(borders):
            if (alive & (template.start <= begin) & (begin <= template.end)).any():
                tree = template.at(begin)
                yield CourseSegment(begin, tree, tree.row_node, np.arange(until - begin))

    return Decode(name, segments)


def verification(draft: Draft, prompt: int = 1000, name: str = "speculative") -> Decode:
    """Makes a speculative decoding: at every step the same token tree over a context that grows by accepted tokens.

    Args:
        draft: The token tree, and the number of accepted tokens of each step.
        prompt: Tokens of the context at step 1.
        name: The name of the decoding.

    Raises:
        TreeError: `prompt` is not a positive integer, or the token tree is impossible.
    """
    check_positive(prompt=prompt)
    tree = Tree.from_token_tree(draft.paths, prompt)
    segment = CourseSegment(1, tree, frozen(np.zeros(1)), offsets(np.array(draft.accepted, np.int64))[:-1])
    return Decode(name, lambda: iter((segment,)))


def is_generated(text: str) -> bool:
    """Returns whether a text names a generated decoding, such as `few-shot:width=30`."""
    return _KIND.fullmatch(text) is not None


def workload_from(text: str) -> Workload:
    """Makes the workload that a WORKLOAD text names.

    Args:
        text: One of

            - `few-shot`, `reasoning` or `speculative`, with options after a colon: `few-shot:width=30,steps=100`;
            - a file of reasoning templates, all of them (`FILE`) or one (`FILE#INDEX`);
            - a file of a recorded speculative decoding (`FILE` or `FILE:prompt=500`).

    Raises:
        FormatError, TreeError: The text or the file is wrong.
    """
    kind = _KIND.fullmatch(text)
    if kind:
        options = options_of(text, kind[2], _OPTIONS[kind[1]])
        return Workload(text, (_generated(kind[1], options),))
    parts: Any = {"path": text, "index": None, "options": None}
    if not os.path.exists(text):
        parts = _FILE.fullmatch(text) or parts
    path, index = parts["path"], parts["index"]
    if not os.path.exists(path):
        reason = "is neither a kind of workload nor a file"
        raise FormatError("workload", text, reason, f"use {', '.join(_OPTIONS)} or name a file")
    course = load_course(path)
    if isinstance(course, Draft):
        if index is not None:
            raise FormatError("workload", text, "selects from a file that holds one decoding", f"give {path}")
        return Workload(text, (verification(course, options_of(text, parts["options"], _RECORDED_DRAFT)["prompt"]),))
    if parts["options"] is not None:
        raise FormatError("workload", text, "gives options to recorded templates", f"give {path}")
    if index is not None and int(index) >= len(course):
        raise FormatError("workload", text, f"names a file of {len(course)} templates", "choose a lower index")
    chosen = range(len(course)) if index is None else (int(index),)
    return Workload(text, tuple(replay(course[number], f"{path}#{number}") for number in chosen))


def _generated(kind: str, options: dict[str, int]) -> Decode:
    if kind == "few-shot":
        return few_shot(**options)
    if kind == "reasoning":
        return replay(generate.reasoning_template(**options))
    check_positive(steps=options["steps"], accepted=options["accepted"])
    tree = generate.speculative(options["seed"], options["tokens"], options["prompt"])
    segment = CourseSegment(1, tree, frozen(np.zeros(1)), np.arange(options["steps"]) * options["accepted"])
    return Decode(kind, lambda: iter((segment,)))


def options_of(workload: str, text: str | None, defaults: dict[str, int]) -> dict[str, int]:
    """Reads the options of a workload.

    Args:
        workload: The whole text, for errors.
        text: `name=value,name=value`; None for no options.
        defaults: The options that there are, with their values.

    Returns:
        `defaults` with the changes of the text.

    Raises:
        FormatError: An option is unknown, given twice or not a whole number.
    """
    found: dict[str, int] = {}
    for entry in [] if text is None else text.split(","):
        name, _, value = entry.partition("=")
        if name not in defaults or name in found:
            reason = f"has no option {name!r}" if name not in defaults else f"gives {name} twice"
            raise FormatError("workload", workload, reason, f"use {', '.join(f'{n}={v}' for n, v in defaults.items())}")
        if not re.fullmatch("[0-9]{1,9}", value):
            reason = f"gives {name} a value that is not a whole number"
            raise FormatError("workload", workload, reason, f"write {name}={defaults[name]}")
        found[name] = int(value)
    return {**defaults, **found}
