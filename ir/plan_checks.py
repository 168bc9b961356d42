"""Checks of a plan's arrays, which its public constructor runs; treegen.ir.verify checks the coverage law."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from treegen.ir.arrays import Ints
from treegen.ir.errors import PlanError
from treegen.ir.groups import ROW_ARRAYS, SEGMENT_ARRAYS

if TYPE_CHECKING:
    from treegen.ir.plan import Plan


def check_offsets(plan: Plan) -> None:
    """Raises PlanError unless both lists of offsets, and the rounds, have an entry for each group."""
    groups = len(plan.row_indptr) - 1
    for indptr, columns in (("row_indptr", ROW_ARRAYS), ("segment_indptr", SEGMENT_ARRAYS)):
        _check_divides(indptr, getattr(plan, indptr), [(name, getattr(plan, name)) for name in columns])
    if len(plan.row_indptr) != len(plan.segment_indptr):
        reason = f"does not match {len(plan.segment_indptr) - 1} groups of segments"
        raise PlanError("row_indptr", f"{groups} groups", reason, "give both for every group")
    if len(plan.round) != groups or (plan.round < 0).any():
        reason = f"does not number the rounds of {groups} groups from 0"
        raise PlanError("round", f"{len(plan.round)} entries", reason, "give one round per group")


def check_intervals(plan: Plan) -> None:
    """Raises PlanError, naming the group, unless all intervals of ranks, tokens and rows are in order and in range."""
    # The end of the previous interval, 0 for the first one of a group. A group without intervals begins where the next
    # group begins, or where the list ends.
    previous = np.zeros(len(plan.row_lo) + 1, np.int32)
    previous[1:] = plan.row_hi
    previous[plan.row_indptr] = 0
    wrong = (plan.row_lo < previous[:-1]) | (plan.row_hi <= plan.row_lo)
    _reject(plan, "rows", plan.row_indptr, wrong)
    wrong = (plan.start < 0) | (plan.stop <= plan.start) | (plan.node < 0)
    _reject(plan, "segments", plan.segment_indptr, wrong)
    visible = plan.group_rows[plan.segment_group]
    wrong = (plan.seen_lo < 0) | (plan.seen_hi < plan.seen_lo) | (plan.seen_hi > visible)
    _reject(plan, "seen intervals", plan.segment_indptr, wrong)


def _reject(plan: Plan, what: str, indptr: Ints, wrong: npt.NDArray[np.bool_]) -> None:
    """Raises PlanError, naming the group of the first wrong entry. what: the entries' name in the plural."""
    if wrong.any():
        group = int(np.searchsorted(indptr, wrong.argmax(), side="right")) - 1
        reason = f"{what} are empty, out of order or out of range"
        raise PlanError(f"group {group} of {plan.strategy}", str(plan.groups[group]), reason, "correct the pass")


def _check_divides(name: str, indptr: Ints, columns: list[tuple[str, Ints]]) -> None:
    """Raises PlanError unless these offsets divide all columns among groups."""
    if len(indptr) == 0 or indptr[0] != 0 or (indptr[1:] < indptr[:-1]).any():
        raise PlanError(name, indptr.tolist(), "is not an ascending list from 0", "give offsets of the groups")
    for column, values in columns:
        if len(values) != indptr[-1]:
            raise PlanError(column, f"{len(values)} entries", f"{name} ends at {indptr[-1]}", "make both agree")
