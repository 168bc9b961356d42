"""The ablation benchmark: what it takes away is there, and plans and kernels without it are others."""

import sys
from pathlib import Path

import pytest

from treegen import Shape, Tree
from treegen.emit import emit
from treegen.lower import lower
from treegen.search.auto import searched
from treegen.strategies.named import cohort
from treegen.targets import target_from

ROOT = Path(__file__).parent.parent
try:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import ablation
finally:
    sys.path.remove(str(ROOT / "benchmarks"))

H200 = target_from("h200")
REPLACING = [each for each in ablation.OPTIMISATIONS if each.replaced]
ON_LAUNCH = ("dependent launches",)


def made() -> list[object]:
    """The kernels and arenas of all cases, and of the last one with the policy that is measured as its best."""
    cases = [(Tree.parse(text), Shape(*heads, 128, dtype="fp16")) for *heads, text in ablation.CASES]
    plans = [(tree, shape, searched(tree, shape, H200).strategy) for tree, shape in cases]
    found: list[object] = []
    for tree, shape, strategy in (*plans, (*cases[-1], cohort(head_rows=64, apart=64, merge="final"))):
        schedule = lower(strategy.plan(tree, shape, H200), tree, shape, H200)
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
