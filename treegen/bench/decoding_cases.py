"""Decoding cases: the controllers, prompts and sizes of served decodings."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treegen.engine.beam import Beam
from treegen.engine.control import Controller
from treegen.engine.forced import Forced
from treegen.engine.forced_drafts import ForcedDrafts
from treegen.ir.tree import Tree
from treegen.workloads.served_decodings import BeamDecoding, DraftDecoding, ForcedDecoding, ServedDecoding

_WARM_TOKENS = 4
"""Tokens of each decoded node, or of a beam, in the run before the measured one; or steps with drafts."""


class DecodingCase(NamedTuple):
    """A decoding, ready to run.

    controller: decides how branches grow. warm: the same, for fewer tokens. prompts: the tokens of each prompt.
    branches: the most branches at a time. rows: the most rows of a step in which all of them decode. pages: pages that
    are enough for all of them. decisions: how often the controller is asked in a run, roughly.
    """

    controller: Controller
    warm: Controller
    prompts: list[list[int]]
    branches: int
    rows: int
    pages: int
    decisions: int


def decoding_case(decoding: ServedDecoding, vocabulary: int, seed: int, page_size: int) -> DecodingCase:
    """Makes the case of a decoding.

    Args:
        decoding: The decoding.
        vocabulary: The number of different tokens.
        seed: Decides the tokens.
        page_size: Tokens of a page.

    Raises:
        TreegenError: The tree or a number does not fit.
    """
    if isinstance(decoding, BeamDecoding):
        return _of_beams(decoding, vocabulary, seed, page_size)
    if isinstance(decoding, DraftDecoding):
        return _of_drafts(decoding, vocabulary, seed, page_size)
    tree, levels = decoding.tree, decoding.prompt_levels
    forced = Forced(tree, vocabulary, seed, levels)
    warm = Forced(_shorter(decoding), vocabulary, seed, levels)
    prompts = forced.prompts
    branches = max(2, forced.width * len(prompts))
    pages = sum(-(-count // page_size) + 1 for count in tree.tokens.tolist()) + branches
    return DecodingCase(forced, warm, prompts, branches, branches, pages, forced.max_new_tokens)


def _of_beams(decoding: BeamDecoding, vocabulary: int, seed: int, page_size: int) -> DecodingCase:
    """Makes the case of a beam search: no beam shares what it has after the prompt, at the most."""
    width, tokens = decoding.width, decoding.tokens
    prompt = np.random.default_rng(seed).integers(vocabulary, size=decoding.prompt).tolist()
    pages = -(-decoding.prompt // page_size) + width * (-(-tokens // page_size) + 2)
    warm, branches = Beam(width, min(tokens, _WARM_TOKENS)), max(2, width)
    return DecodingCase(Beam(width, tokens), warm, [prompt], branches, branches, pages, tokens)


def _of_drafts(decoding: DraftDecoding, vocabulary: int, seed: int, page_size: int) -> DecodingCase:
    """Makes the case of a recorded speculative decoding."""
    parents, accepted = decoding.parents, decoding.accepted
    forced = ForcedDrafts(parents, accepted, vocabulary, seed)
    warm = ForcedDrafts(parents, accepted[:_WARM_TOKENS], vocabulary, seed)
    prompts = np.random.default_rng(seed).integers(vocabulary, size=(decoding.prompts, decoding.prompt)).tolist()
    pages = decoding.prompts * (-(-decoding.most_tokens // page_size) + 1)
    rows = decoding.prompts * (1 + len(parents))
    return DecodingCase(forced, warm, prompts, decoding.prompts, rows, pages, len(accepted))


def _shorter(decoding: ForcedDecoding) -> Tree:
    """Returns the tree with fewer tokens below its prompts."""
    tree = decoding.tree
    is_prompt = tree.topology.depth < decoding.prompt_levels
    short = np.where(is_prompt, tree.tokens, np.minimum(tree.tokens, _WARM_TOKENS))
    return Tree.from_parents(tree.parent.tolist(), short.tolist())
