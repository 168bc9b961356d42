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

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from treegen.engine.branch import Branch
from treegen.engine.control import Controller, Drafting, Frontier, Growth, Selecting, SelectingDrafts, SelectingForks
from treegen.engine.drafts_ahead import DraftsAhead
from treegen.engine.engine_checks import check_going_to_rest
from treegen.engine.forks_ahead import ForksAhead
from treegen.engine.forward import Forward
from treegen.engine.tokens_ahead import TokensAhead

Grow: TypeAlias = "Callable[[Sequence[Branch], Growth, Mapping[tuple[int, int], Branch] | None], None]"
"""Does what follows from a decision about branches. Where a step is under way, it gets the branch whose place each fork
has taken on the device, by the parent's number and the token.
"""


class AroundSteps(NamedTuple):
    """What the engine does around steps.

    is_whole: whether all running branches are these, but for those that rest and wait for some of these. goes_on:
    whether nothing else waits for the next step. grow: see Grow. rest: keeps the logits of branches that rest.
    """

    is_whole: Callable[[Sequence[Branch]], bool]
    goes_on: Callable[[], bool]
    grow: Grow
    rest: Callable[[Sequence[Branch], torch.Tensor], None]


def ahead_of(controller: Controller, forward: Forward) -> TokensAhead | None:
    """Returns how to run ahead of a controller; None for one that does not select."""
    if isinstance(controller, SelectingDrafts):
        return DraftsAhead(controller, forward)
    if isinstance(controller, SelectingForks):
        return ForksAhead(controller, forward)
    selects = isinstance(controller, Selecting) and not isinstance(controller, Drafting)
    return TokensAhead(controller, forward) if selects else None


def run_ahead(ahead: TokensAhead, frontier: Frontier, around: AroundSteps) -> Frontier:
    """Takes steps as long as the controller selects tokens, each before the tokens of the one before are read.

    Args:
        ahead: Selects, and takes the steps.
        frontier: Branches and their logits, without those that rest.
        around: What the engine does around steps.

    Returns:
        A frontier that the controller has to decide about otherwise; an empty one where it has decided about all.

    Raises:
        BranchError: The controller selects something else than a token for each row, or commits another one.
    """
    ahead.begin()
    while frontier.branches:
        branches = frontier.branches
        whole = around.is_whole(branches) and ahead.follows(branches)
        if not whole or not ahead.controller.selects(branches):
            ahead.settle(branches)
            return frontier
        copy = ahead.select(frontier)
        launched = around.goes_on() and ahead.have_room(branches)
        following = ahead.launch(branches) if launched else None
        growth = ahead.commit(branches, copy.read().tolist(), launched)
        check_going_to_rest(growth, ahead.controller.together and ahead.rows == 1)
        around.grow(branches, growth, ahead.places(branches) if launched else None)
        if following is None:
            return Frontier([], frontier.logits[:0])
        frontier = ahead.followed(following)
        if growth.resting:
            resting = [place for place, each in enumerate(frontier.branches) if each.number in {*growth.resting}]
            around.rest([frontier.branches[place] for place in resting], ahead.chosen(frontier, resting).logits)
            others = sorted({*range(len(frontier.branches))} - {*resting})
            frontier = ahead.chosen(frontier, others)
    return frontier
