"""What branches have in common: pages that a fork takes over from an ended branch, and a prompt from a running one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from treegen.engine.branch import Branch
from treegen.engine.prefix import PrefixCache, common_prefix
from treegen.ir.errors import BranchError
from treegen.ir.live_batch import LiveBatch


class ForkPlace(NamedTuple):
    """What a fork takes over from an ended branch.

    tokens: the branch's tokens. pages: the first pages that the fork has as well; where it has all full pages of its
    parent, also the last page, which it copies to. seat: the seat, -1 without such a branch. anew: whether the fork has
    other pages than the branch.
    """

    tokens: list[int]
    pages: list[int]
    seat: int
    anew: bool


def predecessors(ended: Sequence[Branch], parents: Sequence[Branch], page_size: int) -> list[Branch | None]:
    """Chooses for each fork an ended branch whose place it takes.

    The best one has stored the same number of tokens in the same full pages as the fork's parent. The next best has the
    same first page.

    Args:
        ended: The branches that end; each is chosen once at most.
        parents: The parent of each fork.
        page_size: Tokens of a page.

    Returns:
        An ended branch for each fork, or None.
    """
    alike: dict[tuple[int, int], list[Branch]] = {}
    for branch in ended:
        alike.setdefault(_full_pages(branch, page_size), []).append(branch)
    found: list[Branch | None] = []
    for parent in parents:
        same = alike.get(_full_pages(parent, page_size))
        found.append(same.pop() if same else None)
    others: dict[int, list[Branch]] = {}
    for branch in (each for left in alike.values() for each in left if each.pages):
        others.setdefault(branch.pages[0], []).append(branch)
    for place, parent in enumerate(parents if others else ()):
        if found[place] is None and parent.pages and (left := others.get(parent.pages[0])):
            found[place] = left.pop()
    return found


def shared_counts(live: LiveBatch, branches: Iterable[Branch]) -> dict[int, int]:
    """Counts the first pages that each branch shares with others; the counts are by the numbers of branches."""
    most = live.shared_tokens.copy()
    sharing = (live.shared_with >= 0).nonzero()[0]
    np.maximum.at(most, live.shared_with.take(sharing), most.take(sharing))
    return {branch.number: int(most[branch.seat]) // live.page_size for branch in branches}


def tell_stored(live: LiveBatch, branches: Iterable[Branch]) -> None:
    """Tells the live batch of tokens that branches have stored, where a step has not told it ahead."""
    for branch in branches:
        if live.tokens[branch.seat] < branch.stored:
            live.set_tokens(branch.seat, branch.stored)


def share(live: LiveBatch, branch: Branch, other: Branch, tokens: int) -> None:
    """Tells the live batch that a branch shares its first tokens with another one, which has stored them."""
    tell_stored(live, [other])
    live.share(branch.seat, other.seat, tokens)


def follow(live: LiveBatch, fork: Branch, parent: Branch) -> None:
    """Tells the live batch of a fork in the seat of a branch with other pages: what it shares with its parent."""
    seat = parent.seat
    while seat not in (fork.seat, -1):
        seat = int(live.shared_with[seat])
    if seat == fork.seat:  # the parent shares with this seat, directly or through others
        live.set_tokens(fork.seat, 0)
    if live.tokens[fork.seat] != fork.stored:
        live.set_tokens(fork.seat, fork.stored)
    live.share(fork.seat, parent.seat, fork.stored)


def share_by_prompt(live: LiveBatch, branches: Iterable[Branch], page_size: int) -> None:
    """Tells the live batch that branches of a prompt share the pages that all of them have, and no more.

    They share these still whichever of them end, with forks of others in their places. Plans that rely on more are not
    used for the branches that had it in common.
    """
    of_prompts: dict[int, list[Branch]] = {}
    for branch in branches:
        of_prompts.setdefault(branch.label[0], []).append(branch)
    for own in of_prompts.values():
        owner = min(own, key=lambda branch: _depth(live, branch.seat))
        common = min(common_pages(branch, owner, page_size) for branch in own)
        seats, tokens = [branch.seat for branch in own], common * page_size
        while len(untrue := (np.isin(live.shared_with, seats) & (live.shared_tokens > tokens)).nonzero()[0]):
            for seat in untrue.tolist():  # also of branches of other prompts; who shares with it may be untrue then
                live.moved(seat)
                live.share(seat, owner.seat, tokens)
        for seat in seats:
            if seat != owner.seat and live.shared_tokens[seat] != tokens:
                live.share(seat, owner.seat, tokens)


def common_pages(branch: Branch, parent: Branch, page_size: int) -> int:
    """Returns how many first full pages two branches have in common; the same tokens are in them."""
    most = min(branch.stored, parent.stored) // page_size
    if branch.pages[most - 1 : most] == parent.pages[most - 1 : most]:  # whoever shares a page shares all before it
        return most
    return common_prefix(branch.pages[:most], parent.pages[:most])


def common_tokens(branch: Branch, other: Branch, stored: int, page_size: int, known: int = 0) -> int:
    """Returns the first tokens, in full pages, that a branch has in common with another one.

    Args:
        branch: The branch. Its last token is not among the tokens in common.
        other: The other branch.
        stored: The tokens that the other branch has stored.
        page_size: Tokens of a page.
        known: Where there are no more tokens in common than this number, a multiple of `page_size`, returns 0. Mostly
            one page of tokens is compared for that.
    """
    most, following = min(stored, len(branch.tokens) - 1), known + page_size
    if following > most or branch.tokens[known:following] != other.tokens[known:following]:
        return 0
    tokens = common_prefix(branch.tokens[:most], other.tokens[:most]) // page_size * page_size
    return tokens if tokens > known else 0


def known_pages(
    branch: Branch, others: Iterable[Branch], cache: PrefixCache | None, page_size: int
) -> tuple[list[int], Branch, int]:
    """Returns the pages that are known for a branch's first tokens, but the last one: another branch's, or the cache's.

    It also returns the branch that has most of these tokens in full pages, of several the first, and their number.
    """
    owner, tokens = branch, 0
    for other in others:
        stored = min(other.stored, len(other.tokens) - other.drafts)  # drafts may be removed, and written over
        if stored and (more := common_tokens(branch, other, stored, page_size, tokens)):
            owner, tokens = other, more
    cached = [] if cache is None else cache.match(branch.tokens[:-1])
    return (cached if len(cached) * page_size > tokens else owner.pages[: tokens // page_size]), owner, tokens


def check_replaced(ended: Sequence[int], parents: Sequence[int]) -> None:
    """Raises BranchError unless branches end once, and forks are of others."""
    if len({*ended}) < len(ended):
        raise BranchError("ended", [*ended], "names a branch twice", "name each branch once")
    if both := sorted({*ended} & {*parents}):
        raise BranchError("parents", both, "end as well", "fork branches that go on")


def _full_pages(branch: Branch, page_size: int) -> tuple[int, int]:
    """Returns the stored tokens and the last full page: whoever shares a page shares all pages before it."""
    full = branch.stored // page_size
    return branch.stored, branch.pages[full - 1] if full else -1


def _depth(live: LiveBatch, seat: int) -> int:
    """Returns how many seats there are above a seat, which it shares with directly or through others."""
    depth = 0
    while (seat := int(live.shared_with[seat])) >= 0:
        depth += 1
    return depth
