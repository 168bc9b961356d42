"""The pipeline of schedule passes: what each leaves as it was, and that kernels launch its result."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.forests import examples, forests, schedule_counts, visible_slot_counts
from support.h200 import H200
from treegen import Shape, Tree
from treegen.backends import oracle
from treegen.backends.torch_program import TorchProgram
from treegen.ir.verify import verify_schedule
from treegen.schedule import pipeline
from treegen.schedule.lower import lower
from treegen.schedule.pipeline import Lowering
from treegen.strategies import Strategy, batch_invariant, cohort, strategy_from, strategy_names
from treegen.target.problem import Problem

SHAPE = Shape(4, 2, 16, dtype="fp32")
EVERY: tuple[Strategy, ...] = (
    *(strategy_from(name) for name in strategy_names()),
    cohort(head_rows=16, split=64),
    cohort(split_shared_rows=2, merge="final"),
    cohort(split=128, merge="final"),
    batch_invariant(128),
)
EXACT = ["stagger", "fuse-merge", "single-loop"]
LAST = cohort(head_rows=64, split_shared_rows=32, merge="final")


def every_pass(strategy: Strategy, problem: Problem) -> list[tuple[str, Lowering]]:
    """What each pass gives, of an exact kernel."""
    plan = strategy.plan(problem)
    seen = [("lower", Lowering(plan, lower(plan, problem)))]
    for step in (*pipeline.COUNTED, *pipeline.LAUNCHED):
        seen.append((step.name, step.apply(seen[-1][1], problem)))
    return seen


@examples(120)
@given(tree=forests(30, 200, salt=71), strategy=st.sampled_from(EVERY))
def test_every_pass_leaves_a_lawful_schedule(tree: Tree, strategy: Strategy) -> None:
    try:
        seen = every_pass(strategy, Problem(tree, SHAPE, H200))
    except treegen.TreegenError:
        return  # a strategy that does not fit the shape
    slots = tree.kv.last_slot + 1
    assert [name for name, _ in seen] == ["lower", *EXACT]
    for name, made in seen:
        verify_schedule(made.schedule, tree.num_rows)
        if all(tile.fused for tile in made.schedule.configs):
            counts = schedule_counts(made.schedule, tree.num_rows, slots)
            assert (counts == visible_slot_counts(tree, slots)).all(), name


@pytest.mark.parametrize(
    ("text", "strategy", "shape", "changed"),
    [
        ("640(320*64)", cohort(), Shape(16, 1, 32, dtype="fp32"), {"stagger"}),
        ("70(14*4)", cohort(), SHAPE, {"single-loop"}),
        ("1,4,8,64/40,16,16,16", LAST, Shape(4, 1, 32, dtype="fp32"), {"fuse-merge"}),
    ],
)
def test_passes_change_what_they_are_for_and_no_result(
    text: str, strategy: Strategy, shape: Shape, changed: set[str]
) -> None:
    tree = Tree.parse(text)
    problem = Problem(tree, shape, replace(H200, name="15 SMs", sms=15))
    q = torch.randn(tree.num_rows, shape.num_qo_heads, shape.head_dim)
    k, v = torch.randn(2, tree.kv.last_slot + 1, shape.num_kv_heads, shape.head_dim)
    expected, _ = oracle.reference(tree, q, k, v)
    seen = every_pass(strategy, problem)
    found = set()
    for (_, before), (name, made) in pairwise(seen):
        if made.schedule.to_json() != before.schedule.to_json():
            found.add(name)
        out, lse = torch.full_like(q, torch.nan), torch.empty(q.shape[:2])
        TorchProgram(made.schedule, shape, q.device)(q, k, v, out, lse, shape.head_dim**-0.5, 1.0)
        assert oracle.error(out, expected) < 1e-5, name
    assert changed <= found


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
def test_the_schedule_of_a_kernel_is_what_its_program_has(backend: str, appends: bool, fixed: bool) -> None:
    tree = Tree.parse("1,8,32/64,32,24")
    kernel = treegen.compile(
        tree,
        strategy=cohort(head_rows=64, split_shared_rows=8, merge="final"),
        shape=SHAPE,
        backend=backend,
        max_rows=40 if fixed else None,
    )
    free = tree.kv.last_slot + 1
    if appends:
        kernel.step(np.arange(free, free + 32 * 8, 8))
    q = torch.randn(40 if fixed else tree.num_rows, 4, 16)
    k, v = torch.randn(2, free + 32 * 8, 2, 16)
    kernel(q, k, v)
    (program,) = kernel.calls.prepared.programs.values()
    assert program.schedule.to_json() == kernel.schedule.to_json()
    if appends and fixed:
        kernel.step(np.arange(free + 1, free + 1 + 32 * 8, 8))
        assert program.schedule.to_json() == kernel.schedule.to_json()
