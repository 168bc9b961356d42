"""Task division and scheduling of FlashForge: the worked example, longest first, the search, and piece borders."""

import heapq
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.profiles import TABLE_2
from treegen.strategies import makespan
from treegen.strategies.makespan import assign, balanced_cost, borders, divide, division_bounds, longest_first
from treegen.target.task_costs import Costs

Array = npt.NDArray[np.float64]
Tasks = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]

# One node (20, 16384) and twenty nodes (1, 512).
EXAMPLE: Tasks = (np.array([20] + [1] * 20), np.array([16384] + [512] * 20), np.ones(21, np.int64))


def affine(rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> Array:
    """A start cost and a cost per token: finer division always adds to the sum."""
    return np.asarray(8.0 + 0.05 * tokens * np.sqrt(rows))


def mean_load(tasks: Tasks, blocks: int, x: float) -> float:
    """The left side of the inequality that defines cost_l, term by term."""
    total = 0.0
    for rows, tokens, count in zip(*tasks, strict=True):
        pieces = np.ceil(float(affine(rows, tokens)) / x)
        total += count * pieces * float(affine(rows, tokens / pieces))
    return total / blocks


def one_by_one(costs: Array, blocks: int) -> tuple[list[int], list[float]]:
    """(block of every sub-task, loads) of longest processing time first, as the rule is told."""
    heap = [(0.0, block) for block in range(blocks)]
    placed = [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda task: -costs[task]):
        load, block = heapq.heappop(heap)
        placed[task] = block
        heapq.heappush(heap, (load + float(costs[task]), block))
    return placed, sorted(load for load, _ in heap)


def balanced(tasks: Tasks, blocks: int, cost: Costs) -> float:
    return balanced_cost(*tasks, blocks, cost, cost(*tasks[:2]))


def bounds_of(tasks: Tasks, blocks: int, cost: Costs) -> npt.NDArray[np.int64]:
    return division_bounds(*tasks, blocks, cost, cost(*tasks[:2]))


def filled(costs: Array, count: npt.NDArray[np.int64], blocks: int) -> tuple[float, list[float]]:
    """The makespan and the ascending loads of longest first, for count[i] sub-tasks of costs[i] each."""
    makespan, width = longest_first(sorted(zip(costs.tolist(), count.tolist(), strict=True), reverse=True), blocks)
    return makespan, sorted(load for load, number in width.items() for _ in range(number))


def on_grid(costs: Array) -> Array:
    return np.rint(np.asarray(costs) * 2**20) / 2**20


def busiest(tasks: Tasks, blocks: int, pieces: npt.NDArray[np.int64]) -> float:
    rows, tokens, count = tasks
    costs = np.repeat(on_grid(TABLE_2.cost(rows, tokens / pieces)), count * pieces)
    return one_by_one(costs, blocks)[1][-1]


def some_tasks(seed: int, most: int, longest: float) -> Tasks:
    rng = np.random.default_rng(seed)
    number = int(rng.integers(1, most + 1))
    tokens = np.exp(rng.uniform(0, np.log(longest), number)).astype(np.int64)
    return rng.integers(1, 120, number), np.maximum(tokens, 1), rng.choice([1, 2, 8], number)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Array, npt.NDArray[np.int64]]:
    """(costs, how often each occurs), with equal costs and long runs among them."""
    cost = st.one_of(st.floats(0.01, 1000), st.sampled_from([1.0, 2.0, 3.0, 36.0]))
    pairs = draw(st.lists(st.tuples(cost, st.integers(0, 60)), max_size=12))
    return on_grid(np.array([cost for cost, _ in pairs])), np.array([count for _, count in pairs], np.int64)


def test_worked_example() -> None:
    assert balanced(EXAMPLE, 16, TABLE_2.cost) == pytest.approx(81.75, rel=2e-4)  # 0.0818 ms
    assert bounds_of(EXAMPLE, 16, TABLE_2.cost).tolist() == [4] + [1] * 20
    # 16 blocks hold 24 sub-tasks: four of 147 us, and the twenty short ones of 36 us on the other twelve.
    assert divide(*EXAMPLE, 16, TABLE_2.cost).tolist() == [4] + [1] * 20
    assert busiest(EXAMPLE, 16, np.array([4] + [1] * 20)) == pytest.approx(147, rel=1e-6)


