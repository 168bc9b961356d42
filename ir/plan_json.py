"""The JSON form of a plan: its strategy, its options, and its arrays as lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treegen.ir.errors import PlanError
from treegen.ir.groups import ARRAYS
from treegen.ir.json_form import checked_ints, read_object, write_object

if TYPE_CHECKING:
    from treegen.ir.plan import Plan

_OPTIONS = ("mask", "blocks", "merge")
_REQUIRED = frozenset({"strategy", "tiles", *_OPTIONS, *ARRAYS})
_FIELDS = _REQUIRED | {"invariant_block"}
_EARLIER = {"stage": "round", "fixed_block": "invariant_block"}


def read(text: str) -> dict[str, Any]:
    """Returns the arguments of Plan by name. Raises FormatError or PlanError."""
    value = read_object(text, "plan", _FIELDS, _REQUIRED, _EARLIER)
    arrays = {name: checked_ints(f"plan.{name}", value[name]) for name in ARRAYS}
    if not isinstance(value["tiles"], list) or not all(isinstance(tile, list) for tile in value["tiles"]):
        raise PlanError("plan.tiles", value["tiles"], "is not a list of tiles", "give [rows, tokens] per tile")
    return {
        "strategy": str(value["strategy"]),
        "tiles": tuple(tuple(tile) for tile in value["tiles"]),
        "invariant_block": value.get("invariant_block", 0),
        **{name: value[name] for name in _OPTIONS},
        **arrays,
    }


def write(plan: Plan) -> str:
    """Returns the JSON text of a plan."""
    fixed = {"invariant_block": plan.invariant_block} if plan.invariant_block else {}
    options = {name: getattr(plan, name) for name in _OPTIONS}
    arrays = {name: getattr(plan, name).tolist() for name in ARRAYS}
    return write_object("plan", {"strategy": plan.strategy, "tiles": plan.tiles, **options, **fixed, **arrays})
