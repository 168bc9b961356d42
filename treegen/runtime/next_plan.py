"""The next plan of a running batch, made in parts while the batch goes on."""

from __future__ import annotations

from copy import copy

from treegen.backends.batch_form import BatchForm
from treegen.compiled.batch_tree import BatchTree
from treegen.environment import shares
from treegen.ir.live_batch import LiveBatch
from treegen.ir.parts import InParts, go_on
from treegen.runtime.batch_plans import BatchPlan, planning
from treegen.runtime.replanning import Replanning
from treegen.search.batch_choices import BatchChoices
from treegen.strategies import Strategy
from treegen.target.targets import Target
from treegen.timed import phase


class NextPlan:
    """A plan in the making: of a batch as it was when the plan was begun.

        part     1                                  2           3        4
        makes    tree, and in a new bucket walks    estimates   choice   plan, schedule

    Parts take some tenths of a millisecond. There is only one, which makes a tree, plan and schedule, unless `auto` has
    to choose for a new bucket. Where NumPy plans, because requests have several query rows or there is no C compiler,
    each of these three is a part.
    The plan does not know requests that come after it was begun; they are served alone, as after any plan.

    batch: the batch, which goes on. then: a copy of it, as it was.

    Args:
        batch: The running requests.
        wanted: The strategy.
        target: The GPU.
        form: The sizes of the kernel's tables.
        choices: Chooses for `auto`.
        replanning: Decides how much of the sharing the plan uses.
    """

    def __init__(
        self, batch: LiveBatch, wanted: Strategy, target: Target, form: BatchForm, choices: BatchChoices,
        replanning: Replanning,
    ) -> None:  # fmt: skip
        self.batch, self.then = batch, copy(batch)
        self._wanted, self._target, self._form, self._choices = wanted, target, form, choices
        self._replanning = replanning
        self._parts = self._made()

    def is_for(self, batch: LiveBatch) -> bool:
        """Says whether the plan is being made for this batch, and the batch has got no more seats since."""
        return self.batch is batch and len(self.then.row) == len(batch.row)

    def go_on(self, parts: int | None = None) -> BatchPlan | None:
        """Makes the next parts, by default all, and returns the plan after the last one.

        Raises:
            StrategyError, PlanError: As of treegen.runtime.batch_plans.planning.
        """
        with phase("plan"):
            return go_on(self._parts, parts)

    def _made(self) -> InParts[BatchPlan]:
        tree = self._replanning.steady(self.batch, BatchTree.of_batch(self.then, shared=shares()))
        if tree.columns is None:
            yield
        free_share = self._replanning.free_share(self.batch)
        return (yield from planning(tree, self._target, self._wanted, self._choices, self._form, free_share))
