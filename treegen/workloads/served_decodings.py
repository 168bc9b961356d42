"""Served decodings: the decodings that `treegen run` replays with a model, by name, with the lengths of their prompts.

grpo             8 prompts, 16 samples of each            prompts are roots
system-prompts   459 ── 38 ── 584 ── 2,112 ── answers     prompts are paths through four levels of the tree
beams            a prompt, and a search that decides      no tree: the model's logits make one
speculative-64   a prompt, and 63 drafts in each step     a tree of drafts, and how many tokens each step accepted
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from treegen.ir.arrays import positive_int, set_positive_ints
from treegen.ir.errors import FormatError
from treegen.ir.scalars import is_finite
from treegen.ir.tree import Tree
from treegen.ir.tree.build import token_tree_parents
from treegen.text_files import shown
from treegen.workloads import generate
from treegen.workloads.recorded_decodings import Draft, Template, load_course, load_templates
from treegen.workloads.specs import trees_of
from treegen.workloads.traces import options_of

_NAME = re.compile(r"(?P<name>[a-z][a-z0-9-]*)(?::(?P<options>.*))?", re.DOTALL)
_RECORDED = {
    "reasoning-sorting": "deft/reasoning_sorting128.json",
    "reasoning-docmerge": "deft/reasoning_docmerge.json",
    "reasoning-keyword": "deft/reasoning_keyword.json",
}
_DRAFTS = {
    "speculative": "deft/speculative_64.json",
    **{f"speculative-{tokens}": f"deft/speculative_{tokens}.json" for tokens in (32, 64, 128, 256)},
}
_DRAFT_OPTIONS = {"prompts": 1, "prompt": 1000}
_BEAMS = "beams"
_BEAM_OPTIONS = {"width": 32, "prompt": 8000, "tokens": 200}
_SYSTEM_PROMPT = 3193
"""Tokens of the system prompt of FastTree's workloads; `system-prompts` has it in four levels."""


@dataclass(frozen=True, slots=True)
class ForcedDecoding:
    """A decoding whose branches a tree gives.

    Args:
        name: The name in results.
        tree: The tree.
        prompt_levels: The levels of the tree whose tokens are prompts. The nodes below them are decoded.
    """

    name: str
    tree: Tree
    prompt_levels: int = 1

    @property
    def most_tokens(self) -> int:
        """The most tokens of a prompt, and the most tokens that a branch may add to it."""
        depth, parents = self.tree.topology.depth, self.tree.parent.tolist()
        own = np.where(np.array([depth < self.prompt_levels, depth >= self.prompt_levels]), self.tree.tokens, 0)
        paths = np.zeros((2, len(parents) + 1), np.int64)  # one more for the parent -1 of roots
        for node in np.argsort(depth, kind="stable").tolist():
            paths[:, node] = paths[:, parents[node]] + own[:, node]
        return int(paths.max(1).sum())

    def scaled(self, scale: float) -> ForcedDecoding:
        """Multiplies the tokens of each node, down to 1 at least. Raises FormatError for an impossible factor."""
        tokens = [_scaled(count, scale) if count else 0 for count in self.tree.tokens.tolist()]
        return replace(self, tree=Tree.from_parents(self.tree.parent.tolist(), tokens))


