"""The search behind `auto`: the policy with the least estimated time, exact on small trees.

Plans are counted, not made (treegen.search.policy_costs), and only those that a lower bound does not rule out
(treegen.search.bounds). Every step is deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from treegen.cost.analytic import WAITING
from treegen.cost.estimate import account
from treegen.ir.arrays import Ints, frozen
from treegen.ir.errors import ShapeError
from treegen.ir.plan import Merge
from treegen.ir.tree import Tree
from treegen.progress import now
from treegen.schedule.lower import lower
from treegen.search.bounds import Bounds
from treegen.search.halves import halved, large_cohorts
from treegen.search.policy_costs import MOST_PAIRS, Floats, PolicyCosts
from treegen.search.size import is_large, is_too_large, most_counted
from treegen.search.space import MOST_EDGES, SPLITS, policies_of
from treegen.search.walks import Lines, Walks, highest
from treegen.strategies.baselines import query
from treegen.strategies.cohort import Cohort, cohort, seen_below_and_above
from treegen.strategies.groupings import cohorts_of_spans
from treegen.strategies.isolated import Isolated, as_isolated
from treegen.strategies.registry import GroupKind, StrategySpec, searched_specs
from treegen.strategies.strategy import Move, Step, Strategy
from treegen.target.problem import Problem
from treegen.target.tile_config import MOST_RESIDENT

_MOST_LEVELS = (12, 8)  # thresholds on rows at which a tree of many edges, and one that is large, is cut
_MOST_STARTS = 3  # policies with which cuts of a large tree are tried
_MOST_NODES = 24  # nodes of a large tree at which single cuts are tried
_WIDEST_MEASURED = 128  # dims of values up to which kernels that wait were measured; wider ones spill
_OF_NODES: tuple[GroupKind, ...] = ("nodes", "pieces of nodes", "joined nodes")
_LESS = 1 - 1e-9  # an improvement is more than rounding
_CLEARLY_LESS = 0.99  # what waiting costs is less certain than the rest


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found. counted: policies whose time was counted; query_us: plain per-row decoding at its best, None
    where the tree is too large to count it; left_out: what else was not weighed for the size of the tree.
    """

    strategy: Strategy
    time_us: float
    query_us: float | None
    counted: int
    trace: tuple[Step, ...]
    left_out: tuple[str, ...] = ()


@dataclass
class _State:
    """The best so far, every counted time, and what the tree is too large for."""

    best: Strategy | None = None
    time_us: float = np.inf
    times: dict[Strategy, float] = field(default_factory=dict)
    trace: list[Step] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def consider(self, strategy: Strategy, time_us: float) -> bool:
        """Whether the strategy is better than all before it."""
        self.times[strategy] = time_us
        if not time_us < self.time_us * _LESS:
            return False
        self.trace.append(Step(_moves(self.best, strategy), strategy, time_us))
        self.best, self.time_us = strategy, time_us
        return True

    def retime(self, time_us: float) -> bool:
        """Gives the best another time; whether it still is the best of all."""
        given = self.trace.pop().strategy
        self.times[given] = time_us
        self.best = min(self.times, key=self.times.__getitem__)
        self.time_us = self.times[self.best]
        while self.trace and self.trace[-1].time_us <= self.time_us:
            self.trace.pop()
        before = self.trace[-1].strategy if self.trace else None
        self.trace.append(Step(_moves(before, self.best), self.best, self.time_us))
        return self.best == given

    def consider_all(self, strategies: Sequence[Strategy], times: Floats) -> None:
        """The same for several, in their order."""
        for strategy, time_us in zip(strategies, times.tolist(), strict=True):
            self.consider(strategy, time_us)


def search(problem: Problem, *, for_any_tree: bool = False, isolated: bool = False) -> SearchResult:
    """The fastest policy or named strategy by the analytic model.

    Of a tree of at most MOST_EDGES edges none of the whole space (treegen.search.space) is better, each in as many
    launches as its plan has stages; of a larger one none of the named strategies that are weighed: all but those whose
    plans are too large for the tree (treegen.search.size). for_any_tree: only what can plan other trees too, so no cuts
    at single nodes, and no merges within one launch, which a capacity does not have. isolated: only isolated plans:
    policies that have them for this tree, and named strategies with their groups divided. Groups of cohorts cut at
    thresholds mix subtrees, so these are left out.
    """
    tree = problem.tree
    costs = PolicyCosts(problem, isolated=isolated)
    bounds, state = Bounds(costs), _State()
    _walk_whole_paths(costs, bounds, state)
    query_us = min((time for policy, time in state.times.items() if _is_query(policy)), default=None)
    nodes = frozen(np.flatnonzero((tree.parent >= 0) & (tree.topology.rank_hi > tree.topology.rank_lo)))
    if len(nodes) and costs.unique:
        if len(nodes) <= MOST_EDGES and not for_any_tree:
            _cut_everywhere(costs, bounds, state, nodes)
        elif not isolated:
            _cut_at_thresholds(costs, bounds, state)
            if not for_any_tree:
                _cut_once_more(costs, state, nodes)
    if isolated:
        _weigh(_divided(), costs, state)
    else:
        _weigh(_promising(costs, bounds, state), costs, state)
    if not for_any_tree:
        _merge_in_one_launch(costs, state)
    if state.best is None:
        state.consider(Cohort(), costs.time_us(Cohort()))
    assert state.best is not None
    best, left_out = as_named(state.best, tree), tuple(state.left_out)
    best = as_isolated(best) if isolated else best
    return SearchResult(best, state.time_us, query_us, len(state.times), tuple(state.trace), left_out)


