"""How many tokens plans of running batches may read twice, so that they hold longer."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from treegen.runtime.steady_sharing import SteadySharing

STEPS = 8
"""Steps of each plan here."""
LATE_US = 8.0
"""What plans lose by being late that share all."""


def spared(sharing: SteadySharing, plans: int, late_us: Callable[[float], float]) -> list[float]:
    """Makes plans that leave out as much sharing as they may. late_us: what a plan that leaves so much out loses."""
    left_out = []
    for _ in range(plans):
        sharing.spared_us = sharing.allowance(late_us(sharing.spared_us), STEPS)
        left_out.append(sharing.spared_us)
    return left_out


def test_plans_share_less_while_they_lose_less_so() -> None:
    sharing, left_out = SteadySharing(), []
    for plan in range(400):
        sharing.spared_us = min(sharing.allowance(0.5 if sharing.spared_us else LATE_US, STEPS), 3.0)
        assert plan or sharing.spared_us == 3.0
        left_out.append(sharing.spared_us)
    assert sum(us == 3.0 for us in left_out) > 390
    assert left_out.count(0.0) > 2  # now and then one shares all, to see whether that still loses more


def test_plans_share_all_again_once_that_loses_less() -> None:
    """A server that begins: requests come all the time, and later hardly any."""
    sharing = SteadySharing()
    for _ in range(4):
        sharing.spared_us = min(sharing.allowance(0.5 if sharing.spared_us else LATE_US, STEPS), 3.0)
    assert sharing.spared_us == 3.0
    left_out = []
    for _ in range(100):
        sharing.spared_us = min(sharing.allowance(0.0, STEPS), 3.0)
        left_out.append(sharing.spared_us)
    assert left_out.index(0.0) <= 64 // STEPS
    assert sum(us > 0 for us in left_out[64 // STEPS :]) < 12


def test_it_waits_longer_after_each_attempt_that_does_not_help() -> None:
    left_out = spared(SteadySharing(), 1000, lambda _: LATE_US)  # others come, whatever plans share
    attempts = [plan for plan, us in enumerate(left_out) if us]
    assert attempts[0] == 0
    waits = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    # An attempt loses twice as much as a plan that shares all. So 8, 16, 32 and 64 attempts are 16, 32, 64, 128 plans.
    assert waits == [18, 34, 66, *[130] * (len(waits) - 3)]
    assert len(attempts) < 16


@pytest.mark.parametrize("steps", [1, 3])
def test_short_plans_are_tried_for_some_steps(steps: int) -> None:
    """An attempt that costs more than it may ends at once, and one that does not is judged by 8 steps."""
    for spared_us, tried in ((2 * LATE_US, range(1, 3)), (LATE_US / 2, range(8 // steps, 8 // steps + 3))):
        sharing, left_out = SteadySharing(), []
        for plan in range(200 // steps):
            late_us = LATE_US if plan % 2 or not sharing.spared_us else 2 * LATE_US
            sharing.spared_us = spared_us if sharing.allowance(late_us, steps) else 0.0
            left_out.append(sharing.spared_us > 0)
        assert left_out.index(False) in tried
        assert sum(left_out) < 0.3 * len(left_out)


def test_plans_of_a_single_step_that_do_not_help_are_few() -> None:
    sharing, left_out = SteadySharing(), 0
    for _ in range(1000):
        sharing.spared_us = sharing.allowance(LATE_US, 1)
        left_out += sharing.spared_us > 0
    assert 8 < left_out < 40


def test_what_a_plan_takes_counts_only_where_plans_are_late() -> None:
    assert SteadySharing().allowance(0.0, 1, 300.0) == 0.0
    assert SteadySharing().allowance(2.0, 1, 300.0) == 4.0
    assert SteadySharing().allowance(2.0, 3, 3.0) == 3.0


def test_an_attempt_that_may_leave_out_more_does_not_wait() -> None:
    sharing = SteadySharing()
    assert sharing.allowance(1.0, STEPS) == pytest.approx(1.0)
    sharing.spared_us = 1.0
    assert sharing.allowance(LATE_US, STEPS) == 0.0
    sharing.spared_us = 0.0
    assert sharing.allowance(2.0, STEPS) == 0.0  # 1.5 on average: less than twice as much as at the attempt
    weights = [0.5 ** (STEPS * plans / 64) for plans in (3, 1, 0)]  # the second plan did not share all
    lost = sum(weight * us for weight, us in zip(weights, (1.0, 2.0, LATE_US), strict=True))
    assert sharing.allowance(LATE_US, STEPS) == pytest.approx(lost / sum(weights))


def test_what_was_lost_long_ago_counts_little() -> None:
    """Requests came in every step at first. Then they stay, and plans that share all lose nothing any more."""
    sharing = SteadySharing()
    for _ in range(10):
        sharing.spared_us = min(sharing.allowance(0.0 if sharing.spared_us else 17.0, 3), 13.0)
    left_out = []
    for _ in range(20):
        sharing.spared_us = min(sharing.allowance(0.0, 20), 13.0)
        left_out.append(sharing.spared_us)
    assert left_out.index(0.0) <= 2
    assert not any(left_out[3:])


def test_nothing_is_tried_where_no_time_is_lost() -> None:
    assert SteadySharing().allowance(0.0, STEPS) == 0.0