@dataclass(frozen=True, slots=True)
class BeamDecoding:
    """A beam search over one prompt, by the model's logits.

    Args:
        name: The name in results.
        width: Beams.
        prompt: Tokens of the prompt.
        tokens: Tokens at which the search ends.
    """

    name: str
    width: int
    prompt: int
    tokens: int

    def __post_init__(self) -> None:
        set_positive_ints(self, ("width", "prompt", "tokens"), FormatError)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a beam."""
        return self.prompt + self.tokens

    def scaled(self, scale: float) -> BeamDecoding:
        """Multiplies the tokens, down to 1 at least. Raises FormatError for an impossible factor."""
        return replace(self, prompt=_scaled(self.prompt, scale), tokens=_scaled(self.tokens, scale))


@dataclass(frozen=True, slots=True)
class DraftDecoding:
    """A recorded speculative decoding.

    Args:
        name: The name in results.
        prompts: The number of prompts, which are decoded side by side.
        prompt: Tokens of each prompt.
        parents: The number of the draft that each draft follows, -1 for the last token; the same in each step.
        accepted: Tokens that each step adds: the accepted drafts and one more.
    """

    name: str
    prompts: int
    prompt: int
    parents: tuple[int, ...]
    accepted: tuple[int, ...]

    def __post_init__(self) -> None:
        set_positive_ints(self, ("prompts", "prompt"), FormatError)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a branch, with the drafts of its last step."""
        return self.prompt + 1 + sum(self.accepted) + len(self.parents)

    def scaled(self, scale: float) -> DraftDecoding:
        """Multiplies the prompt's tokens and the steps, down to 1 at least; steps have all their drafts.

        Raises FormatError for an impossible factor.
        """
        steps = _scaled(len(self.accepted), scale)
        return replace(self, prompt=_scaled(self.prompt, scale), accepted=self.accepted[:steps])


ServedDecoding = ForcedDecoding | BeamDecoding | DraftDecoding
"""What `treegen run` decodes."""


def served_decoding(text: str, data: Path | None = None) -> ServedDecoding:
    """Makes the decoding that a WORKLOAD text of `treegen run` names.

    Args:
        text: One of

            - `few-shot`, `few-shot-30` and `few-shot-50` (DeFT: branches over one prompt), `grpo`, `system-prompts`,
              `shot-sets`, `chains`, `documents`, `beams` or `reasoning`, with options after a colon:
              `grpo:prompts=4,samples=8`;
            - `reasoning-sorting`, `reasoning-docmerge` or `reasoning-keyword`, a recorded tree, by default the first of
              those with the most nodes; `reasoning-sorting:3` chooses one;
            - `speculative-32`, `-64`, `-128` or `-256`, a recorded speculative decoding with trees of that many tokens;
              `speculative` has 64;
            - whatever `trees_of` takes: the last tree of it.
        data: The folder of recorded trees.

    Raises:
        FormatError, TreeError: The text or a file is wrong, or the folder is missing.
    """
    named = _NAME.fullmatch(text)
    name, options = (named["name"], named["options"]) if named else ("", None)
    if name in _RECORDED:
        return ForcedDecoding(text, _recorded(text, name, options, data))
    if name in _DRAFTS:
        return _drafts(text, _DRAFTS[name], options_of(text, options, _DRAFT_OPTIONS), data)
    if name == _BEAMS:
        return BeamDecoding(text, **options_of(text, options, _BEAM_OPTIONS))
    if name in _FORESTS:
        defaults, make = _FORESTS[name]
        given = options_of(text, options, defaults)
        for option, value in given.items():
            if option != "seed":
                positive_int(option, value, FormatError)
        tree, prompt_levels = make(given)
        return ForcedDecoding(text, tree, prompt_levels)
    *_, (found, tree) = trees_of(text)
    return ForcedDecoding(found, tree)


def _recorded(text: str, name: str, index: str | None, data: Path | None) -> Tree:
    """Returns the whole tree of a recorded decoding. Raises FormatError."""
    templates = load_templates(_file(text, _RECORDED[name], data))
    if index is None:  # runs that were cut off have fewer nodes than the others
        most = max(len(template.parent) for template in templates)
        return _whole(next(template for template in templates if len(template.parent) == most))
    if not re.fullmatch("[0-9]{1,9}", index) or int(index) >= len(templates):
        reason = f"chooses none of the {len(templates)} trees"
        raise FormatError("workload", text, reason, f"write {name}:0 to {name}:{len(templates) - 1}")
    return _whole(templates[int(index)])


def _drafts(text: str, path: str, given: dict[str, int], data: Path | None) -> DraftDecoding:
    """Returns a recorded speculative decoding. Raises FormatError."""
    found = _file(text, path, data)
    course = load_course(found)
    if not isinstance(course, Draft):
        raise FormatError("data", shown(found), "holds no speculative decoding", "give one with paths and accepted")
    paths = sorted(course.paths, key=len)  # parents before their children
    parents = tuple(place - 1 for place in token_tree_parents(paths)[1:])
    return DraftDecoding(text, given["prompts"], given["prompt"], parents, course.accepted)


