"""Batch plans: plans of running batches that fit the room of their kernel."""

from __future__ import annotations

from typing import NamedTuple

from treegen.backends.batch_form import BatchForm
from treegen.compiled.batch_tables import BatchTables, LoweredPlan, tables_of
from treegen.compiled.batch_tree import BatchTree
from treegen.ir.errors import PlanError, StrategyError
from treegen.ir.live_batch import LiveBatch
from treegen.ir.plan import Plan
from treegen.ir.request_schedule import RequestSchedule
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.ir.tree.less_sharing import shallow
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

    tree: the batch's tree by request, without what no window reaches. shape, target: the attention shape and the GPU.
    choice: the strategy, and the reason for it. tables: the plan, and its schedule by request, which the kernel's
    tables hold. free_share: the share of the thread blocks that it leaves to requests that are served alone.
    """

    tree: BatchTree
    shape: Shape
    target: Target
    choice: Choice
    tables: BatchTables
    free_share: float = 0.0

    @property
    def problem(self) -> Problem:
        """The tree, the attention shape and the GPU."""
        return Problem(self.tree.tree, self.shape, self.target)

    @property
    def plan(self) -> Plan:
        """Which rows read which tokens together."""
        return self.tables.plan

    @property
    def schedule(self) -> RequestSchedule:
        """The plan's schedule."""
        return self.tables.schedule

    @property
    def saved_bytes(self) -> int:
        """Bytes of K and V of one layer that the plan saves, compared with each request reading its own."""
        return (self.tree.counts.path_tokens - self.tables.tokens) * self.shape.kv_token_bytes


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


def plan_batch(
    tree: BatchTree, target: Target, wanted: Strategy, choices: BatchChoices, form: BatchForm, free_share: float = 0.0
) -> BatchPlan:
    """Plans for a running batch, in fewer parts and with less sharing where tables have no room.

    Args:
        tree: The batch's tree by request.
        target: The GPU.
        wanted: The strategy to plan with.
        choices: Chooses among strategies, where the wanted one is `auto`.
        form: The sizes of the kernel's tables.
        free_share: The share of the thread blocks that a plan of `auto` leaves to requests that are served alone.

    Raises:
        StrategyError: The strategy makes plans that need launches of their own.
        PlanError: No plan has room.
    """
    whole, tree, shape = tree, _within_windows(tree, form), form.shape
    choice = whole_gpu = _choice(tree, target, wanted, choices, shape)
    if wanted.automatic and tree.counts.unique_tokens <= FEW_TOKENS * form.room.at_once:
        choice = leaving_free(whole_gpu, free_share)
    for strategy in in_fewer_parts(choice.strategy):
        made = _tables(strategy, tree, target, form)
        if (alone := _without_sharing(made, whole, form)) is not None:
            made, tree = _tables(strategy, alone, target, form), alone
        if not strategy.proven:
            verify(made.plan, tree.tree)
        if isinstance(made, LoweredPlan):
            _check_served(strategy, made.plan)
        if made.fits(form.room):
            reason = choice.reason if strategy is choice.strategy else f"{choice.strategy} needs more room"
            left = free_share if strategy is choice.strategy and choice is not whole_gpu else 0.0
            return BatchPlan(tree, shape, target, Choice(strategy, reason), made, left)
        if made.seated.claims > form.room.claims and tree.tree.requests is not None:
            parts, topology, requests = shallow(tree.tree.requests, CLAIMS_PER_ROW)
            fewer = BatchTree.of_tree(Tree(*parts, topology, requests))
            return plan_batch(fewer, target, wanted, choices, form, free_share)
    raise PlanError("batch", str(tree.tree), "needs more tables than there is room for", "raise max_tokens")


def _choice(tree: BatchTree, target: Target, wanted: Strategy, choices: BatchChoices, shape: Shape) -> Choice:
    return choices.choose(tree) if wanted.automatic else wanted.choose(Problem(tree.tree, shape, target))


def _tables(strategy: Strategy, tree: BatchTree, target: Target, form: BatchForm) -> BatchTables:
    if form.room.chunk:
        problem = Problem(tree.tree, form.shape, target)
        plan = strategy.plan(problem)
        return LoweredPlan(plan, lambda: lower_chunks(plan, problem, form.config, form.room))
    causal = form.scoring is not None and form.scoring.causal
    room = ItemRoom(form.config, form.shape.page_size, reserve_of(form.most_tokens), causal)
    return tables_of(strategy, tree, form.shape, target, room)


def _without_sharing(made: BatchTables, whole: BatchTree, form: BatchForm) -> BatchTree | None:
    """Returns the tree in which requests share nothing, if the plan reads each by itself and they share some tokens.

    A plan for that claims nothing of their pages. So it also serves requests that take others' seats.

    Args:
        made: The plan.
        whole: The tree with the tokens that no window reaches.
        form: The sizes of the kernel's tables.
    """
    if form.room.chunk or made.widest != 1 or not whole.shares_tokens or whole.has_queries:
        return None
    alone = whole.alone()
    return None if alone is None else _within_windows(alone, form)


def _within_windows(tree: BatchTree, form: BatchForm) -> BatchTree:
    """Leaves out tokens that no row's window reaches. Batch-invariant mode does so by itself, by chunks."""
    if form.window_left < 0 or form.room.chunk:
        return tree
    unit = max(form.config.tokens, form.shape.page_size)
    return tree.within_windows(form.window_left, unit)
