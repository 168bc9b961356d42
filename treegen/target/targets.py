"""Targets as data: the facts about a device that plans need, and the constants of its cost model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from treegen.ir.errors import BackendError
from treegen.target.cost_grid import CostGrid


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of the analytic model (treegen.target.cost_terms).

    "lone" is for a thread block that is alone on its SM, "full" for an SM with all thread blocks that fit.
    """

    launch_us: float  # microseconds; the first launch, whatever it does
    next_launch_us: float  # microseconds; every further launch
    lone_block_us: float  # microseconds; a thread block without its tiles: queries in, results out
    full_block_us: float  # microseconds of an SM; the same, without the part that rows take
    full_row_us: float  # microseconds of an SM; a query head row of a thread block
    lone_tile_us: float  # microseconds; a KV tile, whatever its size
    lone_flop_fraction: float  # of an SM's tensor rate
    full_tile_us: float  # microseconds of an SM; a KV tile, whatever its size
    full_flop_fraction: float  # of an SM's tensor rate
    full_bytes_per_us: float  # bytes of KV that an SM loads from L2 in a microsecond
    lone_packed_us: float  # microseconds; added by a tile packed from several runs
    full_packed_us: float  # microseconds of an SM; the same
    memory_fraction: float  # of the memory bandwidth, in partial kernels
    merge_fraction: float  # of the memory bandwidth, in merge kernels
    merge_step_us: float  # microseconds; one partial of a row
    sharpness: float  # exponent of the soft maximum of a launch's terms


@dataclass(frozen=True, slots=True)
class BatchConstants:
    """How launches of kernels for running batches differ from the analytic model of one tree's launches.

    Unevenness is left out. It makes all SMs wait for the one with most thread blocks; items of batches differ in
    length, and a thread block takes the next one as soon as one ends. Instead a launch waits for the thread block that
    ends last. To begin and end an item takes this block as long as some tiles do.
    """

    blocks_factor: float  # of the times of all thread blocks
    item_tiles: float  # tiles that a thread block could read in the time that it takes to begin and end an item
    merge_factor: float  # of the traffic of merges, whose thread blocks read a row's partial results at once
    idle_merge_us: float  # microseconds; the launch of merges, where a plan merges nothing


_HOPPER, _BLACKWELL = 90, 100


def starts_launches_early(capability: int) -> bool:
    """Says whether GPUs of a compute capability (times ten) start a launch before the one before has ended.

    The launch waits for the one before where it has to (programmatic dependent launch, from Hopper on).
    """
    return capability >= _HOPPER


def takes_turns(capability: int) -> bool:
    """Says whether thread blocks of a compute capability (times ten) take items of running batches in turn.

    On Blackwell the loop over items takes registers that the loops over KV need, so each item has its own thread block.
    """
    return capability < _BLACKWELL


@dataclass(frozen=True, slots=True)
class Target:
    """A device.

    Attributes:
        name: The name.
        capability: Compute capability times ten; 0 for no GPU.
        sms: Streaming multiprocessors (SMs).
        shared_bytes: The most shared memory of a thread block, in bytes.
        shared_bytes_per_sm: Shared memory of an SM, in bytes.
        l2_bytes: Bytes of L2.
        memory_gbps: GB/s of device memory.
        tensor_tflops: Dense fp16 rate with float32 sums, in TFLOP/s.
        constants: The constants of its cost model.
        batch_constants: Those for kernels for running batches.
        constants_of: The target whose measurements the constants come from.
        grid: Measured times of single tasks, if there are any (treegen.tuning.profile).
    """

    name: str
    capability: int
    sms: int
    shared_bytes: int
    shared_bytes_per_sm: int
    l2_bytes: int
    memory_gbps: float
    tensor_tflops: float
    constants: Constants
    batch_constants: BatchConstants
    constants_of: str
    grid: CostGrid | None = None

    def __hash__(self) -> int:  # short, for look-ups at every plan, in which two targets seldom have one name
        return hash(self.name)

    @property
    def sm_flops_per_us(self) -> float:
        """The most floating-point operations of one SM in a microsecond."""
        return self.tensor_tflops * 1e6 / self.sms

    @property
    def memory_bytes_per_us(self) -> float:
        """The most bytes of device memory in a microsecond."""
        return self.memory_gbps * 1e3


