"""How much sharing plans of a running batch leave out, so that they still hold when requests come and go."""

from __future__ import annotations

from dataclasses import dataclass

_HALF = 64
"""Steps after which what was lost counts half."""
_FIRST, _MOST = 4.0, 64.0
"""The other way of planning is tried again when this way has lost this multiple of what the last attempt lost: at first
four times as much. The multiple is doubled each time that the other way is no better.
"""
_ALLOWED = 2.0
"""The most that plans may lose by sharing less, as a multiple of what plans that share all lose by being late."""
_ATTEMPT = 8
"""The least steps for which the other way is tried, as a plan that lasts a single step says little. An attempt that
loses _MORE times as much as this way ends earlier.
"""
_MORE = 2.0
"""Sharing less is tried again at once if plans that share all lose this many times as much as at the last attempt."""


@dataclass(slots=True)
class _Loss:
    """What plans of one way have lost: microseconds of a layer, summed over steps. Long ago counts little.

    late_us: by being late. last_us: of the last plan alone.
    """

    us: float = 0.0
    steps: float = 0.0
    late_us: float = 0.0
    last_us: float = 0.0

    def fade(self, steps: int) -> None:
        """Makes losses count less, because these steps have passed since."""
        left = 0.5 ** (steps / _HALF)
        self.us, self.steps, self.late_us = self.us * left, self.steps * left, self.late_us * left

    def add(self, late_us: float, besides_us: float, steps: int) -> None:
        """Adds a plan that has lost `late_us` microseconds in each of its steps by being late, and more besides."""
        self.last_us = (late_us + besides_us) * steps
        self.us, self.steps = self.us + self.last_us, self.steps + steps
        self.late_us += late_us * steps

    @property
    def mean_us(self) -> float:
        """The mean of a step; infinity if there was none."""
        return self.us / self.steps if self.steps else float("inf")

    @property
    def allowed_us(self) -> float:
        """What a layer may take longer so that plans lose less; nothing where they are not late."""
        return min(self.us, _ALLOWED * self.late_us) / self.steps


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
        self._tries, self._tries_less = False, False  # whether there is an attempt; which way it is
        self._attempt = _Loss()  # what it has lost, or the last one
        self._tried_us = 0.0  # what plans that share all lost when sharing less was tried last

    def allowance(self, late_us: float, steps: int, plan_us: float = 0.0) -> float:
        """Returns how many microseconds a layer may take longer because the next plan shares less.

        That is what plans that share all lose, at most _ALLOWED times what they lose by being late, or 0 if the next
        plan is to share all.

        Args:
            late_us: Microseconds that a layer has taken longer, because the present plan was late; the mean of its
                steps.
            steps: These steps.
            plan_us: Microseconds of a layer that the next plan is worth.
        """
        of_all, of_less = self._of_all, self._of_less
        of_all.fade(steps)
        of_less.fade(steps)
        present = of_less if self.spared_us else of_all
        present.add(late_us, self.spared_us + plan_us / steps, steps)
        if not of_all.steps:
            return 0.0
        if self._tries:
            self._attempt.add(late_us, self.spared_us + plan_us / steps, steps)
            usual_us = (of_all if self._tries_less else of_less).mean_us
            self._tries = self._attempt.steps < _ATTEMPT and self._attempt.mean_us <= _MORE * usual_us
            if self._tries:
                return of_all.allowed_us if self._tries_less else 0.0
        shares_less = of_less.mean_us < of_all.mean_us
        if shares_less != self._shares_less:
            self._shares_less, self._lost_us, self._times = shares_less, 0.0, _FIRST
        elif present is (of_less if shares_less else of_all):
            self._lost_us += present.last_us
        lose_more = not shares_less and of_all.mean_us > _MORE * self._tried_us
        if lose_more or self._lost_us > self._times * self._attempt.us:
            self._lost_us, self._times = 0.0, min(2 * self._times, _MOST)
            shares_less = not shares_less
            self._tries, self._tries_less, self._attempt = True, shares_less, _Loss()
            self._tried_us = of_all.mean_us if shares_less else self._tried_us
        return of_all.allowed_us if shares_less else 0.0
