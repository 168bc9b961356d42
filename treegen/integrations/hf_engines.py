"""Engines that `generate` keeps: later calls of a model find its pool and its CUDA graphs.

A graph reads weights at their addresses, and repeats what the model's code did when it was captured. So an engine is
used again only while the model's modules, tensors, flags and config are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from treegen.engine import Engine, Sample
from treegen.engine.control import Controller
from treegen.integrations.hf import HFModel

SIZES = ("num_pages", "max_rows", "max_branches")
"""Arguments of the engine that may be larger than a call needs, unless the caller gives them."""

_SIMPLE = (bool, int, float, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class _KeptEngine(NamedTuple):
    """An engine, its model, the arguments that it was made with, and the state of the model then."""

    engine: Engine
    model: HFModel
    options: dict[str, Any]
    state: bytes


_ENGINES: WeakKeyDictionary[Any, _KeptEngine] = WeakKeyDictionary()
"""By model; engines have weak references to their models, so both are freed together."""


@contextmanager
def engine_for(
    model: Any, controller: Controller, options: Mapping[str, Any], given: Mapping[str, Any], max_draft: int
) -> Iterator[Engine]:
    """Gives the engine of a model, which attends by it meanwhile. After an error the engine is not kept.

    Args:
        model: A model of Transformers.
        controller: Decides how branches grow.
        options: Arguments of the engine, with all of SIZES.
        given: Those that have to be as they are; and `keep`, whether to use the kept engine, and to keep this one.
        max_draft: The most drafts of a branch.
    """
    kept, state, keep = _ENGINES.pop(model, None), model_state(model), given.get("keep", True)
    wanted = {**options, "max_draft": max_draft}
    if kept is not None and not (keep and kept.state == state and _fits(kept.options, wanted, given)):
        same = kept.options.keys() == wanted.keys() and kept.options["page_size"] == wanted["page_size"]
        if same and keep:
            wanted |= _larger_sizes(kept.options, wanted, given)
        kept = None  # its memory is free before the next engine takes any
    if kept is None:
        sizes = {name: value for name, value in wanted.items() if name != "max_draft"}
        served = HFModel(model, weak=True)
        kept = _KeptEngine(Engine(served, controller, **sizes, prefix_cache=False), served, wanted, state)
    else:
        kept.model.attach()
        kept.engine.controller = controller
    yield kept.engine
    kept.engine.controller = Sample()  # the call's own one may lead to the model
    if keep:
        _ENGINES[model] = kept


def _fits(kept: Mapping[str, Any], wanted: Mapping[str, Any], given: Collection[str]) -> bool:
    """Says whether an engine with these arguments serves a call that wants those."""
    if kept.keys() != wanted.keys():
        return False
    return all(kept[name] >= value if name in SIZES and name not in given else kept[name] == value
               for name, value in wanted.items())  # fmt: skip


def _larger_sizes(kept: Mapping[str, Any], wanted: Mapping[str, Any], given: Collection[str]) -> dict[str, int]:
    """Returns the sizes of an engine that serves a call like the last one as well, with a row for each draft."""
    larger = {name: max(kept[name], wanted[name]) for name in SIZES if name not in given}
    if "max_rows" in given:  # these may be too few for more branches
        return {name: size for name, size in larger.items() if name != "max_branches"}
    least = larger["max_branches"] * (1 + wanted["max_draft"])
    return {**larger, "max_rows": max(larger["max_rows"], least)}


def model_state(model: Any) -> bytes:
    """Returns a digest of what a captured forward of a model depends on.

    These are the addresses and types of its tensors, its modules with their hooks and simple attributes, such as those
    that switch adapters, and its config; not the values of weights, nor the modes of training.
    """
    digest = blake2b(model.config.to_json_string(use_diff=False).encode(), digest_size=16)
    for name, module in model.named_modules():
        own = vars(module)
        flags = [(key, value) for key, value in own.items() if key != "training" and _is_simple(value)]
        code = [id(own.get("forward")), *(len(own.get(key, ())) for key in _HOOKS)]
        digest.update(repr((name, id(module), type(module).__qualname__, flags, code)).encode())
    for tensor in (*model.parameters(), *model.buffers()):
        digest.update(repr((tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.device)).encode())
    return digest.digest()


def _is_simple(value: object) -> bool:
    """Says whether this is a number, a text, None, or a collection of these."""
    if isinstance(value, dict):
        return all(isinstance(each, _SIMPLE) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple, set)):
        return all(isinstance(each, _SIMPLE) for each in value)
    return isinstance(value, _SIMPLE)
