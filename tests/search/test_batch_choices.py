"""Choices for running batches: policies that fit any length, the policy cache, and tuning over the suite."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.h200 import H200
from support.small_batches import BATCH, CPU
from support.weighed_problems import problems
from treegen import LiveBatch, PageTable, Shape, Tree, cli, compile_batch
from treegen.autotune_cache.entry import Entry
from treegen.autotune_cache.policy_cache import POLICY_CACHE, PolicyCache
from treegen.bench.batch_case import BatchShapes
from treegen.bench.batch_runs import BatchSettings
from treegen.bench.suite_tuning import (
    MeasuredBatch,
    MeasuredPolicy,
    measure_suite,
    save_suite,
    suite_entries,
    suite_table,
)
from treegen.compiled.batch_tree import BatchTree
from treegen.ir.errors import StrategyError
from treegen.ir.verify import verify
from treegen.runtime.batch_room import batch_config
from treegen.search.batch_choices import BatchChoices, accepts_for_batches, batch_key, place_of, policy_at, scaled
from treegen.search.weigh import weights_of
from treegen.search.weighed_policies import as_named
from treegen.strategies import cohort, query
from treegen.strategies.cohort import Cohort
from treegen.strategies.strategy import Choice
from treegen.target.problem import Problem
from treegen.target.targets import target_from

SHAPE = Shape(32, 8, 128, page_size=16)
TILE = batch_config(SHAPE, H200)
pytestmark = pytest.mark.usefixtures("policies_folder")


def prefix(rows: int, shared: int, own: int) -> Problem:
    """Requests that share a prefix."""
    return Problem(Tree.from_parents([-1] + [0] * rows, [shared] + [own] * rows), SHAPE, H200)


def choices_of(most_items: int = 10_000, shape: Shape = SHAPE) -> BatchChoices:
    """Choices of a kernel for batches."""
    return BatchChoices(shape, H200, TILE, most_items)


def choose(choices: BatchChoices, problem: Problem) -> Choice:
    """The choice for a problem's tree."""
    return choices.choose(BatchTree.of_tree(problem.tree))


def weighed_choice(problem: Problem, most_items: int = 10_000) -> Choice:
    """The choice by estimates of NumPy."""
    weights = weights_of(problem, TILE)
    assert weights is not None
    place = weights.best(most_items)
    strategy = as_named(weights.policy(place), has_rows_inside=problem.tree.topology.has_rows_inside)
    return Choice(strategy, weights.reason(strategy, weights.time_us(place)))


def kept(problem: Problem, **policy: object) -> None:
    """Keeps a policy for the bucket of a batch."""
    POLICY_CACHE.store(Entry(batch_key(problem), {"strategy": "cohort", **policy}, 10.0, (), "a test"))  # type: ignore[dict-item]


def test_policies_name_their_places() -> None:
    for problem in problems(18, 3):
        found = weights_of(problem._replace(shape=SHAPE), TILE)
        assert found is not None
        for place in found.order():
            policy = policy_at(found, place)
            assert accepts_for_batches(policy)
            again = place_of(found, policy)
            assert again is not None
            assert found.policy(again) == found.policy(place) or found.walks[place[1]].tile is not None


@pytest.mark.parametrize(
    "policy",
    [{}, {"strategy": "query"}, {"strategy": "cohort"}, {"strategy": "cohort", "head_rows": "64"},
     {"strategy": "cohort", "head_rows": 64, "split": 128}, {"strategy": "cohort", "head_rows": 64, "waves": "3"},
     {"strategy": "cohort", "head_rows": 64, "blocks_per_sm": "3"},
     {"strategy": "cohort", "head_rows": 64, "cut": "middle"}],
)  # fmt: skip
def test_what_is_no_policy_for_batches(policy: dict[str, object]) -> None:
    assert not accepts_for_batches(policy)


