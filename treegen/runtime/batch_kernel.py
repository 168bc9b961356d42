"""BatchKernel: attention for batches that live. It reads the engine's page table and lengths on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from treegen.backends import check_inputs
from treegen.backends.batch_form import BatchForm
from treegen.backends.bound_call import Call
from treegen.backends.devices import backend_for
from treegen.backends.kv_scales import Scales
from treegen.backends.page_table import PageTable
from treegen.backends.request_program import RequestProgram
from treegen.backends.torch_request_program import TorchRequestProgram
from treegen.cost.late_requests import LateCost, late_cost
from treegen.environment import shares
from treegen.ir.arrays import INT32_MAX, Ints
from treegen.ir.errors import InputError, PlanError, StrategyError
from treegen.ir.live_batch import LiveBatch
from treegen.ir.plan import Plan
from treegen.ir.request_schedule import RequestSchedule
from treegen.ir.request_tables import RequestTables
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.ir.tree.requests import shallow
from treegen.ir.verify import verify
from treegen.report.explain import Explanation
from treegen.report.explained_plan import ExplainedPlan
from treegen.runtime.batch_checks import check_batch, check_tensors
from treegen.runtime.batch_room import (
    CLAIMS_PER_ROW,
    chunk_room_of,
    in_fewer_parts,
    is_served,
    reserve_of,
    room_of,
    tile_of,
)
from treegen.schedule.by_request import ItemRoom
from treegen.schedule.chunk_items import lower_chunks
from treegen.schedule.pipeline import lowered
from treegen.schedule.query_runs import lower_requests
from treegen.scoring.options import Scoring
from treegen.search.batch_choices import BatchChoices
from treegen.strategies import Choice, Strategy
from treegen.strategies.batch_invariant import BatchInvariant
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.timed import stage

Program: TypeAlias = "RequestProgram | TorchRequestProgram"

GROWN = 128
"""Tokens that a request gains until `refresh` makes a new plan. On an H200 64 requests of 4,096 tokens take 1.04 times
as long with a plan made so much earlier as with a fresh one.
"""
_PLAN_US = 1000.0
"""Microseconds that a plan takes the host, about."""
_ALONE_US = 1.0
"""Microseconds that a layer takes longer, at least, while requests are walked alone."""
_USUAL_LAYERS = 32
"""Layers of a step, until calls have been counted."""
_MOST_FORMS = 64


@dataclass(frozen=True, eq=False)
class BatchOptions:
    """What was given for calls. sm_scale: None for that of the shape."""

    strategy: Strategy
    backend: str | None = None
    sm_scale: float | None = None
    scales: Scales | None = None
    scoring: Scoring | None = None

    @property
    def chunk(self) -> int:
        """Tokens of a chunk in batch-invariant mode, else 0."""
        return self.strategy.chunk if isinstance(self.strategy, BatchInvariant) else 0

    @property
    def read(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """Tensors that every launch reads besides those of its call, by their names."""
        return tuple(item for part in (self.scales, self.scoring) if part for item in part.tensors.items())


class _PlannedBatch(NamedTuple):
    """A batch as it was at the last update: LiveBatch.changes and moves, how many requests it had, who sat in its seats
    and how long they were.
    """

    batch: LiveBatch
    changes: int
    moves: int
    requests: int
    epoch: Ints
    tokens: Ints


class BatchKernel:
    """An attention kernel for the batches of a server. Made by `treegen.compile_batch`.

        kernel = treegen.compile_batch(shape, pages, max_tokens=131072)
        batch = treegen.LiveBatch(page_size=16)
        batch.add(tokens=900)
        kernel.prepare(batch)                 # before a decode step: says who runs
        kernel.step()                         # once per decode step: looks at the page table and at lengths
        out = kernel(q, k_cache, v_cache)     # once per layer
        kernel.refresh(batch)                 # while the device works: a plan where requests came, else nothing

    What a plan says about sharing is a claim, which every `step` checks against the page table. A request for which a
    claim fails, or of which the plan does not know, is walked alone through its own row of the table: it is right in
    the same step, and slower until the next `update`. Growth needs no host work.

    `step` and calls can be captured in a CUDA graph, after one call outside; replays see the latest `update` and
    `seat`, and whatever the page table and lengths hold by then. A call computes all rows that sit in a seat; what
    others hold in out and lse is left as it is. q may have rows up to the last of these only; a graph is captured with
    as many as any of its replays will need. A kernel belongs to one thread and one stream at a time.
    """

    def __init__(
        self,
        shape: Shape,
        pages: PageTable,
        target: Target,
        options: BatchOptions,
        most_tokens: int,
        most_rows: int | None = None,
    ) -> None:
        self._shape, self._target, self._options = shape, target, options
        self._backend = backend_for(pages.table.device, options.backend)
        tile = tile_of(shape, target)
        positions = options.scoring is not None and options.scoring.positions
        requests = len(pages.seq_lens)
        if most_rows is None and pages.qo_indptr is not None:
            most_rows = requests
        if options.chunk:
            room = chunk_room_of(shape, tile, requests, most_tokens, options.chunk, target.sms, positions=positions)
        else:
            room = room_of(shape, tile, requests, most_tokens, target.sms, most_rows, positions=positions)
        if RequestTables.of(room).words > INT32_MAX:
            found = f"{most_tokens} for {room.rows} rows"
            raise InputError("max_tokens", found, "needs tables of 8 GiB or more", "give fewer tokens, or fewer rows")
        self.form = BatchForm(tile, room, shape, pages, most_tokens, options.scales, options.scoring)
        self._calls: dict[tuple[object, str], Call] = {}
        self._program: Program | None = None
        self._plan: Plan | None = None
        self._made: RequestSchedule | None = None
        self._choice: Choice | None = None
        self.choices = BatchChoices(tile, room.items)
        self._seen: _PlannedBatch | None = None
        self._problem: Problem | None = None
        self._plans, self._layers, self._calls_of_step = 0, _USUAL_LAYERS, 0
        self._late_us = 0.0  # by which layers of steps since the last plan took longer, all together
        self._rows = 0  # that calls write

    @property
    def program(self) -> Program:
        """What runs on the device; made when it is first asked for."""
        if self._program is None:
            with stage(f"prepare {self._backend}"):
                on_gpu = self._backend == "triton"
                self._program = RequestProgram(self.form) if on_gpu else TorchRequestProgram(self.form)
        return self._program

    def update(self, batch: LiveBatch, strategy: Strategy | None = None) -> None:
        """Plans for the requests of a batch and what they share; the next `step` uses the plan. Host work, and one
        copy to the device that is not waited for.

        Args:
            batch: The running requests.
            strategy: Makes this plan in place of the kernel's own strategy.

        Raises:
            InputError: if there are more requests than the page table has lengths for, more query rows than max_rows,
                or pages of another size. The kernel then goes on with the plan that it has.
        """
        rows = self._checked(batch)
        if strategy is not None and (strategy.batch_invariant or self.form.room.chunk):
            reason, fix = "would change what rows' bits follow from", "leave it out, or make another kernel"
            raise StrategyError("strategy", str(strategy), reason, fix)
        with stage("plan"):
            tree = batch.tree(shared=shares())
            problem = Problem(tree, self._shape, self._target)
            choice, plan, made = self._planned(problem, strategy or self._options.strategy)
        self.program.load(made)
        self._seat(batch, rows)
        self._choice, self._plan, self._made, self._problem = choice, plan, made, problem
        self._plans, self._late_us = self._plans + 1, 0.0
        self._seen = _PlannedBatch(
            batch, batch.changes, batch.moves, len(batch), batch.epoch.copy(), batch.tokens.copy()
        )

    def prepare(self, batch: LiveBatch) -> bool:
        """Does what cannot wait until a step is launched, and says whether that was an `update`.

        Nothing, while requests only grow. `seat`, where some came, ended or moved: those that the plan does not know
        are walked alone, until `refresh` makes another one. `update`, where there is no plan for this batch, or where
        walking requests alone would cost the layers of the step more than a plan costs.
        """
        seen = self._seen
        if seen is None or seen.batch is not batch:
            self.update(batch)
            return True
        if seen.moves == batch.moves:
            return False
        rows = self._checked(batch)
        if self._late(batch).late_us * self._layers > _PLAN_US:
            self.update(batch)
            return True
        self._seat(batch, rows)
        self._seen = seen._replace(moves=batch.moves)
        return False

    def refresh(self, batch: LiveBatch) -> bool:
        """Makes a plan for later steps where one pays, and says whether it did: an `update`, else `seat` at most.

        Behind the launch of a step the host plans while the device works. Where requests came, were forked or share
        otherwise, a plan pays at once if the layers of a step take clearly longer than it, and else as soon as they
        have taken longer by as much, all steps since the last plan together. Where an eighth of the requests ended, or
        one grew by 128 tokens, it pays, too.
        """
        seen = self._seen
        if (
            seen is None
            or seen.batch is not batch
            or 8 * len(batch) < 7 * seen.requests
            or len(batch.tokens) != len(seen.tokens)
            or self._outgrows(batch, seen)
            or (seen.changes != batch.changes and self._pays(batch))
        ):
            self.update(batch)
            return True
        if seen.moves != batch.moves:
            self.seat(batch)
            self._seen = seen._replace(moves=batch.moves)
        return False

    def _outgrows(self, batch: LiveBatch, seen: _PlannedBatch) -> bool:
        """Whether a request has grown so much that its plan is not good any more; in chunks it always is."""
        grown = ((batch.tokens - seen.tokens) * (batch.epoch == seen.epoch)).max(initial=0)
        return not self.form.room.chunk and int(grown) >= GROWN

    def _pays(self, batch: LiveBatch) -> bool:
        """Whether to plan anew, after another step in which requests may have been walked alone."""
        cost = self._late(batch)
        self._late_us += cost.late_us + _ALONE_US
        return cost.layer_us * self._layers > 1.5 * _PLAN_US or self._late_us * self._layers > _PLAN_US

    def _late(self, batch: LiveBatch) -> LateCost:
        """What it costs that the plan is the one before."""
        assert self._made is not None
        assert self._problem is not None
        return late_cost(batch, self._made, self.form.room, self.form.tile, self._problem)

    def seat(self, batch: LiveBatch) -> None:
        """Takes who is running, and in which rows, without a new plan: requests that came, moved or were forked since
        the last `update` are walked alone. Some microseconds of host work, and one copy that is not waited for.
        """
        self._seat(batch, self._checked(batch))

    def _seat(self, batch: LiveBatch, rows: int) -> None:
        self.program.seat(batch.rows_and_epochs)
        self._rows = rows

    def step(self) -> None:
        """Looks at the page table and at lengths, for all calls up to the next step."""
        self._layers, self._calls_of_step = self._calls_of_step or self._layers, 0
        self.program.step()

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "ln",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of every request's rows over its tokens; arguments and results as of Kernel.__call__, with rows in
        the order of the batch, or where the page table's qo_indptr says. A row without tokens, or of a request whose
        page ids are impossible, gives 0 and -inf.
        """
        self._calls_of_step += 1
        form = check_inputs.form_of(q, k_cache, v_cache, out, self._options.read)
        call = self._calls.get((form, lse_base)) if form is not None and isinstance(lse_base, str) else None
        if call is None:
            check_tensors(self.form, q, k_cache, v_cache, out, self._options.read)
        if out is None:
            out = torch.empty(*q.shape[:2], self._shape.head_dim_v, dtype=q.dtype, device=q.device)
        if call is None:
            call = self._bind(form, q, k_cache, v_cache, out, lse_base)
        if len(q) < self._rows:
            raise InputError("q", f"{len(q)} rows", f"is less than the batch's {self._rows}", "give one for each")
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        call(q, k_cache, v_cache, out, lse)
        return out if lse is None else (out, lse)

    def _bind(
        self,
        form: tuple[object, ...] | None,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse_base: str,
    ) -> Call:
        """Settles what calls with all tensors of the form of these, which are checked, have in common."""
        shape, options = self._shape, self._options
        lse_scale = check_inputs.lse_scale(lse_base)
        scale = shape.head_dim**-0.5 if options.sm_scale is None else options.sm_scale
        call = self.program.bind(q, k_cache, v_cache, out, scale, lse_scale)
        if form is not None:
            self._calls[form, lse_base] = call
            if len(self._calls) > _MOST_FORMS:
                del self._calls[next(iter(self._calls))]
        return call

    def _checked(self, batch: LiveBatch) -> int:
        return check_batch(batch, self.form.pages, self._shape.page_size, self.form.room)

    def _planned(self, problem: Problem, given: Strategy) -> tuple[Choice, Plan, RequestSchedule]:
        """A choice, its plan and schedule; a plan that has more parts than there is room for is made in fewer."""
        form = self.form
        room = ItemRoom(form.tile, self._shape.page_size, reserve_of(form.most_tokens))
        wanted = self.choices.choose(problem) if given.automatic else given.choose(problem)
        for strategy in in_fewer_parts(wanted.strategy):
            plan = strategy.plan(problem)
            if not strategy.proven:
                verify(plan, problem.tree)
            if not is_served(plan):
                fix = "use query or cohort, or a strategy whose plans have one stage and row intervals"
                raise StrategyError("strategy", str(strategy), "needs launches of its own", fix)
            chunked = form.room.chunk > 0
            made = lower_chunks(plan, problem, form.tile, form.room) if chunked else lower_requests(plan, problem, room)
            if form.room.holds(made):
                reason = wanted.reason if strategy is wanted.strategy else f"{wanted.strategy} needs more room"
                return Choice(strategy, reason), plan, made
            if len(made.claims) > form.room.claims and problem.tree.requests is not None:
                parts, topology, requests = shallow(problem.tree.requests, CLAIMS_PER_ROW)
                return self._planned(problem._replace(tree=Tree(*parts, topology, requests)), given)
        raise PlanError("batch", str(problem.tree), "needs more tables than there is room for", "raise max_tokens")

    @property
    def plan(self) -> Plan | None:
        """Who reads which tokens together, as of the last update."""
        return self._plan

    @property
    def choice(self) -> Choice | None:
        """The strategy of the last update's plan, and why it was taken."""
        return self._choice

    def counters(self) -> dict[str, int]:
        """What has happened so far. Waits for the device.

        - steps: calls of `step`, replays of graphs included.
        - planned, new, refuted, outgrown, invalid: requests, summed over all steps. The plan served the planned ones.
          The others were walked alone: the plan did not know the new ones, a claim about the pages of the refuted ones
          did not hold, and the outgrown ones had more tokens than the plan has room for. The invalid ones had an
          impossible length, page id or number of query rows.
        - plans: calls of `update`, those of `prepare` and `refresh` included.
        - saved_bytes: K and V of one layer that the present plan saves, compared with each request reading its own.
        """
        names = ("steps", "planned", "new", "outgrown", "refuted", "invalid")
        counts = dict(zip(names, self.program.counters.tolist(), strict=True))
        saved = 0
        if self._problem is not None:
            tree, seen = self._problem.tree, self._problem.tree.topology.spans
            read = int(np.dot(seen.lengths, (seen.hi - seen.lo).astype(np.int64)))
            saved = (read - tree.unique_tokens) * self._shape.kv_token_bytes
        return {**counts, "plans": self._plans, "saved_bytes": saved}

    def explain(self, groups: int = 0, formulas: bool = False) -> str:
        """The batch as of the last `update`, its plan and the plan's account, as text. Arguments as of Kernel.explain.
        Raises InputError before the first update.
        """
        if self._problem is None or self._plan is None or self._choice is None:
            raise InputError("kernel", "a kernel without a plan", "has nothing to explain", "call update first")
        counted = lowered(self._plan, self._problem).schedule
        strategy, reason = self._choice.strategy, self._choice.reason
        entry = ExplainedPlan.from_plan(strategy, reason, self._plan, counted, self._problem, fixed=True)
        made = Explanation(self._problem.tree, self._shape, False, self._target, (entry,), self._choice)
        return made.text(groups, formulas)

    def workspace_size(self) -> int:
        """Bytes of device memory for tables and partial results: they follow from the page table and max_tokens."""
        room = self.form.room
        return RequestTables.of(room).words * 4 + (room.slots + room.lone_slots) * self._shape.partial_bytes
