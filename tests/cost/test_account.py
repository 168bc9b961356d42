"""The account of a plan against numbers counted by hand and by plain loops."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples, forests
from support.h200 import H200
from treegen import Shape, Tree, strategies
from treegen.cost.account import Account, account
from treegen.ir.groups import Group, Segment
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.schedule.lower import lower
from treegen.strategies import Strategy, strategy_from, strategy_names
from treegen.target.problem import Problem
from treegen.target.targets import target_from

SHAPE = Shape(
    8, 2, 64, dtype="fp16"
)  # a token's KV: 2 heads * (64 + 64) * 2 bytes = 512 bytes; 4 query heads per KV head
FEW_SHOT = Tree.parse("100(10*4)")


def untimed(estimate: Account) -> Account:
    """Without the time, which the cost model's tests look at."""
    assert estimate.time_us > 0
    return dataclasses.replace(estimate, time_us=0)


def accounted(strategy: Strategy, tree: Tree = FEW_SHOT, shape: Shape = SHAPE) -> Account:
    plan = strategy.plan(Problem(tree, shape, H200))
    return account(plan, lower(plan, Problem(tree, shape, H200)), Problem(tree, shape, H200))


def test_shared_nodes_by_hand() -> None:
    """Five nodes; a row's 4 heads times 4 rows fit a tile of 16 head rows by 32 tokens."""
    assert untimed(accounted(strategies.deft_node())) == Account(
        kv_unique_bytes=140 * 512,
        kv_hbm_bytes=140 * 512,
        kv_l2_bytes=0,
        q_bytes=(4 + 4 * 1) * 8 * 64 * 2,
        out_bytes=4 * 8 * (64 * 2 + 4),
        partial_bytes=(4 + 4 * 1) * 8 * (64 + 1) * 4 * 2,
        score_bytes=0,
        mask_bytes=0,
        useful_flops=4 * 110 * 8 * 2 * (64 + 64),
        padded_flops=(4 + 4 * 1) * 2 * 16 * 32 * 2 * (64 + 64),  # 100 tokens in 4 tiles, 10 tokens in 1
        items=5 * 2,
        launches=2,
        waves=10 / (4 * 132),  # 2 warps: 4 blocks per SM
        time_us=0,
    )


def test_paths_by_hand() -> None:
    """Four rows with 110 tokens each: three are read again, nothing is merged."""
    assert untimed(accounted(strategies.query())) == Account(
        kv_unique_bytes=140 * 512,
        kv_hbm_bytes=440 * 512,
        kv_l2_bytes=300 * 512,
        q_bytes=4 * 8 * 64 * 2,
        out_bytes=4 * 8 * (64 * 2 + 4),
        partial_bytes=0,
        score_bytes=0,
        mask_bytes=0,
        useful_flops=4 * 110 * 8 * 2 * (64 + 64),
        padded_flops=4 * 4 * 2 * 16 * 32 * 2 * (64 + 64),  # 3 full tiles, and the other 14 tokens in a fourth
        items=4 * 2,
        launches=1,
        waves=8 / (4 * 132),
        time_us=0,
    )


def test_two_classes_by_hand() -> None:
    """A masked class of 64 x 64 and an unmasked one of 16 x 32, head dim 80 padded to 128, 24 heads per KV head."""
    tree = Tree.from_parents([-1, 0], [70, 20], rows=[(0, 70), (1, 20)])
    shape = Shape(24, 1, 80, dtype="bf16")
    both, one = Segment(0, 0, 70, (0, 2)), Segment(1, 0, 20, (1, 2))
    plan = Plan.from_groups("by hand", [Group(((0, 2),), (both, one))])
    schedule = Schedule(
        configs=(KernelConfig(64, 64, 16, "interval", 4, 3), KernelConfig(16, 32, 16, "none", 2, 3)),
        config_indptr=np.array([0, 1, 2]),
        # row0, rows, tile0, tiles, run0, packed_tiles, partial0, group
        items=np.array([[0, 2, 0, 1, 0, 1, 0, 0], [1, 1, 1, 0, 4, 1, 2, 0]]),
        rows=np.array([0, 1]),
        tiles=np.array([[0, 64, 0, 2]]),
        packed_runs=np.array([[64, 6, 0, 2], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [70, 16, 0, 1], [86, 4, 0, 1]]),
        merge_rows=np.array([0, 1]),
        merge_indptr=np.array([0, 1, 3]),
        merge_partials=np.array([0, 1, 2]),
    )
    token = 160 * 2
    assert untimed(account(plan, schedule, Problem(tree, shape, target_from("a100")))) == Account(
        kv_unique_bytes=90 * token,
        kv_hbm_bytes=90 * token,
        kv_l2_bytes=20 * token,  # 24 heads in tiles of 16 rows: two blocks read the second item's 20 tokens
        q_bytes=3 * 24 * 80 * 2,
        out_bytes=2 * 24 * (80 * 2 + 4),
        partial_bytes=3 * 24 * 81 * 4 * 2,
        score_bytes=0,
        mask_bytes=2 * 8,  # the runs of 64 and of 6 tokens
        useful_flops=(70 + 90) * 24 * 2 * 160,
        padded_flops=(2 * 64 * 64 + 2 * 16 * 32) * 2 * 256,
        items=1 + 2,
        launches=3,
        waves=1 / 108 + 2 / (3 * 108),  # shared memory: one block of the first config per SM, three of the second
        time_us=0,
    )


