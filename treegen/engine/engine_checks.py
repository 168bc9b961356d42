"""Checks of what callers, controllers and drafters give: errors in one line, before it reaches pages or a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from treegen.engine.branch import Branch
from treegen.engine.draft_trees import DraftTree, chain
from treegen.engine.sequences import SequenceTree
from treegen.ir.arrays import int32_array, positive_int
from treegen.ir.errors import BranchError, InputError

if TYPE_CHECKING:
    from treegen.engine.control import Controller, Frontier, Growth


def check_sizes(controller: Controller, drafts: int, max_branches: int, max_rows: int) -> None:
    """Raises BranchError unless a step holds the branches of a prompt, and all branches that run with their drafts.

    Args:
        controller: Decides how branches grow.
        drafts: The most drafts of a branch.
        max_branches: The most branches that run at a time.
        max_rows: The most tokens of a step.
    """
    positive_int("max_branches", max_branches, BranchError)
    positive_int("max_rows", max_rows, BranchError)
    if controller.width > max_branches:
        reason = f"of a prompt is more than max_branches = {max_branches}"
        raise BranchError("controller.width", controller.width, reason, "raise max_branches")
    if max_rows < max_branches * (1 + drafts):
        reason = f"is less than max_branches = {max_branches}, with {1 + drafts} rows each"
        raise BranchError("max_rows", max_rows, reason, "raise max_rows")


def checked_prompts(prompts: Sequence[Sequence[int]], most: int, new_tokens: int, vocabulary: int) -> list[list[int]]:
    """Returns the tokens of prompts, which may be arrays. Raises BranchError for other tokens or too many.

    Args:
        prompts: The tokens of each prompt.
        most: The most tokens of a branch.
        new_tokens: Those of them that are kept for new tokens.
        vocabulary: The number of different tokens.
    """
    made = []
    for number, prompt in enumerate(prompts):
        name = f"prompts[{number}]"
        tokens = int32_array(name, prompt, low=0, high=vocabulary - 1, error=BranchError).tolist()
        if not 1 <= len(tokens) <= most - new_tokens:
            reason = f"is not within 1..{most - new_tokens} tokens, which leaves room for {new_tokens} new ones"
            raise BranchError(name, f"{len(tokens)} tokens", reason, "shorten it, or add pages")
        made.append(tokens)
    return made


def check_tokens(name: str, tokens: Sequence[int], vocabulary: int) -> None:
    """Raises BranchError, with this name, unless these are tokens of the vocabulary."""
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise BranchError(name, token, f"is not one of the tokens 0..{vocabulary - 1}", "return one of these")


def check_growth(
    sequences: SequenceTree, branches: Sequence[Branch], growth: Growth, prompts: int, vocabulary: int
) -> None:
    """Raises BranchError unless a decision can be followed.

    Args:
        sequences: The running branches.
        branches: Those that were decided about.
        growth: The decision.
        prompts: The number of prompts.
        vocabulary: The number of different tokens.
    """
    grown = growth.grown
    if unknown := grown.keys() ^ {branch.number for branch in branches}:
        reason = "is not in the frontier, or has no decision"
        raise BranchError("decide()", sorted(unknown), reason, "decide for each branch of the frontier")
    check_tokens("decide()", [token for following in grown.values() for token, _ in following], vocabulary)
    for branch in branches:
        prompt = branch.label[:1]
        for following in grown[branch.number]:
            if following.label[:1] != prompt:
                reason = f"is no label that begins with the number of the prompt, {branch.label[0]}"
                raise BranchError("decide()", following.label, reason, "keep the first number of labels")
    for result in growth.results:
        if not result.label or not 0 <= result.label[0] < prompts:
            reason = "is the label of a result, and does not begin with the number of a prompt"
            raise BranchError("decide()", result.label, reason, "begin with the branch's own first number")
    after = len(sequences) - len(grown) + sum(map(len, grown.values())) + len(growth.resting)
    if after > sequences.max_branches:
        reason = f"is more than max_branches = {sequences.max_branches}"
        raise BranchError("decide()", f"{after} branches", reason, "return fewer next tokens, or raise max_branches")


def check_resting(frontier: Frontier, growth: Growth, together: bool, others: bool) -> None:
    """Raises BranchError unless the branches that rest may do so, by what Growth says of them.

    Args:
        frontier: The branches that were decided about.
        growth: The decision.
        together: The controller's attribute.
        others: Whether branches run that are not in the frontier.
    """
    grown, resting = growth.grown, set(growth.resting)
    if wrong := [number for number in resting if number not in grown or grown[number] or not together]:
        reason = "is not in the frontier, has next tokens, or rests without `together`"
        raise BranchError("resting", sorted(wrong), reason, "let a branch without next tokens rest")
    if resting and not others and not any(grown.values()):
        reason = "of all branches none has next tokens, and these rest"
        raise BranchError("resting", sorted(resting), reason, "extend a branch, or end all")


def check_drafts(drafts: DraftTree, most: int, trees: bool) -> None:
    """Raises BranchError for drafts that a step cannot check, whatever their tokens are.

    Args:
        drafts: The drafts.
        most: The most drafts of a branch.
        trees: Whether drafts may be trees.
    """
    count = len(drafts.tokens)
    if count != len(drafts.parents) or count > most:
        found = f"{count} tokens and {len(drafts.parents)} parents"
        raise BranchError("drafts", found, f"are not one parent each, for at most {most}", "return fewer, or max_draft")
    for draft, parent in enumerate(drafts.parents):
        if not -1 <= parent < draft:
            reason = "is no earlier draft, and not -1 for the last token"
            raise BranchError(f"parents[{draft}]", parent, reason, "list drafts behind those that they follow")
    if not trees and list(drafts.parents) != chain(count):
        reason = "are not a chain, and the controller says that there are no trees"
        raise BranchError("parents", list(drafts.parents), reason, "set draft_trees")


def check_selected(tokens: object, branches: int) -> None:
    """Raises BranchError unless this is an int64 tensor with a token for each branch; does not wait for the device."""
    if isinstance(tokens, torch.Tensor):
        if tokens.dtype == torch.int64 and tokens.shape == (branches,):
            return
        found = f"{str(tokens.dtype).removeprefix('torch.')} of shape {tuple(tokens.shape)}"
    else:
        found = type(tokens).__name__
    raise BranchError("select()", found, f"is not int64 of shape ({branches},)", "return a token for each branch")


def check_deterministic(deterministic: object, strategy: object, make_kernel: object) -> None:
    """Raises InputError unless this is a bool, and where it is True the other arguments are left out."""
    if not isinstance(deterministic, bool):
        raise InputError("deterministic", deterministic, "is not a bool", "give True or False")
    for name, given, usual in (("strategy", strategy, "auto"), ("make_kernel", make_kernel, None)):
        if deterministic and given != usual:
            reason = "chooses other kernels than the batch-invariant ones of deterministic=True"
            raise InputError(name, given if isinstance(given, str) else type(given).__name__, reason, "leave it out")


def check_stop_ids(stop_ids: object) -> None:
    """Raises InputError unless this is a collection of tokens."""
    if isinstance(stop_ids, Collection) and all(type(token) is int and token >= 0 for token in stop_ids):
        return
    raise InputError("stop_ids", stop_ids, "is not a sequence of tokens", "give integers of at least 0")
