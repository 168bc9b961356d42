"""A small seeded generator of trees as decoding systems make them: few-shot, reasoning and speculative."""

from __future__ import annotations

import random

import numpy as np

from treegen.files import Template
from treegen.ir.arrays import frozen
from treegen.ir.errors import TreeError
from treegen.ir.tree import Tree


def few_shot(prompt: int = 4000, width: int = 20, step: int = 200) -> Tree:
    """A prompt shared by `width` branches that have grown by `step` tokens each (DeFT, table 6: few-shot prompting)."""
    _check(prompt=prompt, width=width, step=step)
    return Tree.from_levels([1, width], [prompt, step])


def reasoning(seed: int = 0, depth: int = 4, width: int = 10, step: int | None = None) -> Tree:
    """A tree-of-thoughts search in the middle of decoding, or at `step`.

    A prompt, then `depth` rounds: every surviving thought branches into new ones, up to `width` in a round, of uneven
    lengths; one or a few survive a round, and the next starts when the longest of its parent's generation has ended.
    """
    template = reasoning_template(seed, depth, width)
    return template.at(template.middle if step is None else step)


def reasoning_template(seed: int = 0, depth: int = 4, width: int = 10) -> Template:
    """The whole course of the search behind `reasoning`."""
    _check(depth=depth, width=width)
    chance = random.Random(seed)
    prompt = chance.randint(700, 1500)
    parent, start, end = [-1], [1 - prompt], [0]
    survivors = [0]
    for _ in range(depth):
        usual = chance.randint(80, 1000)
        thoughts = []
        for node in survivors:
            for _ in range(max(1, width // len(survivors))):
                length = max(1, round(chance.gauss(usual, usual / 5)))
                thoughts.append(len(parent))
                parent.append(node)
                start.append(end[node] + 1)
                end.append(end[node] + length)
        survivors = sorted(chance.sample(thoughts, min(len(thoughts), chance.randint(1, 3))))
    return Template(*(frozen(np.array(column)) for column in (parent, start, end)))


def speculative(seed: int = 0, tokens: int = 32, prefix: int = 1000) -> Tree:
    """A draft token tree of `tokens` rows, root token included, over a prefix (Medusa; DeFT, table 6).

    Every further token hangs under a random earlier one, more likely under one that is near the root and of low rank.
    """
    _check(tokens=tokens, prefix=prefix)
    chance = random.Random(seed)
    paths: list[tuple[int, ...]] = [()]
    children = [0]
    while len(paths) < tokens:
        weights = [1 / (1 + len(path) + sum(path) + children[i]) for i, path in enumerate(paths)]
        node = chance.choices(range(len(paths)), weights)[0]
        paths.append((*paths[node], children[node]))
        children[node] += 1
        children.append(0)
    return Tree.from_token_tree(sorted(paths[1:], key=lambda path: (len(path), path)), prefix)


def _check(**numbers: int) -> None:
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise TreeError(name, value, "is not a positive integer", "give a whole number of at least 1")
