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

from treegen.engine.branch import Branch
from treegen.engine.control import Frontier, Growth, Selecting
from treegen.engine.engine_checks import check_selected, check_tokens
from treegen.engine.forward import Forward, chosen_rows
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
) -> Frontier:
    """Takes steps as long as the controller selects tokens, each before the tokens of the one before are read.

    Args:
        controller: Selects tokens on the device.
        forward: Takes the steps.
        frontier: Branches and their logits.
        goes_on: Whether nothing else waits for the next step.
        grow: Does what follows from the controller's decision.

    Returns:
        A frontier that the controller has to decide about otherwise; an empty one where it has decided about all.

    Raises:
        BranchError: The controller selects something else than a token for each branch, or commits another one.
    """
    while frontier.branches:
        branches = frontier.branches
        whole = len(branches) == len(forward.sequences) and not any(branch.drafts for branch in branches)
        if not whole or not controller.selects(branches):
            return frontier
        tokens = controller.select(frontier)
        check_selected(tokens, len(branches))
        copy = HostCopy(tokens)
        following = None
        if goes_on() and _have_room(controller, forward, branches):
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
            return Frontier([], frontier.logits[:0])
        for branch, token in zip(branches, chosen, strict=True):
            if growth.grown[branch.number]:
                if [each.token for each in growth.grown[branch.number]] != [token]:
                    raise BranchError("commit()", branch.number, "has not the token that was selected", "return it")
                branch.stored += 1
        kept = [row for row, branch in enumerate(following.branches) if growth.grown[branch.number]]
        frontier = Frontier([following.branches[row] for row in kept], chosen_rows(following.logits, kept))
    return frontier


def _have_room(controller: Selecting, forward: Forward, branches: Sequence[Branch]) -> bool:
    """Says whether each of these branches gets a token after the next one, and there are pages for these."""
    sequences, most = forward.sequences, controller.max_new_tokens
    if any(len(branch.tokens) - branch.prompt + 1 >= most for branch in branches):
        return False
    return sequences.have_pages(dict.fromkeys((branch.number for branch in branches), 1))
