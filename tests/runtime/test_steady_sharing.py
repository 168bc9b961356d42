"""How many tokens plans of running batches may read twice, so that they hold longer."""

from __future__ import annotations

import itertools

import pytest

from treegen.runtime.steady_sharing import SteadySharing


def test_a_plan_tries_to_share_less_and_goes_on_while_that_helps() -> None:
    sharing = SteadySharing()
    assert sharing.allowance(8.0) == pytest.approx(4.0)
    sharing.spared_us = 3.5
    assert sharing.allowance(1.0) == pytest.approx(4.0)  # 4.5 in place of 8
    sharing.spared_us = 4.0
    assert sharing.allowance(0.0) == pytest.approx(4.0)


def test_it_waits_longer_after_each_attempt_that_does_not_help() -> None:
    sharing, attempts = SteadySharing(), []
    for plan in range(200):
        sharing.spared_us = sharing.allowance(8.0)  # others come, whatever plans share
        attempts += [plan] if sharing.spared_us else []
    assert attempts[0] == 0
    waits = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    assert waits == sorted(waits)
    assert waits[-1] > 32
    assert len(attempts) < 12


def test_nothing_is_tried_where_no_time_is_lost() -> None:
    assert SteadySharing().allowance(0.0) == 0.0
