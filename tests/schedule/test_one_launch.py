"""Two launches in one: the same results, the same work, flags that are taken back, and what stays two launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.ahead_kernels import compiled, suited_key
from support.forests import examples, forests
from support.h200 import H200
from support.kv_caches import in_pages, tensors
from treegen import Shape, Tree
from treegen.backends import oracle
from treegen.backends.check_inputs import KV_TORCH_DTYPES
from treegen.backends.scratch import workspace_bytes
from treegen.backends.triton_program import TritonProgram
from treegen.codegen.aot import ARCHITECTURES
from treegen.codegen.emit import emit
from treegen.ir.errors import PlanError
from treegen.ir.schedule import Schedule
from treegen.ir.verify import verify_schedule
from treegen.schedule.lower import lower
from treegen.schedule.passes import fuse_merge
from treegen.schedule.passes.fuse_merge import parts_of, with_fused_merge
from treegen.schedule.passes.single_loop import in_single_loop
from treegen.schedule.pipeline import planned_device_schedule
from treegen.strategies import Strategy, cohort
from treegen.target.problem import Problem
from treegen.tuning.tune import proposals

SHAPE = Shape(4, 1, 32, dtype="fp32")
EVEN, LONG = "1,4,8,64/40,16,16,16", "1,4,8,64/70,64,64,32"
LAST = cohort(head_rows=64, split_shared_rows=32, merge="final")


def scheduled(tree: Tree, strategy: Strategy, shape: Shape = SHAPE) -> Schedule:
    return lower(strategy.plan(Problem(tree, shape, H200)), Problem(tree, shape, H200))


@examples(150)
@given(
    tree=forests(40, salt=21),
    head_rows=st.sampled_from([24, 32, 64]),
    apart=st.integers(2, 9),
    split=st.sampled_from([None, 3, 16]),
    longer=st.integers(1, 9),
)
def test_every_schedule_stays_right(tree: Tree, head_rows: int, apart: int, split: int | None, longer: int) -> None:
    tree = Tree.from_parents(tree.parent, tree.tokens * longer)
    before = scheduled(tree, cohort(head_rows=head_rows, split_shared_rows=apart, split=split, merge="final"))
    with patch.multiple(fuse_merge, MOST_PARTS=9, MOST_LONGER=99.0):
        found = with_fused_merge(before)
    if found is before:
        return
    verify_schedule(found, tree.num_rows)
    (tile,), parts = found.configs, parts_of(found)
    assert tile.fused_merge
    assert not tile.epilogue_merge
    assert found.num_rounds == 1
    assert found.launches == 1 < before.launches
    for name in ("row0", "rows", "tile0", "tiles", "run0", "packed_tiles", "group"):
        assert np.array_equal(found.column(name), before.column(name))
    # What the kernel takes for granted: where every final item's partials are, and who writes them.
    writer = {int(item.partial0): item for item in found.work_items if item.partial0 >= 0}
    for item in found.work_items:
        for p in range(parts) if item.partial0 < 0 else ():
            other = writer.pop(parts * item.row0 + p * item.rows)
            assert (other.row0, other.rows) == (item.row0, item.rows)
    assert not writer
    assert [item.partial0 < 0 for item in found.work_items] == sorted(item.partial0 < 0 for item in found.work_items)


def test_partials_are_merged_in_the_order_of_their_list() -> None:
    before = scheduled(
        Tree.parse("1,4,8,64/16,48,64,32"), cohort(head_rows=64, split_shared_rows=16, split=32, merge="final")
    )
    found = with_fused_merge(before)
    assert found.has_fused_merge
    assert parts_of(found) == 2
    own, new = ({int(i.partial0): i.group for i in each.work_items if i.partial0 >= 0} for each in (before, found))
    for row, (begin, end) in enumerate(zip(before.epilogue_indptr, before.epilogue_indptr[1:], strict=False)):
        first = next(i for i in before.work_items if i.row0 <= row < i.row0 + i.rows).row0
        listed = [own[int(slot) - (row - first)] for slot in before.epilogue_partials[begin:end]]
        again = found.epilogue_partials[found.epilogue_indptr[row] : found.epilogue_indptr[row + 1]]
        assert listed == [new[int(slot) - (row - first)] for slot in again]


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        (EVEN, cohort(head_rows=64, split_shared_rows=16)),  # merged by a launch of its own
        (EVEN, cohort()),  # one round
        (EVEN, cohort(head_rows=64, split_shared_rows=8, merge="final")),  # several items wait for one
        ("1,4,8,64/400,16,16,16", LAST),  # the items before are much longer
        (EVEN, cohort(head_rows=64, split_shared_rows=32, split=16, merge="final")),  # too many partials
    ],
)
def test_what_stays_as_it_is(text: str, strategy: Strategy) -> None:
    schedule = scheduled(Tree.parse(text), strategy)
    assert with_fused_merge(schedule) is schedule


def test_short_and_long_items_share_a_loop() -> None:
    for text, full in ((EVEN, False), (LONG, True)):
        (tile,) = in_single_loop(with_fused_merge(scheduled(Tree.parse(text), LAST))).configs
        assert (tile.fused_merge, tile.has_full_tiles) == (True, full)


def test_two_classes_stay_two_launches() -> None:
    schedule = scheduled(Tree.parse(EVEN), LAST)
    assert with_fused_merge(schedule).has_fused_merge
    first, second = schedule.configs
    other = replace(schedule, configs=(replace(first, run_tokens=1), second))
    assert with_fused_merge(other) is other


def test_a_verified_schedule_has_its_final_items_last() -> None:
    found = with_fused_merge(scheduled(Tree.parse(EVEN), LAST))
    verify_schedule(found, 64)
    turned = replace(found, items=found.items[::-1])
    with pytest.raises(PlanError, match="final items be last"):
        verify_schedule(turned, 64)


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("fp32", {}),
    ("fp16", {}),
    ("fp16", {"partial_dtype": "fp16"}),
    ("bf16", {"page_size": 16}),
    ("fp16", {"kv_dtype": "e4m3"}),
]


@pytest.mark.parametrize(("dtype", "options"), OPTIONS)
@pytest.mark.parametrize("text", [LONG, "1,2,32/8,64,70"])
def test_interpreted(dtype: str, options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, tree = Shape(4, 1, 32, dtype=dtype, **options), Tree.parse(text)
    monkeypatch.setattr(fuse_merge, "MOST_LONGER", 9.0)
    tree, pages = (tree, tree.kv.last_slot + 1) if shape.page_size == 1 else in_pages(tree, shape.page_size)
    q, *caches = tensors(tree, pages, shape)
    caches = [cache.to(KV_TORCH_DTYPES[shape.kv_dtype]) for cache in caches]
    kernel = treegen.compile(tree, strategy=LAST, shape=shape, backend="triton")
    report = kernel.verify(q, *caches)
    assert report.passed, report
    (program,) = kernel.calls.prepared.programs.values()
    assert isinstance(program, TritonProgram)
    assert program.schedule.has_fused_merge


@pytest.mark.parametrize(
    ("heads", "head_dim", "head_rows", "split"), [((3, 1), 40, 48, 192), ((16, 2), 24, 64, 128), ((4, 4), 32, 32, 384)]
)
def test_interpreted_with_other_heads(heads: tuple[int, int], head_dim: int, head_rows: int, split: int) -> None:
    """Areas of blocks whose rows are not multiples of eight, of several KV heads, and padded dims."""
    shape, tree = Shape(*heads, head_dim, dtype="fp16"), Tree.parse(EVEN)
    halves = cohort(head_rows=head_rows, split=split, merge="final")
    kernel = treegen.compile(tree, strategy=halves, shape=shape, backend="triton")
    report = kernel.verify(*tensors(tree, tree.kv.last_slot + 1, shape))
    assert report.passed, report
    ((tile,),) = [program.schedule.configs for program in kernel.calls.prepared.programs.values()]
    assert tile.fused_merge


def test_flags_are_taken_back_and_need_not_be_empty() -> None:
    shape, tree = SHAPE, Tree.parse(EVEN)
    schedule = scheduled(tree, LAST)
    program = TritonProgram(with_fused_merge(schedule), shape, torch.device("cpu"))
    q = torch.randn(tree.num_rows, 4, 32)
    cache = torch.randn(2, tree.kv.last_slot + 1, 1, 32)
    kept: list[torch.Tensor] = []

    def garbage(size: int, **options: Any) -> torch.Tensor:
        kept.append(torch.randint(-128, 127, (size,), dtype=torch.int8).view(torch.uint8))
        return kept[-1]

    expected, _ = oracle.reference(tree, q, *cache)
    for _ in range(2):
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        with patch("treegen.backends.triton_program.torch.empty", garbage):
            program(q, cache[0], cache[1], out, lse, 32**-0.5, 1.0)
        assert oracle.error(out, expected) < 1e-5
    _, flags_at, lse_at, _ = program.scratch(tree.num_rows)
    flags = kept[-1][flags_at:lse_at].view(torch.int64)
    slots = [int(item.partial0) for item in with_fused_merge(schedule).work_items if item.partial0 >= 0]
    assert len(flags) >= schedule.num_partials * 4
    assert not flags[slots].any()


def test_a_call_has_room_for_flags() -> None:
    schedule = scheduled(Tree.parse(EVEN), LAST)
    assert workspace_bytes(with_fused_merge(schedule), SHAPE, 64) - workspace_bytes(schedule, SHAPE, 64) >= 8 * 64


def test_emitted_modules_are_those_that_are_launched() -> None:
    problem = Problem(Tree.parse(EVEN), SHAPE, H200)
    (source,) = emit(planned_device_schedule(LAST.plan(problem), problem), SHAPE)
    assert source.key.fused_merge
    assert "flag_at" in source.text
    assert "gdc_wait()\n    for" not in source.text


def test_tuning_measures_the_best_of_them() -> None:
    tree, shape = Tree.parse("1,4,8,256/8,256,256,32"), Shape(16, 1, 128, dtype="fp16")
    chosen = proposals(Problem(tree, shape, H200), 4)
    assert cohort(head_rows=64, split_shared_rows=64, merge="final") in chosen
    assert cohort(head_rows=64, split=576, merge="final") in chosen  # three quarters of 11 tiles
    assert not any(with_fused_merge(scheduled(tree, each, shape)).has_fused_merge for each in chosen[:4])


def test_tuning_measures_long_paths_in_halves() -> None:
    """No policy that is weighed has a split so long that these paths are in two parts."""
    tree, shape = Tree.parse("1,16,64,256/2048,1024,1024,1024"), Shape(28, 4, 128, dtype="fp16")
    halves = cohort(head_rows=56, split=9984, merge="final")  # of paths of 13,312 tokens
    assert halves in proposals(Problem(tree, shape, H200), 4)
    assert parts_of(with_fused_merge(scheduled(tree, halves, shape))) == 1


@pytest.mark.parametrize(
    ("text", "split", "tiles"),
    [("1,4,8,256/8,256,256,32", 1024, (8, 9)), ("1,4,256/8,256,32", 512, (6, 7)), ("1,256/256,32", 512, (6, 6))],
)
def test_whole_paths_in_two_parts(text: str, split: int, tiles: tuple[int, int]) -> None:
    """The last part takes what is left over, and waits for the other; together they take no more tiles."""
    tree, shape = Tree.parse(text), Shape(32, 8, 128, dtype="fp16")
    schedule = scheduled(tree, cohort(split=split, merge="final"), shape)
    whole = scheduled(tree, cohort(), shape)
    counts = schedule.column("tiles") + schedule.column("packed_tiles")
    first, last = np.split(counts, schedule.config_indptr[1:-1])
    assert (first.max(), last.max(), len(first), len(last)) == (*tiles, 16, 16)
    assert counts.sum() == (whole.column("tiles") + whole.column("packed_tiles")).sum()
    assert with_fused_merge(schedule).has_fused_merge


def check_compiled(shapes: list[Shape]) -> None:
    jobs = [
        (arch, suited_key(arch, shape, large=True, fused_merge=True, has_full_tiles=full))
        for arch in ARCHITECTURES for shape in shapes for full in (False, True)
    ]  # fmt: skip
    for (architecture, key), resources in zip(jobs, compiled(jobs), strict=True):
        most = 48 if key.page_size > 1 and key.head_dim == 64 else 16
        assert resources.stack <= most, f"sm_{architecture} {key}"


def test_the_usual_kernels_compile_for_every_architecture() -> None:
    check_compiled([Shape(32, 8, 128, dtype="fp16")])


def test_kernels_that_join_partials_of_16_bits_compile() -> None:
    shape = Shape(32, 8, 128, dtype="bf16")
    jobs = [
        (arch, suited_key(arch, shape, large=True, **{join: True}))
        for arch in ARCHITECTURES for join in ("fused_merge", "epilogue_merge")
    ]  # fmt: skip
    assert all(resources.stack <= 16 for resources in compiled(jobs, "bf16"))


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(32, 32), (16, 1), (28, 4)])
def test_more_kernels_compile_for_every_architecture(heads: tuple[int, int], head_dim: int) -> None:
    check_compiled([Shape(*heads, head_dim, dtype="bf16", page_size=page) for page in (1, 16)])
