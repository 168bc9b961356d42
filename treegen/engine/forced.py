"""Forced: replays a tree, so that every run does the same work whatever the model's logits are."""

from __future__ import annotations

import numpy as np

from treegen.engine.control import Continuation, Frontier, Growth, Next
from treegen.ir.errors import TreeError
from treegen.ir.tree import Tree


class Forced:
    """Grows the branches of a tree: the root is the prompt, and where a node ends its children begin.

    The tokens are random, but the first ones of branches that fork from one node differ. A branch that has reached a
    leaf ends. Labels are (prompt, node).

    Args:
        tree: A tree with one root, which has tokens, as has some node below. Its rows have no meaning here.
        vocabulary: The number of different tokens.
        seed: Decides the tokens.

    Raises:
        TreeError: The tree has several roots, a root without tokens, or no tokens below it.
    """

    together = False

    def __init__(self, tree: Tree, vocabulary: int, seed: int = 0) -> None:
        parents, counts = tree.parent.tolist(), tree.tokens.tolist()
        if parents.count(-1) != 1 or not counts[parents.index(-1)] or sum(counts) == counts[parents.index(-1)]:
            reason = "has several roots, one without tokens, or no tokens below it"
            raise TreeError("tree", str(tree), reason, "give a tree with one prompt")
        source = np.random.default_rng(seed)
        self._tokens = [source.integers(vocabulary, size=count).tolist() for count in counts]
        self._children: list[list[int]] = [[] for _ in parents]
        for node, parent in enumerate(parents):
            if parent >= 0:
                self._children[parent].append(node)
        self._root = parents.index(-1)
        self._starts = [0] * len(parents)
        order = [self._root]
        for node in order:  # grows while it is read
            for child in self._children[node]:
                self._starts[child] = self._starts[node] + counts[node]
                order.append(child)
            below = self._below(node)
            for place, child in enumerate(below):
                self._tokens[child][0] = (self._tokens[below[0]][0] + place) % vocabulary
        leaves = [node for node in order if counts[node] and not self._below(node)]
        self.width = len(leaves)
        self.max_new_tokens = max(self._starts[leaf] + counts[leaf] for leaf in leaves) - counts[self._root]

    @property
    def prompt(self) -> list[int]:
        """The tokens of the root."""
        return list(self._tokens[self._root])

    def decide(self, frontier: Frontier) -> Growth:
        """See Controller."""
        grown: dict[int, list[Next]] = {}
        ended = []
        for branch in frontier.branches:
            node = branch.label[1] if len(branch.label) > 1 else self._root
            following = self._following(branch.label[0], node, len(branch.tokens) - self._starts[node])
            last = [each for each in following if self._ends(each, len(branch.tokens) + 1)]
            grown[branch.number] = [each for each in following if each not in last]
            ended += [Continuation(each.label, [*branch.new_tokens, each.token]) for each in last]
        return Growth(grown, ended)

    def _ends(self, following: Next, tokens: int) -> bool:
        """Says whether this token, a branch's token number `tokens`, is the last one of a leaf."""
        node = following.label[1]
        return not self._below(node) and tokens == self._starts[node] + len(self._tokens[node])

    def _following(self, prompt: int, node: int, done: int) -> list[Next]:
        """Returns what follows `done` tokens of a node: its next one, or the first ones of the nodes below."""
        if done < len(self._tokens[node]):
            return [Next(self._tokens[node][done], (prompt, node))]
        return [Next(self._tokens[child][0], (prompt, child)) for child in self._below(node)]

    def _below(self, node: int) -> list[int]:
        """Returns the next nodes below a node that have tokens."""
        below = [[child] if self._tokens[child] else self._below(child) for child in self._children[node]]
        return [child for some in below for child in some]
