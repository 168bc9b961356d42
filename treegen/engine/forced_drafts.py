"""ForcedDrafts: replays a recorded speculative decoding, with the same work in every run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treegen.engine.branch import Branch
from treegen.engine.control import Continuation, Frontier, Growth, Next
from treegen.engine.draft_trees import DraftTree, draft_shape
from treegen.ir.arrays import positive_int
from treegen.ir.errors import InputError


class ForcedDrafts:
    """Checks the same tree of drafts in every step, and accepts as many tokens as were recorded.

    Tokens are random. A step accepts the first path of the tree that is long enough, and one more token.

    Args:
        parents: The number of the draft that each draft follows, -1 for the last token.
        accepted: Tokens that each step adds: the accepted drafts and one more.
        vocabulary: The number of different tokens.
        seed: Decides the tokens.

    Raises:
        InputError: There are no steps, or a step accepts no token, or more than the longest path and one.
    """

    together = False
    width = 1

    def __init__(self, parents: Sequence[int], accepted: Sequence[int], vocabulary: int, seed: int = 0) -> None:
        depths = draft_shape(tuple(parents)).depths
        most = int(depths.max(initial=0)) + 1
        for step, count in enumerate(accepted):
            if positive_int(f"accepted[{step}]", count, InputError) > most:
                reason = f"is more than the {most} that the longest path and one more token are"
                raise InputError(f"accepted[{step}]", count, reason, "give the recorded tree")
        if not accepted:
            raise InputError("accepted", [], "has no steps", "give the tokens of every step")
        source = np.random.default_rng(seed)
        self._tree = DraftTree(source.integers(vocabulary, size=len(parents)).tolist(), list(parents))
        self._paths: list[list[int]] = [[]]
        for depth in range(1, most):
            path = [int(np.flatnonzero(depths == depth)[0])]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            self._paths.append(path)
        self.max_draft, self.draft_trees = len(parents), True
        self.max_new_tokens = 1 + sum(accepted)
        begins = np.cumsum([1, *accepted[:-1]]).tolist()
        self._accepted = dict(zip(begins, accepted, strict=True))  # by the new tokens that a branch has before a step
        self._tokens: list[int] = source.integers(vocabulary, size=self.max_new_tokens).tolist()

    def draft(self, branches: Sequence[Branch]) -> list[DraftTree]:
        """See Drafting."""
        return [self._tree if branch.new_tokens else DraftTree((), ()) for branch in branches]

    def decide(self, frontier: Frontier) -> Growth:
        """See Controller."""
        grown: dict[int, list[Next]] = {}
        results = []
        accepted = {}
        for branch in frontier.branches:
            made = branch.tokens[branch.prompt : len(branch.tokens) - branch.drafts]
            if made:
                accepted[branch.number] = self._paths[self._accepted[len(made)] - 1]
                made += [self._tree.tokens[draft] for draft in accepted[branch.number]]
            token = self._tokens[len(made)]
            grown[branch.number] = [Next(token, branch.label)] if len(made) + 1 < self.max_new_tokens else []
            if not grown[branch.number]:
                results.append(Continuation(branch.label, [*made, token]))
        return Growth(grown, results, accepted)
