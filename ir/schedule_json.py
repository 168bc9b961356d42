"""The JSON form of a schedule: its kernel configs as objects, and its arrays as lists."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from treegen.ir.arrays import frozen
from treegen.ir.errors import FormatError
from treegen.ir.json_form import checked_ints, read_object, renamed, write_object
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.work_items import ARRAYS, FLAT_ARRAYS, ITEM_FIELDS, POSITIONED_RUN_FIELDS, RUN_FIELDS, TABLES

if TYPE_CHECKING:
    from treegen.ir.schedule import Schedule

_REQUIRED = frozenset({"configs", *ARRAYS})
_EARLIER = {
    "classes": "configs", "class_indptr": "config_indptr", "blocks": "packed_runs",
    "stage_indptr": "round_indptr", "merge_stage_indptr": "merge_round_indptr",
    "merge_slots": "merge_partials", "epilogue_slots": "epilogue_partials",
}  # fmt: skip
_EARLIER_OF_CONFIG = {
    "block": "run_tokens", "warps": "num_warps", "stages": "num_stages", "dealt": "work_list",
    "merging": "epilogue_merge", "full": "has_full_tiles", "waiting": "fused_merge",
}  # fmt: skip


def read(text: str) -> dict[str, Any]:
    """Returns the arguments of Schedule by name. Raises FormatError or PlanError."""
    value = read_object(text, "schedule", _REQUIRED | {"fixed"}, _REQUIRED, _EARLIER)
    try:
        configs = tuple(KernelConfig(**renamed(entry, _EARLIER_OF_CONFIG)) for entry in value["configs"])
    except (TypeError, AttributeError) as cause:
        raise FormatError("schedule.configs", value["configs"], str(cause), "give kernel configs") from cause
    arrays = {name: checked_ints(f"schedule.{name}", value[name]) for name in FLAT_ARRAYS}
    run_width = len(POSITIONED_RUN_FIELDS if len(arrays["row_positions"]) else RUN_FIELDS)
    for name in TABLES:
        rows, width = value[name], len(ITEM_FIELDS) if name == "items" else run_width
        if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == width for row in rows):
            raise FormatError(
                f"schedule.{name}", rows, f"is not a list of rows with {width} columns", "complete the rows"
            )
        flat = checked_ints(f"schedule.{name}", [entry for row in rows for entry in row])
        arrays[name] = frozen(flat.reshape(-1, width))
    return {"configs": configs, **arrays, "fixed": value.get("fixed") is True}


def write(schedule: Schedule) -> str:
    """Returns the JSON text of a schedule."""
    arrays = {name: getattr(schedule, name).tolist() for name in ARRAYS}
    fixed = {"fixed": True} if schedule.fixed else {}
    return write_object("schedule", {"configs": [asdict(each) for each in schedule.configs], **fixed, **arrays})
