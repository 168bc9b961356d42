"""Checks of what an engine is made of: its model, its controller and its options, before pages are allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treegen.engine.control import Controller, Drafting
from treegen.ir.arrays import is_integer, positive_int
from treegen.ir.errors import BranchError, InputError

_OF_MODELS = ("shape", "layers", "max_tokens", "vocabulary", "device", "__call__")
_OF_CONTROLLERS = ("width", "max_new_tokens", "together", "decide")


def check_model(model: object) -> None:
    """Raises InputError unless this has what a Model has."""
    fix = "give treegen.integrations.HFModel(model) for a model of Transformers, or a treegen.engine.Model"
    _check_has("model", model, _OF_MODELS, fix)


def check_controller(controller: object) -> None:
    """Raises InputError unless this has what a Controller has, with numbers that are in range."""
    _check_has("controller", controller, _OF_CONTROLLERS, "give for instance treegen.engine.Sample()")
    for name in ("width", "max_new_tokens"):
        positive_int(f"controller.{name}", getattr(controller, name), InputError)
    if isinstance(controller, Drafting) and not (is_integer(controller.max_draft) and controller.max_draft >= 0):
        reason = "is not an integer of at least 0"
        raise InputError("controller.max_draft", controller.max_draft, reason, "give the most drafts of a branch")


def check_drafter(drafter: object) -> None:
    """Raises InputError unless this has what a Drafter has."""
    fix = "give treegen.engine.NGrams(), a DraftModel, or an object with `trees` that is called with texts"
    _check_has("drafter", drafter, ("trees", "__call__"), fix)


def check_options(device: str, options: Mapping[str, Any], make_kernel: object) -> None:
    """Raises InputError for switches that are no bools, graphs without a GPU, and a maker of kernels that is none.

    Args:
        device: The type of the model's device.
        options: `prefix_cache` and `cuda_graphs` of the engine.
        make_kernel: Its maker of kernels.
    """
    for name, switch in options.items():
        if not isinstance(switch, bool) and not (switch is None and name == "cuda_graphs"):
            raise InputError(name, switch, "is not a bool", "give True or False")
    if options.get("cuda_graphs") and device != "cuda":
        raise InputError("cuda_graphs", True, f"needs a GPU, and the model is on {device}", "leave it out")
    if make_kernel is not None and not callable(make_kernel):
        found = type(make_kernel).__name__
        raise InputError("make_kernel", found, "is not a function", "give a treegen.engine.KernelMaker, or None")


def checked_step_rows(controller: Controller, drafts: int, max_branches: int, max_rows: int | None, chunk: int) -> int:
    """Returns the most tokens of a step.

    Raises BranchError unless it holds the branches of a prompt, and all branches that run with their drafts.

    Args:
        controller: Decides how branches grow.
        drafts: The most drafts of a branch.
        max_branches: The most branches that run at a time.
        max_rows: The most tokens of a step, None where the caller does not say.
        chunk: The tokens of a step then, if they are enough.
    """
    positive_int("max_branches", max_branches, BranchError)
    if max_rows is not None:
        positive_int("max_rows", max_rows, BranchError)
    if controller.width > max_branches:
        reason = f"of a prompt is more than max_branches = {max_branches}"
        raise BranchError("controller.width", controller.width, reason, "raise max_branches")
    least = max_branches * (1 + drafts)
    if max_rows is None:
        return max(chunk, least)
    if max_rows < least:
        reason = f"is less than max_branches = {max_branches}, with {1 + drafts} rows each"
        raise BranchError("max_rows", max_rows, reason, "raise max_rows, or lower max_branches")
    return max_rows


def check_deterministic(deterministic: object, strategy: object, make_kernel: object) -> None:
    """Raises InputError unless this is a bool, and where it is True the other arguments are left out."""
    if not isinstance(deterministic, bool):
        raise InputError("deterministic", deterministic, "is not a bool", "give True or False")
    for name, given, usual in (("strategy", strategy, "auto"), ("make_kernel", make_kernel, None)):
        if deterministic and given != usual:
            reason = "chooses other kernels than the batch-invariant ones of deterministic=True"
            raise InputError(name, given if isinstance(given, str) else type(given).__name__, reason, "leave it out")


def _check_has(name: str, given: object, wanted: Sequence[str], fix: str) -> None:
    found = type(given).__name__
    if isinstance(given, type):
        raise InputError(name, given.__name__, "is a class, and not an object of it", f"{fix}, with parentheses")
    if missing := [each for each in wanted if not hasattr(given, each)]:
        reason = "cannot be called" if missing == ["__call__"] else f"has no {missing[0]}"
        raise InputError(name, found, reason, fix)
