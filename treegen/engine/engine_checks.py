"""Checks of what callers, controllers and drafters give: errors in one line, before it reaches pages or a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treegen.engine.branch import Branch
from treegen.engine.draft_trees import DraftTree, chain, longest_path
from treegen.ir.arrays import Longs, int32_array, is_integer, positive_int
from treegen.ir.errors import BranchError, InputError
from treegen.ir.shape import Shape

if TYPE_CHECKING:
    from treegen.engine.control import Frontier, Growth
    from treegen.engine.forward import Model


def checked_prompts(prompts: Sequence[Sequence[int]], most: int, new_tokens: int, model: Model) -> list[list[int]]:
    """Returns the tokens of prompts, which may be arrays. Raises BranchError for other tokens or too many.

    Args:
        prompts: The tokens of each prompt.
        most: The most tokens of a branch, by the model and the pages.
        new_tokens: Those of them that are kept for new tokens.
        model: The model.
    """
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise BranchError("prompts", type(prompts).__name__, "is not a list of prompts", "give the tokens of each")
    prompts = list(prompts)
    limit = f"{most} tokens that {'the model' if most == model.max_tokens else 'the pages'} can hold"
    more = "" if most == model.max_tokens else ", or add pages"
    if prompts and new_tokens >= most:
        reason = f"leaves no room for a prompt in the {limit}"
        raise BranchError("max_new_tokens", new_tokens, reason, f"lower it{more}")
    made = []
    for number, prompt in enumerate(prompts):
        name = f"prompts[{number}]"
        tokens = int32_array(name, prompt, low=0, high=model.vocabulary - 1, error=BranchError).tolist()
        if not 1 <= len(tokens) <= most - new_tokens:
            reason = f"is not within 1..{most - new_tokens} tokens: of the {limit}, {new_tokens} are for new ones"
            raise BranchError(name, f"{len(tokens)} tokens", reason, f"shorten it{more}" if tokens else "give some")
        made.append(tokens)
    return made


def check_tokens(name: str, tokens: Sequence[int], vocabulary: int) -> None:
    """Raises BranchError, with this name, unless these are tokens of the vocabulary."""
    for token in tokens:
        if not (type(token) is int or isinstance(token, np.integer)) or not 0 <= token < vocabulary:
            reason, fix = f"is not one of the tokens 0..{vocabulary - 1}", "return one of these"
            if token == vocabulary:
                fix += "; `Sampling` gives this number where logits are NaN"
            raise BranchError(name, token, reason, fix)


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


def check_going_to_rest(growth: Growth, able: bool) -> None:
    """Raises BranchError unless the branches that rest when their token is stored have one, and may rest."""
    if wrong := [number for number in growth.resting if not growth.grown.get(number) or not able]:
        reason = "has no next token, or rests with drafts or without `together`"
        raise BranchError("resting", sorted(wrong), reason, "let a branch rest that goes on")


def checked_drafts(found: object, texts: int) -> list[DraftTree]:
    """Returns the drafts that a drafter has given, in lists, also those of arrays and of NumPy's integers.

    Raises BranchError unless there is a DraftTree for each of this number of texts.
    """
    name, fix = "drafts", "return a treegen.engine.DraftTree for each text"
    if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
        raise BranchError(name, type(found).__name__, "is not a list", fix)
    trees = [DraftTree(*map(_listed, each)) if isinstance(each, DraftTree) else each for each in found]
    if len(trees) != texts:
        raise BranchError(name, f"{len(trees)} of them", f"are not for {texts} texts", fix)
    for each in trees:
        if not isinstance(each, DraftTree) or not all(isinstance(column, list) for column in each):
            raise BranchError(name, type(each).__name__, "is not a DraftTree of two lists", fix)
    return trees


def _listed(column: Any) -> Any:
    """Returns the entries of an array, a tensor or a sequence; anything else as it is, to be refused."""
    if isinstance(column, np.ndarray | torch.Tensor):
        return column.tolist()
    if isinstance(column, Sequence):
        return [int(each) if isinstance(each, np.integer) else each for each in column]
    return column


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
        if type(parent) is not int or not -1 <= parent < draft:
            reason = "is no earlier draft, and not -1 for the last token"
            raise BranchError(f"parents[{draft}]", parent, reason, "list drafts behind those that they follow")
    if not trees and list(drafts.parents) != chain(count):
        reason = "are not a chain, and the controller says that there are no trees"
        raise BranchError("parents", list(drafts.parents), reason, "set draft_trees")


def check_counts(counts: Mapping[int, int], facts: Longs, rows: int | None, most: tuple[int, int, int]) -> None:
    """Raises BranchError for a step that cannot be taken.

    Args:
        counts: The new tokens of each branch.
        facts: `[4, branches]`; seats, stored tokens, tokens and new tokens of these branches.
        rows: The rows of the step; by default one for each new token.
        most: The most tokens of a branch, the most new ones of a branch, and the most rows.
    """
    max_tokens, max_new, max_rows = most
    _, stored, tokens, new = facts
    wrong = (new < 1) | (stored + new > np.minimum(tokens, max_tokens)) | (new > max_new)
    for place in wrong.nonzero()[0].tolist():
        number, pending, count = list(counts)[place], int(tokens[place] - stored[place]), int(new[place])
        if not 1 <= count <= pending:
            raise BranchError(
                "counts", number, f"has {pending} tokens to store, not {count}", "extend the branch first"
            )
        if stored[place] + count > max_tokens:
            reason = f"would have {stored[place] + count} tokens, and max_tokens is {max_tokens}"
            raise BranchError("branch", number, reason, "end it earlier, or raise max_tokens")
        reason = f"has {count} new tokens, and max_new is {max_new}"
        raise BranchError("branch", number, reason, "divide the step, or raise max_new")
    total = sum(counts.values()) if rows is None else rows
    if not sum(counts.values()) <= total <= max_rows or not counts:
        found = f"{total} rows for {sum(counts.values())} tokens"
        raise BranchError("counts", found, f"is not within 1..{max_rows}", "divide the step, or raise max_rows")


def check_layer(layer: int, attended: Collection[int]) -> None:
    """Raises InputError for a layer that has attended in this step: it has room for one K and V of each token."""
    if layer in attended:
        fix = "use a model whose layers attend once, or number its attention layers"
        raise InputError("layer", layer, "attends a second time in a step", fix)


def check_heads(shape: Shape, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raises InputError for tensors of a layer with other heads or head dims than the pool's shape."""
    heads = shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads
    dims = shape.head_dim, shape.head_dim, shape.head_dim_v
    for name, tensor, wanted in zip(
        ("q", "keys", "values"), (q, keys, values), zip(heads, dims, strict=True), strict=True
    ):
        if tuple(tensor.shape[1:]) != wanted:
            reason = f"has not the pool's heads and head dims {wanted}"
            raise InputError(name, f"shape {tuple(tensor.shape)}", reason, "give the model the shape of its layers")