def test_policies_of_earlier_versions_are_taken() -> None:
    policy = {"strategy": "cohort", "head_rows": 32, "blocks_per_sm": "2"}
    earlier = {"strategy": "cohort", "head_rows": 32, "waves": "2"}
    assert accepts_for_batches(earlier)
    found = weights_of(prefix(60, 4096, 500), TILE)
    assert found is not None
    assert place_of(found, earlier) == place_of(found, policy) is not None
    finer = {"strategy": "cohort", "head_rows": 32, "blocks_per_sm": "4"}
    assert accepts_for_batches(finer)
    assert place_of(found, finer) is None


def test_buckets_are_coarse() -> None:
    """Growth, a request more or less and other page sizes stay in the bucket of most batches."""
    usual = batch_key(prefix(60, 4096, 600))
    assert usual == batch_key(prefix(63, 4096, 900)) == batch_key(prefix(50, 4500, 800))
    for other in (replace(SHAPE, page_size=64), replace(SHAPE, dtype="fp16", kv_dtype="fp16")):
        assert batch_key(prefix(60, 4096, 600)._replace(shape=other)) == usual
    assert len({usual, batch_key(prefix(60, 256, 4000)), batch_key(prefix(8, 4096, 500))}) == 3
    assert batch_key(prefix(60, 4096, 600)._replace(shape=Shape(8, 1, 128))) != usual


def test_what_was_measured_is_taken_at_any_length() -> None:
    problem, longer = prefix(60, 4096, 600), prefix(62, 4500, 900)
    kept(problem, head_rows=32, blocks_per_sm="2")
    choices = choices_of()
    chosen, other = choose(choices, problem), choose(choices_of(), longer)
    assert chosen.reason == "measured as the fastest for such batches: a test"
    assert chosen.strategy.options["head_rows"] == other.strategy.options["head_rows"] == 32
    found = weights_of(longer, TILE)
    assert found is not None
    place = place_of(found, {"strategy": "cohort", "head_rows": 32, "blocks_per_sm": "2"})
    assert place is not None
    assert other.strategy.options["split"] == int(found.splits[place])


def test_even_shares_are_those_of_the_batch_that_is_planned() -> None:
    """Also where the choice is remembered, and the batch's groups read more in all than then."""
    few, many = prefix(60, 4096, 600), prefix(62, 4096, 560)
    kept(few, head_rows=64, blocks_per_sm="even")
    choices = choices_of()
    strategy = choose(choices, few).strategy
    assert choose(choices, many).strategy == strategy == Cohort(64, shares=33)
    for problem in (few, many):
        plan = strategy.plan(problem)
        assert plan.group_tokens.max() < 4096
        assert 33 * plan.group_tokens.max() == pytest.approx(1.04 * plan.group_tokens.sum(), rel=0.05)
        verify(plan, problem.tree)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shares": 0}, "shares = 0: is not a positive number"), ({"shares": "8"}, "shares = 8: is not"),
        ({"shares": float("nan")}, "shares = nan"), ({"shares": True}, "shares = True"),
        ({"shares": 8, "split": 64}, "split = 64: does not go with shares"),
        ({"shares": 8, "merge": "final"}, "merge = final: does not go with shares"),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_shares_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        cohort(64, **options)


@pytest.mark.parametrize("policy", [{"head_rows": 48}, {"head_rows": 64, "cut": "lowest"}], ids=str)
def test_what_a_batch_cannot_have_is_weighed(policy: dict[str, object]) -> None:
    problem = Problem(Tree.from_parents([-1] * 64, [1000] * 64), SHAPE, H200)
    kept(problem, **policy)
    assert choose(choices_of(), problem) == weighed_choice(problem)


def test_plans_with_too_many_items_are_not_taken() -> None:
    problem = prefix(60, 4096, 500)
    kept(problem, head_rows=64, blocks_per_sm="2")
    assert "measured" in choose(choices_of(), problem).reason
    assert choose(choices_of(30), problem) == weighed_choice(problem, 30)


