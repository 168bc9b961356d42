"""Work that somebody stops in the middle, at any line: what is called next is right."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.batch_loops import any_case, check_step, made
from support.forests import examples
from support.stops import interrupted_at
from treegen import Shape, Tree, strategies
from treegen.backends import oracle
from treegen.ir.errors import PlanError
from treegen.strategies import Strategy, cohort

SHAPE = Shape(4, 2, 16, dtype="fp32")
EVERY: tuple[str | Strategy, ...] = (
    "auto", strategies.query(split=64), strategies.cascade(), strategies.deft_node(), strategies.fasttree(), cohort(),
    cohort(split_shared_rows=2, merge="final"),
)  # fmt: skip
TREES = ("1,4/40,8", "1,2,6/30,9,4", "3/7", "1,3,3,9/64,16,3,2")


def check_call(kernel: treegen.Kernel, shown: str) -> None:
    """The kernel computes attention of the tree that it has."""
    tree, generator = kernel.tree, torch.Generator().manual_seed(0)
    q = torch.randn(tree.num_rows, 4, 16, generator=generator)
    k, v = torch.randn(2, tree.kv.last_slot + 1, 2, 16, generator=generator)
    for found, expected in zip(kernel(q, k, v, return_lse=True), oracle.reference(tree, q, k, v), strict=True):
        assert oracle.error(found, expected) < 1e-5, shown


def change(kernel: treegen.Kernel, source: random.Random) -> None:
    """Gives a kernel another tree."""
    tree, kind = kernel.tree, source.choice(["append", "branch", "prune", "update"])
    free = tree.kv.last_slot + 1
    if kind == "append":
        rows, tokens = (
            sorted(source.sample(range(tree.num_rows), source.randint(1, tree.num_rows))),
            source.randint(1, 4),
        )
        kernel.append(rows, tokens, np.arange(free, free + len(rows) * tokens).reshape(-1, tokens))
    elif kind == "branch":
        kernel.branch(source.randrange(tree.num_rows), copies=2)
    elif kind == "prune" and tree.num_rows > 2:
        kernel.prune(source.sample(range(tree.num_rows), source.randint(1, tree.num_rows - 2)))
    else:
        kernel.update(Tree.parse(source.choice(TREES)))


@pytest.mark.parametrize("fixed", [False, True])
@examples(25)
@given(seed=st.integers(0, 2**16), strategy=st.sampled_from(EVERY), text=st.sampled_from(TREES))
def test_a_kernel_keeps_its_tree_or_takes_the_next_one(
    fixed: bool, seed: int, strategy: str | Strategy, text: str
) -> None:
    limits = {"max_rows": 200, "max_items": 4000, "max_slots": 4000} if fixed else {}
    kernel, source = (
        treegen.compile(Tree.parse(text), strategy=strategy, shape=SHAPE, backend="torch", **limits),
        random.Random(seed),
    )
    for step in range(8):
        line, again = source.choice([0, source.randint(1, 300), source.randint(1, 4000)]), random.Random(step)
        stopped = False
        with suppress(PlanError):  # more rounds than a fixed capacity has, which changes nothing
            stopped = interrupted_at(line, lambda again=again: change(kernel, again))
        check_call(kernel, f"step {step}, stopped at line {line}: {stopped}")


@pytest.mark.parametrize("shaped", [False, True])
def test_a_first_call(shaped: bool) -> None:
    line, stopped = 1, True
    while stopped:
        kernel = treegen.compile(Tree.parse("1,4/40,8"), backend="torch", **({"shape": SHAPE} if shaped else {}))
        stopped = interrupted_at(line, lambda kernel=kernel: check_call(kernel, "first"))
        check_call(kernel, f"stopped at line {line}")
        line += 37


@examples(12)
@given(seed=st.integers(0, 2**16))
def test_steps_of_running_batches(seed: int) -> None:
    """Odd seeds leave it to `prepare` and `refresh` when to plan."""
    source, case = random.Random(seed), any_case(seed, queries=None if seed % 3 else 4)
    (server, kernel), generator = made(case, seed, "torch"), torch.Generator().manual_seed(seed)
    for step in range(12):
        for _ in range(source.randint(1, 3)):
            server.event()
        kernel.replanning.calls = 10 ** (step % 7)  # layers of the step before
        takes = (
            kernel.prepare if seed % 2 else source.choice([kernel.update, kernel.update if not step else kernel.seat])
        )
        interrupted_at(source.choice([0, source.randint(1, 1500)]), lambda takes=takes: takes(server.batch))
        takes(server.batch)
        lengths = server.write()
        interrupted_at(source.randint(1, 60), kernel.step)
        kernel.step()
        q = torch.randn(server.query_rows, case.shape.num_qo_heads, case.shape.head_dim, generator=generator)
        check_step(server, case, kernel, lengths, f"seed {seed}, step {step}", q)
        if seed % 2:
            interrupted_at(source.choice([0, source.randint(1, 1500)]), lambda: kernel.refresh(server.batch))


def test_a_plan_that_was_not_loaded_is_made_again() -> None:
    case = any_case(1)
    (server, kernel), generator = made(case, 1, "torch"), torch.Generator().manual_seed(1)
    for _ in range(3):
        server.arrive()
    assert kernel.prepare(server.batch)
    assert not kernel.prepare(server.batch)

    def stopped(*given: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel.program, "load", stopped)
        with pytest.raises(KeyboardInterrupt):
            kernel.update(server.batch)
    assert kernel.prepare(server.batch)
    lengths = server.write()
    kernel.step()
    q = torch.randn(server.query_rows, case.shape.num_qo_heads, case.shape.head_dim, generator=generator)
    check_step(server, case, kernel, lengths, "after a stop", q)
