"""Proposals: the drafts that a controller appends to branches before a step."""

from __future__ import annotations

from treegen.engine.control import Drafting
from treegen.engine.engine_checks import check_drafts, check_tokens, checked_drafts
from treegen.engine.sequences import SequenceTree


def propose(controller: Drafting, sequences: SequenceTree, max_tokens: int, vocabulary: int) -> None:
    """Appends drafts to branches that decode, where there are pages for all of them.

    Args:
        controller: Proposes the drafts.
        sequences: The branches.
        max_tokens: The most tokens of a branch.
        vocabulary: The number of different tokens.

    Raises:
        BranchError: Drafts cannot be checked in a step, or are no tokens.
    """
    running = sequences.branches.values()
    able = [branch for branch in running if branch.stored and branch.pending == 1]
    drafts, proposed = [], checked_drafts(controller.draft(able), len(able))
    for branch, own in zip(able, proposed, strict=True):
        check_drafts(own, controller.max_draft, controller.draft_trees)
        check_tokens("draft()", own.tokens, vocabulary)
        drafts.append(own.first(max_tokens - len(branch.tokens)))
    counts = {branch.number: 1 + len(own.tokens) for branch, own in zip(able, drafts, strict=True)}
    if sequences.have_pages(counts):
        for branch, own in zip(able, drafts, strict=True):
            sequences.propose(branch.number, own)
