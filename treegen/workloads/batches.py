"""The suite of batches: 16 batches in four families (traces, groups, agents, unshared) and five special ones.

The families `trees`, `small`, `large` and `equal` are beside the suite: they have to be named.
"""

from __future__ import annotations

from pathlib import Path

from treegen.ir.errors import InputError
from treegen.workloads.agent_batches import agent_batches
from treegen.workloads.group_batches import group_batches
from treegen.workloads.large_batches import large_batches
from treegen.workloads.served_batch import ServedBatch
from treegen.workloads.small_batches import small_batches
from treegen.workloads.special_batches import special_batches
from treegen.workloads.trace_batches import trace_batches
from treegen.workloads.tree_batches import fasttree_batches
from treegen.workloads.unshared_batches import equal_batches, unshared_batches

FAMILIES = ("traces", "groups", "agents", "unshared", "special")
"""Families of the suite, in its order."""


def batches(data: Path | None, seed: int = 0) -> tuple[ServedBatch, ...]:
    """Makes the suite: four batches of each family and five special ones, in the order of FAMILIES.

    Args:
        data: The folder of the recorded traces; None leaves the family `traces` out.
        seed: 0 for the suite. Other seeds make batches of the same kinds and sizes, to check results on batches that
            nothing was tuned for.

    Raises:
        FormatError: A trace file cannot be read.
    """
    recorded = () if data is None else trace_batches(data, seed)
    return (
        *recorded,
        *group_batches(seed),
        *agent_batches(seed),
        *unshared_batches(seed),
        *special_batches(seed),
    )


def chosen_batches(data: Path | None, names: str | None, seed: int = 0) -> tuple[ServedBatch, ...]:
    """Selects batches by family or by name.

    Args:
        data: See `batches`.
        names: Families and names, separated by commas; None for the whole suite.
        seed: See `batches`.

    Raises:
        InputError: There is no batch of such a name or family.
    """
    suite = batches(data, seed)
    if names is None:
        return suite
    made = (*suite, *fasttree_batches(seed), *small_batches(seed), *large_batches(seed), *equal_batches(seed))
    wanted = [name.strip() for name in names.split(",")]
    known = {key for batch in made for key in (batch.name, batch.family)}
    for name in wanted:
        if name not in known:
            families = ", ".join(dict.fromkeys(batch.family for batch in made))
            raise InputError("family", name, "has no batches", f"use some of {families}, or a batch's name")
    return tuple(batch for batch in made if batch.name in wanted or batch.family in wanted)
