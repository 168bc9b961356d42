"""Verified plans: the plans that strategies make of a tree, checked against the coverage law and lowered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from treegen.ir.errors import StrategyError
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.verify import verify
from treegen.progress import now
from treegen.schedule.lower import lower
from treegen.strategies import Choice, Strategy, strategy_from
from treegen.target.problem import Problem


class Planned(NamedTuple):
    """A strategy with the reason for choosing it, its verified plan, and the schedule."""

    choice: Choice
    plan: Plan
    schedule: Schedule


def planned(problem: Problem, strategies: Sequence[str | Strategy]) -> list[Planned]:
    """Plans a tree with every strategy, without accounts. Raises TreegenError (see `explain`)."""
    return list(verified(choices_of(problem, listed(strategies)), problem))


def listed(strategies: Sequence[str | Strategy]) -> list[Strategy]:
    """Returns the strategies of names. Raises StrategyError for an unknown name, or no name."""
    if not strategies:
        raise StrategyError("strategies", strategies, "is empty", "give at least one name")
    return [strategy_from(strategy) for strategy in strategies]


def choices_of(problem: Problem, strategies: Sequence[Strategy], automatic: Choice | None = None) -> list[Choice]:
    """Returns the choices of strategies for a tree, each once. automatic: the choice of `auto`, where it is known."""
    choices: dict[str, Choice] = {}
    for strategy in strategies:
        choice = automatic if automatic and strategy.automatic else strategy.choose(problem)
        if choice.strategy is not strategy:
            choice = Choice(choice.strategy, f"chosen by {strategy.name}: {choice.reason}")
            choices[str(choice.strategy)] = choice
        choices.setdefault(str(choice.strategy), choice)
    return list(choices.values())


def verified(choices: Sequence[Choice], problem: Problem) -> Iterator[Planned]:
    """Yields verified plans and schedules of choices."""
    for choice in choices:
        now(f"planning {choice.strategy.name}")
        plan = choice.strategy.plan(problem)
        now(f"verifying {choice.strategy.name}")
        verify(plan, problem.tree)
        now(f"lowering {choice.strategy.name}")
        yield Planned(choice, plan, lower(plan, problem))
