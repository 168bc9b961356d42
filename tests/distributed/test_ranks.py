"""Ranks: what several processes compute together is what one computes alone."""

import pytest

from support.full_tests import others_full
from support.ranks import run_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_states_merge_across_ranks(ranks):
    code, printed = run_ranks("support.rank_programs:merges", ranks)
    assert code == 0, printed


@pytest.mark.parametrize("ranks", others_full([2, 4]))
def test_random_trees(ranks):
    code, printed = run_ranks("support.rank_programs:random_trees", ranks, "100")
    assert code == 0, printed


@pytest.mark.parametrize("ranks", others_full([2, 4]))
def test_running_batches(ranks):
    code, printed = run_ranks("support.rank_programs:running_batches", ranks, "12")
    assert code == 0, printed


def test_bad_input_is_refused_on_all_ranks():
    code, printed = run_ranks("support.rank_refusals:bad_input", 2)
    assert code == 0, printed


def test_a_rank_that_is_killed_leaves_no_process_behind():
    code, printed = run_ranks("support.rank_refusals:failing", 3, seconds=60)
    assert code == 1, printed  # that of rank 1 alone
    assert printed.count("ended with an error") == 2, printed


def test_links_are_measured():
    code, printed = run_ranks("support.rank_programs:links", 2)
    assert code == 0, printed
