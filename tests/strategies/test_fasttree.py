"""FastTree's greedy edge assignment: worked examples, published plans, rows inside nodes, splits and tiles."""

import json
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest

from support.h200 import H200
from treegen import Shape, Tree
from treegen.ir.errors import StrategyError
from treegen.ir.plan import Plan
from treegen.ir.verify import verify, verify_schedule
from treegen.schedule.lower import lower
from treegen.strategies import fasttree
from treegen.strategies.edge_assignment import EdgeCosts, assign_edges, virtual_tree
from treegen.strategies.fasttree import FastTree
from treegen.target.problem import Problem

SHAPE = Shape(1, 1, 128)
COSTS = EdgeCosts(0.66, 0.33, 0.1, (64, 16), (32, 32))


@pytest.mark.parametrize(
    ("root", "leaf", "rows", "first", "second", "edges"),
    [
        # Figure 4(d): padding of the small groups decides, the root stays apart.
        (1000, 100, (8, 8), (528.8, 11088), (528.8, 11088), (0, 0)),
        # Figure 4(e): no padding anywhere, partial results decide.
        (1000, 100, (128, 128), (12.8, 0), (12.8, 0), (1, 1)),
        (1000, 100, (120, 136), (540, 42768), (3709.6, 45936), (0, 0)),
        (1000, 100, (100, 100), (38818, 38808), (20338, 20328), (1, 1)),
        # A root as short as its leaves: context padding tips the balance.
        (8, 8, (8, 8), (233.12, 232.32), (212, 126.72), (1, 1)),
        # Our own: 64 and 16 rows fill their tiles, so keeping the first leaf costs its partials, and concatenating it
        # leaves 48 rows on a tile of 64. The second leaf has 48 rows: its padding is the same 16 rows, apart or not.
        (500, 50, (16, 48), (1.6 + 0, 0.66 * 16 * 500), (4.8 + 0.66 * 16 * 50, 0.66 * 16 * 550), (0, 0)),
    ],
)
def test_worked_examples(
    root: int,
    leaf: int,
    rows: tuple[int, int],
    first: tuple[float, float],
    second: tuple[float, float],
    edges: tuple[int, int],
) -> None:
    left = sum(rows)
    for number, expected in zip(rows, (first, second), strict=True):
        sizes = (left, root, number, leaf)
        assert (COSTS.keep(*sizes), COSTS.concatenate(*sizes)) == pytest.approx(expected)
        left -= number if expected[0] > expected[1] else 0
    tree = Tree.from_parents([-1, 0, 0], [root, leaf, leaf], [(v + 1, leaf) for v in (0, 1) for _ in range(rows[v])])
    assert tuple(assign_edges(tree, COSTS)) == (False, *map(bool, edges))


def test_the_published_code_weighs_padding_by_heads() -> None:
    paper = FastTree().costs((64, 16), (32, 32), 4)
    artifact = FastTree(variant="artifact").costs((64, 16), (32, 32), 4)
    assert (paper.tile_rows, artifact.tile_rows) == ((16, 4), (16, 4))
    assert artifact.compute(5, 100) == pytest.approx(4 * paper.compute(5, 100))
    assert artifact.reduce(5) == paper.reduce(5)
    # Four rows more on the small tile of 4, all padding: 0.66 * 3 * 20 for one row, beta nothing at 32 tokens and more.
    assert paper.compute(1, 40) == pytest.approx(0.66 * 3 * 40)
    assert paper.compute(1, 20) == pytest.approx(0.66 * 3 * 20 + 0.33 * 12)


def test_groups_of_a_virtual_tree() -> None:
    tree = Tree.parse("100(10,20(3,4),30)")
    #                  n0  n1 n2 n3 n4 n5; leaves n1, n3, n4, n5 are rows 0..3
    edges = [False, False, True, False, True, True]
    plan = virtual_tree(tree, np.array(edges))
    verify(plan, tree)
    assert [str(group) for group in plan.groups] == [
        "rows 0-0 | n0[0:100]",
        "rows 0-0 | n1[0:10]",
        "rows 1-1 | n0[0:100], n2[0:20]",
        "rows 1-1 | n3[0:3]",
        "rows 2-2 | n0[0:100], n2[0:20], n4[0:4]",
        "rows 3-3 | n0[0:100], n5[0:30]",
    ]


def test_rows_that_stay_need_not_be_neighbours() -> None:
    tree = Tree.parse("100(10,20,30)")
    plan = virtual_tree(tree, np.array([False, False, True, False]))
    verify(plan, tree)
    assert str(plan.groups[0]) == "rows 0-0,2-2 | n0[0:100]"


