"""BatchKernel: attention for batches that live. It reads the engine's page table and lengths on the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from treegen.backends import check_inputs
from treegen.backends.bound_call import Call
from treegen.backends.devices import backend_for
from treegen.backends.kv_scales import Scales
from treegen.backends.page_table import PageTable
from treegen.backends.request_program import BatchForm, RequestProgram, TorchRequestProgram
from treegen.codegen.emit import tile_form
from treegen.codegen.kernel_signature import in_same_place
from treegen.cost.late_requests import LateCost, late_cost
from treegen.environment import shares
from treegen.ir.arrays import INT32_MAX, Ints, largest
from treegen.ir.errors import InputError, PlanError, StrategyError
from treegen.ir.live_batch import LiveBatch
from treegen.ir.plan import Plan
from treegen.ir.request_schedule import RequestRoom, RequestSchedule, RequestTables
from treegen.ir.schedule import TileClass
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.ir.tree.requests import shallow
from treegen.ir.verify import verify
from treegen.report.explain import ExplainedPlan, Explanation
from treegen.schedule.by_request import ItemRoom, block_of
from treegen.schedule.pipeline import lowered
from treegen.schedule.query_runs import lower_requests
from treegen.scoring.options import Scoring
from treegen.search.batch_choices import BatchChoices
from treegen.strategies import Choice, Strategy
from treegen.strategies.baselines import query
from treegen.strategies.cohort import Cohort
from treegen.target.problem import Problem
from treegen.target.targets import Target
from treegen.target.tile_config import SMALL_ROWS, lanes_of, rows_per_tile, tile_class
from treegen.timed import stage

Program: TypeAlias = "RequestProgram | TorchRequestProgram"

RESERVE = 2048
"""Tokens that every request may gain until it is walked alone, if there is no new plan."""
GROWN = 128
"""Tokens that a request gains until `refresh` makes a new plan. On an H200 64 requests of 4,096 tokens take 1.04 times
as long with a plan made so much earlier as with a fresh one.
"""
_WAVES = 1.5
"""Times that the work items of a plan fill the GPU, at most, besides one for every request. On an H200 no batch of the
suite gains from more, and thread blocks without work take 1.1 us a thousand.
"""
_PARTS_PER_ROW = 3
"""Partial results of every row, on average at most, besides those of the items that fill the GPU."""
_CLAIMS_PER_ROW = 8
"""Requests that a request has pages of, on average at most; where there are more, each shares with so many."""
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
        self._shape, self._pages, self._target, self._options = shape, pages, target, options
        self._most_tokens = most_tokens
        self._backend = backend_for(pages.table.device, options.backend)
        self._tile = _tile_of(shape, target)
        positions = options.scoring is not None and options.scoring.positions
        requests = len(pages.seq_lens)
        if most_rows is None and pages.qo_indptr is not None:
            most_rows = requests
        self._room = room_of(shape, self._tile, requests, most_tokens, target.sms, most_rows, positions=positions)
        if RequestTables.of(self._room).words > INT32_MAX:
            found = f"{most_tokens} for {self._room.rows} rows"
            raise InputError("max_tokens", found, "needs tables of 8 GiB or more", "give fewer tokens, or fewer rows")
        self._calls: dict[tuple[object, str], Call] = {}
        self._program: Program | None = None
        self._plan: Plan | None = None
        self._made: RequestSchedule | None = None
        self._choice: Choice | None = None
        self.choices = BatchChoices(self._tile, self._room.items)
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
                options = self._options
                form = BatchForm(
                    self._tile, self._room, self._shape, self._pages, self._most_tokens, options.scales, options.scoring
                )
                on_gpu = self._backend == "triton"
                self._program = RequestProgram(form) if on_gpu else TorchRequestProgram(form)
        return self._program

    def update(self, batch: LiveBatch, strategy: Strategy | None = None) -> None:
        """Plans for the requests of a batch, with what they share; the next `step` uses the plan. strategy: makes this
        plan in place of the kernel's own strategy.

        Host work alone, and one copy that is not waited for. Raises InputError for more requests than the page table
        has lengths for, and for other page sizes; the kernel then goes on with the plan that it has.
        """
        rows = self._check(batch)
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
        rows = self._check(batch)
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
            or int(((batch.tokens - seen.tokens) * (batch.epoch == seen.epoch)).max(initial=0)) >= GROWN
            or (seen.changes != batch.changes and self._pays(batch))
        ):
            self.update(batch)
            return True
        if seen.moves != batch.moves:
            self.seat(batch)
            self._seen = seen._replace(moves=batch.moves)
        return False

    def _pays(self, batch: LiveBatch) -> bool:
        """Whether to plan anew, after another step in which requests may have been walked alone."""
        cost = self._late(batch)
        self._late_us += cost.late_us + _ALONE_US
        return cost.layer_us * self._layers > 1.5 * _PLAN_US or self._late_us * self._layers > _PLAN_US

    def _late(self, batch: LiveBatch) -> LateCost:
        """What it costs that the plan is the one before."""
        assert self._made is not None
        assert self._problem is not None
        return late_cost(batch, self._made, self._room, self._tile, self._problem)

    def seat(self, batch: LiveBatch) -> None:
        """Takes who is running, and in which rows, without a new plan: requests that came, moved or were forked since
        the last `update` are walked alone. Some microseconds of host work, and one copy that is not waited for.
        """
        self._seat(batch, self._check(batch))

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
            self._check_tensors(q, k_cache, v_cache, out)
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

    def _check_tensors(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor | None
    ) -> None:
        """Raises InputError unless tensors fit the shape, the page table and one another."""
        shape, pages = self._shape, self._pages
        found = check_inputs.shape_of(q, k_cache, v_cache, shape.kv_layout)
        if shape.shared_kv and not in_same_place(k_cache, v_cache):
            fix = f"give k_cache[..., :{shape.head_dim_v}], or a shape without shared_kv"
            raise InputError("v_cache", str(found), "is not the beginning of k_cache, as shared_kv says", fix)
        # Tensors do not show these two.
        found = replace(found, partial_dtype=shape.partial_dtype, shared_kv=shape.shared_kv)
        check_inputs.check_shape(shape, found)
        if q.device != pages.table.device:
            raise InputError("q", q.device, f"is not on the page table's device {pages.table.device}", "move it there")
        if len(q) > self._room.rows:
            fix = "give at most a row for each"
            reason = f"the page table has {self._room.rows} lengths"
            if pages.qo_indptr is not None:
                reason, fix = f"is more than max_rows, {self._room.rows}", "give fewer, or a larger max_rows"
            raise InputError("q", f"{len(q)} rows", reason, fix)
        if len(k_cache) < pages.num_pages:
            reason = f"the page table says {pages.num_pages}"
            raise InputError("k_cache", f"{len(k_cache)} pages", reason, "give the whole cache, or a smaller num_pages")
        if self._options.scoring is not None:
            self._options.scoring.check(found, q.device)
        if out is not None:
            check_inputs.check_output(out, q, found.head_dim_v)
        named = (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out), *self._options.read)
        check_inputs.refuse_gradients(check_inputs.needing_gradients(named))
        check_inputs.check_strides(self._tile.tokens, k_cache, v_cache, shape.kv_layout)

    def _check(self, batch: LiveBatch) -> int:
        """How many rows the batch needs. Raises InputError unless the kernel serves such a batch."""
        if not isinstance(batch, LiveBatch):
            raise InputError("batch", type(batch).__name__, "is not a LiveBatch", "give treegen.LiveBatch")
        if batch.page_size != self._shape.page_size:
            reason = f"differs from the shape's {self._shape.page_size}"
            raise InputError("batch.page_size", batch.page_size, reason, "give both the same")
        most, seats = largest(batch.row), self._room.seats
        if most >= seats or (len(batch.row) > seats and largest(batch.row[seats:]) >= 0):
            raise InputError(
                "batch",
                f"{len(batch)} requests, row {most}",
                f"the page table has {seats} lengths",
                "make a kernel for more",
            )
        if self._pages.qo_indptr is None:
            if (rows := largest(batch.rows)) > 1:
                seat = int(batch.rows.argmax())
                fix = "give PageTable a qo_indptr, or each request one row"
                raise InputError(f"batch.rows[{seat}]", rows, "needs to know where the request's rows are in q", fix)
            return most + 1
        total = int(batch.rows.dot(batch.row >= 0))
        if total > self._room.rows:
            reason = f"have more than max_rows, {self._room.rows}, query rows: {total}"
            raise InputError("batch", f"{len(batch)} requests", reason, "make a kernel for more")
        return total

    def _planned(self, problem: Problem, given: Strategy) -> tuple[Choice, Plan, RequestSchedule]:
        """A choice, its plan and schedule; a plan that has more parts than there is room for is made in fewer."""
        reserve = min(RESERVE, self._most_tokens)
        room = ItemRoom(self._tile, self._shape.page_size, reserve)
        wanted = self.choices.choose(problem) if given.automatic else given.choose(problem)
        for strategy in _with_fewer_parts(wanted.strategy):
            plan = strategy.plan(problem)
            if not strategy.proven:
                verify(plan, problem.tree)
            if not is_served(plan):
                fix = "use query or cohort, or a strategy whose plans have one stage and row intervals"
                raise StrategyError("strategy", str(strategy), "needs launches of its own", fix)
            made = lower_requests(plan, problem, room)
            if self._room.holds(made):
                reason = wanted.reason if strategy is wanted.strategy else f"{wanted.strategy} needs more room"
                return Choice(strategy, reason), plan, made
            if len(made.claims) > self._room.claims and problem.tree.requests is not None:
                parts, topology, requests = shallow(problem.tree.requests, _CLAIMS_PER_ROW)
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

        steps: calls of `step`, replays included. Of all requests in all of them: planned, served by the plan; new,
        alone as the plan did not know them; refuted, alone as a claim about their pages did not hold; outgrown, alone
        as they had outgrown the plan; invalid, with an impossible length or page id. plans: calls of `update`, of
        `refresh` as well. saved_bytes: K and V of one layer that the present plan does not read from memory again.
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
        shape = self._shape
        return RequestTables.of(self._room).words * 4 + (self._room.slots + self._room.lone_items) * shape.partial_bytes


def is_served(plan: Plan) -> bool:
    """Whether a plan is of the form that the tables of kernels for batches have room for."""
    plain = plan.merge == "reduce" and plan.mask == "interval" and not plan.blocks and not plan.fixed_block
    return plain and not np.count_nonzero(plan.stage)


def room_of(
    shape: Shape,
    tile: TileClass,
    requests: int,
    most_tokens: int,
    sms: int,
    max_rows: int | None = None,
    *,
    positions: bool = False,
) -> RequestRoom:
    """What any plan for so many requests of so many tokens may take, which follows from nothing else. max_rows: query
    rows of all requests together, where these may have several; None where each has one.
    """
    rows = requests if max_rows is None else max_rows
    lanes, per_tile = lanes_of(tile, shape), rows_per_tile(tile.rows, shape.group)
    filling = math.ceil(_WAVES * 2 * sms / lanes)
    items = rows + filling
    slots = _PARTS_PER_ROW * rows + 2 * filling * per_tile
    entries = 8 * items + 4 * rows
    page_size, packed = shape.page_size, tile.tokens // block_of(shape.page_size)
    tiles = -(-(most_tokens + min(RESERVE, most_tokens)) // tile.tokens)
    lone_items = max(-(-rows // per_tile), math.ceil(sms / lanes))
    lone_rows = 1 << (-(-rows // lone_items) - 1).bit_length()
    _, tile_width = tile_form(tile.tokens, page_size, positions=positions)
    return RequestRoom(
        seats=requests,
        items=items,
        rows=rows,
        entries=entries,
        claims=_CLAIMS_PER_ROW * requests,
        slots=slots,
        merge_slots=slots,
        tiles=rows * tiles,
        blocks=entries * packed,
        lone_items=lone_items,
        lone_rows=lone_rows,
        lone_tiles=lone_rows * tiles,
        lone_blocks=lone_rows * packed,
        tile_width=tile_width,
        run_width=5 if positions else 4,
        queries=max_rows is not None,
    )


def _with_fewer_parts(strategy: Strategy) -> Iterator[Strategy]:
    """The strategy, then with longer and longer parts, and at last one item for every request, which always fits."""
    yield strategy
    split = strategy.options.get("split")
    if isinstance(split, int):
        for longer in (2 * split, 4 * split, 8 * split):
            yield replace(strategy, split=longer) if isinstance(strategy, Cohort) else query(longer)
    yield query()


def _tile_of(shape: Shape, target: Target) -> TileClass:
    """The one tile class of all plans: the large one, with masks."""
    return replace(tile_class(shape, target, SMALL_ROWS + 1), mask="interval", block=block_of(shape.page_size))
