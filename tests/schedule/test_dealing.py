"""Work dealt to thread blocks beforehand (FlashForge): longest first, every lane once, and kernels that walk lists."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.forests import examples, forests
from support.h200 import H200
from treegen import Shape, Tree, strategies
from treegen.backends import oracle
from treegen.backends.torch_program import TorchProgram
from treegen.backends.triton_program import ProgramRoom, TritonProgram
from treegen.ir.errors import PlanError, StrategyError
from treegen.ir.plan import Mask, Plan
from treegen.ir.schedule import Schedule
from treegen.ir.verify import verify, verify_schedule
from treegen.schedule.lower import lower
from treegen.strategies import Strategy, strategy_from
from treegen.target.problem import Problem
from treegen.target.targets import target_from
from treegen.target.task_costs import task_costs, task_rows
from treegen.target.tile_config import WORK_LIST_RUN_TOKENS, resident_blocks

SHAPES = {
    "mha": Shape(4, 4, 128, dtype="fp16"),
    "gqa": Shape(32, 8, 128, dtype="bf16"),
    "heads in tiles": Shape(80, 1, 64, dtype="fp16"),
}
SMALL = Shape(4, 2, 16, dtype="fp32")
TARGETS = ("h200", "a100")  # with a measured grid of costs, and without one


def scheduled(tree: Tree, blocks: int | None, shape: Shape, target: str = "h200") -> tuple[Plan, Schedule]:
    plan = strategies.flashforge(blocks).plan(Problem(tree, shape, target_from(target)))
    return plan, lower(plan, Problem(tree, shape, target_from(target)))


def lanes_of(schedule: Schedule, shape: Shape) -> int:
    return shape.num_kv_heads * math.ceil(shape.group / schedule.configs[0].rows)


def tokens_of(schedule: Schedule) -> list[int]:
    """Tokens that every item walks, from its table entries."""
    per_tile = schedule.configs[0].runs_per_tile
    return [
        int(schedule.tiles[item.tile0 : item.tile0 + item.tiles, 1].sum())
        + int(schedule.packed_runs[item.run0 : item.run0 + item.packed_tiles * per_tile, 1].sum())
        for item in schedule.work_items
    ]


def lists(schedule: Schedule) -> list[list[int]]:
    """The work of every thread block."""
    return [
        schedule.work[begin:end].tolist()
        for begin, end in zip(schedule.work_indptr[:-1], schedule.work_indptr[1:], strict=True)
    ]


def costs_of(schedule: Schedule, shape: Shape, target: str) -> list[float]:
    """Microseconds of every entry of work, item by item and lane by lane."""
    rows = task_rows(np.array([item.rows for item in schedule.work_items]), schedule.configs[0], shape)
    costs = task_costs(shape, target_from(target))(rows, np.array(tokens_of(schedule)))
    return np.repeat(costs, lanes_of(schedule, shape)).tolist()


def test_by_hand() -> None:
    """Tasks of 4096, 2048, 1024 and 512 tokens and 2 KV heads for 3 blocks: the least loaded block takes the next."""
    shape = Shape(2, 2, 128, dtype="fp16")
    tree = Tree.parse("4096+2048+1024+512")
    plan = dataclasses.replace(strategies.deft_node().plan(Problem(tree, shape, H200)), blocks=3)
    schedule = lower(plan, Problem(tree, shape, H200))
    assert tokens_of(schedule) == [4096, 2048, 1024, 512]
    longest, second, third, last = costs_of(schedule, shape, "h200")[::2]
    assert longest < 2 * second < 2 * second + last < longest + third  # what the lists rest on
    # Both of 4096 and the first of 2048 open a list each, the second of 2048 joins it, those of 1024 the other two.
    assert lists(schedule) == [[0, 4], [1, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES)
@examples(40)
@given(data=st.data())
def test_longest_first(shape: str, target: str, data: st.DataObject) -> None:
    """Every item and lane once, to the block with the least load so far, and lists in falling length."""
    tree = data.draw(forests(25, 400, salt=910))
    blocks = data.draw(st.sampled_from((1, 2, 7, 40, 1000)))
    plan, schedule = scheduled(tree, blocks, SHAPES[shape], target)
    verify(plan, tree)
    verify_schedule(schedule, tree.num_rows)
    (tile,) = schedule.configs
    lanes = lanes_of(schedule, SHAPES[shape])
    work = len(schedule.items) * lanes
    assert tile.work_list
    assert tile.run_tokens in (1, min(WORK_LIST_RUN_TOKENS, tile.tokens))
    assert len(lists(schedule)) == min(blocks, max(work, 1))
    assert sorted(schedule.work.tolist()) == list(range(work))
    tokens = tokens_of(schedule)
    for own in lists(schedule):
        walked = [tokens[entry // lanes] for entry in own]
        assert walked == sorted(walked, reverse=True)

    exact = [max(round(cost * 2**20), 1) for cost in costs_of(schedule, SHAPES[shape], target)]
    loads = [0] * len(lists(schedule))
    expected: list[set[int]] = [set() for _ in loads]
    for entry in sorted(range(work), key=lambda entry: (-exact[entry], entry)):
        least = min(range(len(loads)), key=loads.__getitem__)
        loads[least] += exact[entry]
        expected[least].add(entry)
    assert [set(own) for own in lists(schedule)] == expected


def least_makespan(costs: list[float], blocks: int) -> float:
    """A bound below every schedule's makespan.

    The mean load; the longest task; of the n longest tasks, blocks < n <= 2 blocks, either three on one block, or one
    of the 2 blocks + 1 - n longest with another; of 2 blocks + 1 tasks, three on one block. Longest-first is within 4/3
    of it: where the task that ends last is at most a third of the bound, the mean tells, else the other terms do.
    """
    falling = sorted(costs, reverse=True)
    bound = max(sum(costs) / blocks, falling[0])
    for n in range(blocks + 1, min(len(costs), 2 * blocks) + 1):
        three = sum(falling[n - 3 : n]) if n >= 3 else math.inf
        bound = max(bound, min(falling[2 * blocks - n] + falling[n - 1], three))
    if len(costs) > 2 * blocks:
        bound = max(bound, sum(falling[2 * blocks - 2 : 2 * blocks + 1]))
    return bound


@pytest.mark.parametrize("target", TARGETS)
@examples(50)
@given(data=st.data())
def test_makespan_is_near_the_least(target: str, data: st.DataObject) -> None:
    tree = data.draw(forests(30, 2000, salt=920))
    blocks = data.draw(st.sampled_from((1, 3, 16, 132)))
    shape = SHAPES[data.draw(st.sampled_from(sorted(SHAPES)))]
    _, schedule = scheduled(tree, blocks, shape, target)
    if not len(schedule.items):
        return
    costs = costs_of(schedule, shape, target)
    loads = [sum(costs[entry] for entry in own) for own in lists(schedule)]
    assert max(loads) <= 4 / 3 * least_makespan(costs, blocks) * (1 + 1e-4)


def test_the_bound_is_below_every_assignment() -> None:
    """Of few tasks, all assignments tried: the bound of the test above is one."""
    source = np.random.default_rng(0)
    for _ in range(150):
        blocks, count = int(source.integers(1, 4)), int(source.integers(1, 8))
        costs = source.integers(1, 20, count)
        owner = np.indices((blocks,) * count).reshape(count, -1)
        loads = [(costs[:, None] * (owner == block)).sum(0) for block in range(blocks)]
        best = int(np.max(loads, axis=0).min())
        assert least_makespan(costs.tolist(), blocks) <= best


@pytest.mark.parametrize("blocks", [1, 7, 10_000])
def test_as_many_lists_as_blocks(blocks: int) -> None:
    """More blocks than pieces of work leave no list empty; by default the target's resident blocks."""
    shape, tree = SHAPES["gqa"], Tree.parse("3000(40(10*5),500*9)")
    plan, schedule = scheduled(tree, blocks, shape)
    work = len(schedule.items) * 8
    assert plan.blocks == blocks
    assert len(lists(schedule)) == min(blocks, work)
    assert all(lists(schedule))
    assert str(strategies.flashforge(blocks)) == f"flashforge(blocks={blocks})"
    plan, schedule = scheduled(tree, None, shape)
    assert plan.blocks == resident_blocks(schedule.configs[0], shape, H200) * H200.sms
    one, _ = scheduled(tree, 1, shape)
    assert len(one) == 16  # a single block gains nothing from divided nodes