def test_rows_inside_nodes_are_masked() -> None:
    tree = Tree.from_parents([-1, 0], [10, 5], rows=[(0, 4), (0, 10), (1, 5)])
    plan = virtual_tree(tree, np.array([False, True]))
    verify(plan, tree)
    assert [str(group) for group in plan.groups] == [
        "rows 0-1 | n0[0:4], n0[4:10] seen 1-1",
        "rows 2-2 | n0[0:10], n1[0:5]",
    ]


def test_splits_and_tiles_follow_the_number_of_blocks() -> None:
    # Thread blocks of the root: 8 KV heads x 64 row tiles x 2 splits; of the leaves: 8 x 1024. Both fill their phase.
    shape = Shape(32, 8, 128)
    usual = fasttree().plan(Problem(Tree.parse("1,1024/2048,32"), shape, H200))
    assert (usual.tiles, max(usual.read_tokens)) == (((64, 32), (16, 32)), 1024)
    # 8 x 4 blocks of 1,024 tokens are too few, 8 x 32 of 128 are enough.
    short = fasttree().plan(Problem(Tree.parse("4000"), shape, H200))
    assert (short.tiles, max(short.read_tokens)) == (((64, 32), (16, 32)), 128)
    # 8 x 4 blocks of 128 tokens are too few for a phase of its own: the other tile serves both.
    single = fasttree().plan(Problem(Tree.parse("500"), shape, H200))
    assert (single.tiles, max(single.read_tokens)) == (((64, 32),), 128)
    unsplit = fasttree(split=(4000, 4000)).plan(Problem(Tree.parse("4000"), shape, H200))
    assert unsplit.read_tokens.tolist() == [4000]


def test_the_tiles_of_the_plan_are_the_tiles_launched() -> None:
    tree = Tree.parse("300(100*70)+50*3")
    shape = Shape(4, 4, 64)
    plan = fasttree().plan(Problem(tree, shape, H200))
    schedule = lower(plan, Problem(tree, shape, H200))
    verify_schedule(schedule, tree.num_rows)
    assert [(tile.rows, tile.tokens) for tile in schedule.configs] == list(plan.tiles)
    rows = schedule.column("rows")
    for c, tile in enumerate(schedule.configs):
        of_config = rows[schedule.config_indptr[c] : schedule.config_indptr[c + 1]]
        smaller = schedule.configs[c + 1].rows if c + 1 < len(schedule.configs) else 0
        assert all(smaller < count <= tile.rows for count in of_config)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alpha": -1}, "alpha = -1"),
        ({"tile_q": (64, 0)}, "tile_q"),
        ({"tile_q": (64, 24)}, "power of two"),
        ({"tile_q": (16, 64)}, "small above a large"),
        ({"variant": "code"}, "variant = code"),
        ({"delta": 1}, "delta"),
    ],
)
def test_bad_options(options: dict[str, object], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        fasttree(**options)


def edge_text(edges: list[bool]) -> str:
    """Edges in node order as runs: `0*5 1*3`."""
    return " ".join(f"{int(value)}*{len(list(run))}" for value, run in groupby(edges))


@pytest.mark.parametrize("variant", ["paper", "artifact"])
def test_plans_of_the_published_benchmark(variant: str, data_dir: Path, golden: Callable[[str], None]) -> None:
    """Which edges are 1, the tiles and the groups, for 15 trees and 3 head settings.

    The edges and tiles of "artifact" were compared with the published planner's on all 45: they are the same.
    """
    table = json.loads((data_dir / "fasttree_kernel_bench.json").read_text())
    lines = []
    for query_heads, kv_heads in table["heads"]:
        for entry in table["trees"]:
            tree = Tree.from_levels(entry["nodes_per_level"], entry["tokens_per_node"])
            shape = Shape(query_heads, kv_heads, table["head_dim"], dtype=table["dtype"])
            passes: dict[str, Plan] = {}
            plan = FastTree(variant=variant).plan(Problem(tree, shape, H200), passes.__setitem__)
            verify(plan, tree)
            edges = concatenated(passes["assign-edges"], tree)
            lines.append(
                f"{query_heads}/{kv_heads} {tree.text} tiles {plan.tiles} groups {len(plan)}: {edge_text(edges)}"
            )
    golden("\n".join(lines))


def concatenated(plan: Plan, tree: Tree) -> list[bool]:
    """Edges that are 1, read off the groups: neighbours in a context are a node and a child that it was joined to."""
    edges = [False] * len(tree.parent)
    for group in plan.groups:
        nodes = [segment.node for segment in group.segments]
        for above, below in pairwise(nodes):
            if above != below:
                edges[below] = True
    return edges
