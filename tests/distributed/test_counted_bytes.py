"""Bytes that ranks send: those of the account, counted at torch.distributed."""

import pytest

from support.ranks import run_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_merges_send_the_bytes_of_the_account(ranks: int) -> None:
    code, printed = run_ranks("support.rank_counts:counted_bytes", ranks)
    assert code == 0, printed
