"""Targets as data: shipped ones, files, the options that name them, and profiles without a GPU."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from support.profiles import TABLE_2
from treegen import Tree, cli
from treegen.ir.errors import BackendError
from treegen.ir.shape import Shape
from treegen.report.explain import explain
from treegen.target.targets import DEFAULT_TARGET, Target, target_from, targets
from treegen.target.tile_config import kernel_config, resident_blocks
from treegen.tuning.profile import measure_grid, target_object

FEW_SHOT = "1,4/100,10"
OWN = {**target_object(targets()["h100"]), "name": "own", "sms": 100}


def file_of(tmp_path: Path, value: object) -> str:
    path = tmp_path / "gpu.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def test_shipped_targets() -> None:
    assert {"h200", "h100", "a100", "rtx4090", "l40s", "b200", "cpu"} == set(targets())
    assert DEFAULT_TARGET == "h200"
    for name, target in targets().items():
        assert target.name == name
        assert target.constants_of == "h200"
        assert target.constants == targets()["h200"].constants
        assert target.shared_bytes < target.shared_bytes_per_sm
    assert target_from(None) is targets()["h200"]
    assert target_from(targets()["a100"]) is targets()["a100"]
    assert targets()["h200"].sm_flops_per_us == pytest.approx(989e6 / 132)
    assert targets()["h200"].memory_bytes_per_us == 4.8e6


def test_shipped_grids() -> None:
    """The A100's is FlashForge's table; the H200's was measured."""
    assert targets()["a100"].grid == TABLE_2
    assert "H200" in targets()["h200"].grid.source
    assert all(target.grid is None for name, target in targets().items() if name not in ("a100", "h200"))


@pytest.mark.parametrize("target", ["h200", "a100"])
def test_grids_grow_with_tokens(target: str) -> None:
    """Where tasks are long; short ones differ by less than a measurement does."""
    grid = targets()[target].grid
    for short, long in zip(grid.microseconds[3:], grid.microseconds[4:], strict=False):
        assert all(more > less for less, more in zip(short, long, strict=True))


@pytest.mark.parametrize("rows", [1, 64])
def test_resident_blocks_fit(rows: int) -> None:
    for target in targets().values():
        config = kernel_config(Shape(32, 8, 128, dtype="fp16"), target, rows)
        assert 1 <= resident_blocks(config, Shape(32, 8, 128, dtype="fp16"), target) <= 32


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
@pytest.mark.parametrize("dims", [64, 128, 160, 256])
@pytest.mark.parametrize("kv_dtype", ["bf16", "e4m3"])
def test_two_thread_blocks_with_large_tiles_fit_into_an_sm(name: str, dims: int, kv_dtype: str) -> None:
    target, shape = targets()[name], Shape(16, 8, dims, dtype="bf16", kv_dtype=kv_dtype)
    by_eight_warps = kv_dtype == "e4m3" and dims > 128
    assert resident_blocks(kernel_config(shape, target, 64), shape, target) == (1 if by_eight_warps else 2)


@pytest.mark.parametrize(
    ("target", "of_128"), [("h200", {1, 3, 4, 7, 12, 128}), ("b200", {1, 4, 128}), ("a100", set())]
)
def test_narrow_heads_take_twice_the_tokens_where_that_spills_nothing(target: str, of_128: set[int]) -> None:
    groups = (1, 3, 4, 7, 12, 128)
    tokens = {group: kernel_config(Shape(2 * group, 2, 64), targets()[target], 999).tokens for group in groups}
    assert {group for group in groups if tokens[group] == 128} == of_128


@pytest.mark.parametrize("name", sorted(targets()))
def test_files_hold_targets(tmp_path: Path, name: str) -> None:
    path = file_of(tmp_path, target_object(targets()[name]))
    assert target_from(path) == targets()[name]


