"""A small seeded generator of trees as decoding systems make them: few-shot, reasoning and speculative."""

from __future__ import annotations

import heapq
import math
import random

import numpy as np

from treegen.ir.arrays import check_made, frozen
from treegen.ir.errors import TreeError
from treegen.ir.tree import Tree
from treegen.ir.tree.kv import KVRuns
from treegen.workloads.tree_files import Template

_LARGEST = 1_000_000
_DRAFT_DEPTH = 4  # Medusa's heads: tokens below the root token
_RANK_CHANCES = (0.6, 0.15)  # that a head's first guess, and its second, is the token that will be accepted


def few_shot(prompt: int = 4000, width: int = 20, step: int = 200) -> Tree:
    """A prompt shared by `width` branches that have grown by `step` tokens each (DeFT, table 6). Raises TreeError."""
    _check(prompt=prompt, width=width, step=step)
    return Tree.from_levels([1, width], [prompt, step])


def reasoning(
    seed: int = 0, depth: int = 5, width: int = 10, prompt: int = 1000, thought: int = 300, step: int | None = None
) -> Tree:
    """A tree-of-thoughts search at a decoding step, by default in the middle (see `reasoning_template`).

    Raises TreeError.
    """
    template = reasoning_template(seed, depth, width, prompt, thought)
    if step is not None:
        _check(step=step)
    return template.at(template.middle if step is None else step)


def reasoning_template(
    seed: int = 0, depth: int = 5, width: int = 10, prompt: int = 1000, thought: int = 300
) -> Template:
    """The whole course of a breadth-first tree-of-thoughts search (DeFT, section 4).

    In each of `depth` rounds the surviving thoughts branch into `width` new ones altogether, about `thought` tokens
    long but uneven: some stop early, some run twice as long. One to three of them survive, the others are pruned when
    they end. A round's thoughts start when their own parent ends, so rounds overlap. Raises TreeError.
    """
    _check(depth=depth, width=width, prompt=prompt, thought=thought)
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
    """A draft token tree of `tokens` rows, the root token's included, over `prefix` tokens.

    Grown as Medusa's sparse trees are: the guess most likely to be accepted next, by rank and depth, joins first; here
    likelihoods are random around a geometric law. KV lies in order of depth. Raises TreeError.
    """
    _check(tokens=tokens, prefix=prefix)
    source = _random(seed)
    paths: list[tuple[int, ...]] = []
    # Each entry stands for the guesses of one rank and higher below one token; losses are negative log likelihoods.
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
    """The tree with its KV in pages of `page_size` tokens in random order, every node on pages of its own.

    Raises TreeError.
    """
    _check(page_size=page_size)
    counts = -(-tree.tokens // page_size)
    check_made("page_size", page_size, int(counts.sum(dtype=np.int64)), "pages")
    pages = list(range(int(counts.sum())))
    _random(seed).shuffle(pages)
    ends = np.cumsum(counts).tolist()
    of_nodes = [pages[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]
    return tree.with_kv(KVRuns.from_pages(tree.tokens, of_nodes, page_size))


def _check(**numbers: int) -> None:
    for name, value in numbers.items():
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise TreeError(name, value, "is not a positive integer", f"give a whole number of 1..{_LARGEST}")


def _random(seed: int) -> random.Random:
    if type(seed) is not int:
        raise TreeError("seed", seed, "is not an integer", "give a whole number")
    return random.Random(seed)
