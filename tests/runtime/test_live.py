"""Kernels whose tree grows, branches and is pruned from step to step: each serves what a fresh one would."""

from __future__ import annotations

import random
import re
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import treegen
from support.call_counts import calls
from support.forests import examples, forests, schedule_counts, visible_slot_counts
from treegen import Shape, Tree, strategies
from treegen.backends import oracle
from treegen.backends.triton_program import TritonProgram
from treegen.ir.errors import InputError, TreeError
from treegen.search import auto as choosing
from treegen.search.bucket import policy_bucket
from treegen.strategies import Choice, Strategy, cohort
from treegen.target.problem import Problem

SHAPE = Shape(4, 2, 16, dtype="fp32")
CPU = torch.device("cpu")
EVERY: tuple[Strategy, ...] = (
    strategies.query(), strategies.query(split=64), strategies.specinfer(), strategies.cascade(),
    strategies.deft_node(), strategies.deft_flatten(64), strategies.deft_flatten(32, "bits"),
    strategies.fasttree(), strategies.flashforge(), cohort(), cohort(split_shared_rows=2, merge="final"),
)  # fmt: skip


def spread(text: str, room: int = 100) -> Tree:
    """A tree whose nodes lie apart, with room to grow behind each."""
    tree = Tree.parse(text)
    apart = np.cumsum(np.append(0, tree.tokens[:-1] + room))
    return tree.with_kv([np.arange(n) + first for n, first in zip(tree.tokens.tolist(), apart.tolist(), strict=True)])


def compiled(tree: Tree, strategy: str | Strategy = "deft-node", **options: object) -> treegen.Kernel:
    return treegen.compile(tree, **({"strategy": strategy, "shape": SHAPE, "backend": "triton"} | options))


