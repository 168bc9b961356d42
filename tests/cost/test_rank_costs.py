"""The cost of several ranks: what they hold, whether the slowest counts, and from which length on they pay."""

import json

import pytest

from support.forests import forest
from treegen.cost.known_links import link_named
from treegen.cost.ranks import Division, cost_of_ranks
from treegen.ir.errors import InputError, ShapeError, TreeError
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.report.explain import explain
from treegen.report.ranks_text import ranks_lines, ranks_object
from treegen.search.auto import time_of
from treegen.strategies import auto, strategy_from
from treegen.target.problem import Problem
from treegen.target.targets import target_from

NVLINK, SLOW = link_named("nvlink"), link_named("400g")
SHAPE, H200 = Shape(32, 8, 128), target_from("h200")


def prefix(tokens: int, rows: int = 64) -> Problem:
    return Problem(Tree.from_levels([1, rows], [tokens, 0]), SHAPE, H200)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("ranks", "tensor", "interleave"), [(2, 1, 1), (8, 2, 4), (5, 1, 16), (4, 4, 1)])
def test_ranks_hold_all_tokens_once(seed: int, ranks: int, tensor: int, interleave: int) -> None:
    tree = forest(nodes=9, most_tokens=60, seed=seed, roots=0.3, rows="mixed")
    division = Division(ranks, NVLINK, tensor, interleave)
    found = cost_of_ranks(Problem(tree, SHAPE, H200), division, auto(), scaled=False)
    local = SHAPE.divided(tensor)
    assert found.shape == local
    assert [held.rank for held in found.held] == list(range(division.context))
    assert sum(held.tokens for held in found.held) == tree.tokens.sum()
    assert all(held.kv_bytes == held.tokens * local.kv_token_bytes for held in found.held)
    for held in found.held:
        part = tree.shard(held.rank, division.context, interleave) if division.context > 1 else tree
        problem = Problem(part, local, H200)
        assert held.attention_us == time_of(auto().choose(problem).strategy, problem)
    assert found.slowest.attention_us == max(held.attention_us for held in found.held)
    merge = found.merge()
    merge_us = merge.time_us if merge is not None else 0.0
    assert found.total_us() == found.slowest.attention_us + merge_us
    assert (merge is None) == (division.context == 1 or not tree.num_rows)


def test_long_prefixes_pay_and_short_ones_do_not() -> None:
    times = {}
    for tokens in (1_000, 8_192, 131_072, 1_048_576):
        found = cost_of_ranks(prefix(tokens), Division(2, NVLINK), auto())
        times[tokens] = found.speedup()
        assert found.pays == (tokens >= found.pays_from)
        assert found.pays_from == 5_800
    assert times[1_000] < 1 < times[8_192] < times[131_072] < times[1_048_576] < 2


def test_a_slower_link_pays_later() -> None:
    fast, slow = (cost_of_ranks(prefix(8_192), Division(8, link), auto()) for link in (NVLINK, SLOW))
    assert fast.pays_from < slow.pays_from
    assert fast.total_us() < slow.total_us()
    assert fast.slowest == slow.slowest


def test_heads_are_divided_without_messages() -> None:
    shape = Shape(64, 8, 128)
    found = cost_of_ranks(Problem(prefix(8_192).tree, shape, H200), Division(4, SLOW, tensor=4), auto())
    assert found.merges == ()
    assert found.shape == Shape(16, 2, 128)
    assert found.total_us() == found.slowest.attention_us
    assert 1.5 < found.speedup() < 4
    assert cost_of_ranks(prefix(8), Division(16, SLOW, tensor=16), auto()).shape == Shape(2, 1, 128)


def test_the_strategy_of_ranks() -> None:
    found = cost_of_ranks(prefix(100, 4), Division(2, NVLINK), strategy_from("query"))
    assert {held.strategy for held in found.held} == {strategy_from("query").summary}


def test_ranks_with_nothing_to_do() -> None:
    division = Division(4, NVLINK)
    nobody = cost_of_ranks(Problem(Tree.from_parents([-1], [5], rows=[]), SHAPE, H200), division, auto())
    assert (nobody.merges, nobody.total_us(), nobody.speedup(), nobody.pays, nobody.pays_from) == (
        (),
        0,
        1,
        False,
        None,
    )
    blind = cost_of_ranks(Problem(Tree.from_levels([1, 2], [0, 0]), SHAPE, H200), division, auto())
    assert not blind.pays
    assert [held.tokens for held in blind.held] == [0] * 4
    few = cost_of_ranks(Problem(Tree.from_levels([1, 2], [1, 1]), SHAPE, H200), division, auto())
    assert [held.tokens for held in few.held] == [1, 2, 0, 0]


