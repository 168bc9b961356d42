"""Problems that policies are weighed for."""

import random
from collections.abc import Callable

from support.h200 import H200
from treegen import Shape, Tree
from treegen.search.weigh import Weights, weights_of
from treegen.target.problem import Problem
from treegen.workloads.generate import in_shuffled_pages, speculative

SHAPES = tuple(
    Shape(heads, kv, dim) for heads, kv in ((32, 8), (8, 1), (16, 2), (64, 8), (32, 32)) for dim in (128, 64)
)


def unshared(rng: random.Random, rows: int) -> Tree:
    """Rows that share nothing, of uneven lengths."""
    median = rng.choice((300, 1000, 3000))
    return Tree.from_parents([-1] * rows, [1 + int(median * rng.lognormvariate(0, 1)) for _ in range(rows)])


def few_and_long(rng: random.Random, rows: int) -> Tree:
    """Very few long rows, whatever number is asked for."""
    rows = rng.choice((1, 2, 4, 8))
    return Tree.from_parents([-1] * rows, [rng.randint(8000, 128_000) for _ in range(rows)])


def one_prefix(rng: random.Random, rows: int) -> Tree:
    """A prompt below which all rows go on for themselves."""
    tail = rng.choice((20, 100, 500, 2000))
    tails = [rng.randint(tail // 2, 2 * tail) for _ in range(rows)]
    return Tree.from_parents([-1] + [0] * rows, [rng.choice((500, 2000, 8000, 32_000)), *tails])


def groups(rng: random.Random, rows: int) -> Tree:
    """Prompts that some rows share, beside rows that share nothing."""
    parents, tokens, size = (
        [-1] * (rows // 8),
        [rng.randint(100, 8000) for _ in range(rows // 8)],
        rng.choice((8, 16, 32)),
    )
    for _ in range(-(-rows // size)):
        parents += [-1] + [len(parents)] * rng.randint(size // 2, size)
        tokens += [rng.randint(200, 16_000)] + [rng.randint(20, 4000) for _ in range(len(parents) - len(tokens) - 1)]
    return Tree.from_parents(parents, tokens)


def deep(rng: random.Random, rows: int) -> Tree:
    """Three levels."""
    width = rng.choice((2, 4, 8))
    parents, tokens = (
        [-1] + [0] * width,
        [rng.choice((100, 1000, 5000))] + [rng.randint(30, 1500) for _ in range(width)],
    )
    leaves = rows // width
    parents += [1 + branch for branch in range(width) for _ in range(leaves)]
    return Tree.from_parents(parents, tokens + [rng.randint(10, 600) for _ in range(width * leaves)])


def drafts(rng: random.Random, rows: int) -> Tree:
    """Requests with drafts of 8 tokens, several rows each."""
    return Tree.joined([speculative(rng.randrange(4), 8, rng.randint(200, 6000)) for _ in range(max(rows // 8, 1))])


FAMILIES: tuple[Callable[[random.Random, int], Tree], ...] = (unshared, few_and_long, one_prefix, groups, deep, drafts)


def problems(number: int, seed: int, sizes: tuple[int, ...] = (8, 32, 64, 128)) -> list[Problem]:
    """Problems of all families in turn; some trees lie in shuffled pages."""
    rng, found = random.Random(seed), []
    for index in range(number):
        tree = FAMILIES[index % len(FAMILIES)](rng, rng.choice(sizes))
        if index % 7 == 6:
            tree = in_shuffled_pages(tree, 16, index)
        found.append(Problem(tree, rng.choice(SHAPES), H200))
    return found


def weights(problem: Problem) -> Weights:
    found = weights_of(problem)
    assert found is not None
    return found
