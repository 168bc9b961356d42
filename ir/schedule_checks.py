"""Checks of a schedule's offsets, which its public constructor runs; treegen.ir.verify checks what they lead to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treegen.ir.errors import PlanError

if TYPE_CHECKING:
    from treegen.ir.schedule import Schedule


def check_offsets(schedule: Schedule) -> None:
    """Raises PlanError unless all lists of offsets divide the tables that they belong to."""
    indptr = schedule.config_indptr
    if len(indptr) != len(schedule.configs) + 1 or indptr[0] != 0 or indptr[-1] != len(schedule.items):
        raise PlanError("config_indptr", indptr.tolist(), "does not match items", "give offsets by kernel config")
    indptr = schedule.merge_indptr
    if len(indptr) != len(schedule.merge_rows) + 1 or indptr[0] != 0 or indptr[-1] != len(schedule.merge_partials):
        raise PlanError("merge_indptr", f"{len(indptr)} entries", "does not match", "give row offsets")
    _check_work(schedule)
    _check_epilogues(schedule)
    _check_rounds(schedule)


def _check_work(schedule: Schedule) -> None:
    """Raises PlanError unless a config with work lists, which has to be the only one, has them."""
    indptr, configs = schedule.work_indptr, schedule.configs
    if len(indptr) == 0 or indptr[0] != 0 or indptr[-1] != len(schedule.work) or (np.diff(indptr) < 0).any():
        raise PlanError("work_indptr", f"{len(indptr)} entries", "does not match work", "give offsets by thread block")
    if any(config.work_list for config in configs) != (len(indptr) > 1) or (len(indptr) > 1 < len(configs)):
        raise PlanError("configs", len(configs), "does not go with work", "deal the work of a single kernel config")


def _check_epilogues(schedule: Schedule) -> None:
    """Raises PlanError unless configs with epilogue_merge list partial slots for each entry of the row table."""
    indptr, fix = schedule.epilogue_indptr, "give offsets by row entry"
    if (
        len(indptr) not in (1, len(schedule.rows) + 1)
        or indptr[0] != 0
        or indptr[-1] != len(schedule.epilogue_partials)
    ):
        raise PlanError("epilogue_indptr", f"{len(indptr)} entries", "does not match", fix)
    listed = len(indptr) > 1 or len(schedule.rows) == 0
    if (np.diff(indptr) < 0).any() or any(config.epilogue_merge for config in schedule.configs) > listed:
        reason = "is not an ascending list for configs with epilogue_merge"
        raise PlanError("epilogue_indptr", f"{len(indptr)} entries", reason, fix)


def _check_rounds(schedule: Schedule) -> None:
    """Raises PlanError unless rounds divide both the configs and the merged rows."""
    for name, total in (("round_indptr", len(schedule.configs)), ("merge_round_indptr", len(schedule.merge_rows))):
        indptr = getattr(schedule, name)
        if indptr[0] != 0 or indptr[-1] != total or (np.diff(indptr) < 0).any():
            raise PlanError(name, indptr.tolist(), f"does not divide {total} entries", "give round offsets")
    launched, merged = len(schedule.round_indptr) - 1, len(schedule.merge_round_indptr) - 1
    if launched != merged:
        reason = f"does not match {merged} rounds of merges"
        raise PlanError("round_indptr", f"{launched} rounds", reason, "give both for every round")
