"""The cost of attention on several ranks: what each rank holds and how long it attends, and the merge across ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from treegen.cost.account import CostModel, account
from treegen.cost.communication import Communication, Link, Wanted, merge_cost, merge_modes
from treegen.ir.arrays import INT32_MAX
from treegen.ir.errors import InputError
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.ir.tree.shards import Shard
from treegen.progress import now
from treegen.schedule.lower import lower
from treegen.target.problem import Problem

if TYPE_CHECKING:
    from treegen.strategies import Strategy

MOST_RANKS = 1024
_CLEARLY_LESS = 0.95  # of one GPU's time: the model is not more exact
_LENGTHS = [int(float(f"{2 ** (step / 4):.2g}")) for step in range(94)]
"""Lengths of a node, from 1 to 10,000,000, in steps of a fourth of a doubling and with two digits that count."""
_MOST_SCALED = 4096
"""The most nodes and rows of trees whose longest node is scaled."""


@dataclass(frozen=True, slots=True)
class Division:
    """How attention is divided among ranks, for its cost (`treegen.distributed.Parallel` divides it in programs).

    Args:
        ranks: The number of ranks.
        link: What connects them.
        tensor: The ranks that divide the heads; `ranks / tensor` divide the tokens of every path.
        interleave: Neighbouring positions of a path that one rank holds.

    Raises:
        InputError: A number is out of range.
        TreeError: interleave is out of range.
    """

    ranks: int
    link: Link
    tensor: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        if type(self.ranks) is not int or not 1 <= self.ranks <= MOST_RANKS:
            raise InputError("ranks", self.ranks, "is no number of ranks", f"give 1..{MOST_RANKS}")
        if type(self.tensor) is not int or self.tensor < 1 or self.ranks % self.tensor:
            raise InputError("tensor", self.tensor, f"does not divide {self.ranks} ranks", "give a divisor of them")
        _ = self.shard(0)  # its checks

    @property
    def context(self) -> int:
        """The ranks that divide the tokens of every path."""
        return self.ranks // self.tensor

    def shape_of(self, shape: Shape) -> Shape:
        """Returns the shape of each rank. Ranks beyond the number of KV heads hold heads that others hold, too.

        Raises ShapeError if the ranks do not divide the heads.
        """
        return shape.divided(self.tensor, replicate_kv=True)

    def shard(self, rank: int) -> Shard:
        """Returns the positions that one of `context` ranks holds."""
        return Shard(rank, self.context, self.interleave)


class Held(NamedTuple):
    """One of the ranks that divide tokens: its tokens, their bytes of KV, its strategy, and the time of its attention.

    Ranks that divide heads hold the same tokens and take equal times.
    """

    rank: int
    tokens: int
    kv_bytes: int
    strategy: str
    attention_us: float


class Merging(NamedTuple):
    """A way of merging a layer across ranks. wanted: the heads that each rank gets. cost: its cost."""

    wanted: Wanted
    cost: Communication


@dataclass(frozen=True, slots=True)
class RanksCost:
    """The cost of a layer's attention on several ranks.

    Args:
        division: How it is divided.
        shape: The shape of each rank.
        held: The ranks that divide tokens.
        merges: The ways to merge; none where no tokens are divided, or where the tree has no rows.
        alone_us: The time of one GPU for all of it.
        pays_from: The tokens of the tree's longest node from which on the ranks pay; None where they do not up to
            10,000,000 tokens, and for large trees.
    """

    division: Division
    shape: Shape
    held: tuple[Held, ...]
    merges: tuple[Merging, ...]
    alone_us: float
    pays_from: int | None

    @property
    def slowest(self) -> Held:
        """The rank whose attention takes longest; the others wait for it."""
        return max(self.held, key=lambda held: held.attention_us)

    def merge(self, wanted: Wanted = "all") -> Communication | None:
        """Returns the cost of the fastest merge that gives each rank these heads; None if there is none."""
        costs = [each.cost for each in self.merges if each.wanted == wanted]
        return min(costs, key=lambda cost: cost.time_us, default=None)

    def total_us(self, wanted: Wanted = "all") -> float:
        """Returns the time of a layer: attention of the slowest rank, and the merge."""
        merge = self.merge(wanted)
        return self.slowest.attention_us + (0.0 if merge is None else merge.time_us)

    def speedup(self, wanted: Wanted = "all") -> float:
        """Returns the time of one GPU divided by that of the ranks; 1 where nothing is to be done."""
        total = self.total_us(wanted)
        return self.alone_us / total if total else 1.0

    @property
    def pays(self) -> bool:
        """Whether the ranks, merges of all heads included, are clearly faster than one GPU."""
        return self.total_us() < _CLEARLY_LESS * self.alone_us


def cost_of_ranks(
    problem: Problem, division: Division, strategy: Strategy, model: CostModel = "analytic", *, scaled: bool = True
) -> RanksCost:
    """Estimates the time of a layer's attention on several ranks, each with a plan for its own tokens and heads.

    Args:
        problem: The whole tree, the shape of the whole attention, and the target.
        division: How it is divided among ranks.
        strategy: Makes, or chooses, the plan of each rank, as of one GPU.
        model: The cost model that estimates times.
        scaled: Whether to search for the length of the longest node from which on several ranks pay.

    Raises:
        ShapeError: The ranks do not divide the heads, or there is no kernel for the shape.
        TreeError: The tree names tokens by request.
    """
    shape = division.shape_of(problem.shape)
    ways = tuple(_merges(problem, shape, division))
    held = tuple(_held(problem._replace(shape=shape), division, strategy, model))
    small = len(problem.tree.parent) + problem.tree.num_rows <= _MOST_SCALED
    wanted = scaled and small and problem.tree.num_rows and problem.tree.unique_tokens
    pays_from = _pays_from(problem, division, strategy, model) if wanted else None
    return RanksCost(division, shape, held, ways, _time_of(problem, strategy, model)[0], pays_from)


def _merges(problem: Problem, shape: Shape, division: Division) -> Iterator[Merging]:
    rows, ranks = problem.tree.num_rows, division.context
    if ranks == 1 or not rows:
        return
    whole = shape.num_qo_heads % ranks == 0
    for wanted in ("all", "own") if whole else ("all",):
        for mode in merge_modes(wanted, rows, shape, ranks, division.link):
            cost = merge_cost(mode, wanted, rows, shape, ranks, division.link, problem.target.memory_gbps)
            yield Merging(wanted, cost)


def _held(problem: Problem, division: Division, strategy: Strategy, model: CostModel) -> Iterator[Held]:
    """Yields the ranks that divide tokens. Ranks with equal trees share one plan."""
    times: dict[bytes, tuple[float, str]] = {}
    for rank in range(division.context):
        now(f"planning rank {rank} of {division.context}")
        tree = _shard_of(problem.tree, division, rank)
        key = tree.tokens.tobytes() + tree.row_sees.tobytes()
        if key not in times:
            times[key] = _time_of(problem.with_tree(tree), strategy, model)
        attention_us, name = times[key]
        tokens = int(tree.tokens.sum())
        yield Held(rank, tokens, tokens * problem.shape.kv_token_bytes, name, attention_us)


def _shard_of(tree: Tree, division: Division, rank: int) -> Tree:
    shard = division.shard(rank)
    return tree if shard.size == 1 else tree.shard(shard.rank, shard.size, shard.interleave)


def _time_of(problem: Problem, strategy: Strategy, model: CostModel) -> tuple[float, str]:
    """Returns the estimated time of attention on one GPU, and the strategy."""
    chosen = strategy.choose(problem).strategy
    plan = chosen.plan(problem)
    return account(plan, lower(plan, problem), problem, model).time_us, chosen.summary


def _pays_from(problem: Problem, division: Division, strategy: Strategy, model: CostModel) -> int | None:
    """Returns the length of the longest node from which on several ranks pay, by bisection of rounded lengths.

    Rank 0 stands for all ranks: it holds the most tokens of every path.
    """
    now("searching for the length from which on ranks pay")
    shape = division.shape_of(problem.shape)
    merges = [each.cost.time_us for each in _merges(problem, shape, division) if each.wanted == "all"]
    tree = problem.tree
    longest = int(tree.tokens.argmax())

    def pays(tokens: int) -> bool:
        whole = problem.with_tree(_with_length(tree, longest, tokens))
        part = Problem(_shard_of(whole.tree, division, 0), shape, problem.target)
        ranks_us = _time_of(part, strategy, model)[0] + min(merges, default=0.0)
        return ranks_us < _CLEARLY_LESS * _time_of(whole, strategy, model)[0]

    room = INT32_MAX - int(tree.tokens.sum()) + int(tree.tokens[longest])
    lengths = [length for length in _LENGTHS if length <= room]
    if not pays(lengths[-1]):
        return None
    low, high = -1, len(lengths) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(lengths[middle]) else (middle, high)
    return lengths[high]


def _with_length(tree: Tree, node: int, length: int) -> Tree:
    """Returns the tree with another length of a node; rows that saw all of it still do, others see at most as much."""
    tokens, sees = tree.tokens.copy(), tree.row_sees.copy()
    here = tree.row_node == node
    sees[here & (sees == tokens[node])] = length
    sees[here] = sees[here].clip(max=length)
    tokens[node] = length
    rows = list(zip(tree.row_node.tolist(), sees.tolist(), strict=True))
    return Tree.from_parents(tree.parent, tokens, rows)
