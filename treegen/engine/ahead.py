"""Running ahead: the next step is launched before the host has read the tokens of the one before.

    device   step 7 ──▶ tokens 7 ──▶ step 8 ──▶ tokens 8 ──▶ ...
                          │ copied     ▲
    host     prepare 8 ───┼── launch ──┘  read 7, end branches, prepare 9 ...

So the host's work is hidden behind the device's. A branch that ends by its token has a row too many in the step that is
under way; nobody reads it. The row's KV goes behind the branch's stored tokens, so never to a page that the cache or
another branch holds. That page may be free, or another branch's, before the KV is written: what the other branch writes
there is launched later, on the same stream (see `KVPool`).

Where the controller selects forks as well, rows become forks on the device (`row_forks`). The host's branches follow
when it has read which. Kernels are told that the branches of a prompt share what all of them share: no fork changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from treegen.engine.branch import Branch
from treegen.engine.control import Frontier, Growth, Selecting, SelectingForks, Selection
from treegen.engine.engine_checks import check_forks, check_selected, check_tokens
from treegen.engine.forward import Forward, chosen_rows
from treegen.engine.host_copy import HostCopy
from treegen.engine.shared_pages import share_by_prompt

UNKNOWN = -1
"""Stands for a token that the host has not read: no prompt has it, so the prefix cache never finds its page."""
_TOLD = 64
"""Steps after which kernels are told what the branches of a prompt have come to share."""

Ahead: TypeAlias = "Selecting | SelectingForks"
Grow: TypeAlias = "Callable[[Sequence[Branch], Growth, Mapping[tuple[int, int], Branch] | None], None]"
"""Does what follows from a decision about branches. Where the device has made the forks, it gets the branch whose place
each has taken, by the parent's number and the token.
"""


class _Chosen(NamedTuple):
    """What the host has read of a selection: the token in the place of each branch, and the branch that it continues.

    forks: whether the controller selects forks; otherwise each branch continues itself.
    """

    tokens: list[int]
    parents: list[int]
    forks: bool


def run_ahead(
    controller: Ahead, forward: Forward, frontier: Frontier, goes_on: Callable[[], bool], grow: Grow
) -> Frontier:
    """Takes steps as long as the controller selects tokens, each before the tokens of the one before are read.

    Args:
        controller: Selects on the device.
        forward: Takes the steps.
        frontier: Branches and their logits.
        goes_on: Whether nothing else waits for the next step.
        grow: Does what follows from the controller's decision.

    Returns:
        A frontier that the controller has to decide about otherwise; an empty one where it has decided about all.

    Raises:
        BranchError: The controller selects something else than a token for each branch, or commits another one.
    """
    forks, steps = isinstance(controller, SelectingForks), 0
    while frontier.branches:
        branches = frontier.branches
        if not _follows(forward, branches, forks) or not controller.selects(branches):
            return frontier
        tokens, parents = _selected(controller, frontier)
        copy = HostCopy(tokens if parents is None else torch.stack([tokens, parents]))
        following = None
        if goes_on() and _have_room(controller, forward, branches):
            if forks and steps % _TOLD == 0:
                share_by_prompt(forward.sequences.live, branches, forward.sequences.pool.page_tokens)
            for branch in branches:
                branch.tokens.append(UNKNOWN)
            within = tokens.clamp(0, forward.vocabulary - 1)  # the host sees only later whether they are
            following = forward(dict.fromkeys((branch.number for branch in branches), 1), within, parents)
            steps += 1
        read = copy.read().tolist()
        selected, continued = read if forks else (read, list(range(len(branches))))
        chosen = _Chosen(selected, continued, forks)
        check_tokens("select()", chosen.tokens, forward.vocabulary)
        if following is not None:
            for branch in branches:
                branch.tokens.pop()
                branch.stored -= 1
        growth = controller.commit(branches, chosen.tokens)
        if following is None:
            grow(branches, growth, None)
            return Frontier([], frontier.logits[:0])
        check_forks(branches, chosen.tokens, chosen.parents, growth)
        frontier = _followed(forward, following, chosen, growth, grow)
    return frontier


def _follows(forward: Forward, branches: Sequence[Branch], forks: bool) -> bool:
    """Says whether a step may follow that has these branches in this order, with forks where the controller selects
    them.
    """
    rows = forward.sequences.live.row.take([branch.seat for branch in branches])
    whole = len(branches) == len(forward.sequences) and not any(branch.drafts for branch in branches)
    return whole and bool((rows[1:] > rows[:-1]).all()) and (forward.decoding.takes_forks or not forks)


def _selected(controller: Ahead, frontier: Frontier) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the tokens, and the parents where the controller selects forks; checks them."""
    count = len(frontier.branches)
    if not isinstance(controller, SelectingForks):
        tokens = controller.select(frontier)
        check_selected("select()", tokens, count)
        return tokens, None
    tokens, parents = Selection(*controller.select_forks(frontier))
    check_selected("select_forks()", tokens, count)
    check_selected("select_forks()", parents, count)
    return tokens, parents.contiguous()


def _followed(forward: Forward, following: Frontier, chosen: _Chosen, growth: Growth, grow: Grow) -> Frontier:
    """Does what follows from a decision whose step is under way; returns the frontier after that step."""
    sequences, before, parents = forward.sequences, following.branches, chosen.parents
    seats = [branch.seat for branch in before]
    rows = sequences.live.row.take(seats).tolist()
    forked = [place for place, parent in enumerate(parents) if parent != place]
    grow(before, growth, {(before[parents[place]].number, chosen.tokens[place]): before[place] for place in forked})
    present = {branch.seat: branch for branch in sequences.branches.values()}
    after = [present.get(seat) for seat in seats]
    if chosen.forks:
        held = {row: branch for row, branch in zip(rows, after, strict=True) if branch is not None}
        forward.decoding.forked(held, [rows[place] for place in forked])
    going = [(place, branch) for place, branch in enumerate(after) if branch is not None]
    for _, branch in going:
        branch.stored += 1
    return Frontier([branch for _, branch in going], chosen_rows(following.logits, [place for place, _ in going]))


def _have_room(controller: Ahead, forward: Forward, branches: Sequence[Branch]) -> bool:
    """Says whether each of these branches gets a token after the next one, and there are pages for these."""
    sequences, most = forward.sequences, controller.max_new_tokens
    if any(len(branch.tokens) - branch.prompt + 1 >= most for branch in branches):
        return False
    return sequences.have_pages(dict.fromkeys((branch.number for branch in branches), 1))
