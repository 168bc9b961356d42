"""The page about several GPUs: its code runs with two ranks as well."""

from support.ranks import run_ranks


def test_the_code_of_the_page_runs_with_two_ranks() -> None:
    code, printed = run_ranks("support.rank_pages:page", 2, "docs/several_gpus.md")
    assert code == 0, printed