def attend(kernel: treegen.Kernel, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's out and lse on inputs that are the same for all kernels of a tree."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(kernel.tree.num_rows, 4, 16, generator=generator)
    k, v = torch.randn(2, slots, 2, 16, generator=generator)
    out, lse = kernel(q, k, v, return_lse=True)
    expected_out, expected_lse = oracle.reference(kernel.tree, q, k, v)
    assert oracle.error(out, expected_out) < 1e-5
    assert oracle.error(lse, expected_lse) < 1e-5
    return out, lse


def check_tables(kernel: treegen.Kernel) -> None:
    """What is launched covers the tree, and the tables on the device are those of a program made for it now."""
    served, tree = kernel.calls.prepared, kernel.tree
    slots = tree.kv.last_slot + 1
    assert (schedule_counts(served.schedule, tree.num_rows, slots) == visible_slot_counts(tree, slots)).all()
    for program in served.programs.values():
        assert isinstance(program, TritonProgram)
        anew = served.make_program("triton", CPU)
        assert isinstance(anew, TritonProgram)
        assert torch.equal(program.tables.table, anew.tables.table)


def prepare(kernel: treegen.Kernel) -> None:
    """Makes the program that a call would make, and the tables on its device."""
    kernel.calls.options.program(kernel.calls.prepared, CPU)


def grow(kernel: treegen.Kernel, tree: Tree, source: random.Random) -> Tree:
    """Lets some rows of the kernel and of the tree grow; they grow by the same, or both refuse."""
    rows = sorted(source.sample(range(tree.num_rows), source.randint(1, tree.num_rows)))
    chosen = source.choice([None, rows])
    count, tokens = tree.num_rows if chosen is None else len(rows), source.choice((1, 1, 1, 2, 5))
    last = tree.kv.last_slot + 1
    slots = source.choice([None, np.array(source.sample(range(last, last + 300), count * tokens)).reshape(-1, tokens)])
    if slots is not None and source.random() < 0.5:  # behind one another
        slots = slots[:, :1] + np.arange(tokens)
    try:
        grown = tree.appended(chosen, tokens, slots)
    except TreeError as refused:
        refusal = refused
    else:
        kernel.append(chosen, tokens, slots)
        return grown
    with pytest.raises(TreeError, match=re.escape(str(refusal))):
        kernel.append(chosen, tokens, slots)
    return tree


@examples(40)
@given(
    tree=forests(10, 60, salt=81),
    strategy=st.sampled_from(EVERY),
    seed=st.integers(0, 2**16),
    fixed=st.booleans(),
)
def test_growing_kernels_serve_the_tree_that_a_fresh_one_would(
    tree: Tree, strategy: Strategy, seed: int, fixed: bool
) -> None:
    assume(tree.num_rows)
    source = random.Random(seed)
    options = {"max_rows": 400, "max_items": 5000, "max_slots": 5000} if fixed else {}
    try:
        kernel = compiled(tree, strategy, **options)
    except treegen.TreegenError:
        assume(False)
    for _ in range(4):
        try:
            tree = grow(kernel, tree, source)
        except treegen.TreegenError:
            assert fixed  # more levels than launches
            break
        prepare(kernel)
        assert kernel.tree.to_json() == tree.to_json()
        check_tables(kernel)
        if not fixed:
            fresh = compiled(tree, strategy)
            assert kernel.plan.to_json() == fresh.plan.to_json()
            assert kernel.schedule.to_json() == fresh.schedule.to_json()
            assert kernel.estimate == fresh.estimate
            assert kernel.explain() == fresh.explain()


def test_pages_may_follow_any_others() -> None:
    tree = Tree.from_page_table([0, 3, 6, 9], [9, 1, 2, 9, 1, 4, 9, 7, 6], [5, 16, 9], 16)
    shape = Shape(4, 2, 16, dtype="fp32", page_size=16)
    kernel = treegen.compile(tree, strategy="deft-node", shape=shape, backend="triton")
    free = iter(range(10, 60))
    lengths = [37, 48, 41]
    pages = [2, 4, 6]
    q, (k, v) = torch.randn(3, 4, 16), torch.randn(2, 60, 16, 2, 16)
    for step in range(50):
        for row, length in enumerate(lengths):
            if length % 16 == 0:
                pages[row] = next(free)
        kernel.step([16 * page + length % 16 for page, length in zip(pages, lengths, strict=True)])
        lengths = [length + 1 for length in lengths]
        assert [len(kernel.tree.slots(row)) for row in range(3)] == lengths
        if step % 16 == 9:
            assert kernel.verify(q, k, v).passed
            check_tables(kernel)


@examples(60)
@given(
    text=st.sampled_from(["1,3/6,2", "5/4", "1,2,4/5,3,2"]),
    seed=st.integers(0, 2**16),
    tokens=st.sampled_from((1, 1, 2)),
    backend=st.sampled_from(("triton", "torch")),
)
def test_slots_that_hold_tokens_are_refused_by_kernels_as_by_trees(
    text: str, seed: int, tokens: int, backend: str
) -> None:
    source = random.Random(seed)
    tree = spread(text, 9)
    kernel = compiled(tree, "deft-node", backend=backend)
    for _ in range(12):
        rows = source.choice([None, sorted(source.sample(range(tree.num_rows), source.randint(1, tree.num_rows)))])
        chosen = range(tree.num_rows) if rows is None else rows
        behind = [int(tree.slots(row)[-1]) + 1 for row in chosen]
        begins = [slot if source.random() < 0.7 else source.randrange(150) for slot in behind]
        slots = source.choice([None, np.array(begins)[:, None] + np.arange(tokens)])
        served = kernel.calls.prepared
        try:
            grown = tree.appended(rows, tokens, slots)
        except TreeError as error:
            with pytest.raises(TreeError, match=re.escape(str(error))):
                kernel.append(rows, tokens, slots)
            assert kernel.calls.prepared is served
        else:
            kernel.append(rows, tokens, slots)
            tree = grown
        assert kernel.tree.to_json() == tree.to_json()
        held = np.concatenate([tree.kv.slots(node) for node in range(len(tree.tokens))])
        assert len(np.unique(held)) == len(held)
    attend(kernel, tree.kv.last_slot + 1)


def test_rows_go_on_behind_their_last_slots_by_default() -> None:
    kernel = compiled(spread("1,3/20,4"))
    kernel.step([300, kernel.tree.slots(1)[-1] + 1, 400])
    kernel.step()
    assert [int(kernel.tree.slots(row)[-1]) for row in (0, 2)] == [301, 401]
    attend(kernel, 402)
    kernel.append([1], slots=[302])
    served = kernel.calls.prepared
    for taken in (lambda: kernel.step(), lambda: kernel.append([0], slots=[400]), lambda: kernel.step([9, 9, 9])):
        with pytest.raises(TreeError, match="slots = "):
            taken()
        assert kernel.calls.prepared is served
    attend(kernel, 402)


EXACT: dict[str, int] = {}
FIXED = {"max_rows": 16}
NAMED = ("deft-node", cohort(split_shared_rows=2, merge="final"), strategies.deft_flatten(32, "bits"))
USUAL = [*((each, options, "torch") for each in NAMED for options in (EXACT, FIXED))]
USUAL += [(NAMED[1], EXACT, "triton")]
SLOW = [(each, options, "triton") for each in NAMED for options in (EXACT, FIXED)]
SLOW = [pytest.param(*case, marks=pytest.mark.full) for case in SLOW if case not in USUAL]


@pytest.mark.parametrize(("strategy", "options", "backend"), [*USUAL, *SLOW], ids=str)
def test_results_are_those_of_the_grown_tree(strategy: str | Strategy, options: dict[str, int], backend: str) -> None:
    kernel = compiled(spread("1,4/50,3"), strategy, backend=backend, **options)
    attend(kernel, 700)
    for step in range(20):
        if step % 3:
            kernel.step()
        else:
            kernel.append(
                [0, 3], 2, [[600 + 2 * step, 601 + 2 * step], [520 + step, 599 - step]] if step == 9 else None
            )
        attend(kernel, 700)


def decode(steps: int, seed: int) -> None:
    """Grows, branches and prunes a tree at random on a kernel of fixed capacity, and checks every step."""
    source, slots = random.Random(seed), 4000
    free = iter(range(1000, slots))
    tree = Tree.parse("1,2/20,4")
    kernel = compiled(tree, cohort(), max_rows=12, max_items=12)
    loaded = None
    for _ in range(steps):
        chance = source.random()
        if chance < 0.06 and tree.num_rows < 10:
            row, copies = source.randrange(tree.num_rows), source.randint(1, 3)
            kernel.branch(row, copies)
            tree = tree.branched(row, copies)
        elif chance < 0.12 and tree.num_rows > 1:
            rows = source.sample(range(tree.num_rows), source.randint(1, min(3, tree.num_rows - 1)))
            kernel.prune(rows)
            tree = tree.pruned(rows)
        else:
            rows = None if chance < 0.8 else source.sample(range(tree.num_rows), source.randint(1, tree.num_rows))
            chosen = range(tree.num_rows) if rows is None else rows
            # A row goes on where it was, or in a piece of 8 slots of its own.
            given = []
            for row in chosen:
                own = tree.slots(row)
                node = int(tree.row_node[row])
                alone = (tree.row_node == node).sum() == 1 and node not in tree.parent
                given.append(int(own[-1]) + 1 if alone and own[-1] % 8 != 7 and own[-1] > 999 else -1)
            given = [slot if slot >= 0 else next(slot for slot in free if slot % 8 == 0) for slot in given]
            kernel.append(rows, slots=given)
            tree = tree.appended(rows, slots=given)
        out, lse = attend(kernel, slots)
        assert kernel.tree.to_json() == tree.to_json()
        fresh_out, fresh_lse = attend(compiled(tree, cohort(), backend="torch"), slots)
        assert oracle.error(out, fresh_out.double()) < 1e-5
        assert oracle.error(lse, fresh_lse.double()) < 1e-5
        loaded = loaded or treegen.kernel_counts().loaded
        assert treegen.kernel_counts().loaded == loaded


def test_a_short_decode_on_fixed_tables() -> None:
    decode(24, 1)


@pytest.mark.full
def test_a_long_decode_on_fixed_tables() -> None:
    decode(400, 2)


def test_a_thousand_steps_take_no_more_memory_or_work_than_few() -> None:
    kernel = compiled(spread("1,32/300,5", 1200), max_rows=32, max_items=2000)
    prepare(kernel)
    early, memory = calls(kernel.step), []
    tracemalloc.start()
    for step in range(996):
        kernel.step()
        if step % 100 == 95:
            memory.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    late = calls(kernel.step)
    assert kernel.tree.tokens.tolist() == [300] + [1005] * 32
    check_tables(kernel)
    assert max(memory[2:]) < 1.5 * memory[1] + 200_000
    assert late < 1.1 * early


def test_the_tables_stay_where_they_are() -> None:
    kernel = compiled(spread("1,4/50,3"), max_rows=16)
    prepare(kernel)
    (program,) = kernel.calls.prepared.programs.values()
    assert isinstance(program, TritonProgram)
    place = program.tables.table.data_ptr()
    for _ in range(40):
        kernel.step()
    kernel.prune([1])
    assert list(kernel.calls.prepared.programs.values()) == [program]
    assert program.tables.table.data_ptr() == place


def test_refusals_leave_the_kernel_as_it_was() -> None:
    kernel = compiled(spread("1,4/50,3"), max_rows=5)
    prepare(kernel)
    kernel.step()
    before, served = kernel.tree.to_json(), kernel.calls.prepared
    for wrong in (
        lambda: kernel.append([4]),
        lambda: kernel.append([1, 1]),
        lambda: kernel.append([1], 0),
        lambda: kernel.append([1], True),
        lambda: kernel.append([1, 2], slots=[3]),
        lambda: kernel.step([1, 2, 3, 0.5]),
        lambda: kernel.step([-1, 2, 3, 5]),
        lambda: kernel.append(tokens=101),
        lambda: kernel.branch(4, 2),
        lambda: kernel.prune([7]),
    ):
        with pytest.raises(TreeError):
            wrong()
    with pytest.raises(InputError, match="max_rows"):
        kernel.branch(0, 3)
    assert kernel.calls.prepared is served
    assert kernel.tree.to_json() == before
    check_tables(kernel)


def test_auto_chooses_anew_where_the_bucket_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Tree] = []
    choose = choosing.by_estimate

    def counted(problem: Problem, **options: bool) -> Choice:
        found.append(problem.tree)
        return choose(problem, **options)

    monkeypatch.setattr(choosing, "by_estimate", counted)
    kernel = compiled(spread("1,16/600,40"), "auto")
    for _ in range(40):
        kernel.step()
    buckets = [policy_bucket(tree) for tree in found]
    assert 1 < len(buckets) < 5
    assert all(one != other for one, other in pairwise(buckets))


def test_rows_that_end_in_the_same_slot_need_slots() -> None:
    tree = Tree.from_parents([-1, -1, -1], [5, 5, 5], kv=[range(5), range(5), range(10, 15)])
    kernel = compiled(tree, "query")
    with pytest.raises(TreeError, match="rows 0 and 1 would both go on in slot 5"):
        kernel.step()
    kernel.step([20, 30, 15])
    attend(kernel, 40)
    kernel.step()
    attend(kernel, 40)
