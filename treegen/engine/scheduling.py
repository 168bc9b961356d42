"""Scheduling: which branches store how many tokens in the next step, and which are preempted where pages run out.

Branches that decode come first, prompts in chunks after them, older branches before younger ones.
"""

from __future__ import annotations

from typing import NamedTuple

from treegen.engine.branch import Branch
from treegen.engine.sequences import SequenceTree
from treegen.engine.shared_pages import common_tokens, known_pages
from treegen.ir.errors import PoolError


class Scheduled(NamedTuple):
    """The next step. counts: the tokens of each branch. preempted: branches that lost their pages."""

    counts: dict[int, int]
    preempted: list[int]


def schedule(sequences: SequenceTree, max_rows: int, together: bool, width: int = 1, new_tokens: int = 0) -> Scheduled:
    """Chooses the tokens of each branch in the next step. Preempts branches where pages run out.

    Args:
        sequences: The branches.
        max_rows: The most tokens of a step.
        together: Whether all branches of a prompt are needed together.
        width: The most branches of a prompt at a time, for the number of pages that the error names.
        new_tokens: The most tokens of a branch after its prompt, likewise.

    Raises:
        PoolError: What has to run together needs more pages than there are.
    """
    branches = sequences.branches
    if all(branch.stored and branch.pending == 1 + branch.drafts for branch in branches.values()):
        counts = {number: branch.pending for number, branch in branches.items()}  # the usual step: each branch decodes
        if sequences.have_pages(counts):
            return Scheduled(counts, [])
    counts, preempted = {}, []
    left, taken, pages = max_rows, 0, sequences.available
    pending = (branch for branch in branches.values() if branch.pending)
    for branch in sorted(pending, key=lambda each: (each.pending > 1 + each.drafts, *_age(each))):
        if not left:
            break
        begins = not branch.stored
        if begins:
            if _is_coming(sequences, branch, counts):
                continue
            sequences.adopt(branch.number)
            pages = sequences.available - taken  # less than none where it took over pages that others are to get
        count = min(branch.pending, left)
        missing = sequences.pages_missing({branch.number: count})
        victims = _victims(sequences, branch, counts, together) if missing > pages >= 0 else []
        if missing <= pages + _freed_by(sequences, victims):  # otherwise they would lose their pages for nothing
            while missing > pages >= 0 and victims:
                preempted.append(victims.pop().number)
                sequences.preempt(preempted[-1])
                pages = sequences.available - taken
        if missing <= pages:
            counts[branch.number] = count
            left, taken, pages = left - count, taken + missing, pages - missing
        elif begins:  # so that others may store what it has in common with them, before it takes that over
            sequences.preempt(branch.number)
            pages = sequences.available - taken
    if not counts:
        _raise_needed(sequences, together, width, new_tokens)
    return Scheduled(counts, preempted)


def _is_coming(sequences: SequenceTree, branch: Branch, counts: dict[int, int]) -> bool:
    """Says whether `adopt` finds more pages for a branch after a step that stores these numbers of tokens."""
    size, running = sequences.pool.page_tokens, sequences.branches
    known = len(known_pages(branch, running.values(), sequences.cache, size)[0]) * size
    others = ((running[number], count) for number, count in counts.items())
    return any(common_tokens(branch, each, each.stored + count - each.drafts, size, known) for each, count in others)


def _victims(sequences: SequenceTree, branch: Branch, counts: dict[int, int], together: bool) -> list[Branch]:
    """Returns the branches with pages that may make room for `branch`, the youngest last: younger ones outside of the
    step.

    Where all branches of a prompt are needed together, those of the same prompt make no room.
    """
    able = [
        each for each in sequences.branches.values()
        if each.pages and each.number not in counts and _age(each) > _age(branch)
        and not (together and each.label[0] == branch.label[0])
    ]  # fmt: skip
    return sorted(able, key=_age)


def _freed_by(sequences: SequenceTree, victims: list[Branch]) -> int:
    """Returns the number of pages that no branch holds once these branches have lost theirs."""
    if not victims:
        return 0
    numbers = {each.number for each in victims}
    kept = {page for each in sequences.branches.values() if each.number not in numbers for page in each.pages}
    return len({page for each in victims for page in each.pages} - kept)


def _raise_needed(sequences: SequenceTree, together: bool, width: int, new_tokens: int) -> None:
    """Raises PoolError: what has to run together needs more pages than there are. It says how many are enough."""
    branches, pool = sequences.branches.values(), sequences.pool
    oldest = min((each for each in branches if each.pending), key=_age)
    needy = [each for each in branches if each.label[0] == oldest.label[0]] if together else [oldest]
    missing = sequences.pages_missing({each.number: each.pending for each in needy})
    needed = missing + len({page for each in branches for page in each.pages})  # also of others, which rest
    what = f"{len(needy)} branches that run together need" if len(needy) > 1 else "one branch needs"
    shared = oldest.prompt // pool.page_tokens
    enough = shared + (width if together else 1) * (pool.pages_for(oldest.prompt + new_tokens) - shared)
    fix = f"add pages; {max(enough, needed)} hold this prompt until it ends"
    raise PoolError("num_pages", pool.num_pages, f"is less than the {needed} that {what}", fix)


def _age(branch: Branch) -> tuple[int, int]:
    """Returns what orders branches by age: those of earlier prompts are older."""
    return branch.label[0], branch.number
