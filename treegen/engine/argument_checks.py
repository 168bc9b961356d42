"""Checks of what an engine is made of: its model, its controller and its options, before pages are allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treegen.engine.control import Drafting
from treegen.ir.arrays import is_integer, positive_int
from treegen.ir.errors import InputError

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


def _check_has(name: str, given: object, wanted: Sequence[str], fix: str) -> None:
    found = type(given).__name__
    if isinstance(given, type):
        raise InputError(name, given.__name__, "is a class, and not an object of it", f"{fix}, with parentheses")
    if missing := [each for each in wanted if not hasattr(given, each)]:
        reason = "cannot be called" if missing == ["__call__"] else f"has no {missing[0]}"
        raise InputError(name, found, reason, fix)