def test_more_blocks_divide_long_nodes_further() -> None:
    shape, tree = Shape(1, 1, 128, dtype="fp16"), Tree.parse("50000(10*3)")
    sizes = [len(scheduled(tree, blocks, shape)[0]) for blocks in (1, 2, 8, 64)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 4 < sizes[-1]
    few = scheduled(tree, 8, shape)[0]
    prompt = [sum(s.stop - s.start for s in group.segments) for group in few.groups if group.segments[0].node == 0]
    assert max(prompt) - min(prompt) <= 1
    assert sum(prompt) == 50_000


def test_head_tiles_are_lanes() -> None:
    """80 query heads per KV head in tiles of 64: two lanes for each of 2 KV heads, of one item each."""
    shape = Shape(160, 2, 64, dtype="fp16")
    _, schedule = scheduled(Tree.parse("100+90"), 3, shape)
    assert (len(schedule.items), schedule.configs[0].rows, lanes_of(schedule, shape)) == (2, 64, 4)
    assert sorted(schedule.work.tolist()) == list(range(8))
    assert sorted(len(own) for own in lists(schedule)) == [2, 3, 3]


@pytest.mark.parametrize("blocks", [0, -1, 2.0, True, "7"])
def test_blocks_are_counted(blocks: object) -> None:
    with pytest.raises(StrategyError, match="blocks = "):
        strategies.flashforge(blocks)


@pytest.mark.parametrize(
    "strategy", [strategies.fasttree(min_blocks=((0, 0), (0, 0))), strategies.cascade(), strategies.medusa()], ids=str
)
def test_lists_need_a_single_class(strategy: Strategy) -> None:
    """Two tile sizes, several rounds, and a dense mask."""
    tree = Tree.parse("300(20*80)")
    plan = dataclasses.replace(strategy.plan(Problem(tree, SHAPES["mha"], H200)), blocks=5)
    assert strategy.name != "fasttree" or len(plan.tiles) == 2
    with pytest.raises(PlanError, match="blocks = 5: needs a single kernel config"):
        lower(plan, Problem(tree, SHAPES["mha"], H200))


def test_any_plan_of_one_class_can_be_dealt() -> None:
    tree = Tree.from_parents([-1, 0, 0], [90, 40, 33], rows=[(0, 20), (1, 40), (1, 7), (2, 33)])
    for name in ("query", "specinfer", "deft-node-chunk", "deft-flatten"):
        plan = dataclasses.replace(strategy_from(name).plan(Problem(tree, SMALL, H200)), blocks=2)
        schedule = lower(plan, Problem(tree, SMALL, H200))
        verify_schedule(schedule, tree.num_rows)
        assert len(lists(schedule)) == 2
        assert_attention(schedule, tree, SMALL, "triton")


# Kernels


def assert_attention(schedule: Schedule, tree: Tree, shape: Shape, backend: str, workers: int = 0) -> None:
    """In the interpreter; `workers`: more thread blocks than there are lists."""
    generator = torch.Generator().manual_seed(0)
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[shape.dtype]
    q = torch.randn(tree.num_rows, shape.num_qo_heads, shape.head_dim, generator=generator).to(dtype)
    caches = torch.randn(2, tree.kv.last_slot + 1, shape.num_kv_heads, shape.head_dim, generator=generator).to(dtype)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan)
    if backend == "torch":
        program: TorchProgram | TritonProgram = TorchProgram(schedule, shape, q.device)
    else:
        size = schedule.size
        program = TritonProgram(
            schedule,
            shape,
            q.device,
            ProgramRoom(dataclasses.replace(size, workers=size.workers + workers, work=size.work + workers)),
        )
    program(q, *caches, out, lse, shape.head_dim**-0.5, 1.0)
    for found, expected in zip((out, lse), oracle.reference(tree, q, *caches), strict=True):
        assert oracle.error(found, expected) <= oracle.TOLERANCE[shape.dtype]