@given(seed=st.integers(0, 10**6), blocks=st.integers(1, 40))
def test_balanced_cost_is_the_least_that_holds(seed: int, blocks: int) -> None:
    tasks = some_tasks(seed, 12, 50_000)
    x = balanced(tasks, blocks, affine)
    assert mean_load(tasks, blocks, x * (1 + 1e-9)) <= x * (1 + 1e-9)
    below = x / (1 + 2e-4)
    assert mean_load(tasks, blocks, below) > below


def test_pieces_may_cost_less_than_their_task() -> None:
    # Table 2 is not subadditive at 100 rows: 16,384 tokens take 746 us, 8,192 take 266.
    tasks = np.array([100]), np.array([16384]), np.array([16])
    assert balanced(tasks, 16, TABLE_2.cost) == pytest.approx(2 * 266, rel=2e-4)
    assert divide(*tasks, 16, TABLE_2.cost).tolist() == [2]


def test_bounds_leave_sixteen_tokens_to_a_piece() -> None:
    rows, tokens = np.ones(6, np.int64), np.array([1, 15, 16, 31, 33, 1000])
    bounds = bounds_of((rows, tokens, np.ones(6, np.int64)), 10_000, lambda rows, tokens: 1.0 * rows * tokens)
    assert bounds.tolist() == [1, 1, 1, 1, 2, 62]


@given(runs=runs(), blocks=st.integers(1, 30))
def test_runs_give_the_loads_of_one_by_one(runs: tuple[Array, npt.NDArray[np.int64]], blocks: int) -> None:
    costs, count = runs
    _, expected = one_by_one(np.repeat(costs, count), blocks)
    result, loads = filled(costs, count, blocks)
    assert loads == expected
    assert result == expected[-1]


@given(runs=runs(), blocks=st.integers(1, 30), seed=st.integers(0, 100))
def test_assign_follows_the_rule(runs: tuple[Array, npt.NDArray[np.int64]], blocks: int, seed: int) -> None:
    costs = np.random.default_rng(seed).permutation(np.repeat(*runs))
    assert assign(costs, blocks).tolist() == one_by_one(costs, blocks)[0]


@pytest.mark.parametrize("low", [1, 8, 40])
def test_assign_where_few_blocks_are_far_behind(low: int) -> None:
    rng = np.random.default_rng(low)
    costs = on_grid(np.concatenate([np.full(264 - low, 900.0), rng.uniform(1, 9, 300), np.full(700, 2.5)]))
    assert assign(costs, 264).tolist() == one_by_one(costs, 264)[0]


