"""Ranks: what several processes compute together is what one computes alone."""

import pytest

from support.ranks import run_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_states_merge_across_ranks(ranks):
    code, printed = run_ranks("support.rank_programs:merges", ranks)
    assert code == 0, printed


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_trees(ranks):
    code, printed = run_ranks("support.rank_programs:random_trees", ranks, "100")
    assert code == 0, printed


@pytest.mark.parametrize("ranks", [2, 4])
def test_running_batches(ranks):
    code, printed = run_ranks("support.rank_programs:running_batches", ranks, "12")
    assert code == 0, printed
