"""How much sharing plans of a running batch leave out, so that they still hold when requests come and go."""

from __future__ import annotations

_WAIT = 64
"""Steps until the other way of planning is tried again. The wait is doubled each time that it was no better."""
_MOST_WAIT = 1024
_MORE = 2.0
"""Sharing less is tried again at once if plans that share all lose this many times as much as at the last attempt."""


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
        self._lost_us: list[float | None] = [None, None]  # in a step, by plans that share all, and by those that do not
        self._shares_less = False  # whether the latter lose less
        self._tried_us = 0.0  # what plans that share all lost when sharing less was tried last
        self._wait, self._steps_left = _WAIT, 0

    def allowance(self, late_us: float, steps: int) -> float:
        """Returns how many microseconds a layer may take longer because the next plan shares less.

        That is what plans that share all lose, or 0 if the next plan is to share all.

        Args:
            late_us: Microseconds that a layer has taken longer, because the present plan was late; the mean of its
                steps.
            steps: These steps.
        """
        now, lost_us = bool(self.spared_us), late_us + self.spared_us
        before_us = self._lost_us[now]
        self._lost_us[now] = lost_us if before_us is None else (before_us + lost_us) / 2
        self._steps_left -= steps
        all_us, less_us = self._lost_us
        if all_us is None:
            return 0.0
        shares_less = less_us is not None and less_us < all_us
        if shares_less != self._shares_less:
            self._shares_less, self._wait, self._steps_left = shares_less, _WAIT, _WAIT
        if self._steps_left <= 0 or (not shares_less and all_us > _MORE * self._tried_us):
            self._steps_left, self._wait = self._wait, min(2 * self._wait, _MOST_WAIT)
            shares_less = not shares_less
            if shares_less:
                self._tried_us = all_us
        return all_us if shares_less else 0.0
