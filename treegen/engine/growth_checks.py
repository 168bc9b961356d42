"""Checks of what controllers decide: its form, and whether the engine can follow it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from treegen.engine.branch import Branch
from treegen.engine.control import Growth, Selection
from treegen.engine.engine_checks import check_tokens
from treegen.engine.sequences import SequenceTree
from treegen.ir.arrays import is_integer
from treegen.ir.errors import BranchError

_COLUMNS = {"grown": Mapping, "results": Iterable, "accepted": Mapping, "resting": Collection}


def check_form(name: str, growth: object) -> Growth:
    """Returns a decision. Raises BranchError, with this name, unless it has the form of a Growth."""
    fix = "return treegen.engine.Growth(grown, results)"
    if not all(hasattr(growth, column) for column in _COLUMNS):
        raise BranchError(name, type(growth).__name__, "is no Growth", fix)
    columns: dict[str, Any] = {column: getattr(growth, column) for column in _COLUMNS}
    for column, kind in _COLUMNS.items():
        if not isinstance(columns[column], kind):
            found, reason = type(columns[column]).__name__, f"is no {kind.__name__} as in Growth"
            raise BranchError(f"{name}.{column}", found, reason, fix)
    made = Growth(**columns | {"results": list(columns["results"])})
    for following in made.grown.values():
        if not isinstance(following, Sequence) or not all(map(_is_next, following)):
            reason, fix = "is no list of next tokens", "return treegen.engine.Next(token, label) for each"
            raise BranchError(name, following, reason, fix)
    for number, drafts in made.accepted.items() if {*map(type, made.accepted.values())} - {list} else ():
        if not isinstance(drafts, Sequence | np.ndarray) or isinstance(drafts, str | bytes) or not np.ndim(drafts):
            raise BranchError(f"{name}.accepted[{number!r}]", drafts, "is no list of drafts", "list their numbers")
    if not all(map(is_integer, made.resting)):
        raise BranchError(f"{name}.resting", made.resting, "are no numbers of branches", "list integers")
    for result in made.results:
        if not isinstance(getattr(result, "label", None), tuple) or not hasattr(result, "tokens"):
            fix = "return treegen.engine.Continuation(label, tokens)"
            raise BranchError(name, type(result).__name__, "is no result", fix)
    return made._replace(resting=frozenset(made.resting))


def checked_selection(found: Any) -> Selection:
    """Returns what `select_forks` has returned. Raises BranchError unless it has the form of a Selection."""
    try:
        return Selection(*found)
    except TypeError as cause:
        fix = "return treegen.engine.Selection(tokens, parents)"
        raise BranchError("select_forks()", type(found).__name__, "is no Selection", fix) from cause


def _is_next(each: object) -> bool:
    return isinstance(each, tuple) and len(each) == 2 and isinstance(each[1], tuple)


def _is_label(label: tuple[object, ...]) -> bool:
    return bool(label) and all(map(is_integer, label))


def check_growth(
    sequences: SequenceTree, branches: Sequence[Branch], growth: Growth, prompts: int, vocabulary: int, most: int
) -> None:
    """Raises BranchError unless a decision can be followed.

    Args:
        sequences: The running branches.
        branches: Those that were decided about.
        growth: The decision.
        prompts: The number of prompts.
        vocabulary: The number of different tokens.
        most: The most tokens after a prompt.
    """
    grown = growth.grown
    if unknown := grown.keys() ^ {branch.number for branch in branches}:
        reason = "is not in the frontier, or has no decision"
        raise BranchError("decide()", sorted(unknown, key=str), reason, "decide for each branch of the frontier")
    if unknown := growth.accepted.keys() - grown.keys():
        raise BranchError("accepted", sorted(unknown, key=str), "is not in the frontier", "name branches with drafts")
    check_tokens("decide()", [token for following in grown.values() for token, _ in following], vocabulary)
    for branch in branches:
        prompt, kept = branch.label[:1], len(growth.accepted.get(branch.number, ()))
        if kept > branch.drafts:
            reason = f"should keep {kept} drafts, and has {branch.drafts}"
            raise BranchError("accepted", branch.number, reason, "name branches with drafts")
        if grown[branch.number] and len(branch.tokens) - branch.drafts + kept - branch.prompt >= most:
            reason = f"would have more than max_new_tokens = {most}"
            raise BranchError("decide()", branch.number, reason, "end it, or raise the controller's max_new_tokens")
        for _, label in grown[branch.number]:
            if label is not branch.label and not (_is_label(label) and label[:1] == prompt):
                reason = f"is no label of integers that begins with the number of the prompt, {branch.label[0]}"
                raise BranchError("decide()", label, reason, "keep the first number of labels")
    for result in growth.results:
        if not _is_label(result.label) or not 0 <= result.label[0] < prompts:
            reason = "is the label of a result, and no integers that begin with the number of a prompt"
            raise BranchError("decide()", result.label, reason, "begin with the branch's own first number")
    resting = sum(not grown.get(number) for number in growth.resting)
    after = len(sequences) - len(grown) + sum(map(len, grown.values())) + resting
    if after > sequences.max_branches:
        reason = f"is more than max_branches = {sequences.max_branches}"
        raise BranchError("decide()", f"{after} branches", reason, "return fewer next tokens, or raise max_branches")