def test_files_may_leave_out_what_is_not_known(tmp_path: Path) -> None:
    facts = {key: value for key, value in OWN.items() if not key.endswith(("constants", "constants_of", "grid"))}
    target = target_from(file_of(tmp_path, facts))
    assert (target.name, target.sms, target.grid) == ("own", 100, None)
    assert (target.constants, target.constants_of) == (targets()["h200"].constants, "h200")
    fitted = {**facts, "constants": {**asdict(target.constants), "launch_us": 3.5}}
    target = target_from(file_of(tmp_path, fitted))
    assert (target.constants.launch_us, target.constants_of) == (3.5, "own")
    assert target.batch_constants == targets()["h200"].batch_constants
    of_batches = {**facts, "batch_constants": {**asdict(target.batch_constants), "idle_merge_us": 0.5}}
    target = target_from(file_of(tmp_path, of_batches))
    assert (target.batch_constants.idle_merge_us, target.constants_of) == (0.5, "h200")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "cannot be read"),
        ([1], "is not a target"),
        ({"name": "own"}, "give an object with name, capability"),
        ({**OWN, "speed": 1}, "is not a target"),
        ({**OWN, "sms": 0}, "sms = 0: is not a positive number"),
        ({**OWN, "sms": "many"}, "sms = many"),
        ({**OWN, "l2_bytes": True}, "l2_bytes = True"),
        ({**OWN, "memory_gbps": -1.5}, "memory_gbps = -1.5"),
        ({**OWN, "name": 7}, "name = 7"),
        ({**OWN, "constants": {"launch_us": 1.0}}, "lacks or adds constants"),
        ({**OWN, "constants": [1.0]}, "lacks or adds constants"),
        ({**OWN, "constants": {**OWN["constants"], "launch_us": 0}}, "not positive"),
        ({**OWN, "constants": {**OWN["constants"], "launch_us": "1"}}, "not positive"),
        ({**OWN, "batch_constants": {"sharpness": 4.4}}, "batch_constants .* lacks or adds constants"),
        ({**OWN, "grid": {"rows": [1]}}, "cost grid"),
    ],
)
def test_bad_files(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        target_from(file_of(tmp_path, value))


@pytest.mark.parametrize("wrong", ["h2000", "", "absent.json", 3, ["h200"]])
def test_unknown_targets(wrong: object) -> None:
    with pytest.raises(BackendError, match="target"):
        target_from(wrong)


def test_the_command_line_takes_files_and_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of(tmp_path, OWN)
    assert cli.main(["explain", FEW_SHOT, "--target", path, "--cost", "profiled"]) == 0
    expected = explain(Tree.parse(FEW_SHOT), target=target_from(path), model="profiled")
    assert capsys.readouterr().out == f"{expected}\n"
    assert "analytic: own has no measured grid" in str(expected)
    assert cli.main(["explain", FEW_SHOT, "--target", "current"]) == 0
    assert capsys.readouterr().err == ""


def test_profiled_costs_change_the_estimate() -> None:
    tree = Tree.parse(FEW_SHOT)
    analytic, profiled = (explain(tree, ["query"], model=model) for model in ("analytic", "profiled"))
    assert analytic.entries[0].estimate.time_us != profiled.entries[0].estimate.time_us
    assert targets()["h200"].grid.source in " ".join(str(profiled).split())
    assert targets()["h200"].grid.source not in str(analytic)


def test_an_unknown_cost_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", FEW_SHOT, "--cost", "guessed"]) == 2
    assert "cost = guessed: is unknown; use one of analytic, profiled" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_no_profile_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["profile", "-o", str(tmp_path / "gpu.json")]) == 2
    assert "has no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with pytest.raises(BackendError):
        measure_grid(targets()["h200"])


def test_profiles_survive_files(tmp_path: Path) -> None:
    target: Target = replace(targets()["l40s"], name="mine", grid=TABLE_2, constants_of="mine")
    assert target_from(file_of(tmp_path, target_object(target))) == target