def candidates(problem: Problem, most: int) -> list[tuple[Strategy, float]]:
    """At most `most` strategies by rising estimated time in microseconds: policies that fit any tree, and the named
    ones.
    """
    tree, shape, target = problem
    costs, found = PolicyCosts(problem), {}
    for policy in policies_of(shape, target)[0]:
        for apart in (None, *_thresholds(tree)):
            for merge in get_args(Merge)[: None if apart else 1]:
                cut = replace(policy, apart=apart, merge=merge)
                walks = costs.walks(cut)
                # Under "final" merge the second stage is not split; all in one stage is a plan of "reduce" merge.
                longest = highest(walks.tokens, walks.line, walks.lines)
                for split in SPLITS if longest.all() else ():
                    if split is None or longest[0] > split:
                        chosen = replace(cut, split=split)
                        found[as_named(chosen, tree)] = costs.time_us(chosen)
    for strategy in (spec.factory() for spec in _compared(tree)):
        with suppress(ShapeError):
            found[strategy] = time_of(strategy, problem)
    return sorted(found.items(), key=lambda entry: entry[1])[:most]


def time_of(strategy: Strategy, problem: Problem) -> float:
    """Estimated microseconds of a strategy's plan, which is made."""
    plan = strategy.plan(problem)
    return account(plan, lower(plan, problem), problem).time_us


def as_named(strategy: Strategy, tree: Tree) -> Strategy:
    """`query` for a cohort of one row with its whole path, where both plan the tree alike."""
    if isinstance(strategy, Cohort) and _is_query(strategy) and not _has_rows_inside(tree):
        return query(strategy.split)
    return strategy


def _has_rows_inside(tree: Tree) -> bool:
    """Whether rows of a node see different parts of it: `query` reads each in one piece, a cohort of one row cut."""
    node = tree.topology.spans.node
    return bool((node[1:] == node[:-1]).any())


def _compared(tree: Tree) -> list[StrategySpec]:
    """The strategies that the search compares as they are. Policies stand for those whose options it varies, but not
    for `query` on a tree that `query` plans in another way.
    """
    specs, with_query = searched_specs(), _has_rows_inside(tree)
    return [spec for spec in specs if not spec.policy_options or (with_query and spec.factory is query)]


def _divided() -> list[Strategy]:
    """The strategies that an isolated search compares with policies: those that group rows by the nodes they see, and
    whole paths of large cohorts divided, with every split.
    """
    splits = [tokens for tokens in SPLITS if tokens is not None]
    by_nodes = [(spec.factory, spec.split_option) for spec in searched_specs() if spec.groups in _OF_NODES]
    of_nodes = [make() for make, option in by_nodes if option is None]
    of_pieces = [make(**{option: tokens}) for make, option in by_nodes if option is not None for tokens in splits]
    whole = [cohort(split=split) for split in SPLITS]
    return [*map(as_isolated, (*of_nodes, *of_pieces, *whole)), *(Isolated(each, two_tiles=True) for each in whole)]


def _is_query(strategy: Strategy) -> bool:
    if not isinstance(strategy, Cohort) or strategy.head_rows > 1:
        return False
    return strategy.tile is None and strategy.apart is None and not strategy.cut


def _walk_whole_paths(costs: PolicyCosts, bounds: Bounds, state: _State) -> None:
    """Every policy without cuts, all at once; one after another where they have many segments."""
    policies = policies_of(costs.shape, costs.target)[0]
    sizes = [int(cohorts_of_spans(costs.tree, costs.rows_of(policy)).sum()) for policy in policies]
    most = most_counted(costs.tree)
    weighed = [policy for policy, size in zip(policies, sizes, strict=True) if size <= most]
    unweighed = [policy for policy in policies if policy not in weighed]
    state.left_out += ["plain per-row decoding" if _is_query(policy) else str(policy) for policy in unweighed]
    for some in [weighed] if sum(sizes) <= MOST_PAIRS else [[policy] for policy in weighed]:
        _walk_some(costs, bounds, state, some, most)


