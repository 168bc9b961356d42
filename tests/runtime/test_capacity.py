"""Kernels of fixed capacity: one launch sequence and one place in memory for every tree that fits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.forests import examples, forests, schedule_counts, visible_slot_counts
from support.h200 import H200
from treegen import Shape, Tree, strategies
from treegen.backends import oracle
from treegen.backends.torch_program import TorchProgram
from treegen.backends.triton_program import TritonProgram
from treegen.ir.arena import SURPLUS_MERGE
from treegen.ir.errors import InputError, PlanError, StrategyError
from treegen.ir.schedule import Schedule
from treegen.runtime.graph_layout import layout_of
from treegen.runtime.limits import WantedLimits
from treegen.runtime.window import WindowedTree
from treegen.search import auto as choosing
from treegen.strategies import Choice, Strategy, cohort
from treegen.target.problem import Problem

SHAPE = Shape(4, 2, 16, dtype="fp32")
FIRST = Tree.parse("1,4/300,3")
BLIND = Tree.from_parents([-1, -1, 1], [40, 0, 3], rows=[(0, 0), (1, 0), (0, 40), (2, 3)])
TREES = (FIRST, Tree.parse("1,2,8/200,20,9"), Tree.parse("3*2+70"), BLIND, FIRST)
EVERY: tuple[Strategy, ...] = (
    strategies.query(), strategies.query(split=64), strategies.specinfer(), strategies.cascade(),
    strategies.deft_node(), strategies.deft_node_chunk(64), strategies.deft_flatten(64),
    strategies.deft_flatten(32, "bits"), strategies.fasttree(), strategies.flashforge(),
    cohort(), cohort(split=128), cohort(split_shared_rows=2, merge="final"),
    cohort(split_shared_rows=3, split=64, merge="final"), cohort(16, shares=5),
)  # fmt: skip


def compiled(tree: Tree = FIRST, *, strategy: str | Strategy = "deft-node", **options: Any) -> treegen.Kernel:
    return treegen.compile(
        tree, **({"strategy": strategy, "shape": SHAPE, "backend": "torch", "max_rows": 16} | options)
    )


def tensors(tree: Tree, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(rows, 4, 16, generator=generator)
    k, v = torch.randn(2, max(tree.kv.last_slot + 1, 1), 2, 16, generator=generator)
    return q, k, v


def check(kernel: treegen.Kernel, rows: int | None = None) -> None:
    """The kernel's attention over its tree is the oracle's, and surplus rows are as they were."""
    n = kernel.tree.num_rows
    q, k, v = tensors(kernel.tree, n if rows is None else rows)
    out = torch.full_like(q, 7.0)
    result, lse = kernel(q, k, v, out=out, return_lse=True)
    assert result is out
    expected_out, expected_lse = oracle.reference(kernel.tree, q[:n], k, v)
    assert oracle.error(out[:n], expected_out) < 1e-5
    assert oracle.error(lse[:n], expected_lse) < 1e-5
    assert (out[n:] == 7).all()


def launches(kernel: treegen.Kernel) -> list[tuple[object, ...]]:
    """Modules, grids and arguments of the kernel's launches, tensors as addresses."""
    ((_, program),) = kernel.calls.prepared.programs.items()
    assert isinstance(program, TritonProgram)
    q, k, v = tensors(FIRST, 16)
    made: list[tuple[object, ...]] = []
    own = {tensor.data_ptr() for tensor in (q, k, v)}
    for launch in program.launches(q, k, v, q, q, 0.25, 1.0):
        pointers = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in launch.arguments]
        others = [pointer for pointer in pointers if pointer not in own]
        made.append((launch.kernel.fn.__module__, launch.grid, others, sorted(launch.options.items())))
    return made


INTERPRETED = [pytest.param(each, "triton", marks=[pytest.mark.full] if n % 8 else []) for n, each in enumerate(EVERY)]


@pytest.mark.parametrize(("strategy", "backend"), [*((each, "torch") for each in EVERY), *INTERPRETED], ids=str)
def test_every_tree_is_served_by_the_launches_of_the_first(strategy: Strategy, backend: str) -> None:
    kernel = compiled(TREES[1], strategy=strategy, backend=backend, max_slots=400)
    expected = None
    for tree in TREES:
        kernel.update(tree)
        check(kernel, tree.num_rows + 3)
        if backend == "triton":
            expected = expected or launches(kernel)
            assert launches(kernel) == expected


