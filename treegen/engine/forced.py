"""Forced: replays a tree, so that every run does the same work whatever the model's logits are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from treegen.engine.branch import Branch
from treegen.engine.control import Continuation, Frontier, Growth, Next
from treegen.ir.arrays import positive_int
from treegen.ir.errors import TreeError
from treegen.ir.tree import Tree


class Forced:
    """Grows the branches of trees: the first levels are prompts, and where a node ends its children begin.

    With one level of prompts each root is a prompt. With several, each path through these levels is one, and prompts
    that begin with the same nodes begin with the same tokens. Decode `prompts` with it, in their order.

    The tokens are random, but the first ones of branches that fork from one node differ. A branch that has reached a
    leaf ends; no step reads its last token. Labels are (prompt, node).

    Args:
        tree: A tree, or several. Its rows have no meaning here.
        vocabulary: The number of different tokens.
        seed: Decides the tokens.
        prompt_levels: The levels that are prompts.

    Raises:
        TreeError: A prompt has no tokens, or there are none below it.
    """

    together = False

    def __init__(self, tree: Tree, vocabulary: int, seed: int = 0, prompt_levels: int = 1) -> None:
        positive_int("prompt_levels", prompt_levels, TreeError)
        parents, counts = tree.parent.tolist(), tree.tokens.tolist()
        self._parents = parents
        source = np.random.default_rng(seed)
        self._tokens = [source.integers(vocabulary, size=count).tolist() for count in counts]
        children: list[list[int]] = [[] for _ in parents]
        for node, parent in enumerate(parents):
            if parent >= 0:
                children[parent].append(node)
        order = [node for node, parent in enumerate(parents) if parent < 0]
        level, self._starts = tree.topology.depth.tolist(), [0] * len(parents)
        _begin_differently(self._tokens, order, vocabulary)
        for node in order:  # grows while it is read
            for child in children[node]:
                self._starts[child] = self._starts[node] + counts[node]
                order.append(child)
        self._below: list[list[int]] = [[] for _ in parents]  # the next nodes below each node that have tokens
        for node in reversed(order):
            for child in children[node]:
                self._below[node] += [child] if counts[child] else self._below[child]
        for node in order:
            _begin_differently(self._tokens, self._below[node], vocabulary)
        self._ends = [node for node in range(len(parents)) if level[node] == prompt_levels - 1]
        dead = [node for node, own in enumerate(level) if own < prompt_levels and not self._below[node]]
        if dead or not all(map(self._prompt_tokens, self._ends)):
            reason = "has a prompt without tokens, or without tokens below it"
            raise TreeError("tree", str(tree), reason, "give each prompt tokens and branches")
        leaves = [self._leaves(node) for node in self._ends]
        self.width = max(map(len, leaves))
        self.max_new_tokens = max(
            self._starts[leaf] + counts[leaf] - self._prompt_tokens(node)
            for node, own in zip(self._ends, leaves, strict=True) for leaf in own
        )  # fmt: skip

    @property
    def prompts(self) -> list[list[int]]:
        """The tokens of each prompt."""
        return [self._path(node) for node in self._ends]

    def decide(self, frontier: Frontier) -> Growth:
        """See Controller."""
        return self._growth(frontier.branches)

    def selects(self, branches: Sequence[Branch]) -> bool:
        """See Selecting. Not where a branch forks or ends: a step launched ahead would have rows that nobody reads."""
        return all(map(self._goes_on, branches))

    def select(self, frontier: Frontier) -> torch.Tensor:
        """See Selecting. The host has known the tokens all along."""
        tokens = [self._tokens[branch.label[1]][self._done(branch)] for branch in frontier.branches]
        return torch.tensor(tokens).to(frontier.logits.device, non_blocking=True)

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        """See Selecting."""
        return self._growth(branches)

    def _growth(self, branches: Sequence[Branch]) -> Growth:
        """Returns what follows from these branches."""
        grown: dict[int, list[Next]] = {}
        ended = []
        for branch in branches:
            prompt = branch.label[0]
            node = branch.label[1] if len(branch.label) > 1 else self._ends[prompt]
            following = self._following(prompt, node, len(branch.tokens) - self._starts[node])
            last = [each for each in following if self._is_last(each, len(branch.tokens) + 1)]
            grown[branch.number] = [each for each in following if each not in last]
            ended += [Continuation(each.label, [*branch.new_tokens, each.token]) for each in last]
        return Growth(grown, ended)

    def _goes_on(self, branch: Branch) -> bool:
        """Says whether a branch gets one token more, and does not end by it."""
        if len(branch.label) == 1:
            return False
        left = len(self._tokens[branch.label[1]]) - self._done(branch)
        return left > (0 if self._below[branch.label[1]] else 1)

    def _done(self, branch: Branch) -> int:
        """Returns the tokens that a branch has of its node."""
        return len(branch.tokens) - self._starts[branch.label[1]]

    def _is_last(self, following: Next, tokens: int) -> bool:
        """Says whether this token, a branch's token number `tokens`, is the last one of a leaf."""
        node = following.label[1]
        return not self._below[node] and tokens == self._starts[node] + len(self._tokens[node])

    def _following(self, prompt: int, node: int, done: int) -> list[Next]:
        """Returns what follows `done` tokens of a node: its next one, or the first ones of the nodes below."""
        if done < len(self._tokens[node]):
            return [Next(self._tokens[node][done], (prompt, node))]
        return [Next(self._tokens[child][0], (prompt, child)) for child in self._below[node]]

    def _prompt_tokens(self, node: int) -> int:
        """Returns the number of tokens of the prompt that ends with a node."""
        return self._starts[node] + len(self._tokens[node])

    def _path(self, node: int) -> list[int]:
        """Returns the tokens from the root to the end of a node."""
        path = [node]
        while self._parents[path[-1]] >= 0:
            path.append(self._parents[path[-1]])
        return [token for own in reversed(path) for token in self._tokens[own]]

    def _leaves(self, node: int) -> list[int]:
        """Returns the nodes at whose end branches end: those below a node that have tokens, and none below them."""
        found, waiting = [], list(self._below[node])
        while waiting:
            child = waiting.pop()
            waiting += self._below[child]
            found += [] if self._below[child] else [child]
        return found


def _begin_differently(tokens: list[list[int]], nodes: list[int], vocabulary: int) -> None:
    """Changes the first tokens of nodes that begin at one place, so that they differ."""
    having = [node for node in nodes if tokens[node]]
    for place, node in enumerate(having):
        tokens[node][0] = (tokens[having[0]][0] + place) % vocabulary