def _walk_some(costs: PolicyCosts, bounds: Bounds, state: _State, policies: Sequence[Cohort], most: int) -> None:
    """Weighs policies without cuts, and with every split that makes no more than `most` segments."""
    now(f"weighing {', '.join(map(str, policies[:1]))}{' and others' * (len(policies) > 1)}")
    walks = costs.whole_walks([costs.rows_of(policy) for policy in policies])
    whole = costs.lines_of(policies, walks)
    state.consider_all(policies, costs.times_us(walks, whole))
    splits = len(SPLITS) - 1
    some = np.flatnonzero(bounds.of_two_launches(walks, whole, merged=2) < state.time_us * _LESS)
    chosen = (some[:, None] * splits + np.arange(splits)).ravel()
    tokens = np.tile(np.array(SPLITS[1:]), len(policies))
    line, in_all = chosen // splits, np.bincount(walks.line, walks.tokens, walks.lines)
    parts = len(walks.span) + in_all[line] // tokens[chosen]
    chosen = chosen[(tokens[chosen] < highest(walks.tokens, walks.line, walks.lines)[line]) & (parts <= most)]
    if len(chosen):
        lines = Lines(whole.classes, whole.tile[chosen // splits], tokens[chosen])
        least = bounds.of_walks(walks.taken(chosen // splits, spans=False), lines)
        kept = np.flatnonzero(least < state.time_us * _LESS)
        chosen, lines = chosen[kept], lines.taken(kept)
    if len(chosen):
        times = costs.times_of(walks, chosen // splits, lines)
        split = [replace(policies[index // splits], split=SPLITS[1 + index % splits]) for index in chosen.tolist()]
        state.consider_all(split, times)


def _promising(costs: PolicyCosts, bounds: Bounds, state: _State) -> Iterator[Strategy]:
    """The named strategies that may be better than the best so far."""
    for spec in _compared(costs.tree):
        if bounds.of_groups(spec.groups, state.time_us * _LESS) < state.time_us * _LESS:
            yield spec.factory()


def _weigh(strategies: Iterable[Strategy], costs: PolicyCosts, state: _State) -> None:
    """Strategies by the plans that they make, but for those whose plans are too large for the tree."""
    for strategy in strategies:
        if is_too_large(strategy, costs.tree, costs.shape):
            state.left_out.append(strategy.name)
            continue
        now(f"weighing {strategy.name}")
        with suppress(ShapeError):  # FastTree's tiles do not fit every shape
            state.consider(strategy, time_of(strategy, costs.problem))


def _cut_everywhere(costs: PolicyCosts, bounds: Bounds, state: _State, nodes: Ints) -> None:
    """Every policy with every assignment of edges: all sets of `nodes` at which paths are cut."""
    every = (np.arange(1, 1 << len(nodes))[:, None] >> np.arange(len(nodes)) & 1).astype(bool)
    for policy in policies_of(costs.shape, costs.target)[0]:
        walks = costs.cut_walks(costs.rows_of(policy), nodes, every)
        cuts, admitted = every, np.flatnonzero(costs.admits(walks))
        if not len(admitted):
            continue
        if len(admitted) < len(every):
            cuts, walks = every[admitted], walks.taken(admitted)
        lines = costs.lines_of([policy] * walks.lines, walks)
        _try_splits(costs, bounds, state, policy, _Cuts(nodes, cuts, walks, lines))
        kept = np.flatnonzero(bounds.of_two_launches(walks, lines) < state.time_us * _LESS)
        if len(kept):
            staged = costs.staged(walks.taken(kept), nodes, cuts[kept])
            of_kept = _Cuts(nodes, cuts[kept], staged, lines.taken(kept))
            _try_splits(costs, bounds, state, replace(policy, merge="final"), of_kept)


class _Cuts(NamedTuple):
    """Ways to cut paths: at those of `nodes` that are set in a line of `cuts`."""

    nodes: Ints
    cuts: npt.NDArray[np.bool_]
    walks: Walks
    lines: Lines


def _try_splits(costs: PolicyCosts, bounds: Bounds, state: _State, policy: Cohort, ways: _Cuts) -> None:
    """The policy cut in the best of these ways, with every split."""
    for split in SPLITS:
        lines = ways.lines.cut(split)
        kept = np.flatnonzero(bounds.of_splits(ways.walks, lines) < state.time_us * _LESS)
        if len(kept):
            times = costs.times_us(ways.walks.taken(kept), lines.taken(kept))
            best = int(times.argmin())
            cut = tuple(ways.nodes[ways.cuts[kept[best]]].tolist())
            state.consider(replace(policy, split=split, cut=cut), float(times[best]))


def _cut_at_thresholds(costs: PolicyCosts, bounds: Bounds, state: _State) -> None:
    """The best policies so far with paths cut at thresholds on rows."""
    best = sorted((policy for policy in state.times if isinstance(policy, Cohort)), key=state.times.__getitem__)
    starts, thresholds = best[:_MOST_STARTS], _thresholds(costs.tree)
    if not starts:
        return
    now("weighing cuts")
    merged_rows = bounds.merged_at(thresholds)
    for merge in get_args(Merge):
        least = bounds.of_thresholds(starts, merged_rows, merge)
        for start, place in np.argwhere(least < state.time_us * _LESS).tolist():
            if least[start, place] < state.time_us * _LESS:
                _cut_at(costs, bounds, state, replace(starts[start], apart=thresholds[place], merge=merge))


def _cut_at(costs: PolicyCosts, bounds: Bounds, state: _State, policy: Cohort) -> None:
    """The policy, which cuts paths, with its split and without."""
    walks = costs.walks(policy)
    for split in dict.fromkeys((policy.split, None)):
        chosen = replace(policy, split=split)
        lines = costs.lines_of([chosen], walks)
        if bounds.of_splits(walks, lines)[0] < state.time_us * _LESS:
            state.consider(chosen, float(costs.times_us(walks, lines)[0]))


def _cut_once_more(costs: PolicyCosts, state: _State, nodes: Ints) -> None:
    """Where cuts pay, single ones more or less, at nodes with many rows below much context."""
    tree = costs.tree
    if not isinstance(state.best, Cohort) or state.best.apart is None:
        return
    if is_large(tree):
        state.left_out.append("cuts at single nodes")
        return
    now("weighing cuts at single nodes")
    seen = tree.topology.rank_hi.astype(np.int64) - tree.topology.rank_lo
    order = np.argsort(-(seen * tree.topology.prefix)[nodes], kind="stable")
    start = replace(state.best, apart=None, cut=tuple(state.best.cut_nodes(tree).tolist()))
    for node in nodes[order[:_MOST_NODES]].tolist():
        cut = tuple(sorted(set(start.cut) ^ {node}))
        chosen = replace(start, cut=cut, merge=start.merge if cut else "reduce")
        if state.consider(chosen, costs.time_us(chosen)):
            start = chosen


def _merge_in_one_launch(costs: PolicyCosts, state: _State) -> None:
    """The best policy, if items merge last, by what it takes as it is launched, as costs are those of two launches; and
    halves of whole paths.
    """
    shape, target = costs.shape, costs.target
    while isinstance(state.best, Cohort) and state.best.merge == "final":
        if state.retime(time_of(state.best, costs.problem)):
            break
    launch_us = target.constants.launch_us
    for whole in large_cohorts(shape) if shape.head_dim_v <= _WIDEST_MEASURED else ():
        if costs.rows // costs.rows_of(whole) * shape.num_kv_heads > MOST_RESIDENT * target.sms:
            continue  # certainly no room
        # Of twice as many blocks that each do half as much none takes less than half of the time.
        least = launch_us + WAITING * (state.times.get(whole, np.inf) - launch_us) / 2
        half = halved(whole, costs.problem, where_room=True) if least < state.time_us * _CLEARLY_LESS else None
        if half is not None:
            time_us = account(half.plan, half.schedule, costs.problem).time_us
            if time_us < state.time_us * _CLEARLY_LESS:
                state.consider(half.strategy, time_us)


def _thresholds(tree: Tree) -> list[int]:
    """Numbers of rows at which some path can be cut, at most _MOST_LEVELS, evenly spread."""
    above = seen_below_and_above(tree)[1]
    values, most = np.flatnonzero(np.bincount(above, minlength=2)[2:]) + 2, _MOST_LEVELS[is_large(tree)]
    if len(values) > most:
        values = values[np.linspace(0, len(values) - 1, most).astype(np.int64)]
    return [int(value) for value in values[::-1]]


def _moves(before: Strategy | None, after: Strategy) -> tuple[Move, ...]:
    """What changes from one strategy to the next."""
    if before is None or before.name != after.name or not isinstance(after, Cohort):
        return (Move("strategy", None if before is None else before.summary, after.summary),)
    names = ("head_rows", "split", "tile", "apart", "cut", "merge")
    changes = ((name, getattr(before, name), getattr(after, name)) for name in names)
    return tuple(Move(name, old, new) for name, old, new in changes if old != new)
