"""The ablation benchmark: what it takes away is there, and plans and kernels without it are others."""

import sys

import pytest

from support.h200 import H200
from support.paths import ROOT
from treegen import Shape, Tree
from treegen.codegen.emit import emit
from treegen.schedule.pipeline import planned_device_schedule
from treegen.search.auto import by_estimate
from treegen.strategies import cohort, deft_node
from treegen.target.problem import Problem

try:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import ablation
finally:
    sys.path.remove(str(ROOT / "benchmarks"))

REPLACING = [each for each in ablation.OPTIMISATIONS if each.replaced]
CASES = (
    (16, 1, "1,10/4000,400"),
    (16, 1, "1,256/256,32"),
    (32, 8, "1,4,16,512/1024,256,128,32"),
    (32, 8, "1,16,64/1024,256,32"),
    (16, 1, "1,4,16,64,256,1024/256,8,256,64,32,256"),
    (16, 1, "1,4,8,256/8,256,256,32"),
)
ON_LAUNCH = ("dependent launches",)


def made() -> list[object]:
    """The kernels and arenas of some cases, of one where nothing is hidden, and of the last one with the policy that is
    measured as its best.
    """
    cases = [(Tree.parse(text), Shape(*heads, 128, dtype="fp16")) for *heads, text in CASES]
    plans = [(tree, shape, by_estimate(Problem(tree, shape, H200)).strategy) for tree, shape in cases]
    found: list[object] = []
    for tree, shape, strategy in (
        *plans,
        (*cases[0], deft_node()),
        (*cases[-1], cohort(head_rows=64, split_shared_rows=64, merge="final")),
    ):
        schedule = planned_device_schedule(strategy.plan(Problem(tree, shape, H200)), Problem(tree, shape, H200))
        found += [[source.digest for source in emit(schedule, shape)], schedule.pack().array.tolist()]
    return found


@pytest.mark.parametrize(
    "optimisation", [each for each in ablation.OPTIMISATIONS if each.replaced], ids=lambda o: o.name
)
def test_what_is_taken_away_makes_a_difference(optimisation: ablation.Optimisation) -> None:
    assert all(hasattr(module, name) for module, name, _ in optimisation.replaced)
    usual = made()
    with ablation.taken_away(optimisation):
        without = made()
    assert (without == usual) == (optimisation.name in ON_LAUNCH)
    assert made() == usual


def test_every_optimisation_is_in_some_case() -> None:
    """The table has a case for each, and names of cases are distinct."""
    names, seen = [], set()
    for name, tree, shape in list(ablation.cases())[::4]:
        names.append(name)
        chosen = by_estimate(Problem(tree, shape, H200)).strategy
        _, _, usual = ablation.made_without(None, tree, shape, chosen, H200)
        for each in ablation.OPTIMISATIONS:
            made, _, facts = ablation.made_without(each, tree, shape, chosen, H200)
            if made and facts != usual:
                seen.add(each.name)
    assert len(set(names)) == len(names)
    assert len(seen) >= len(ablation.OPTIMISATIONS) - 4
