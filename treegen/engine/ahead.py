"""Running ahead: the next step is launched before the host has read the tokens of the one before.

    device   step 7 ──▶ tokens 7 ──▶ step 8 ──▶ tokens 8 ──▶ ...
                          │ copied     ▲
    host     prepare 8 ───┼── launch ──┘  read 7, end branches, prepare 9 ...

So the host's work is hidden behind the device's. A branch that ends by its token has a row too many in the step that is
under way; nobody reads it. The row's KV goes behind the branch's stored tokens, so never to a page that the cache or
another branch holds. That page may be free, or another branch's, before the KV is written: what the other branch writes
there is launched later, on the same stream (see `KVPool`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from treegen.engine.control import Frontier, Growth, Selecting
from treegen.engine.engine_checks import check_selected, check_tokens
from treegen.engine.forward import Forward, chosen_rows
from treegen.engine.sequences import Branch
from treegen.ir.errors import BranchError

UNKNOWN = -1
"""Stands for a token that the host has not read: no prompt has it, so the prefix cache never finds its page."""


class HostCopy:
    """A copy of a tensor of tokens to the host, that is waited for when it is read."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._copy, self._done = tokens, None
        if tokens.device.type == "cuda":
            self._copy = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._copy.copy_(tokens, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def read(self) -> list[int]:
        """Waits for the copy; returns the tokens."""
        if self._done is not None:
            self._done.synchronize()
        return list(map(int, self._copy.tolist()))


def run_ahead(
    controller: Selecting,
    forward: Forward,
    frontier: Frontier,
    goes_on: Callable[[], bool],
    grow: Callable[[Sequence[Branch], Growth], None],
) -> bool:
    """Takes steps as long as all branches decode, each before the tokens of the one before are read.

    Args:
        controller: Selects tokens on the device.
        forward: Takes the steps.
        frontier: All running branches, and their logits.
        goes_on: Whether nothing else waits for the next step.
        grow: Does what follows from the controller's decision.

    Returns:
        Whether it has decided about the frontier; if not, nothing has changed.

    Raises:
        BranchError: The controller selects something else than a token for each branch, or commits another one.
    """
    if not _may_run(controller, forward, frontier):
        return False
    while frontier.branches:
        branches = frontier.branches
        tokens = controller.select(frontier)
        check_selected(tokens, len(branches))
        copy = HostCopy(tokens)
        following = None
        if goes_on() and _may_run(controller, forward, frontier):
            for branch in branches:
                branch.tokens.append(UNKNOWN)
            within = tokens.clamp(0, forward.vocabulary - 1)  # the host sees only later whether they are
            following = forward(dict.fromkeys((branch.number for branch in branches), 1), within)
        chosen = copy.read()
        check_tokens("select()", chosen, forward.vocabulary)
        if following is not None:
            for branch in branches:
                branch.tokens.pop()
                branch.stored -= 1
        growth = controller.commit(branches, chosen)
        grow(branches, growth)
        if following is None:
            return True
        for branch, token in zip(branches, chosen, strict=True):
            if growth.grown[branch.number]:
                if [each.token for each in growth.grown[branch.number]] != [token]:
                    raise BranchError("commit()", branch.number, "has not the token that was selected", "return it")
                branch.stored += 1
        kept = [row for row, branch in enumerate(following.branches) if growth.grown[branch.number]]
        frontier = Frontier([following.branches[row] for row in kept], chosen_rows(following.logits, kept))
    return True


def _may_run(controller: Selecting, forward: Forward, frontier: Frontier) -> bool:
    """Says whether each running branch is in the frontier and certainly gets one more token, for which there is room.

    Branches at their first token may fork.
    """
    sequences, most = forward.sequences, controller.max_new_tokens
    if len(frontier.branches) != len(sequences):
        return False
    for branch in frontier.branches:
        made = len(branch.tokens) - branch.prompt
        if not made or made + 1 >= most or branch.drafts:
            return False
    counts = dict.fromkeys((branch.number for branch in frontier.branches), 1)
    return sequences.pages_missing(counts) <= sequences.available