@pytest.mark.parametrize("mask", ["interval", "token-bits"])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_lists_of_several_turns_with_masked_rows(blocks: int, mask: Mask) -> None:
    """Rows inside nodes, rows that see nothing, more rows than a tile; a block goes on from item to item."""
    attached = [(0, 70), (0, 33), (1, 5), (1, 40), (2, 0), *[(2, 20)] * 18, (3, 9), (4, 0)]
    tree = Tree.from_parents([-1, 0, 0, 1, -1], [70, 40, 20, 9, 3], rows=attached)
    plan = dataclasses.replace(strategies.flashforge(blocks).plan(Problem(tree, SMALL, H200)), mask=mask)
    schedule = lower(plan, Problem(tree, SMALL, H200))
    assert schedule.configs[0].mask == ("interval" if mask == "interval" else "bits")
    assert schedule.configs[0].work_list
    assert max(map(len, lists(schedule))) >= 2
    assert_attention(schedule, tree, SMALL, "triton")
    assert_attention(schedule, tree, SMALL, "torch")


def test_lists_over_head_tiles() -> None:
    shape = Shape(80, 1, 16, dtype="fp16")
    tree = Tree.from_parents([-1, 0, 0], [70, 5, 20], rows=[(0, 33), (1, 5), (2, 20), (2, 8)])
    _, schedule = scheduled(tree, 3, shape)
    assert lanes_of(schedule, shape) == 2
    assert_attention(schedule, tree, shape, "triton")


def test_blocks_without_work_do_nothing() -> None:
    tree = Tree.parse("90(20,33)")
    _, schedule = scheduled(tree, 2, SMALL)
    assert_attention(schedule, tree, SMALL, "triton", workers=3)


@examples(6)
@given(tree=forests(8, 90, rows=("inside", "mixed", "leaves"), salt=930), blocks=st.sampled_from((1, 3, 9)))
def test_random_lists_in_the_kernels(tree: Tree, blocks: int) -> None:
    if tree.num_rows:
        assert_attention(scheduled(tree, blocks, SMALL)[1], tree, SMALL, "triton")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_flashforge_is_compiled(backend: str) -> None:
    tree = Tree.from_parents([-1, 0, 0], [90, 40, 33], rows=[(0, 20), (1, 40), (1, 7), (2, 33)])
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, h, 16, generator=generator) for n, h in ((4, 4), (163, 2), (163, 2)))
    for blocks in (1, 4, None):
        assert treegen.compile(tree, strategy=strategies.flashforge(blocks), backend=backend).verify(q, k, v).passed
