"""Batch plans: plans of running batches that fit the room of their kernel."""

from __future__ import annotations

from typing import NamedTuple

from treegen.backends.batch_form import BatchForm
from treegen.compiled.cohort_plan import plan_of
from treegen.compiled.item_tables import tables_of
from treegen.compiled.tree_by_request import plans_are_compiled
from treegen.ir.arrays import largest
from treegen.ir.errors import PlanError, StrategyError
from treegen.ir.live_batch import LiveBatch
from treegen.ir.parts import InParts
from treegen.ir.plan import Plan
from treegen.ir.positions import windowed_requests
from treegen.ir.request_schedule import RequestSchedule
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.ir.tree.less_sharing import shallow, without_sharing
from treegen.ir.verify import verify
from treegen.runtime.batch_room import CLAIMS_PER_ROW, FEW_TOKENS, in_fewer_parts, is_served, leaving_free, reserve_of
from treegen.schedule.by_request import ItemRoom
from treegen.schedule.chunk_items import lower_chunks
from treegen.search.batch_choices import BatchChoices
from treegen.strategies import Choice, Strategy
from treegen.strategies.batch_invariant import BatchInvariant
from treegen.target.problem import Problem
from treegen.target.targets import Target


class BatchPlan(NamedTuple):
    """A plan of a running batch.

    problem: the batch's tree by request, without what no window reaches, the attention shape and the target. choice:
    the strategy, and the reason for it. schedule: the plan's schedule by request, which the kernel's tables hold.
    free_share: the share of the thread blocks that it leaves to requests that are served alone.
    """

    problem: Problem
    choice: Choice
    plan: Plan
    schedule: RequestSchedule
    free_share: float = 0.0

    @property
    def saved_bytes(self) -> int:
        """Bytes of K and V of one layer that the plan saves, compared with each request reading its own."""
        alone = self.problem.tree.topology.path_tokens
        return (alone - int(self.plan.group_tokens.sum())) * self.problem.shape.kv_token_bytes


def check_strategy(strategy: Strategy, shape: Shape, target: Target) -> None:
    """Raises StrategyError unless kernels for running batches have tables for this strategy's plans, as of a batch of
    three requests that share pages. A caller's own strategy, or one for certain trees, is first asked when it plans.
    """
    if strategy.automatic or isinstance(strategy, BatchInvariant):
        return
    if not (strategy.proven and strategy.serves_any_tree):
        return
    batch, page = LiveBatch(shape.page_size), shape.page_size
    first = batch.add(3 * page)
    second = batch.add(4 * page, first, 2 * page)
    batch.add(5 * page, second, 3 * page)
    _check_served(strategy, strategy.plan(Problem(batch.tree(), shape, target)))


def _check_served(strategy: Strategy, plan: Plan) -> None:
    if not is_served(plan):
        fix = "use query or cohort, or a strategy whose plans have one round and row intervals"
        raise StrategyError("strategy", str(strategy), "needs launches of its own", fix)


def planning(
    problem: Problem, wanted: Strategy, choices: BatchChoices, form: BatchForm, free_share: float = 0.0
) -> InParts[BatchPlan]:
    """Plans for a running batch, in fewer parts and with less sharing where tables have no room.

    Each part takes some tenths of a millisecond; see NextPlan.

    Args:
        problem: The batch's tree by request, the attention shape and the target.
        wanted: The strategy to plan with.
        choices: Chooses among strategies, where the wanted one is `auto`.
        form: The sizes of the kernel's tables.
        free_share: The share of the thread blocks that a plan of `auto` leaves to requests that are served alone.

    Raises:
        StrategyError: The strategy makes plans that need launches of their own.
        PlanError: No plan has room.
    """
    whole, problem = problem, _within_windows(problem, form)
    causal = form.scoring is not None and form.scoring.causal
    room = ItemRoom(form.config, form.shape.page_size, reserve_of(form.most_tokens), causal)
    whole_gpu = (yield from choices.choosing(problem)) if wanted.automatic else wanted.choose(problem)
    choice = whole_gpu
    if wanted.automatic and problem.tree.unique_tokens <= FEW_TOKENS * form.room.at_once:
        choice = leaving_free(whole_gpu, free_share)
    for strategy in in_fewer_parts(choice.strategy):
        plan = plan_of(strategy, problem)
        if (alone := _without_sharing(plan, whole, form)) is not None:
            plan, problem = plan_of(strategy, alone), alone
        if not strategy.proven:
            verify(plan, problem.tree)
        _check_served(strategy, plan)
        if form.room.chunk or not plans_are_compiled(problem.tree):
            yield
        chunked = form.room.chunk > 0
        made = lower_chunks(plan, problem, form.config, form.room) if chunked else tables_of(plan, problem, room)
        if form.room.holds(made):
            reason = choice.reason if strategy is choice.strategy else f"{choice.strategy} needs more room"
            left = free_share if strategy is choice.strategy and choice is not whole_gpu else 0.0
            return BatchPlan(problem, Choice(strategy, reason), plan, made, left)
        if len(made.claims) > form.room.claims and problem.tree.requests is not None:
            parts, topology, requests = shallow(problem.tree.requests, CLAIMS_PER_ROW)
            tree = Tree(*parts, topology, requests)
            return (yield from planning(problem._replace(tree=tree), wanted, choices, form, free_share))
    raise PlanError("batch", str(problem.tree), "needs more tables than there is room for", "raise max_tokens")


def _without_sharing(plan: Plan, whole: Problem, form: BatchForm) -> Problem | None:
    """Returns the problem in which requests share nothing, if the plan reads each by itself and they share some tokens.

    A plan for that claims nothing of their pages. So it also serves requests that take others' seats.

    Args:
        plan: The plan.
        whole: The problem with the tokens that no window reaches.
        form: The sizes of the kernel's tables.
    """
    requests = whole.tree.requests
    if (
        requests is None
        or requests.queries is not None
        or form.room.chunk
        or not len(plan)
        or largest(plan.group_rows) > 1
    ):
        return None
    made = without_sharing(requests)
    if made is None:
        return None
    parts, topology, alone = made
    return _within_windows(whole.with_tree(Tree(*parts, topology, alone)), form)


def _within_windows(problem: Problem, form: BatchForm) -> Problem:
    """Leaves out tokens that no row's window reaches. Batch-invariant mode does so by itself, by chunks."""
    if form.window_left < 0 or form.room.chunk:
        return problem
    unit = max(form.config.tokens, form.shape.page_size)
    return problem.with_tree(windowed_requests(problem.tree, form.window_left, unit))