def test_row_tiles_read_again() -> None:
    """300 rows of 4 heads: tiles of 64 head rows hold 16 rows, so 19 of them load the prompt."""
    estimate = accounted(strategies.deft_node(), Tree.parse("100(1*300)"))
    assert estimate.kv_hbm_bytes == estimate.kv_unique_bytes == 400 * 512
    assert estimate.kv_l2_bytes == 18 * 100 * 512


def test_masks_are_counted_where_rows_are_masked() -> None:
    estimate = accounted(strategies.deft_flatten(block=128))
    assert estimate.mask_bytes > 0
    assert estimate.mask_bytes % 8 == 0
    assert accounted(strategies.deft_flatten(block=128), Tree.parse("200")).mask_bytes == 0


@pytest.mark.parametrize("strategy", [*strategy_names(), "auto"])
def test_nothing_to_do(strategy: str) -> None:
    estimate = accounted(strategy_from(strategy), Tree.from_parents([-1], [10], rows=[]))
    assert dataclasses.astuple(estimate) == (0,) * len(dataclasses.fields(estimate))
    assert estimate.padding_waste == 0


def test_estimates_add_up() -> None:
    one, other = accounted(strategies.query()), accounted(strategies.deft_node())
    total = one + other
    for field in dataclasses.fields(Account):
        assert getattr(total, field.name) == getattr(one, field.name) + getattr(other, field.name)
    assert one.padding_waste == 1 - 440 * 8 * 256 / one.padded_flops
    assert one.useful_flops == other.useful_flops


@given(forests(40, 120, salt=77), st.sampled_from(strategy_names()), st.sampled_from(((8, 2), (3, 3), (80, 1))))
@examples(150)
def test_counts_by_loops(tree: Tree, strategy: str, heads: tuple[int, int]) -> None:
    shape = Shape(*heads, 64, dtype="fp16")
    plan = strategy_from(strategy).plan(Problem(tree, shape, H200))
    schedule = lower(plan, Problem(tree, shape, H200))
    found = account(plan, schedule, Problem(tree, shape, H200))
    if not all(config.fused for config in schedule.configs):
        assert strategy == "medusa"
        return
    loaded = blocks = flops = runs = rows = 0
    for number, config in enumerate(schedule.configs):
        head_tiles = -(-shape.group // config.rows)
        for index in range(schedule.config_indptr[number], schedule.config_indptr[number + 1]):
            item = schedule.work_items[index]
            walked = schedule.tiles[item.tile0 : item.tile0 + item.tiles].tolist()
            packed = item.packed_tiles * config.runs_per_tile
            walked += schedule.packed_runs[item.run0 : item.run0 + packed].tolist()
            loaded += head_tiles * sum(length for _, length, _, _ in walked)
            runs += (config.mask != "none") * sum(length > 0 for _, length, _, _ in walked)
            blocks += head_tiles * shape.num_kv_heads
            tokens = (item.tiles + item.packed_tiles) * config.tokens
            flops += head_tiles * shape.num_kv_heads * config.rows * tokens * 2 * 128
            rows += item.rows
    assert found.kv_unique_bytes + found.kv_l2_bytes == loaded * shape.kv_token_bytes
    if plan.mask == "interval":
        assert found.mask_bytes == 8 * runs
    assert found.items == blocks
    assert found.padded_flops == flops
    assert found.q_bytes == rows * shape.num_qo_heads * 128
    assert found.kv_l2_bytes >= 0
    assert 0 <= found.padding_waste < 1
