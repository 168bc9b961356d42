"""Batch-invariant mode: where plans and schedules put tokens, and the bits of rows in random batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.compositions import Composition, Probes, bits, composition
from support.forests import examples, forests, obeys_law, visible_slots
from treegen import Kernel, KVRuns, Shape, Tree
from treegen.codegen.merge_forms import merge_key_of
from treegen.codegen.partial_keys import kernel_key
from treegen.ir.errors import InputError, PlanError, StrategyError
from treegen.ir.groups import Group, Segment
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.verify import verify, verify_schedule
from treegen.schedule.lower import lower
from treegen.strategies import Strategy, batch_invariant, deft_node
from treegen.target.problem import Problem
from treegen.target.targets import Target, target_from

SMALL = Shape(2, 1, 16, dtype="fp16")
FP32 = Shape(4, 2, 16, dtype="fp32")  # whose tiles are the smallest, 32 tokens
TARGET = target_from("h200")
CROWDED = replace(TARGET, sms=1)
"""Where rows that share any tile share work items, which then have tiles that are hidden from some of their rows."""


def check_places(schedule: Schedule, tree: Tree, chunk: int) -> None:
    """Every row's partials are merged in the order of its path, one per chunk, and a chunk's tokens fill tiles, the
    first token in the first column, and so on; other tiles of its work items hide all from it.
    """
    (tile,) = schedule.configs
    walked: dict[tuple[int, int], list[dict[int, int]]] = {}
    for item in schedule.work_items:
        assert item.tiles == 0
        entries = schedule.packed_runs[item.run0 : item.run0 + item.packed_tiles * tile.runs_per_tile].tolist()
        for number, row in enumerate(schedule.rows[item.row0 : item.row0 + item.rows].tolist()):
            tiles: list[dict[int, int]] = [{} for _ in range(item.packed_tiles)]
            for index, (slot, length, lo, hi) in enumerate(entries):
                if lo <= number < hi:
                    own, block = divmod(index, tile.runs_per_tile)
                    tiles[own] |= {block * tile.run_tokens + i: slot + i for i in range(length)}
            walked[row, item.partial0 + number if item.partial0 >= 0 else -1] = [
                columns for columns in tiles if columns
            ]
    bounds = schedule.merge_indptr.tolist()
    merged = {
        row: schedule.merge_partials[begin:end].tolist()
        for row, begin, end in zip(schedule.merge_rows.tolist(), bounds[:-1], bounds[1:], strict=True)
    }
    for row in range(tree.num_rows):
        path = visible_slots(tree, row)
        parts = [walked[row, slot] for slot in merged.get(row, [-1])]
        chunks = [path[begin : begin + chunk] for begin in range(0, len(path), chunk)]
        assert (row in merged) == (len(chunks) != 1)
        assert parts == [
            [dict(enumerate(own[begin : begin + tile.tokens])) for begin in range(0, len(own), tile.tokens)]
            for own in chunks
        ]


@given(
    forests(max_nodes=40, max_tokens=300),
    st.sampled_from((128, 256)),
    st.sampled_from((FP32, SMALL)),
    st.sampled_from((TARGET, CROWDED)),
)
@examples(100)
def test_every_token_lies_where_its_place_along_the_path_says(
    tree: Tree, chunk: int, shape: Shape, target: Target
) -> None:
    plan = batch_invariant(chunk).plan(Problem(tree, shape, target))
    verify(plan, tree)
    Plan.from_json(plan.to_json())
    schedule = lower(plan, Problem(tree, shape, target))
    verify_schedule(schedule, tree.num_rows)
    check_places(schedule, tree, chunk)


@given(forests(max_nodes=40, max_tokens=60, rows=("inside", "mixed", "every"), salt=1))
@examples(100)
def test_plans_obey_the_law_by_brute_force(tree: Tree) -> None:
    assert obeys_law(batch_invariant(128).plan(Problem(tree, FP32, CROWDED)), tree)


def paged(tree: Tree, seed: int) -> Tree:
    """The forest with 16 tokens for each one, in shuffled pages; rows end anywhere in their last 16."""
    tokens, source = tree.tokens * 16, np.random.default_rng(seed)
    sees = np.maximum(tree.row_sees * 16 - source.integers(0, 16, tree.num_rows), 0)
    pages = np.split(source.permutation(int(tree.tokens.sum())), np.cumsum(tree.tokens))[:-1]
    rows = zip(tree.row_node.tolist(), sees.tolist(), strict=True)
    return Tree.from_parents(tree.parent, tokens, rows, KVRuns.from_pages(tokens, pages, 16))


@given(forests(max_nodes=40, max_tokens=20, kv=("default",), salt=2), st.integers(0, 99))
@examples(60)
def test_blocks_of_16_put_tokens_in_the_same_places(tree: Tree, seed: int) -> None:
    tree = paged(tree, seed)
    plan = batch_invariant(128, 16).plan(Problem(tree, FP32, CROWDED))
    assert obeys_law(plan, tree)
    schedule = lower(plan, Problem(tree, FP32, TARGET))
    check_places(schedule, tree, 128)
    assert {tile.run_tokens for tile in schedule.configs} == {16}


@pytest.mark.parametrize("kv", [None, [[*range(5), *range(8, 23)], [30]]])
def test_blocks_of_16_refuse_what_begins_between(kv: list[list[int]] | None) -> None:
    tree = Tree.from_parents([-1, 0], [20, 1], kv=kv)
    with pytest.raises(PlanError, match=r"block = 16: a path goes on after its token (5|20)"):
        treegen.compile(tree, strategy=batch_invariant(block=16), shape=SMALL)


def compiled(tree: Tree, shape: Shape, backend: str, strategy: Strategy | None = None, **options: Any) -> Kernel:
    return treegen.compile(tree, strategy=strategy or batch_invariant(128), shape=shape, backend=backend, **options)


Known = dict[int, tuple[torch.Tensor, torch.Tensor]]


def changed_rows(kernel: Kernel, batch: Composition, known: Known) -> int:
    """How many probes of a batch have other bits than before; those that are new are remembered."""
    kernel.update(batch.tree)
    rows = kernel.capacity.max_rows if kernel.capacity else len(batch.q)
    q = torch.zeros(rows, *batch.q.shape[1:], dtype=batch.q.dtype)
    q[: len(batch.q)] = batch.q
    out, lse = kernel(q, batch.k_cache, batch.v_cache, return_lse=True)
    changed = 0
    for probe, row in enumerate(batch.rows):
        if row >= 0:
            found = bits(out[row]), bits(lse[row])
            before = known.setdefault(probe, found)
            changed += not all(map(torch.equal, found, before))
    return changed


PROBES = Probes(SMALL, (300, 128, 70, 257))


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_bits_are_the_same_in_50_batches(backend: str) -> None:
    first, known = composition(PROBES, 0).tree, {}
    kernels = [compiled(first, SMALL, backend, target=target) for target in (TARGET, CROWDED)]
    shared = 0
    for seed in range(50):
        batch, kernel = composition(PROBES, seed, 3), kernels[seed % 2]
        assert changed_rows(kernel, batch, known) == 0
        plan = kernel.plan
        shared += bool((plan.group_rows > 1).any() and (plan.seen_lo > 0).any())
    assert len(known) == len(PROBES.lengths)
    assert shared > 10
    assert kernel.verify(batch.q, batch.k_cache, batch.v_cache).passed


def test_without_the_mode_bits_depend_on_the_batch() -> None:
    kernel, known = compiled(composition(PROBES, 0).tree, SMALL, "torch", deft_node()), {}
    assert sum(changed_rows(kernel, composition(PROBES, seed, 3), known) for seed in range(10)) > 0


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_bits_are_those_of_a_kernel_of_fixed_capacity(backend: str) -> None:
    first, known = composition(PROBES, 0), {}
    assert changed_rows(compiled(first.tree, SMALL, backend), first, known) == 0
    kernel = compiled(first.tree, SMALL, backend, max_rows=12, max_items=40, max_slots=60)
    assert sum(changed_rows(kernel, composition(PROBES, seed, 3), known) for seed in range(5)) == 0


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_bits_are_the_same_after_steps(backend: str) -> None:
    shape = replace(SMALL, dtype="fp32", kv_dtype="fp32")
    tree = Tree.from_parents(
        [-1, 0, 0], [100, 27, 5], kv=KVRuns.from_runs([100, 27, 5], [[(0, 100)], [(100, 27)], [(200, 5)]])
    )
    q, caches = torch.randn(2, 2, 16), torch.randn(2, 300, 1, 16)
    kernel = compiled(tree, shape, backend)
    kernel(q, *caches)
    for _ in range(3):  # over the border of a chunk
        kernel.step()
        out, lse = kernel(q, *caches, return_lse=True)
        fresh = compiled(kernel.tree, shape, backend)(q, *caches, return_lse=True)
        assert torch.equal(bits(out), bits(fresh[0]))
        assert torch.equal(bits(lse), bits(fresh[1]))
    assert kernel.tree.tokens.tolist() == [100, 30, 8]


CASES = {
    "bf16": (replace(SMALL, dtype="bf16", kv_dtype="bf16"), 1, 1),
    "fp32, groups": (FP32, 1, 1),
    "fp16 partials": (replace(SMALL, partial_dtype="fp16"), 1, 1),
    "large heads": (Shape(8, 1, 128, dtype="fp16"), 1, 1),
    "more heads than a tile": (Shape(80, 1, 16, dtype="fp16"), 1, 1),
    "pages": (SMALL, 16, 1),
    "pages by blocks": (SMALL, 16, 16),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_bits_are_the_same_in_other_formats(name: str, backend: str) -> None:
    shape, page, block = CASES[name]
    probes = Probes(shape, (304, 128, 64, 256, 640))
    first, strategy, known = composition(probes, 0, page=page).tree, batch_invariant(128, block), {}
    kernels = [compiled(first, shape, backend, strategy, target=target) for target in (TARGET, CROWDED)]
    for seed in range(16):
        batch, kernel = composition(probes, seed, 4, page), kernels[seed % 2]
        assert changed_rows(kernel, batch, known) == 0
    assert kernel.verify(batch.q, batch.k_cache, batch.v_cache).passed


@pytest.mark.parametrize("text", ["5", "1,64/4096,256", "1,4,16,512/1024,256,128,32", "300*700", "1000(50*16)"])
def test_every_tree_has_the_same_kernels(text: str) -> None:
    keys = set()
    for tree in (Tree.parse(text), Tree.parse("20(30,40)")):
        plan = batch_invariant().plan(Problem(tree, FP32, TARGET))
        schedule = Schedule.from_json(lower(Plan.from_json(plan.to_json()), Problem(tree, FP32, TARGET)).to_json())
        keys.add((*(kernel_key(tile, FP32) for tile in schedule.configs), merge_key_of(schedule, FP32, 0)))
    assert len(keys) == 1


def test_rows_that_share_tiles_share_work_items() -> None:
    tree = Tree.parse("1,64/4096,256")
    plan = batch_invariant().plan(Problem(tree, Shape(32, 8, 128), TARGET))
    shared = plan.node == 0
    assert plan.group_rows[plan.segment_group[shared]].min() == 16
    few = Tree.parse("1,10/64,4000")  # rows that share little have work items of their own
    assert batch_invariant().plan(Problem(few, Shape(32, 8, 128), TARGET)).group_rows.max() == 1


def test_mode_plans_for_auto_and_explains_what_it_costs() -> None:
    tree = Tree.parse("1,64/256,32")
    kernel = treegen.compile(tree, batch_invariant=True)
    text = kernel.explain()
    assert "strategy batch-invariant(chunk=512, block=1): a row's bits follow from" in text
    assert "chosen by auto" in text
    assert "2. batch-invariant(chunk=512, block=1):" in text
    assert "\nauto takes cohort" in text
    own = treegen.compile(tree, batch_invariant=True, strategy=batch_invariant(1024))
    assert str(own.choice.strategy) == "batch-invariant(chunk=1024, block=1)"
    kernel.update(Tree.parse("1,64/256,33"))
    assert kernel.plan.invariant_block == 1


def test_mode_refuses_what_decides_by_the_batch() -> None:
    tree = Tree.parse("20(5,7)")
    with pytest.raises(StrategyError, match="strategy = query: divides rows' work by the batch"):
        treegen.compile(tree, batch_invariant=True, strategy="query")
    with pytest.raises(StrategyError, match="autotune = True"):
        treegen.compile(tree, batch_invariant=True, autotune=True)
    with pytest.raises(InputError, match="batch_invariant = 512: is not a bool"):
        treegen.compile(tree, batch_invariant=512)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="chunk = 100: is no multiple of 128"):
        batch_invariant(100)
    with pytest.raises(StrategyError, match="block = 8"):
        batch_invariant(block=8)


def test_invariant_plans_have_no_other_options() -> None:
    tree = Tree.parse("20(5,7)")
    plan = batch_invariant().plan(Problem(tree, SMALL, TARGET))
    assert "packed runs of 1" in str(plan)
    for change in (
        {"merge": "final"},
        {"tiles": ((64, 64),)},
        {"blocks": 4},
        {"mask": "row-bits"},
        {"invariant_block": 2},
    ):
        with pytest.raises(PlanError, match="invariant_block"):
            replace(plan, **change)


def test_invariant_plans_have_whole_tiles_and_rows_of_one() -> None:
    tree = Tree.parse("200")
    split = Plan.from_groups("split", [Group(((0, 1),), (Segment(0, a, b, (0, 1)),)) for a, b in ((0, 50), (50, 200))])
    with pytest.raises(PlanError, match="some run begins inside a tile"):
        lower(replace(split, invariant_block=1), Problem(tree, SMALL, TARGET))
    many = Tree.from_parents([-1], [10], [(0, 10)] * 99)
    wide = Plan.from_groups("wide", [Group(((0, 99),), (Segment(0, 0, 10, (0, 99)),))])
    with pytest.raises(PlanError, match="exceeds a tile"):
        lower(replace(wide, invariant_block=1), Problem(many, SMALL, TARGET))


def test_wrapper_serves_the_mode_for_graphs() -> None:
    requests, buffers = 4, (torch.zeros(5, dtype=torch.int32), torch.zeros(120, dtype=torch.int32), torch.ones(4))
    wrapper = treegen.TreeAttentionWrapper(
        use_cuda_graph=True,
        paged_kv_indptr_buffer=buffers[0],
        paged_kv_indices_buffer=buffers[1],
        paged_kv_last_page_len_buffer=buffers[2].int(),
        strategy=batch_invariant(128, 16),
    )
    pages, q, found = torch.randn(200, 2, 16, 1, 16).half(), torch.randn(requests, 2, 16).half(), []
    for seed in range(4):
        source = np.random.default_rng(seed)
        lengths = [20, *source.integers(1, 30, requests - 1).tolist()]
        other = iter(source.permutation(np.arange(30, 200)).tolist())
        shared = [20, *(min(length, 3 * seed) for length in lengths[1:])]
        indices = [
            [*range(same), *(next(other) for _ in range(same, length))]
            for same, length in zip(shared, lengths, strict=True)
        ]
        indptr = np.cumsum([0, *lengths]).astype(np.int32)
        last = np.array([9, *source.integers(1, 17, requests - 1)], np.int32)
        wrapper.plan(indptr, np.concatenate(indices).astype(np.int32), last, 2, 1, 16, 16, q_data_type="float16")
        found.append(bits(wrapper.run(q, pages)[0]))
    assert all(torch.equal(found[0], other) for other in found)