@cache
def targets() -> dict[str, Target]:
    """Returns the shipped targets by name."""
    table, grids = (
        json.loads(files("treegen.target").joinpath(name).read_text("utf-8")) for name in ("targets.json", "grids.json")
    )
    shared = {
        "constants": Constants(**table["constants"]),
        "batch_constants": BatchConstants(**table["batch_constants"]),
        "constants_of": table["constants_of"],
    }
    measured = {name: CostGrid.from_object(grid) for name, grid in grids.items()}
    return {entry["name"]: Target(**entry, **shared, grid=measured.get(entry["name"])) for entry in table["targets"]}


DEFAULT_TARGET = "h200"
C = TypeVar("C", Constants, BatchConstants)
_OPTIONAL = ("constants", "batch_constants", "constants_of", "grid")


def target_from(target: str | Target | None) -> Target:
    """Returns the target of a name, or of a JSON file.

    Args:
        target: A name (default h200); the path of a JSON file, which holds one object with the fields of Target, in
            which `constants`, `batch_constants`, `constants_of` and `grid` may be left out; or a Target, which is
            returned as it is.

    Raises:
        BackendError: The name is unknown, or the file is no target.
    """
    if isinstance(target, Target):
        return target
    name = DEFAULT_TARGET if target is None else target
    if isinstance(name, str) and name in targets():
        return targets()[name]
    if isinstance(name, str) and (name.endswith(".json") or os.path.isfile(name)):
        return _target_in_file(name)
    raise BackendError("target", name, "is not known", f"use one of {', '.join(targets())}, or a JSON file")


def _target_in_file(path: str) -> Target:
    """Reads a target from a JSON file. Raises BackendError."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError) as cause:
        raise BackendError("target", path, f"cannot be read ({cause})", "name a JSON file") from cause
    names = [field.name for field in fields(Target)]
    if not isinstance(value, dict) or set(value) - set(names) or set(names) - set(_OPTIONAL) - set(value):
        raise BackendError("target", path, "is not a target", f"give an object with {', '.join(names)}")
    usual = targets()[DEFAULT_TARGET]
    constants = _constants(path, "constants", value.get("constants"), usual.constants)
    batch_constants = _constants(path, "batch_constants", value.get("batch_constants"), usual.batch_constants)
    grid = None if value.get("grid") is None else CostGrid.from_object(value["grid"])
    facts = {name: _fact(path, name, value[name]) for name in names if name not in _OPTIONAL}
    of = value.get("constants_of") or (usual.constants_of if value.get("constants") is None else facts["name"])
    return Target(**facts, constants=constants, batch_constants=batch_constants, constants_of=str(of), grid=grid)


def _fact(path: str, name: str, value: Any) -> Any:
    """Returns a field of a target in a file. Raises BackendError unless it is a name or a positive number."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and value >= (name != "capability")
    if name == "name" and isinstance(value, str):
        return value
    if name == "name" or not number:
        raise BackendError(f"{path}: {name}", value, "is not a positive number", "correct the target")
    return value


def _constants(path: str, field: str, value: Any, usual: C) -> C:
    """Returns the constants in a field of a target in a file; without them the usual ones. Raises BackendError."""
    if value is None:
        return usual
    names = {each.name for each in fields(usual)}
    if not isinstance(value, Mapping) or set(value) != names:
        raise BackendError(f"{path}: {field}", value, "lacks or adds constants", f"give {', '.join(sorted(names))}")
    if not all(isinstance(number, int | float) and number > 0 for number in value.values()):
        raise BackendError(f"{path}: {field}", value, "has one that is not positive", "refit them")
    return type(usual)(**value)