def test_a_policy_that_does_not_suit_a_batch_of_the_bucket_is_not_taken() -> None:
    """Here it leaves most of the GPU idle."""
    problem = prefix(60, 4096, 500)
    kept(problem, head_rows=64)
    assert choose(choices_of(), problem) == weighed_choice(problem)


def test_plans_that_merge_nothing_pay_for_the_launch_of_merges() -> None:
    """By the term for it; and kernels for one tree, which then have no such launch, do not."""
    problem = prefix(32, 256, 64)
    constants = problem.target.batch_constants
    without = problem._replace(target=replace(problem.target, batch_constants=replace(constants, idle_merge_us=0.0)))
    idle, free = weights_of(problem, TILE), weights_of(without, TILE)
    assert idle is not None
    assert free is not None
    paid = np.unique((idle.times_us - free.times_us).round(9)).tolist()
    assert paid == [0.0, constants.idle_merge_us]
    whole = idle.walks.index(Cohort(64))
    assert idle.times_us[0, whole] > free.times_us[0, whole]
    alone, other = weights_of(problem), weights_of(without)
    assert alone is not None
    assert other is not None
    assert (alone.times_us == other.times_us).all()


def test_files_are_read_once_for_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not there is an entry, and however often policies are weighed anew."""
    reads: list[object] = []
    lookup = PolicyCache.lookup

    def counted(self: PolicyCache, *arguments: object) -> object:
        reads.append(arguments)
        return lookup(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PolicyCache, "lookup", counted)
    choices = choices_of()
    for own in (560, 700, 900, 560, 900):
        choose(choices, prefix(60, 4096, own))
    assert len(reads) == 1
    choose(choices, prefix(8, 4096, 400))
    assert len(reads) == 2


def test_a_kernel_for_batches_takes_what_was_measured() -> None:
    shape = Shape(4, 2, 16, dtype="fp32", page_size=4)
    table = torch.arange(4 * 16, dtype=torch.int32).reshape(4, 16)
    kernel = compile_batch(shape, PageTable(table, torch.full((4,), 40, dtype=torch.int32), 64), max_tokens=64)
    batch = LiveBatch(4, 4)
    for _ in range(4):
        batch.add(40)
    problem = Problem(batch.tree(), shape, target_from(None))
    POLICY_CACHE.store(Entry(batch_key(problem), {"strategy": "cohort", "head_rows": 1}, 9.0, (), "a test"))
    kernel.update(batch)
    assert kernel.choice is not None
    assert kernel.choice.reason == "measured as the fastest for such batches: a test"
    kernel.update(batch, query(16))
    assert kernel.choice.strategy == query(16)


# Tuning over the suite


def called(call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """In place of a capture: the call itself, which fills the same tensor again."""

    def again() -> None:
        call()

    return again, call()


SETTINGS = BatchSettings(capture=called, timer=lambda call, repeats: 1.0)


def of_us(*times: float, name: str = "a", own: int = 500) -> MeasuredBatch:
    """A batch whose policies take these times, the weighed one first."""
    sizes = ((64, "8"), (32, "4"), (64, "2"), (4, "2"))
    policies = ({"strategy": "cohort", "head_rows": rows, "blocks_per_sm": blocks} for rows, blocks in sizes)
    named = enumerate(zip(policies, times, strict=False))
    measured = tuple(MeasuredPolicy(each, 1.0 + place, us) for place, (each, us) in named)
    return MeasuredBatch(name, "groups", batch_key(prefix(60, 4096, own)), measured)


def test_the_fastest_of_a_bucket_is_kept() -> None:
    """By the geometric mean over its batches, of policies that were measured in all of them."""
    (entry,) = suite_entries([of_us(100, 80, 99, 10), of_us(200, 210, 150, name="b")], "medians")
    assert entry.policy == {"strategy": "cohort", "head_rows": 64, "blocks_per_sm": "2"}
    assert entry.measured_us == pytest.approx((99 * 150) ** 0.5)
    assert entry.measured_us == min(time for _, time, _ in entry.candidates if time is not None)
    assert entry.source == "medians: a, b, 1.16x the weighed choice"
    POLICY_CACHE.store(entry)
    assert "measured" in choose(choices_of(), prefix(60, 4096, 500)).reason


def test_nothing_is_kept_where_the_weighed_choice_is_good() -> None:
    assert suite_entries([of_us(100, 99, 105)], "medians") == []
    assert len(suite_entries([of_us(100, 97), of_us(100, 90, own=4000, name="b")], "medians")) == 2


def test_the_table_has_a_line_for_each_family() -> None:
    measured = [of_us(100, 80, 120), replace_family(of_us(100, 110, 120, own=4000))]
    table = suite_table(measured, suite_entries(measured, "medians"))
    assert table[1:] == [
        ("groups", "1", "3", "1.250", "1.250", "0.50", "0.50", "0.500", "1"),
        ("agents", "1", "3", "1.000", "1.000", "1.00", "1.00", "1.000", "0"),
    ]


def replace_family(batch: MeasuredBatch) -> MeasuredBatch:
    return replace(batch, family="agents")


def test_the_suite_is_measured_on_any_device(tmp_path: Path) -> None:
    """A tiny batch on the torch backend: outputs are checked, and all is written."""
    told: list[None] = []
    shapes = BatchShapes(["4:2", "4:1"], 16, "fp32")
    found = list(
        measure_suite([BATCH], shapes, target_from(None), SETTINGS, CPU, most=3, on_batch=lambda: told.append(None))
    )
    assert len(found) == len(told) == 2
    assert [len(batch.policies) for batch in found] == [3, 3]
    assert all(each.measured_us == 1.0 for batch in found for each in batch.policies)
    assert all(accepts_for_batches(each.policy) for batch in found for each in batch.policies)
    save_suite(tmp_path / "suite.json", {"device": "none"}, found, suite_entries(found, "medians"))
    written = json.loads((tmp_path / "suite.json").read_text())
    assert [batch["batch"] for batch in written["batches"]] == ["tiny", "tiny"]
    assert written["entries"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["1,4/5,5", "--suite"], "excludes TREE"), ([], "name trees, or give --suite"),
     (["--suite", "--heads", "32:8,8"], "heads"), (["--suite", "--family", "nobody"], "has no batches"),
     (["--suite", "--family", "drafts-8"], "has no batches that can be tuned")],
)  # fmt: skip
def test_wrong_commands(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_entries_name_batches_of_other_seeds() -> None:
    (entry,) = suite_entries([of_us(100, 80), replace(of_us(100, 82), seed=1)], "medians")
    assert entry.source == "medians: a, a of seed 1, 1.23x the weighed choice"


def test_the_split_of_an_earlier_choice_follows_the_tokens() -> None:
    """So growth adds no work items beyond those that were weighed, which may just fill the GPU."""
    shape = replace(SHAPE, num_qo_heads=8, num_kv_heads=1)
    choices, items = choices_of(shape=shape), []
    for own in (60, 70, 80, 95):
        problem = Problem(Tree.from_parents([-1, *[0] * 20], [4000, *[own] * 20]), shape, H200)
        chosen = choose(choices, problem)
        assert chosen.reason == choose(choices, problem).reason
        items.append(len(chosen.strategy.plan(problem)))
    assert max(items) == items[0]
    assert chosen.strategy.options["split"] > 0


def test_what_has_no_split_is_not_scaled() -> None:
    assert [scaled(each, 1.1) for each in (query(), Cohort(64))] == [query(), Cohort(64)]
    assert [scaled(each, 1.1) for each in (query(640), Cohort(64, split=64))] == [query(704), Cohort(64, split=128)]
    assert scaled(Cohort(64, split=640, split_shared_rows=2), 0.9) == Cohort(64, split=576, split_shared_rows=2)


def test_an_empty_batch_has_nothing_to_scale() -> None:
    choices = choices_of()
    empty = Problem(LiveBatch(16).tree(), SHAPE, H200)
    assert choose(choices, empty) == choose(choices, empty)
