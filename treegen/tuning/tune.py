"""Tuning: the model's best candidates are measured on the current GPU, and the fastest one is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median

import torch

from treegen.autotune_cache.entry import Entry, installed_versions
from treegen.autotune_cache.policy_cache import POLICY_CACHE, CachedPolicy
from treegen.backends.devices import current_target
from treegen.ir.arrays import positive_int, set_positive_ints
from treegen.ir.errors import BackendError, InputError, StrategyError
from treegen.search.halves import PlannedStrategy, halved, large_cohorts
from treegen.search.path_cuts import thresholds_of
from treegen.search.policies import accepts, key_of, policy_of
from treegen.search.weigh import candidates
from treegen.strategies import cohort, query
from treegen.strategies.cohort import Cohort
from treegen.strategies.strategy import Strategy
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.tuning.measurer import Measurer, Outcome, check_timeout, check_tree
from treegen.tuning.worker import Meter

DEFAULT_CANDIDATES = 8
DEFAULT_REPEATS = 15
_MOST_AT_ONCE = 2
"""The most strategies with cuts that merge last in one launch."""
_MOST_LOWERED = 8
"""The most strategies that are lowered to find these."""
_CLOSE = 1.02
"""Candidates within this factor of the fastest time are measured again."""
_MORE_ROUNDS = 2
"""The number of rounds in which these are measured again, one after another."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Settings of tuning.

    Attributes:
        most: Candidates of the model.
        repeats: Timed calls of each.
        timeout_s: Seconds for one candidate, including compiling and checking it.
        meter: Measures in place of the device (treegen.tuning.worker).
    """

    most: int = DEFAULT_CANDIDATES
    repeats: int = DEFAULT_REPEATS
    timeout_s: float = 60.0
    meter: Meter | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "most", positive_int("candidates", self.most, InputError))
        set_positive_ints(self, ["repeats"], InputError)
        check_timeout("timeout", self.timeout_s)

    def measurer(self, device: int | None = None) -> Measurer:
        """Returns a measurer for a CUDA device, by default the current one. Raises BackendError and InputError."""
        return Measurer(device, self.repeats, self.timeout_s, self.meter)


def tuned(
    problem: Problem,
    tuning: Tuning | None = None,
    *,
    again: bool = False,
    on_candidate: Callable[[Outcome], None] | None = None,
    measurer: Measurer | None = None,
) -> CachedPolicy:
    """Returns the measured policy of a tree's bucket: from the cache, or from measurements, which are stored.

    One process measures a key, and others wait for it.

    Args:
        problem: The tree, the attention shape and the target.
        tuning: The settings.
        again: Measures in any case.
        on_candidate: Called as `on_candidate(outcome)` after each candidate.
        measurer: A measurer that serves other trees, too; by default one for this tree.

    Raises:
        BackendError: There is no CUDA device, or no candidate could be measured.
    """
    tree = problem.tree
    key, chosen = key_of(problem), tuning or Tuning()

    def make() -> Entry:
        if measurer is not None:
            return _measured(problem, chosen, on_candidate, measurer)
        check_tree(tree)
        with chosen.measurer() as own:
            return _measured(problem, chosen, on_candidate, own)

    if again:
        entry = make()
        POLICY_CACHE.store(entry)
        return CachedPolicy(entry, "made")
    return POLICY_CACHE.decide(key, accepts, make)


def check_tuning(strategy: Strategy, target: Target) -> None:
    """Raises StrategyError or BackendError unless measurements on this machine can decide the strategy's choices."""
    if not strategy.automatic:
        raise StrategyError("autotune", True, f"has nothing to choose for {strategy}", "use strategy='auto'")
    if not torch.cuda.is_available():
        raise BackendError("autotune", True, "needs a CUDA device to measure on", "leave it out, or run on a GPU")
    if target != current_target():
        raise BackendError(
            "target", target.name, "is not this machine's GPU, on which autotune measures", "leave it out"
        )


def proposals(problem: Problem, most: int) -> list[Strategy]:
    """Returns the candidates to measure: the model's best `most` policies, and a few others.

    Plain per-row decoding and whole paths in large tiles are always among them, so that the choice loses to neither. So
    are some strategies that merge last in one launch.
    """
    found = [strategy for strategy, _ in candidates(problem)]
    plain = next((strategy for strategy in found if strategy.name == "query"), query())
    return list(dict.fromkeys((*found[:most], plain, cohort(), *_in_one_launch(found, problem))))


def _in_one_launch(found: list[Strategy], problem: Problem) -> Iterator[Strategy]:
    """Yields strategies that merge last in one launch.

    These are the first ones among `found` with cuts, the first ones of paths with many head rows cut at any threshold,
    and whole paths with many head rows in halves.
    """
    shape = problem.shape
    best = [each for each in found if isinstance(each, Cohort) and each.split_shared_rows is not None]
    further = [
        replace(whole, split_shared_rows=rows) for rows in thresholds_of(problem.tree) for whole in large_cohorts(shape)
    ]
    for cut in (best, further):
        made = (PlannedStrategy.of(replace(each, merge="final"), problem) for each in cut[:_MOST_LOWERED])
        yield from islice((each.strategy for each in made if each.takes_one_launch), _MOST_AT_ONCE)
    for whole in large_cohorts(shape):
        found_half = halved(whole, problem)
        if found_half is not None:
            yield found_half.strategy


def _settled(outcomes: list[Outcome], chosen: list[Strategy], measurer: Measurer) -> list[Outcome]:
    """Returns the outcomes, with medians of more rounds for candidates that are close to the best.

    Each round measures these one after another, because an earlier candidate may have met another state of the device.
    A candidate that fails in one round has failed.
    """
    times = [math.inf if outcome.microseconds is None else outcome.microseconds for outcome in outcomes]
    close = [place for place, time in enumerate(times) if time <= _CLOSE * min(times) and time < math.inf]
    if len(close) < 2:
        return outcomes
    rounds = [[outcomes[place] for place in close]]
    rounds += [measurer.again([chosen[place] for place in close]) for _ in range(_MORE_ROUNDS)]
    settled = list(outcomes)
    for place, own in zip(close, zip(*rounds, strict=True), strict=True):
        failed = next((outcome for outcome in own if outcome.microseconds is None), None)
        settled[place] = failed or replace(own[0], microseconds=median(outcome.microseconds or 0.0 for outcome in own))
    return settled


def _measured(
    problem: Problem,
    tuning: Tuning,
    on_candidate: Callable[[Outcome], None] | None,
    measurer: Measurer,
) -> Entry:
    """Measures the candidates of a tree, and returns the entry of the fastest."""
    target = problem.target
    chosen = proposals(problem, tuning.most)
    outcomes = _settled(measurer.measure(problem, chosen, on_candidate), chosen, measurer)
    times = [
        (outcome.microseconds, index) for index, outcome in enumerate(outcomes) if outcome.microseconds is not None
    ]
    if not times:
        reason = next((outcome.problem for outcome in outcomes if outcome.problem), "there are none")
        raise BackendError("candidates", f"{len(chosen)} of {target.name}", f"all failed: {reason}", "see treegen tune")
    microseconds, best = min(times)
    return Entry(
        key_of(problem),
        policy_of(chosen[best]),
        microseconds,
        tuple((outcome.strategy, outcome.microseconds, outcome.problem or "measured") for outcome in outcomes),
        f"{len(chosen)} candidates, medians of {tuning.repeats} calls on a cold L2, {target.name}",
        installed_versions(),
    )
