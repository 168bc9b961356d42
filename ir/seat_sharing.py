"""Which seat owns the tokens that requests share, and who takes its place when it leaves.

The functions change the arrays by seat of a LiveBatch: seat s begins with the first `shared_tokens[s]` tokens of seat
`shared_with[s]` (-1: of none), which itself shares fewer tokens and so owns the last of them.

    before                         after leave(0)
    seat 0   [ 0 ............      seat 1   [ 0 ............      shares most with seat 0, so it takes its place
    seat 1   [ 0 .. 64 | own       seat 2   [ 0 .. 32 | own       shares with seat 1
    seat 2   [ 0 .. 32 | own
"""

from __future__ import annotations

import numpy as np

from treegen.ir.arrays import Bools, Ints, Longs
from treegen.ir.errors import TreeError


def owner_of(shared_with: Ints, shared_tokens: Ints, seat: int, tokens: int) -> tuple[int, int]:
    """Returns the owner of the last of a seat's first `tokens` tokens, and their number; -1 and 0 for no tokens.

    The owner is this seat, or one up the chain of seats that it shares with.
    """
    if not tokens:
        return -1, 0
    while shared_tokens.item(seat) >= tokens:
        seat = shared_with.item(seat)
    return seat, tokens


def begin_alike(shared_with: Ints, shared_tokens: Ints, seat: int, other: int, tokens: int) -> bool:
    """Says whether two seats begin with the same first `tokens` tokens, at least 1, as far as is known.

    For a pair or two this takes a fraction of the time of `share`.
    """
    owner, _ = owner_of(shared_with, shared_tokens, seat, tokens)
    return owner == owner_of(shared_with, shared_tokens, other, tokens)[0]


def share(shared_with: Ints, shared_tokens: Ints, pairs: Longs, tokens: Longs) -> Bools:
    """Tells for each pair of seats whether both begin with the same first tokens, as far as is known.

    Args:
        shared_with, shared_tokens: The arrays by seat.
        pairs: `[2, pairs]`; two seats each.
        tokens: `[pairs]`; the number of first tokens, at least 1.
    """
    owners = pairs
    while np.count_nonzero(up := shared_tokens.take(owners) >= tokens):
        owners = np.where(up, shared_with.take(owners), owners)
    alike: Bools = owners[0] == owners[1]
    return alike


def leave(shared_with: Ints, shared_tokens: Ints, seat: int, kept: int = 0) -> bool:
    """Limits the tokens that a seat shares with others to its first `kept` tokens; returns whether others shared more.

    Of these others, the one that shares most becomes the owner of all further tokens, and the rest share with it.
    """
    above, shared = shared_with.item(seat), shared_tokens.item(seat)
    sharers = (shared_with == seat).nonzero()[0]
    if len(sharers):
        sharers = sharers[shared_tokens[sharers] > kept]
    if len(sharers):
        heir = sharers[shared_tokens[sharers].argmax()]
        # A seat that keeps only what it shares itself owns no tokens, so the heir shares with the seat above it. The
        # heir comes first: if this is stopped between both lines, there is no cycle, and the same call ends it.
        own = kept > shared
        shared_with[heir], shared_tokens[heir] = (seat, kept) if own else (above, shared)
        shared_with[sharers[sharers != heir]] = heir
    if shared > kept:
        shared_with[seat], shared_tokens[seat] = owner_of(shared_with, shared_tokens, above, kept)
    return len(sharers) > 0


def too_short(shared_with: Ints, shared_tokens: Ints, tokens: Ints) -> list[int]:
    """Returns the seats with fewer tokens than they share, or than others share with them, ascending."""
    sharing = (shared_with >= 0).nonzero()[0]
    both = np.array([sharing, shared_with.take(sharing)])
    short = both[shared_tokens.take(sharing) > tokens.take(both)]
    return np.unique(short).tolist() if len(short) else []


def settle(shared_with: Ints, shared_tokens: Ints, seat: int) -> None:
    """Attaches those that share no more with a seat than the seat shares itself to the owner of their last token."""
    sharers = (shared_with == seat).nonzero()[0]
    for sharer in sharers[shared_tokens[sharers] <= shared_tokens[seat]].tolist():
        shared_with[sharer] = owner_of(shared_with, shared_tokens, seat, int(shared_tokens[sharer]))[0]


def check_shares_not(shared_with: Ints, above: int, seat: int) -> None:
    """Raises TreeError if the seat `above` is this seat, or shares with it, directly or through others."""
    up = above
    while up >= 0:
        if up == seat:
            reason = f"shares with seat {seat} itself" if up != above else "is the seat itself"
            fix = f"let seat {above} share with seat {seat}, or name another"
            raise TreeError("shared_with", above, reason, fix)
        up = int(shared_with[up])
