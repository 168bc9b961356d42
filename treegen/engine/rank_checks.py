"""Checks of engines on several ranks: what they cannot do, and what has to be the same on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from treegen.distributed.agreement import check_agreement
from treegen.distributed.parallel import Parallel
from treegen.engine.control import Controller, Drafting, SelectingDrafts
from treegen.engine.forward import Model
from treegen.engine.sequences import SequenceTree
from treegen.environment import checks_inputs
from treegen.ir.errors import InputError


@runtime_checkable
class DividedModel(Protocol):
    """A model that several ranks compute together."""

    @property
    def ranks(self) -> int:
        """The number of these ranks."""


def check_parallel(parallel: Parallel | None, model: object) -> None:
    """Raises InputError unless this is a Parallel that goes with the model, or None for a model of one rank."""
    if parallel is not None and not isinstance(parallel, Parallel):
        fix = "give treegen.distributed.Parallel(...), or Parallel.over(mesh, ...)"
        raise InputError("parallel", type(parallel).__name__, "is not a Parallel", fix)
    ranks = 1 if parallel is None else parallel.tensor_place[1]
    if isinstance(model, DividedModel) and model.ranks != ranks:
        reason = f"has {ranks} ranks that divide heads, and the model is divided among {model.ranks}"
        fix = "give Parallel(tensor=group) with the ranks of the model"
        raise InputError("parallel", "None" if parallel is None else "Parallel", reason, fix)


def check_engines(
    parallel: Parallel | None, model: Model, controller: Controller, options: Mapping[str, object]
) -> None:
    """Raises RankError unless the engines of all ranks have the same arguments. Waits for the other ranks.

    Args:
        parallel: The ranks.
        model: The model.
        controller: Decides how branches grow.
        options: The engine's other arguments.
    """
    if parallel is None:
        return
    sizes = {name: getattr(model, name) for name in ("shape", "layers", "max_tokens", "vocabulary")}
    of_parallel = {"parallel.interleave": parallel.interleave}
    of_model = {f"model.{name}": size for name, size in sizes.items()}
    check_ranks(parallel, {**options, **of_parallel, **_of_controller(controller), **of_model})


def _of_controller(controller: Controller) -> dict[str, Any]:
    """Returns what ranks compare of a controller: by the same names, whatever it has."""
    drafts = isinstance(controller, Drafting)
    facts = {name: getattr(controller, name) for name in ("width", "max_new_tokens", "together")}
    facts |= {name: getattr(controller, name) if drafts else None for name in ("max_draft", "draft_trees")}
    parents = list(controller.draft_parents) if isinstance(controller, SelectingDrafts) else []
    numbers = {"draft_parents": parents, "limits": _numbers(controller, "limits")}
    numbers["stop_ids"] = sorted(_numbers(controller, "stop_ids"))
    facts |= {name: np.array(found, np.int64) for name, found in numbers.items()}
    return {"controller": type(controller).__name__, **{f"controller.{name}": fact for name, fact in facts.items()}}


def _numbers(controller: Controller, name: str) -> list[int]:
    """Returns the numbers of an attribute; none where a controller of a user has something else by this name."""
    found = getattr(controller, name, ())
    return [*found] if isinstance(found, Collection) and all(type(number) is int for number in found) else []


def check_context(parallel: Parallel | None, trees: bool, deterministic: bool, make_kernel: object) -> None:
    """Raises InputError for what engines cannot do where ranks divide tokens.

    Args:
        parallel: The ranks.
        trees: Whether drafts may be trees.
        deterministic: Whether the bits of attention may not depend on other branches.
        make_kernel: The maker of other kernels.
    """
    if parallel is None or parallel.shard.size == 1:
        return
    if trees:
        reason = "are not served where ranks divide tokens: the KV of accepted drafts would move between ranks"
        raise InputError("draft_trees", trees, reason, "propose chains of drafts, or divide heads instead")
    if deterministic:
        reason = "would merge partial results in another order on several ranks than on one"
        raise InputError("deterministic", deterministic, reason, "divide heads instead")
    if make_kernel is not None:
        reason = "makes kernels that would see the tokens of one rank only"
        raise InputError("make_kernel", type(make_kernel).__name__, reason, "leave it out, or divide heads instead")


def check_ranks(parallel: Parallel | None, facts: Mapping[str, Any]) -> None:
    """Raises RankError unless all ranks have the same. Waits for the other ranks."""
    for group in () if parallel is None else parallel.groups:
        check_agreement(group, facts)


def check_prompts(parallel: Parallel | None, prompts: Sequence[Sequence[int]]) -> None:
    """Raises RankError, with `TREEGEN_CHECK=1`, unless all ranks have the same prompts."""
    if checks_inputs():
        of_each = {f"prompts[{number}]": np.asarray(prompt) for number, prompt in enumerate(prompts)}
        check_ranks(parallel, {"the number of prompts": len(prompts), **of_each})


def check_step(parallel: Parallel | None, counts: Mapping[int, int], sequences: SequenceTree) -> None:
    """Raises RankError, with `TREEGEN_CHECK=1`, unless all ranks take the same step of the same branches."""
    if checks_inputs():
        branches = [sequences[number] for number in counts]
        stored = np.array([(each.number, each.stored, counts[each.number]) for each in branches])
        tokens = np.array([token for each in branches for token in each.tokens])
        pages = np.array([page for each in branches for page in each.pages])
        check_ranks(parallel, {"branches": stored.ravel(), "tokens": tokens, "pages": pages})