@examples(60)
@given(
    trees=st.lists(forests(20, 90, salt=41), min_size=2, max_size=3),
    strategy=st.sampled_from(EVERY),
)
def test_schedules_of_a_layout_cover_their_trees(trees: list[Tree], strategy: Strategy) -> None:
    wanted = WantedLimits(400, 5000, 5000)
    first = Tree.joined(trees)  # has every level that another may have
    layout = layout_of(wanted, Choice(strategy, "told so"), WindowedTree(Problem(first, SHAPE, H200)))
    arenas = set()
    for tree in (first, *trees):
        schedule = layout.lowered(WindowedTree(Problem(tree, SHAPE, H200))).schedule
        assert schedule.configs == layout.frame.configs
        assert (np.diff(schedule.merge_indptr) > 0).all()
        slots = tree.kv.last_slot + 1
        assert (schedule_counts(schedule, tree.num_rows, slots) == visible_slot_counts(tree, slots)).all()
        assert_writes_every_row_once(schedule, tree.num_rows)
        q, k, v = tensors(tree, tree.num_rows)
        out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan)
        TorchProgram(schedule, SHAPE, q.device)(q, k, v, out, lse, 0.25, 1.0)
        expected_out, expected_lse = oracle.reference(tree, q, k, v)
        assert oracle.error(out, expected_out) < 1e-5
        assert oracle.error(lse, expected_lse) < 1e-5
        arenas.add(schedule.pack(layout.room)._replace(array=None))
    assert len(arenas) == 1


def assert_writes_every_row_once(schedule: Schedule, rows: int) -> None:
    written = schedule.merge_rows[schedule.merge_rows >= 0].tolist()
    for item in schedule.work_items:
        if item.partial0 < 0:
            written += schedule.rows[item.row0 : item.row0 + item.rows].tolist()
    assert sorted(written) == list(range(rows))


@pytest.mark.parametrize("strategy", ["deft-node", "flashforge", cohort(split_shared_rows=2, merge="final")], ids=str)
def test_surplus_entries_are_zero_items_and_marked_merges(strategy: str | Strategy) -> None:
    kernel = compiled(strategy=strategy)
    layout = kernel.calls.prepared.layout
    assert layout is not None
    for tree in (FIRST, BLIND):
        kernel.update(tree)
        size, arena = kernel.schedule.size, kernel.schedule.pack(layout.room)
        for c, place in enumerate(arena.items):
            surplus = arena.array[place + 8 * size.items[c] : place + 8 * layout.room.items[c]]
            assert len(surplus)
            assert not surplus.any()
        for s, place in enumerate(arena.merge_rows):
            assert (arena.array[place + size.merges[s] : place + layout.room.merges[s]] == SURPLUS_MERGE).all()
            indptr = arena.array[arena.merge_indptr[s] :][: size.merges[s] + 1]
            assert (np.diff(indptr) > 0).all()


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.full)])
def test_a_tree_beyond_the_capacity_is_refused_and_the_old_one_stays(backend: str) -> None:
    kernel = compiled(backend=backend, max_items=8, max_slots=12)
    check(kernel)
    for text, limit, enough in (
        ("1,17/300,3", "max_rows", 17),
        ("1,2,8/300,3,3", "max_items", 11),
        ("1,2,5/300,3,3", "max_slots", 15),
    ):
        tree = Tree.parse(text)
        with pytest.raises(InputError, match=f"raise {limit} to at least {enough}") as caught:
            kernel.update(tree)
        assert caught.value.argument == limit
        assert kernel.tree is FIRST
        check(kernel)
        larger = {"max_rows": 40, "max_items": 40, "max_slots": 40, limit: enough}
        with pytest.raises(InputError, match=f"raise {limit} to at least {enough}"):
            compiled(backend=backend, **(larger | {limit: enough - 1})).update(tree)
        wider = compiled(backend=backend, **larger)
        wider.update(tree)
        check(wider)


def test_max_items_makes_room_for_longer_items() -> None:
    short, long = Tree.parse("1,4/300,3"), Tree.parse("1,4/300000,3")
    kernel = compiled(short, strategy="query", max_items=16)
    with pytest.raises(InputError, match="full tiles, with room for") as caught:
        kernel.update(long)
    assert caught.value.argument == "max_items"
    enough = int(str(caught.value).rsplit(" ", 1)[1])
    kernel = compiled(short, strategy="query", max_items=enough)
    kernel.update(long)
    with pytest.raises(InputError, match="full tiles"):
        compiled(short, strategy="query", max_items=enough - 1).update(long)


def test_a_tree_grows_to_twice_its_rows_and_far_in_tokens_by_default() -> None:
    tree = Tree.parse("1,16/2000,1")
    kernel = treegen.compile(tree, strategy=cohort(), shape=SHAPE, backend="torch", max_slots=4000)
    for length in (2, 64, 65, 127, 1000):
        kernel.update(Tree.parse(f"1,16/2000,{length}"))
    kernel.update(Tree.parse("1,32/2000,40"))
    check(kernel)