def check_computed(attended: int, layers: int, logits: object, shape: tuple[int, int]) -> None:
    """Raises InputError unless all layers have attended in a step, and there are logits of this shape."""
    if attended < layers:
        found, fix = f"{attended} of {layers} layers", "call attend in each attention layer"
        raise InputError("model", found, "called attend in the step", fix)
    if not isinstance(logits, torch.Tensor) or logits.shape != shape:
        found = type(logits).__name__
        if isinstance(logits, torch.Tensor):
            found = f"logits of shape {tuple(logits.shape)}"
        reason = f"has not a row for each of {shape[0]}, with a number for each of {shape[1]} tokens"
        raise InputError("model", found, reason, "return logits of the rows that are asked for")


def check_selected(name: str, selected: object, *shape: int) -> None:
    """Raises BranchError, with this name, unless this is an int64 tensor of this shape, whose first dimension are
    branches or their rows; does not wait for the device.
    """
    if isinstance(selected, torch.Tensor):
        if selected.dtype == torch.int64 and selected.shape == shape:
            return
        found = f"{str(selected.dtype).removeprefix('torch.')} of shape {tuple(selected.shape)}"
    else:
        found = type(selected).__name__
    raise BranchError(name, found, f"is not int64 of shape {shape}", "return an entry for each branch")