def test_longest_first_stays_near_the_optimum() -> None:
    """500 task sets, against 4/3 of a lower bound on the optimum."""
    rng = np.random.default_rng(0)
    for _ in range(500):
        blocks = int(rng.integers(1, 65))
        number = int(rng.integers(1, 40))
        costs = TABLE_2.cost(rng.integers(1, 100, number), np.exp(rng.uniform(0, 10, number)))
        count = rng.integers(1, 33, number)
        falling = np.sort(on_grid(np.repeat(costs, count)))[::-1]
        # Of the first k * blocks + 1 sub-tasks, k + 1 share a block; the shortest k + 1 of them take the least time.
        shared = [falling[k * blocks - k : k * blocks + 1].sum() for k in range(-(-len(falling) // blocks))]
        bound = max(falling.sum() / blocks, *shared)
        result, _ = filled(on_grid(costs), count, blocks)
        assert bound * (1 - 1e-12) <= result <= 4 / 3 * bound


@given(costs=st.lists(st.integers(1, 40), min_size=1, max_size=7), blocks=st.integers(1, 3))
def test_longest_first_against_every_assignment(costs: list[int], blocks: int) -> None:
    placements = np.array(list(product(range(blocks), repeat=len(costs))))
    loads = [((placements == block) * np.array(costs)).sum(axis=1) for block in range(blocks)]
    least = np.max(loads, axis=0).min()
    result, _ = filled(np.array(costs, np.float64), np.ones(len(costs), np.int64), blocks)
    assert result <= (4 / 3 - 1 / (3 * blocks)) * least + 1e-9


@given(seed=st.integers(0, 10**6), blocks=st.sampled_from([1, 3, 16, 40]))
def test_the_search_finds_the_best_combination(seed: int, blocks: int) -> None:
    tasks = some_tasks(seed, 4, 60_000)
    bounds = bounds_of(tasks, blocks, TABLE_2.cost)
    pieces = divide(*tasks, blocks, TABLE_2.cost)
    assert (pieces >= 1).all()
    assert (pieces <= bounds).all()
    if bounds.prod() > 60 or len(set(zip(*tasks[:2], strict=True))) < len(bounds):
        return
    every = [np.array(cut) for cut in product(*(range(1, bound + 1) for bound in bounds.tolist()))]
    best = min((busiest(tasks, blocks, cut), int((cut * tasks[2]).sum())) for cut in every)
    assert (busiest(tasks, blocks, pieces), int((pieces * tasks[2]).sum())) == best


@given(seed=st.integers(0, 10**6), blocks=st.sampled_from([4, 40, 264]), most=st.sampled_from([1, 1000]))
def test_division_is_never_worse_than_none(seed: int, blocks: int, most: int) -> None:
    tasks = some_tasks(seed, 25, 60_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(makespan, "MOST_COMBINATIONS", most)  # 1: always task by task
        pieces = divide(*tasks, blocks, TABLE_2.cost)
    assert (pieces <= bounds_of(tasks, blocks, TABLE_2.cost)).all()
    assert (pieces * 16 <= np.maximum(tasks[1], 16)).all()
    result = busiest(tasks, blocks, pieces)
    assert result <= busiest(tasks, blocks, np.ones_like(pieces))


def test_many_long_tasks_are_searched_one_after_another() -> None:
    rows, tokens = np.arange(1, 13) * 4, np.arange(12, 0, -1) * 3000
    count = np.full(12, 8)
    bounds = bounds_of((rows, tokens, count), 264, TABLE_2.cost)
    assert bounds.prod() > makespan.MOST_COMBINATIONS
    pieces = divide(rows, tokens, count, 264, TABLE_2.cost)
    none = busiest((rows, tokens, count), 264, np.ones_like(pieces))
    assert busiest((rows, tokens, count), 264, pieces) < 0.4 * none


@given(seed=st.integers(0, 10**6))
def test_division_does_not_depend_on_order(seed: int) -> None:
    rows, tokens, count = some_tasks(seed, 12, 60_000)
    order = np.random.default_rng(seed).permutation(len(rows))
    pieces = divide(rows, tokens, count, 40, TABLE_2.cost)
    assert divide(rows[order], tokens[order], count[order], 40, TABLE_2.cost).tolist() == pieces[order].tolist()


def test_equal_tasks_are_one() -> None:
    """A root and 256 equal leaves: only two sizes are priced, and leaves are cut alike."""
    priced = 0

    def counting(rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> Array:
        nonlocal priced
        priced += np.broadcast(rows, tokens).size
        return TABLE_2.cost(rows, tokens)

    rows, tokens = np.array([64] * 4 + [1] * 256), np.array([30_000] * 4 + [2000] * 256)
    pieces = divide(rows, tokens, np.full(260, 8), 264, counting)
    assert priced < 1500
    assert len(set(pieces[4:].tolist())) == 1
    merged = divide(rows[[0, -1]], tokens[[0, -1]], np.array([32, 2048]), 264, counting)
    assert pieces.tolist() == [merged[0]] * 4 + [merged[1]] * 256


def test_no_tasks() -> None:
    none = np.empty(0, np.int64)
    assert balanced((none, none, none), 8, TABLE_2.cost) == 0
    assert divide(none, none, none, 8, TABLE_2.cost).tolist() == []
    assert assign(np.empty(0), 8).tolist() == []
    assert filled(np.empty(0), none, 3) == (0, [0, 0, 0])


@given(st.lists(st.tuples(st.integers(1, 100_000), st.integers(1, 40)), max_size=8))
def test_borders_cover_the_tokens(tasks: list[tuple[int, int]]) -> None:
    sizes = [(tokens, min(pieces, tokens)) for tokens, pieces in tasks]
    tokens, pieces = (np.array([size[column] for size in sizes], np.int64) for column in (0, 1))
    task, start, stop = borders(tokens, pieces)
    for number, (length, parts) in enumerate(sizes):
        mine = task == number
        assert start[mine].tolist() == [0, *stop[mine].tolist()[:-1]]
        assert stop[mine][-1] == length
        lengths = (stop - start)[mine]
        assert len(lengths) == parts
        assert set(lengths.tolist()) <= {length // parts, -(-length // parts)}
