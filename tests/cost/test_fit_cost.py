"""The command that refits the cost model: it finds constants again, and ships what it found."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from support.paths import ROOT
from support.profiles import TABLE_2
from treegen.ir.errors import FormatError
from treegen.target.targets import Target, targets

H200 = targets()["h200"]
TREES = ("1,16/1024,64", "1,256/256,32", "64*4096", "20000", "1,4,16,64/256,8,256,64")


@pytest.fixture(scope="module")
def fit_cost() -> Iterator[ModuleType]:
    pytest.importorskip("scipy")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import fit_cost

    yield fit_cost
    sys.path.remove(str(ROOT / "benchmarks"))


def results(tmp_path: Path, **change: object) -> Path:
    entries = [
        {"case": tree, "heads": heads, "strategy": name, "dtype": "fp16", "passed": True, "microseconds": 1.0, **change}
        for tree in TREES
        for heads in ("32/8", "16/1")
        for name in ("query", "deft-node", "fasttree", "cohort", "cascade", "medusa")
    ]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"results": entries}))
    return path


def test_fit_finds_times_again(fit_cost: ModuleType, tmp_path: Path) -> None:
    """Times made by the model with other constants: the fit starts at the shipped ones and meets them."""
    found = fit_cost.samples([results(tmp_path)], H200)
    assert len(found) == len(TREES) * 2 * 5  # medusa is not fused
    other = replace(H200.constants, launch_us=14.0, memory_fraction=0.6, full_block_us=0.9, merge_step_us=0.9)
    made = fit_cost.estimates(found, H200, other)
    samples = [replace(sample, measured_us=float(time)) for sample, time in zip(found, made, strict=True)]
    fitted = fit_cost.fit(samples, H200)
    before = np.abs(fit_cost.estimates(found, H200, H200.constants) / made - 1)
    after = np.abs(fit_cost.estimates(found, H200, fitted) / made - 1)
    assert np.median(before) > 0.05
    assert after.max() < 0.03


def test_shipped_targets_are_what_the_command_writes(fit_cost: ModuleType, tmp_path: Path) -> None:
    names = ("targets.json", "grids.json")
    shipped = {name: (ROOT / "treegen" / "target" / name).read_text() for name in names}
    for name, text in shipped.items():
        (tmp_path / name).write_text(text)
    fit_cost.ship(tmp_path, H200, H200.constants)
    assert {name: (tmp_path / name).read_text() for name in names} == shipped
    target: Target = replace(H200, name="l40s", grid=TABLE_2)
    constants = replace(H200.constants, launch_us=3.5)
    fit_cost.ship(tmp_path, target, constants)
    table, grids = (json.loads((tmp_path / name).read_text()) for name in names)
    assert (table["constants"], table["constants_of"]) == (asdict(constants), "l40s")
    assert list(grids) == ["a100", "h200", "l40s"]
    assert grids["l40s"] == TABLE_2.to_object()


@pytest.mark.parametrize(
    "change", [{"passed": False}, {"dtype": "bf16"}, {"case": "reasoning#1"}, {"strategy": "none"}]
)
def test_results_that_hold_nothing(fit_cost: ModuleType, tmp_path: Path, change: dict[str, object]) -> None:
    with pytest.raises(FormatError, match="holds no fp16 results"):
        fit_cost.samples([results(tmp_path, **change)], H200)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1]"])
def test_files_that_are_no_results(fit_cost: ModuleType, tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(FormatError, match="cannot be read"):
        fit_cost.samples([path], H200)