def check_forks(branches: Sequence[Branch], tokens: Sequence[int], parents: Sequence[int], growth: Growth) -> None:
    """Raises BranchError unless a decision is what was selected on the device, or ends branches.

    Args:
        branches: Those that were decided about.
        tokens: The next token in the place of each branch.
        parents: The branch that it continues.
        growth: The decision.
    """
    continued: dict[int, list[int]] = {}
    for place, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        branch, other = branches[place], branches[parent] if 0 <= parent < len(branches) else None
        alike = other is not None and (other.label[0], other.stored) == (branch.label[0], branch.stored)
        if not alike or parents[parent] != parent:
            reason = f"does not go on in its own place, or is no branch like {place}, of its prompt and its length"
            raise BranchError("select_forks()", parent, reason, f"return another parent for {place}")
        continued.setdefault(parent, []).append(token)
    for place, branch in enumerate(branches):
        found, selected = [token for token, _ in growth.grown.get(branch.number, ())], continued.get(place, [])
        if found and (found[0] != tokens[place] or sorted(found) != sorted({*selected})):
            raise BranchError("commit()", branch.number, "has not the token that was selected", "return it")


def check_drafted(branch: Branch, drawn: Sequence[int], growth: Growth) -> None:
    """Raises BranchError unless a decision about a branch with drafts is what was accepted on the device, or ends it.

    Args:
        branch: The branch, with its drafts.
        drawn: The token that was selected after its last token that is no draft, and after each draft.
        growth: The decision.
    """
    path = longest_path(drawn, branch.tokens[len(branch.tokens) - branch.drafts :], branch.draft_parents)
    found, kept = [token for token, _ in growth.grown.get(branch.number, ())], growth.accepted.get(branch.number, ())
    if found and (found != [drawn[[-1, *path][-1] + 1]] or [*kept] != path):
        reason = f"has not the token that was selected after the accepted drafts {path}"
        raise BranchError("commit()", branch.number, reason, "accept the drafts that were selected, and return it")


def check_limits(limits: object, most: int) -> None:
    """Raises InputError unless these are numbers of new tokens, at most `most`."""
    if not isinstance(limits, Sequence) or isinstance(limits, str):
        raise InputError("limits", limits, "is no list of numbers", "give one for each prompt")
    for prompt, limit in enumerate(limits):
        if positive_int(f"limits[{prompt}]", limit, InputError) > most:
            raise InputError(f"limits[{prompt}]", limit, f"is more than max_new_tokens = {most}", "raise that, too")


def check_count(limits: Sequence[int], prompts: int) -> None:
    """Raises BranchError unless there are no limits, or one for each of this number of prompts."""
    if limits and len(limits) != prompts:
        reason, fix = f"are not one for each of {prompts} prompts", "give one for each, or leave them out"
        raise BranchError("controller.limits", f"{len(limits)} limits", reason, fix)


def checked_stop_ids(stop_ids: object) -> tuple[int, ...]:
    """Returns these tokens, in a collection of any type. Raises InputError unless they are tokens."""
    given: Any = stop_ids.tolist() if isinstance(stop_ids, np.ndarray | torch.Tensor) else stop_ids
    listed = isinstance(given, Collection) and not isinstance(given, str | bytes | Mapping)
    if not listed or not all(is_integer(token) and token >= 0 for token in given):
        raise InputError("stop_ids", stop_ids, "is not a sequence of tokens", "give integers of at least 0")
    return tuple(map(int, given))