def _file(text: str, path: str, data: Path | None) -> Path:
    """Returns the place of a recorded file. Raises FormatError where it is missing."""
    fix = "name the folder of recorded trees with --data or TREEGEN_DATA"
    if data is None:
        raise FormatError("workload", text, "is recorded, and no folder is given", fix)
    if not (data / path).is_file():
        raise FormatError("data", shown(data), f"has no {path}", fix)
    return data / path


def _whole(template: Template) -> Tree:
    """Returns the tree of all nodes of a template, with all their tokens."""
    return Tree.from_parents(template.parent.tolist(), (template.end.astype(np.int64) - template.start + 1).tolist())


def _few_shot(width: int) -> _Forest:
    """Returns a prompt with branches (DeFT, table 6)."""
    defaults = {"prompt": 4000, "width": width, "steps": 400}
    return defaults, lambda given: (generate.few_shot(given["prompt"], given["width"], given["steps"]), 1)


def _reasoning(given: dict[str, int]) -> tuple[Tree, int]:
    return _whole(generate.reasoning_template(**given)), 1


def _grpo(given: dict[str, int]) -> tuple[Tree, int]:
    counts = [given["prompts"], given["prompts"] * given["samples"]]
    return Tree.from_levels(counts, [given["prompt"], given["tokens"]]), 1


def _system_prompts(given: dict[str, int]) -> tuple[Tree, int]:
    """Returns a system prompt of four levels, each of which has variants, and requests for each of the last ones."""
    counts = np.cumprod([1, *(given[name] for name in ("countries", "rules", "languages", "requests"))]).tolist()
    return Tree.from_levels(counts, [459, 38, 584, 2112, given["tokens"]]), 4


def _shot_sets(given: dict[str, int]) -> tuple[Tree, int]:
    counts = np.cumprod([1, given["sets"], given["questions"]]).tolist()
    return Tree.from_levels(counts, [_SYSTEM_PROMPT, given["shots"], given["tokens"]]), 2


def _chains(given: dict[str, int]) -> tuple[Tree, int]:
    counts = np.cumprod([1, given["questions"], given["chains"]]).tolist()
    return Tree.from_levels(counts, [_SYSTEM_PROMPT, given["question"], given["tokens"]]), 2


def _documents(given: dict[str, int]) -> tuple[Tree, int]:
    counts = np.cumprod([given["first"], given["second"], given["questions"]]).tolist()
    return Tree.from_levels(counts, [given["document"], given["document"], given["tokens"]]), 2


def _scaled(count: int, scale: float) -> int:
    if not is_finite(scale) or not 0 < scale <= 1:
        raise FormatError("scale", scale, "is not above 0 and at most 1", "give a part, for instance 0.1")
    return max(1, math.floor(count * scale + 0.5))


_Forest = tuple[dict[str, int], Callable[[dict[str, int]], tuple[Tree, int]]]
_FORESTS: dict[str, _Forest] = {
    "few-shot": _few_shot(20),
    "few-shot-20": _few_shot(20),
    "few-shot-30": _few_shot(30),
    "few-shot-50": _few_shot(50),
    "reasoning": ({"seed": 0, "depth": 5, "width": 10, "prompt": 1000, "thought": 300}, _reasoning),
    "grpo": ({"prompts": 8, "samples": 16, "prompt": 1000, "tokens": 500}, _grpo),
    # FastTree, section 5.2: 128 requests of 256 tokens. It does not publish how often levels branch, nor the tokens of
    # shots, questions and documents.
    "system-prompts": ({"countries": 2, "rules": 4, "languages": 4, "requests": 4, "tokens": 256}, _system_prompts),
    "shot-sets": ({"sets": 8, "shots": 3000, "questions": 16, "tokens": 256}, _shot_sets),
    "chains": ({"questions": 32, "question": 64, "chains": 4, "tokens": 256}, _chains),
    "documents": ({"first": 4, "second": 4, "document": 2000, "questions": 8, "tokens": 256}, _documents),
}
"""Decodings by name: the options with their defaults, and what makes the tree and says how many levels are prompts."""
