"""How much sharing plans of a running batch leave out, so that they still hold when requests come and go."""

from __future__ import annotations

from dataclasses import dataclass

_HALF = 64
"""Steps after which what was lost counts half."""
_FIRST, _MOST = 4.0, 64.0
"""The other way of planning is tried again when this way has lost this multiple of what the last plan of the other way
lost: at first four times as much. The multiple is doubled each time that the other way is no better.
"""
_TRIAL = 8
"""The least steps for which plans go the other way: one that lasts a single step says little."""
_MORE = 2.0
"""Sharing less is tried again at once if plans that share all lose this many times as much as at the last attempt."""


@dataclass(slots=True)
class _Loss:
    """What plans of one way have lost: microseconds of a layer, summed over steps. Long ago counts little.

    last_us: of the last plan alone.
    """

    us: float = 0.0
    steps: float = 0.0
    last_us: float = 0.0

    def fade(self, steps: int) -> None:
        """Makes losses count less, because these steps have passed since."""
        left = 0.5 ** (steps / _HALF)
        self.us, self.steps = self.us * left, self.steps * left

    def add(self, us: float, steps: int) -> None:
        """Adds a plan that has lost `us` microseconds in each of its steps."""
        self.last_us = us * steps
        self.us, self.steps = self.us + self.last_us, self.steps + steps

    @property
    def mean_us(self) -> float:
        """The mean of a step; infinity if there was none."""
        return self.us / self.steps if self.steps else float("inf")


class SteadySharing:
    """Compares two ways of planning: plans that share all that requests share, and plans that share less.

    A plan relies on what requests share. Where others come that do not share it, as beams that fork later, these and
    whoever shares with them are served alone until the next plan. Nodes that few requests share save little, and a plan
    without them may hold for long: it loses less time by being late, and some by reading tokens again. Which way loses
    less depends on what comes. So plans go the way that has lost less, and now and then one goes the other way.

    spared_us: microseconds that a layer takes longer because the present plan shares less than it could.
    """

    def __init__(self) -> None:
        self.spared_us = 0.0
        self._of_all, self._of_less = _Loss(), _Loss()
        self._shares_less = False  # whether plans that share less lose less
        self._lost_us, self._times = 0.0, _FIRST  # by this way since the other one was tried; see _FIRST
        self._trying, self._tries_less = 0, False  # for these steps, see _TRIAL; which way
        self._tried_us = 0.0  # what plans that share all lost when sharing less was tried last

    def allowance(self, late_us: float, steps: int) -> float:
        """Returns how many microseconds a layer may take longer because the next plan shares less.

        That is what plans that share all lose, or 0 if the next plan is to share all.

        Args:
            late_us: Microseconds that a layer has taken longer, because the present plan was late and the next one
                takes time, too; the mean of its steps.
            steps: These steps.
        """
        of_all, of_less = self._of_all, self._of_less
        of_all.fade(steps)
        of_less.fade(steps)
        present = of_less if self.spared_us else of_all
        present.add(late_us + self.spared_us, steps)
        if not of_all.steps:
            return 0.0
        self._trying -= steps
        if self._trying > 0:
            return of_all.mean_us if self._tries_less else 0.0
        shares_less = of_less.mean_us < of_all.mean_us
        if shares_less != self._shares_less:
            self._shares_less, self._lost_us, self._times = shares_less, 0.0, _FIRST
        elif present is (of_less if shares_less else of_all):
            self._lost_us += present.last_us
        other = of_all if shares_less else of_less
        lose_more = not shares_less and of_all.mean_us > _MORE * self._tried_us
        if lose_more or self._lost_us > self._times * other.last_us:
            self._lost_us, self._times = 0.0, min(2 * self._times, _MOST)
            shares_less = not shares_less
            self._trying, self._tries_less = _TRIAL, shares_less
            self._tried_us = of_all.mean_us if shares_less else self._tried_us
        return of_all.mean_us if shares_less else 0.0