def test_limits_that_are_not_given_follow_from_the_first_tree() -> None:
    limits = compiled(Tree.parse("1,40/300,3"), max_rows=None, max_items=100).capacity
    assert limits is not None
    assert (limits.max_rows, limits.max_items, limits.max_slots) == (80, 100, 160)
    grown = compiled(Tree.parse("1,40/300,3"), max_rows=400).capacity
    assert grown is not None
    assert (grown.max_items, grown.max_slots) == (430, 800)
    assert treegen.compile(FIRST, shape=SHAPE).capacity is None


@pytest.mark.parametrize("value", [0, -3, 2.0, True, "9"])
@pytest.mark.parametrize("name", ["max_rows", "max_items", "max_slots"])
def test_a_limit_is_a_positive_integer(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{name} = "):
        treegen.compile(FIRST, shape=SHAPE, **{name: value})


def test_what_runs_unfused_is_refused() -> None:
    with pytest.raises(StrategyError, match="medusa: runs unfused"):
        compiled(strategy="medusa")


def test_a_tree_with_more_levels_than_the_launches_of_cascade_is_refused() -> None:
    kernel = compiled(strategy="cascade")
    with pytest.raises(PlanError, match="more than the 2 rounds"):
        kernel.update(Tree.parse("1,2,4/20,10,5"))
    check(kernel)


def test_calls_take_rows_between_the_trees_and_the_most() -> None:
    kernel = compiled()
    for rows in (4, 9, 16):
        check(kernel, rows)
    with pytest.raises(InputError, match="the tree has 4"):
        check(kernel, 3)
    with pytest.raises(InputError, match="raise max_rows"):
        check(kernel, 17)
    kernel.update(Tree.parse("1,9/300,3"))
    with pytest.raises(InputError, match="the tree has 9"):  # of a form that was served before
        kernel(*tensors(kernel.tree, 4))
    check(kernel, 9)
    q, k, v = tensors(kernel.tree, 16)
    q[9:] = math.nan
    kernel.check_inputs(q, k, v)
    assert kernel.verify(q, k, v).passed


def test_auto_chooses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    monkeypatch.setattr(choosing, "by_estimate", lambda *_, **__: Choice(cohort(cut_nodes=(1,)), "of one tree"))

    def for_all(problem: Problem, *, for_any_tree: bool, isolated: bool) -> Choice:
        assert not isolated
        found.append(for_any_tree)
        return Choice(cohort(split=128), "of any tree")

    monkeypatch.setattr("treegen.runtime.planner.by_estimate", for_all)
    kernel = compiled(strategy="auto")
    for tree in TREES:
        kernel.update(tree)
        check(kernel)
        assert kernel.choice == Choice(cohort(split=128), "of any tree")
    assert found == [True]


def test_a_shape_seen_at_the_first_call_makes_the_layout_anew() -> None:
    kernel = treegen.compile(FIRST, backend="triton", strategy="deft-node", max_rows=16)
    assumed = kernel.workspace_size()
    check(kernel, 16)
    assert kernel.shape == SHAPE
    assert kernel.workspace_size() < assumed


def test_a_tree_without_rows_is_served_and_followed() -> None:
    nobody = Tree.from_parents([-1], [5], rows=[])
    for strategy in EVERY:
        kernel = compiled(strategy=strategy)
        kernel.update(nobody)
        check(kernel, 16)
        kernel.update(FIRST)
        check(kernel, 16)
    kernel = compiled(nobody, strategy="query")
    kernel.update(FIRST)
    check(kernel)


@pytest.mark.parametrize("options", [{"max_rows": 16}, {"max_rows": None}], ids=["fixed", "exact"])
def test_the_workspace_is_what_is_allocated(options: dict[str, int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compiled(backend="triton", **options)
    made: list[torch.Tensor] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: made.append(empty(*size, **kind)) or made[-1])
    size = kernel.workspace_size()
    assert made == []
    q, k, v = tensors(FIRST, 4)
    kernel(q, k, v, out=torch.empty_like(q), return_lse=True)
    scratch = max(tensor.nbytes for tensor in made if tensor.dtype == torch.uint8)
    lse = 0 if options["max_rows"] else 4 * 4 * 4  # only bound calls have it beside the partial results
    assert scratch + sum(tensor.nbytes for tensor in made if tensor.dtype == torch.int32) + lse == size


def test_estimates_and_explanations_are_of_the_fixed_launches() -> None:
    kernel = compiled(BLIND, strategy="query")
    assert kernel.estimate.launches == 1
    assert "group 2: rows 0" in str(kernel.plan)
    assert "query" in kernel.explain()
