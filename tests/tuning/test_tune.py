"""Tuning: what is proposed, measured and kept, and what `auto` makes of it; with a meter in place of a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import treegen
from support.h200 import H200
from support.meters import Favourite, Wavering
from treegen import Shape, Tree, cli, strategies
from treegen.autotune_cache.policy_cache import POLICY_CACHE
from treegen.ir.errors import BackendError, CacheWarning, InputError, StrategyError
from treegen.report.explain import explain
from treegen.search.policies import accepts, key_of, policy_of, strategy_of
from treegen.search.weigh import candidates
from treegen.strategies import cohort, strategy_from, strategy_names
from treegen.target.problem import Problem
from treegen.target.targets import target_from
from treegen.tuning.measurer import Outcome
from treegen.tuning.tune import Tuning, proposals, tuned

SHAPE = Shape(32, 8, 128, dtype="fp16")
TREE = Tree.parse("1,4,16,64/512,256,64,32")
OTHER = Tree.parse("1,4,16,64/510,250,65,33")  # of the same bucket
pytestmark = pytest.mark.usefixtures("policies_folder")


def test_policies_are_data() -> None:
    """Every candidate of any tree survives as a policy."""
    for strategy, _ in candidates(Problem(TREE, SHAPE, H200), 10_000):
        assert strategy_of(policy_of(strategy)) == strategy
        assert accepts(policy_of(strategy))
    final = strategies.cohort(16, 256, (64, 64), 8, merge="final")
    assert strategy_of(policy_of(final)) == final
    for name in strategy_names():
        assert strategy_of(policy_of(strategy_from(name))) == strategy_from(name)


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"strategy": "auto"},
        {"strategy": 3},
        {"strategy": "os.system"},
        {"strategy": "query", "chunk": 3},
        {"strategy": "cohort", "head_rows": 0},
        {"strategy": "cohort", "head_rows": "64"},
        {"strategy": "cohort", "cut": (1,)},
        {"strategy": "cohort", "tile": (1, 2)},
        {"strategy": "cohort", "merge": "never"},
    ],
)
def test_what_is_no_policy(policy: dict[str, object]) -> None:
    assert not accepts(policy)
    with pytest.raises(StrategyError):
        strategy_of(policy)


def test_plain_decoding_is_always_proposed() -> None:
    """The model's best in its order, behind them the best plain per-row decoding, whole paths in large tiles; and
    what one launch merges: the best with cuts, others with cuts, and halves.
    """
    expected = [strategy for strategy, _ in candidates(Problem(TREE, SHAPE, H200), 4)]
    found = proposals(Problem(TREE, SHAPE, H200), 4)
    assert found[:4] == expected
    assert found[4].name == "query"
    halves = [cohort(split=1152, merge="final"), cohort(head_rows=32, split=896, merge="final")]
    with_fused_merge = [cohort(split=split, split_shared_rows=64, merge="final") for split in (512, 256)]
    further = [cohort(split_shared_rows=64, merge="final"), cohort(head_rows=32, split_shared_rows=64, merge="final")]
    assert found[5:] == [cohort(), *with_fused_merge, *further, *halves]
    flat = Tree.parse("4096*200")
    assert "query" in [strategy.name for strategy in proposals(Problem(flat, Shape(16, 16, 128), H200), 3)]


def test_the_fastest_is_kept_for_the_bucket(policies_folder: Path) -> None:
    third = str(proposals(Problem(TREE, SHAPE, H200), 8)[2])
    seen: list[Outcome] = []
    found = tuned(Problem(TREE, SHAPE, H200), Tuning(meter=Favourite(third)), on_candidate=seen.append)
    assert found.where == "made"
    assert found.entry is not None
    assert str(strategy_of(found.entry.policy)) == third
    assert found.entry.measured_us == 10.0
    assert len(seen) == len(found.entry.candidates) == 16
    assert len(list(policies_folder.glob("*.json"))) == 1

    assert key_of(Problem(TREE, SHAPE, H200)) == key_of(Problem(OTHER, SHAPE, H200))
    choice = strategies.auto().choose(Problem(OTHER, SHAPE, H200))
    assert str(choice.strategy) == third
    assert choice.reason.startswith("measured as the fastest for such trees: 16 candidates, ")
    assert str(explain(OTHER, shape=SHAPE).best) == third
    for shape, target in ((Shape(32, 8, 64, dtype="fp16"), "h200"), (SHAPE, "h100")):
        assert "estimated" in strategies.auto().choose(Problem(OTHER, shape, target_from(target))).reason


def test_a_known_bucket_is_not_measured_again(tmp_path: Path) -> None:
    meter = Favourite(str(proposals(Problem(TREE, SHAPE, H200), 2)[0]), noted=str(tmp_path / "calls"))
    tuned(Problem(TREE, SHAPE, H200), Tuning(most=2, meter=meter))
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 10
    assert tuned(Problem(OTHER, SHAPE, H200), Tuning(meter=meter)).where == "memory"
    assert len((tmp_path / "calls").read_text().splitlines()) == 10
    best = str(proposals(Problem(OTHER, SHAPE, H200), 2)[2])
    again = tuned(Problem(OTHER, SHAPE, H200), Tuning(most=2, meter=Favourite(best)), again=True)
    assert again.entry is not None
    assert str(strategies.auto().choose(Problem(TREE, SHAPE, H200)).strategy) == best


def test_those_close_to_the_best_are_measured_three_times() -> None:
    first, second, third = map(str, proposals(Problem(TREE, SHAPE, H200), 3)[:3])
    seen: list[Outcome] = []
    meter = Wavering({first: (10.0, 10.4, 10.3), second: (10.1, 10.0, 10.2), third: (10.3, 9.0)})
    found = tuned(Problem(TREE, SHAPE, H200), Tuning(most=3, meter=meter), on_candidate=seen.append)
    assert found.entry is not None
    assert str(strategy_of(found.entry.policy)) == second
    assert [time for _, time, _ in found.entry.candidates[:3]] == [10.3, 10.1, 10.3]
    assert len(seen) == len(found.entry.candidates)


def test_who_fails_once_has_failed() -> None:
    first, second = map(str, proposals(Problem(TREE, SHAPE, H200), 2)[:2])
    meter = Wavering({first: (10.0, 10.0, None), second: (10.1,)})
    found = tuned(Problem(TREE, SHAPE, H200), Tuning(most=2, meter=meter))
    assert found.entry is not None
    assert str(strategy_of(found.entry.policy)) == second
    assert found.entry.candidates[0][1:] == (None, "wrong output: error 1.0e+00 exceeds 2.0e-03")


def test_wrong_outputs_are_recorded_and_never_chosen() -> None:
    first, second = map(str, proposals(Problem(TREE, SHAPE, H200), 2)[:2])
    found = tuned(Problem(TREE, SHAPE, H200), Tuning(most=2, meter=Favourite(first, wrong=(first,))))
    assert found.entry is not None
    assert str(strategy_of(found.entry.policy)) == second
    outcomes = {text: (time, outcome) for text, time, outcome in found.entry.candidates}
    assert outcomes[first] == (None, "wrong output: error 1.0e+00 exceeds 2.0e-03")
    assert outcomes[second] == (20.0, "measured")


def test_no_entry_when_everything_fails(policies_folder: Path) -> None:
    with pytest.raises(BackendError, match=r"all failed: .*does not compile"):
        tuned(Problem(TREE, SHAPE, H200), Tuning(most=1, meter=Favourite(failing=True)))
    assert not list(policies_folder.glob("*.json"))
    assert "estimated" in strategies.auto().choose(Problem(TREE, SHAPE, H200)).reason


def test_an_entry_that_is_no_policy_is_a_miss(policies_folder: Path) -> None:
    """As after a version that knew other strategies: one warning, and estimates decide."""
    found = tuned(Problem(TREE, SHAPE, H200), Tuning(most=1, meter=Favourite()))
    assert found.entry is not None
    POLICY_CACHE.store(replace(found.entry, policy={"strategy": "unheard-of"}))
    with pytest.warns(CacheWarning, match="policy"):
        choice = strategies.auto().choose(Problem(TREE, SHAPE, H200))
    assert "estimated" in choice.reason


@pytest.mark.parametrize("options", [{"most": 0}, {"most": True}, {"repeats": 0}, {"repeats": 1.5}])
def test_bad_tunings(options: dict[str, object]) -> None:
    with pytest.raises(InputError):
        Tuning(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_no_tuning_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BackendError, match="needs a CUDA device"):
        treegen.compile(TREE, autotune=True)
    with pytest.raises(StrategyError, match="has nothing to choose for query"):
        treegen.compile(TREE, strategy="query", autotune=True)
    assert cli.main(["tune", "1,4/5,5"]) == 2
    assert "device = cpu: is not a CUDA device to measure on" in capsys.readouterr().err
    assert cli.main(["tune", "1,4/5"]) == 2
    assert "tokens_per_node" in capsys.readouterr().err


def test_explain_lists_what_was_weighed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "1,16,64/1024,256,32", "--trace"]) == 0
    printed = capsys.readouterr().out
    lines = printed[printed.index("weighed on h200:") :].splitlines()[1:]
    assert len(lines) == 12
    times = [float(line.split(" us: ")[0]) for line in lines]
    assert times == sorted(times)
    assert all("cohort(" in line or "query" in line for line in lines)


def test_cache_why_knows_tuned_trees(capsys: pytest.CaptureFixture[str]) -> None:
    tuned(Problem(TREE, SHAPE, H200), Tuning(most=1, meter=Favourite()))
    assert cli.main(["cache", "why", OTHER.text or "", "--dtype", "fp16"]) == 0
    assert "hit (" in capsys.readouterr().out
    assert cli.main(["cache", "why", "5+6"]) == 0
    assert "miss: " in capsys.readouterr().out
