"""How much sharing plans of a running batch leave out, so that they still hold when requests come and go."""

from __future__ import annotations

_PART = 0.5
"""The part of the time lost by late plans that a plan may lose by sharing less, to find out whether that helps.

By estimates, over 60 steps, 32 beams lose less than half of the time with a half that they lose with a quarter (8:1
heads), and 0.96 of it with 32:8 heads; groups of 8 samples and requests on templates lose up to 1.7 times as much.
"""
_BETTER = 0.75
"""Plans that share less go on if less than this part of the time is lost by them."""
_MOST_WAIT = 32
"""The most plans between two attempts."""


class SteadySharing:
    """Tries plans that share less, and goes on with them if steps then lose less time.

    A plan relies on what requests share. Where others come that do not share it, as beams that fork later, these and
    whoever shares with them are walked alone until the next plan. Nodes that few requests share save little, and a plan
    without them may hold for long. Whether it does depends on what comes. So one plan in some tries it.

    spared_us: microseconds that a layer takes longer because the present plan shares less than it could.
    """

    def __init__(self) -> None:
        self.spared_us = 0.0
        self._plain_us: float | None = None  # lost by plans that shared all, a weighted mean
        self._wait, self._next_wait = 0, 1  # plans

    def allowance(self, late_us: float) -> float:
        """Returns the microseconds that a layer may take longer by the next plan, which shares less for that.

        Args:
            late_us: Microseconds that a layer has taken longer, because the present plan was late; the mean of its
                steps.
        """
        if not self.spared_us:
            self._plain_us = late_us if self._plain_us is None else (self._plain_us + late_us) / 2
            if self._wait:
                self._wait -= 1
                return 0.0
            return _PART * late_us
        if self._plain_us is not None and late_us + self.spared_us < _BETTER * self._plain_us:
            self._next_wait = 1
            return self.spared_us + _PART * late_us
        self._wait, self._next_wait = self._next_wait, min(2 * self._next_wait, _MOST_WAIT)
        return 0.0