def test_heads_that_ranks_do_not_divide_are_merged_for_all() -> None:
    found = cost_of_ranks(prefix(100), Division(3, NVLINK), auto())
    assert {way.wanted for way in found.merges} == {"all"}
    assert found.merge("own") is None
    assert list(ranks_object(found)["speedup"]) == ["all"]


def test_large_trees_are_not_scaled() -> None:
    tree = Tree.from_levels([1, 3000], [100, 1])
    assert cost_of_ranks(Problem(tree, SHAPE, H200), Division(2, NVLINK), strategy_from("query")).pays_from is None


@pytest.mark.parametrize("ranks", [0, -1, 1025, 2.0, True, "2"])
def test_numbers_of_ranks(ranks: object) -> None:
    with pytest.raises(InputError, match=r"ranks = .*: is no number of ranks; give 1\.\.1024"):
        Division(ranks, NVLINK)


def test_divisions_that_cannot_be() -> None:
    for tensor in (0, 3, 16, True):
        with pytest.raises(InputError, match=r"tensor = .*: does not divide 8 ranks"):
            Division(8, NVLINK, tensor)
    with pytest.raises(TreeError, match="interleave = 0"):
        Division(8, NVLINK, interleave=0)
    with pytest.raises(TreeError, match="interleave = 2147483647: is too large"):
        Division(8, NVLINK, interleave=2147483647)
    for shape in (Shape(6, 2, 64), Shape(12, 3, 64)):
        with pytest.raises(ShapeError, match="are no multiple of 4 ranks; divide heads among fewer ranks"):
            cost_of_ranks(Problem(prefix(9).tree, shape, H200), Division(4, NVLINK, tensor=4), auto())


def test_text_and_json_have_the_same_figures() -> None:
    found = cost_of_ranks(prefix(8_192), Division(8, NVLINK, tensor=2, interleave=16), auto())
    lines, value = list(ranks_lines(found)), json.loads(json.dumps(ranks_object(found)))
    assert list(value) == [
        "ranks", "tensor", "context", "interleave", "link", "shape", "held", "merges", "total_us", "speedup",
        "alone_us", "pays", "pays_from",
    ]  # fmt: skip
    assert [(way["heads"], way["mode"]) for way in value["merges"]] == [
        ("all", "direct"), ("all", "exchange"), ("all", "gather"),
        ("own", "direct"), ("own", "exchange"), ("own", "gather"),
    ]  # fmt: skip
    for way in value["merges"]:
        assert way["sent"] == sum(each["sent"] for each in way["collectives"])
        assert any(f"{way['heads']}, {way['mode']}" in line for line in lines)
    assert lines[0] == "8 ranks over nvlink, predicted: heads divided by 2, tokens divided by 4, 16 at a time"
    assert any(f"{value['total_us']['all']:.1f} us = slowest rank {value['held'][0]['attention_us']:.1f} us" in line
               for line in lines)  # fmt: skip
    assert f"{value['speedup']['all']:.2f}x as fast" in " ".join(lines)


def test_many_unlike_ranks_are_cut_short() -> None:
    tree = forest(nodes=40, most_tokens=60, seed=1, roots=0.3, rows="leaves")
    lines = list(ranks_lines(cost_of_ranks(Problem(tree, SHAPE, H200), Division(64, NVLINK), auto(), scaled=False)))
    assert len(lines) < 24
    assert any("more; the slowest takes" in line for line in lines)


def test_explanations_have_ranks_on_request() -> None:
    tree, division = prefix(8_192).tree, Division(2, NVLINK)
    told, plain = explain(tree, division=division), explain(tree)
    assert told.text().startswith(f"{plain.text()}\n\n2 ranks over nvlink")
    assert told.ranks == cost_of_ranks(Problem(tree, SHAPE, H200), division, auto())
    assert "ranks" not in plain.to_object()
    named = explain(tree, ["query"], division=division)
    assert {held.strategy for held in named.ranks.held} == {strategy_from("query").summary}
    of_all = explain(tree, ["query", "cohort"], division=division)
    assert of_all.ranks == told.ranks
