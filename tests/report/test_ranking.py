"""Rankings: the order by time, and the reason for each place."""

from dataclasses import fields, replace

import numpy as np
import pytest

from support.h200 import H200
from treegen import Shape, Tree
from treegen.cost.account import Account, assess
from treegen.cost.analytic import Times
from treegen.report.ranking import ranked, ranking_lines
from treegen.schedule.lower import lower
from treegen.strategies import strategy_from, strategy_names
from treegen.target.problem import Problem

EMPTY = Account(*[0] * (len(fields(Account)) - 2), 0.0, 0.0)
BUSY = replace(
    EMPTY, launches=1, time_us=50.0, useful_flops=5, padded_flops=10, kv_unique_bytes=1 << 20, score_bytes=1 << 30
)


def made_of(launching: float = 0, chain: float = 0, full: float = 0, traffic: float = 0, **others: float) -> Times:
    terms = {"chain": chain, "throughput": full, "traffic": traffic}
    parts = {"merges": 0.0, "unfused": 0.0, **others}
    return Times(
        launching=launching,
        items=max(chain, full, traffic),
        launch_terms={name: np.array([value]) for name, value in terms.items()},
        merge_terms={},
        **parts,
    )


def test_order_and_ties() -> None:
    times = made_of(chain=1.0)
    entries = [(name, replace(BUSY, time_us=time), times) for name, time in (("c", 30.0), ("a", 10.0), ("b", 10.0))]
    places = ranked(entries)
    assert [(entry.place, entry.name) for entry in places] == [(1, "a"), (2, "b"), (3, "c")]
    assert places[0].reason.startswith("fastest: ")
    assert places[1].reason.startswith("as fast as a: ")
    assert places[2].reason.startswith("3.00x: ")


@pytest.mark.parametrize(
    ("estimate", "times", "reason"),
    [
        (EMPTY, made_of(), "fastest: nothing to do"),
        (BUSY, made_of(chain=9, full=3, traffic=3), "fastest: bound by the longest thread block"),
        (BUSY, made_of(chain=3, full=9, traffic=3), "fastest: bound by the work of full SMs"),
        (BUSY, made_of(chain=3, full=3, traffic=9), "fastest: bound by traffic with memory"),
        (BUSY, made_of(launching=9, chain=3), "fastest: bound by 1 launch"),
        (replace(BUSY, launches=3), made_of(launching=9, chain=3), "fastest: bound by 3 launches"),
        (
            replace(BUSY, partial_bytes=2048),
            made_of(chain=3, merges=9),
            "fastest: bound by merging 2.0 KiB of partials",
        ),
        (BUSY, made_of(chain=3, unfused=9), "fastest: bound by the traffic of 1.0 GiB of scores and masks"),
    ],
)
def test_the_reason_of_the_fastest(estimate: Account, times: Times, reason: str) -> None:
    assert ranked([("one", estimate, times)])[0].reason == reason


@pytest.mark.parametrize(
    ("estimate", "times", "reason"),
    [
        (BUSY, made_of(chain=40), "2.50x: 30.0 us more for the longest thread block"),
        (replace(BUSY, kv_l2_bytes=1 << 20), made_of(full=40),
         "2.50x: 30.0 us more for the work of full SMs, which load 2.0 MiB of KV (2.0 times as much)"),
        (replace(BUSY, padded_flops=40), made_of(full=40),
         "2.50x: 30.0 us more for the work of full SMs, 88 % of it padding"),
        (replace(BUSY, launches=5), made_of(launching=20, chain=10), "2.50x: 20.0 us more for 5 launches"),
        (replace(BUSY, partial_bytes=1 << 20), made_of(chain=10, merges=25),
         "2.50x: 25.0 us more to merge 1.0 MiB of partials"),
        (BUSY, made_of(unfused=30), "2.50x: 30.0 us more for 1.0 GiB of scores that pass through memory"),
    ],
)  # fmt: skip
def test_the_reason_of_the_slower(estimate: Account, times: Times, reason: str) -> None:
    best = replace(BUSY, time_us=20.0), made_of(chain=10)
    assert ranked([("best", *best), ("slow", estimate, times)])[1].reason == reason


def test_a_real_ranking() -> None:
    """One line per strategy in each half, titles first, and places as estimated."""
    tree, shape = Tree.from_levels([1, 4, 8, 64], [8, 256, 256, 32]), Shape(32, 8, 128)
    entries = []
    for name in strategy_names():
        plan = strategy_from(name).plan(Problem(tree, shape, H200))
        entries.append((name, *assess(plan, lower(plan, Problem(tree, shape, H200)), Problem(tree, shape, H200))))
    places = ranked(entries)
    assert [entry.estimate.time_us for entry in places] == sorted(estimate.time_us for _, estimate, _ in entries)
    lines = list(ranking_lines(places))
    count = len(entries)
    assert len(lines) == 2 * count + 2
    assert lines[0].split()[:2] == ["strategy", "time"]
    assert lines[count + 1] == ""
    for line, reason, entry in zip(lines[1 : count + 1], lines[count + 2 :], places, strict=True):
        assert line.split()[:2] == [f"{entry.place}.", entry.name]
        assert reason.strip() == f"{entry.place}. {entry.name}: {entry.reason}"
    assert len({len(line) for line in lines[: count + 1]}) == 1
    assert len({entry.reason for entry in places}) == count
