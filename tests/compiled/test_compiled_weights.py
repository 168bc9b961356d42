"""Policies weighed in C, compared with NumPy."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator

import numpy as np
import pytest

import treegen.compiled.c_library as c_library
from support.compilers import needs_compiler
from support.h200 import H200
from support.random_batches import random_batch, with_rows
from support.weighed_problems import problems
from treegen import LiveBatch, Shape, Tree
from treegen.compiled.batch_tree import BatchTree
from treegen.runtime.batch_room import batch_config
from treegen.search.batch_choices import BatchChoices
from treegen.search.compiled_weights import BatchWalks, CompiledWeights, Weighed
from treegen.search.weigh import Weights, weights_of
from treegen.target.problem import Problem
from treegen.target.targets import Target, target_from

MLA = Shape(16, 1, 576, 512, dtype="bf16", page_size=64, shared_kv=True)
SHAPES = (
    *(Shape(heads, kv, 128, dtype="bf16", page_size=16) for heads, kv in ((32, 8), (8, 1), (5, 1), (32, 32))),
    *(Shape(64, 8, 64, page_size=1), MLA),
)


def both(tree: BatchTree, shape: Shape, target: Target = H200) -> tuple[CompiledWeights, Weights]:
    """The weights of a tree, by C and by NumPy."""
    config = batch_config(shape, target)
    in_c = BatchWalks(shape, target, config, min(tree.counts.rows, config.rows)).weights(tree)
    in_numpy = weights_of(Problem(tree.tree, shape, target), config)
    assert in_c is not None
    assert in_numpy is not None
    return in_c, in_numpy


def check(tree: BatchTree, shape: Shape, target: Target = H200) -> None:
    """That C and NumPy find the same policies, with the same times but for rounding."""
    in_c, in_numpy = both(tree, shape, target)
    assert in_c.walks == in_numpy.walks
    assert (in_c.splits == in_numpy.splits).all()
    assert in_c.times_us == pytest.approx(in_numpy.times_us, rel=1e-12)
    assert in_c.query_us == pytest.approx(in_numpy.query_us, rel=1e-12)
    for place in np.ndindex(*in_c.splits.shape):
        assert in_c.items(place) == in_numpy.items(place)  # type: ignore[arg-type]
        assert in_c.time_us(place) == pytest.approx(in_numpy.time_us(place), rel=1e-12)  # type: ignore[arg-type]
        assert in_c.policy(place) == in_numpy.policy(place)  # type: ignore[arg-type]
    items = in_numpy.items(in_numpy.best())
    for most in (None, items, items - 1, items // 2, 1):
        assert in_c.best(most) == in_numpy.best(most)


def chunks(source: random.Random) -> LiveBatch:
    """Requests that decode beside chunks of prompts."""
    batch = LiveBatch(16)
    for _ in range(source.randint(1, 30)):
        batch.add(source.randint(1, 4000))
    for _ in range(source.randint(1, 3)):
        rows = source.randint(2, 300)
        batch.add(rows + source.choice([0, 500, 3000]), rows=rows)
    return batch


def trees(number: int) -> Iterator[BatchTree]:
    """Running batches, with and without columns, and trees whose KV is one run for each node."""
    source = random.Random(5)
    for _ in range(number):
        batch = random_batch(source)
        if int(batch.tokens.sum()):
            yield BatchTree.of_batch(batch)
            yield BatchTree.of_tree(batch.tree())
        yield BatchTree.of_batch(chunks(source))
    for problem in problems(6, 8):
        yield BatchTree.of_tree(problem.tree)


@needs_compiler
def test_random_trees() -> None:
    source = random.Random(7)
    for tree in trees(40):
        check(tree, source.choice(SHAPES), target_from(source.choice(["a100", "h200", "b200"])))


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.num_qo_heads}:{shape.num_kv_heads}")
def test_large_batches(shape: Shape) -> None:
    """Whose cohorts are many, and so counted in bins."""
    source = np.random.default_rng(3)
    for width in (0, 40):
        batch = LiveBatch(16)
        for request in range(1500):
            tokens = int(source.lognormal(6, 1)) + 600
            first = request - request % max(width, 1)
            sharing = () if first == request else (first, 512)
            batch.add(tokens, *sharing)
        check(BatchTree.of_batch(batch), shape)


@needs_compiler
def test_long_requests() -> None:
    """Nearly 2^31 tokens in all."""
    batch = LiveBatch(16)
    for tokens in (2**30, 2**30 - 5000, 3000):
        batch.add(tokens)
    check(BatchTree.of_batch(batch), SHAPES[1])


@needs_compiler
def test_c_has_the_structures_of_python() -> None:
    library = c_library.library()
    assert library is not None
    assert library.size_of_weighed() == ctypes.sizeof(Weighed)


@needs_compiler
def test_nested_sharing() -> None:
    """Paths are cut at two thresholds. The second tree has too few rows for the higher one."""
    parents, tokens = [-1, 0, 0, *[1] * 20, *[2] * 7, -1, *[30] * 3], [2000, 900, 700, *[60] * 27, 500, *[90] * 3]
    check(BatchTree.of_tree(Tree.from_parents(parents, tokens)), SHAPES[1])


@needs_compiler
def test_rows_that_see_nothing() -> None:
    """The launch of merges writes them."""
    rows = [(0, 5000), *[(1, 0)] * 20, (1, 3000)]
    check(BatchTree.of_tree(Tree.from_parents([-1, -1], [5000, 3000], rows=rows)), SHAPES[0])


@needs_compiler
def test_nodes_with_several_runs_are_left_to_numpy() -> None:
    tree = Tree.from_parents([-1, 0, 0], [64, 32, 32]).with_kv([range(0, 128, 2), range(200, 232), range(300, 332)])
    made, config = BatchTree.of_tree(tree), batch_config(SHAPES[0], H200)
    assert BatchWalks(SHAPES[0], H200, config, 2).weights(made) is None
    assert BatchChoices(SHAPES[0], H200, config, 99).choose(made).strategy.name in ("query", "cohort")


@needs_compiler
@pytest.mark.parametrize("most_items", [10_000, 40])
def test_choices_are_the_same_without_c(most_items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen() -> list[object]:
        source, made = random.Random(11), []
        for _ in range(25):
            shape, batch = source.choice(SHAPES), random_batch(source)
            batch = with_rows(source, batch) if source.random() < 0.5 else batch
            choices = BatchChoices(shape, H200, batch_config(shape, H200), most_items)
            made.append(choices.choose(BatchTree.of_batch(batch)))
        return made

    with_c = chosen()
    monkeypatch.setattr(c_library, "library", lambda: None)
    assert chosen() == with_c
