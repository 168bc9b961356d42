"""Generators of trees as decoding systems make them: few-shot, reasoning and speculative. All are seeded."""

from __future__ import annotations

import heapq
import math
import random

import numpy as np

from treegen.ir.arrays import check_made, frozen
from treegen.ir.errors import TreeError
from treegen.ir.tree import Tree
from treegen.ir.tree.kv import KVRuns
from treegen.workloads.recorded_decodings import Template

_LARGEST = 1_000_000
_DRAFT_DEPTH = 4  # tokens below the root token: Medusa has one head for each
_RANK_CHANCES = (0.6, 0.15)  # chances that a head's first guess and its second guess are accepted


def few_shot(prompt: int = 4000, width: int = 20, step: int = 200) -> Tree:
    """Makes a prompt with `width` branches of `step` tokens each (DeFT, table 6).

    Args:
        prompt: Tokens of the prompt.
        width: Number of branches, one query row each.
        step: Tokens of each branch.

    Raises:
        TreeError: An argument is not a positive integer.
    """
    check_positive(prompt=prompt, width=width, step=step)
    return Tree.from_levels([1, width], [prompt, step])


def reasoning(
    seed: int = 0, depth: int = 5, width: int = 10, prompt: int = 1000, thought: int = 300, step: int | None = None
) -> Tree:
    """Makes the tree of a tree-of-thoughts search at one decoding step.

    Args:
        seed: Decides lengths and survivors.
        depth, width, prompt, thought: As in `reasoning_template`.
        step: The decoding step; by default the middle of the search.

    Raises:
        TreeError: An argument is out of range, or no row is alive at the step.
    """
    template = reasoning_template(seed, depth, width, prompt, thought)
    if step is not None:
        check_positive(step=step)
    return template.at(template.middle if step is None else step)


def reasoning_template(
    seed: int = 0, depth: int = 5, width: int = 10, prompt: int = 1000, thought: int = 300
) -> Template:
    """Makes the whole course of a breadth-first tree-of-thoughts search (DeFT, section 4).

    In each round the surviving thoughts branch into new ones of uneven length: some stop early, some run twice the
    usual length. One to three of them survive; the others are pruned when they end. A thought starts when its own
    parent ends, so rounds overlap.

    Args:
        seed: Decides lengths and survivors.
        depth: Number of rounds.
        width: New thoughts of a round, all branches together.
        prompt: Tokens of the prompt.
        thought: Usual tokens of a thought.

    Raises:
        TreeError: An argument is out of range.
    """
    check_positive(depth=depth, width=width, prompt=prompt, thought=thought)
    if depth * width > _LARGEST:
        raise TreeError("depth * width", depth * width, f"exceeds {_LARGEST} nodes", "make fewer or smaller rounds")
    source = _random(seed)
    parent, start, end = [-1], [1 - prompt], [0]
    survivors = [0]
    for _ in range(depth):
        usual = thought * source.uniform(0.5, 1.5)
        children = []
        for place, node in enumerate(survivors):
            for _ in range(width // len(survivors) + (place < width % len(survivors))):
                spread = source.uniform(0.02, 0.5) if source.random() < 0.15 else source.gauss(1, 0.2)
                children.append(len(parent))
                parent.append(node)
                start.append(end[node] + 1)
                end.append(end[node] + max(1, round(usual * min(max(spread, 0.02), 2))))
        survivors = sorted(source.sample(children, min(len(children), source.randint(1, 3))))
    return Template(*(frozen(np.array(column)) for column in (parent, start, end)))


def speculative(seed: int = 0, tokens: int = 32, prefix: int = 1000) -> Tree:
    """Makes a draft token tree over a prefix.

    It grows like Medusa's sparse trees: the guess that is most likely to be accepted, by rank and depth, joins first.
    Likelihoods are random around a geometric law. KV is stored in order of depth.

    Args:
        seed: Decides the likelihoods.
        tokens: Query rows: draft tokens, the root token included.
        prefix: Tokens of the prefix.

    Raises:
        TreeError: An argument is not a positive integer.
    """
    check_positive(tokens=tokens, prefix=prefix)
    source = _random(seed)
    paths: list[tuple[int, ...]] = []
    # Each entry stands for the guesses below one token from one rank on; losses are negative log likelihoods.
    waiting: list[tuple[float, tuple[int, ...]]] = [(0.0, (0,))]
    while len(paths) < tokens - 1:
        loss, path = heapq.heappop(waiting)
        paths.append(path)
        first, next_rank = (-math.log(chance) * source.uniform(0.5, 1.5) for chance in _RANK_CHANCES)
        heapq.heappush(waiting, (loss + next_rank / (1 + path[-1]), (*path[:-1], path[-1] + 1)))
        if len(path) < _DRAFT_DEPTH:
            heapq.heappush(waiting, (loss + first, (*path, 0)))
    return Tree.from_token_tree(sorted(paths, key=lambda path: (len(path), path)), prefix)


def in_shuffled_pages(tree: Tree, page_size: int, seed: int = 0) -> Tree:
    """Moves the KV of a tree to pages in random order. No two nodes share a page.

    Args:
        tree: The tree.
        page_size: Tokens of a page.
        seed: Decides the order of pages.

    Raises:
        TreeError: An argument is not a positive integer, or there are too many pages.
    """
    check_positive(page_size=page_size)
    counts = -(-tree.tokens // page_size)
    check_made("page_size", page_size, int(counts.sum(dtype=np.int64)), "pages")
    pages = list(range(int(counts.sum())))
    _random(seed).shuffle(pages)
    ends = np.cumsum(counts).tolist()
    of_nodes = [pages[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]
    return tree.with_kv(KVRuns.from_pages(tree.tokens, of_nodes, page_size))


def check_positive(**numbers: int) -> None:
    """Raises TreeError for a number, by the name of its argument, that is not a positive integer, or too large."""
    for name, value in numbers.items():
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise TreeError(name, value, "is not a positive integer", f"give a whole number of 1..{_LARGEST}")


def _random(seed: int) -> random.Random:
    if type(seed) is not int:
        raise TreeError("seed", seed, "is not an integer", "give a whole number")
    return random.Random(seed)
