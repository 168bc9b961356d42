"""BatchKernel: attention for running batches. It reads the engine's page table and lengths on the device."""

from __future__ import annotations

from copy import copy
from typing import NoReturn, TypeAlias

import torch

import treegen.compiled.c_library as c_library
from treegen.backends import check_inputs
from treegen.backends.bound_call import Call
from treegen.backends.devices import backend_for
from treegen.backends.page_table import PageTable
from treegen.backends.request_program import RequestProgram
from treegen.backends.torch_request_program import TorchRequestProgram
from treegen.compiled.batch_tree import BatchTree
from treegen.cost.token_rates import TokenRates
from treegen.environment import shares
from treegen.ir.errors import InputError, PlanError, StrategyError
from treegen.ir.live_batch import LiveBatch
from treegen.ir.plan import Plan
from treegen.ir.request_tables import RequestTables
from treegen.ir.shape import Shape
from treegen.report.explain import Explanation
from treegen.runtime.batch_checks import check_batch, check_tensors, chosen_strategy
from treegen.runtime.batch_plans import BatchPlan, plan_batch
from treegen.runtime.batch_room import form_for
from treegen.runtime.call_options import BatchOptions
from treegen.runtime.explained_kernel import ExplainedKernel
from treegen.runtime.kept_calls import KeptCalls
from treegen.runtime.kernel_text import batch_explanation
from treegen.runtime.replanning import Replanning
from treegen.search.batch_choices import BatchChoices
from treegen.strategies import Choice, Strategy
from treegen.target.targets import Target
from treegen.timed import phase

BatchProgram: TypeAlias = "RequestProgram | TorchRequestProgram"


class BatchKernel(ExplainedKernel):
    """An attention kernel for the running batches of a server. `treegen.compile_batch` makes it.

        kernel = treegen.compile_batch(shape, pages, max_tokens=131072)
        batch = treegen.LiveBatch(page_size=16)
        batch.add(tokens=900)
        kernel.prepare(batch)                 # before a decode step: takes the running requests
        kernel.step()                         # once per decode step: reads the page table and lengths
        out = kernel(q, k_cache, v_cache)     # once per layer
        kernel.refresh(batch)                 # while the device works: plans, if that pays

    A plan relies on claims: statements of the batch that requests share pages. Each `step` checks them against the page
    table. A request is served alone, through its own row of the page table, if one of the plan's claims about it fails,
    or the plan does not know it. Its results are right in the same step; it only takes longer, until the next `update`.
    Growth needs no host work.

    CUDA graphs: `step` and calls can be captured after one call outside of a capture. Replays use the latest `update`
    and `seat`, and the present page table and lengths. A call computes all rows of running requests, and leaves out and
    lse of other rows as they are. q may end with the last row of a running request; capture a graph with the most rows
    that its replays will need. Keep the kernel while its graphs are in use, because they read its tables.

    Threads and streams: one thread and one stream at a time may use a kernel. It cannot be copied or pickled.

    For debugging, `form` has sizes and options, `choices` chooses for `auto`, `replanning` decides when a plan pays.
    """

    device_tables = device_lengths = True
    """The page table and the lengths are read on the device alone: an engine may change them there."""

    def __init__(
        self, shape: Shape, pages: PageTable, target: Target, options: BatchOptions, most_tokens: int,
        most_rows: int | None = None,
    ) -> None:  # fmt: skip
        self._shape, self._target, self._options = shape, target, options
        self._backend = backend_for(pages.table.device, options.backend)
        self.form = form = form_for(shape, pages, target, options, most_tokens, most_rows)
        self.choices = BatchChoices(form.shape, target, form.config, form.room.items)
        rates = TokenRates.of(form.config, shape, target, form.window_left)
        self.replanning = Replanning(form.room, rates, most_tokens)
        self._calls: KeptCalls[Call] = KeptCalls()
        self._program: BatchProgram | None = None
        self._planned: BatchPlan | None = None
        self._rows = 0
        with phase("load C"):
            c_library.library()  # a machine's first one compiles it, so that no step waits for that

    def __reduce__(self) -> NoReturn:
        raise InputError("kernel", "a BatchKernel", "cannot be copied: it reads an engine's tensors", "make another")

    @property
    def program(self) -> BatchProgram:
        """The program on the device, made at the first use."""
        if self._program is None:
            with phase(f"prepare {self._backend}"):
                on_gpu = self._backend == "triton"
                self._program = RequestProgram(self.form) if on_gpu else TorchRequestProgram(self.form)
        return self._program

    def update(self, batch: LiveBatch, strategy: str | Strategy | None = None) -> None:
        """Plans for the requests of a batch and the pages that they share; the next `step` uses the plan.

        Where no plan can be made, the kernel keeps its plan, and takes the running requests as `seat` does.

        Args:
            batch: The running requests.
            strategy: Makes this plan instead of the kernel's own strategy.

        Raises:
            InputError: The batch has more requests than the page table has lengths, more query rows than `max_rows`, or
                pages of another size. The kernel keeps its plan.
            StrategyError: The strategy makes plans that this kernel cannot use, or the kernel is batch-invariant.
            PlanError: No plan has room, as where a request is far longer than `max_tokens`.
        """
        wanted = self._options.strategy if strategy is None else chosen_strategy(strategy, self.form)
        self._plan(batch, copy(batch), wanted)

    def _plan(self, batch: LiveBatch, then: LiveBatch, wanted: Strategy) -> None:
        """Plans for `then`, a copy of the batch that nobody changes: as it is, or as the next step will find it."""
        rows, replanning = check_batch(self.form, batch), self.replanning
        with phase("plan"):
            tree = replanning.steady(batch, BatchTree.of_batch(then, shared=shares()))
            free_share = replanning.free_share(batch)
            try:
                planned = plan_batch(tree, self._target, wanted, self.choices, self.form, free_share)
            except (PlanError, StrategyError):
                self.seat(batch)  # so that the next step serves these requests
                raise
        try:
            replanning.note_plan(batch, then, planned)
            self.program.load(planned.tables, replanning.running(batch))
            self._planned, self._rows = planned, rows
            replanning.note_seats(batch)
        except BaseException:  # stopped in the middle: the next call plans anew
            replanning.forget_plan()
            raise

    def prepare(self, batch: LiveBatch) -> bool:
        """Takes the running requests before a step, and plans only if the step cannot wait for `refresh`.

        Does nothing while requests of one query row only grow. Does what `seat` does where requests came, ended or
        moved: those that the plan does not know are served alone until `refresh` plans. Plans as `update` does where
        there is no plan for this batch, or where the layers of the step would lose more than 4 ms because requests are
        served alone. 0.3 ms are enough where chunks of prompts that the plan expects did not come.

        Args:
            batch: The running requests.

        Returns:
            Whether it made a plan.

        Raises:
            InputError, StrategyError, PlanError: As of `update`.
        """
        new, moved = self.replanning.is_new(batch), self.replanning.has_moved(batch)
        if new:
            check_batch(self.form, batch)  # before anything is noted of it
        plans = new or ((moved or self.form.room.queries) and self.replanning.cannot_wait(batch))
        self.replanning.note_prepared(batch)
        if plans:
            self._plan(batch, copy(batch), self._options.strategy)
            return True
        if moved:
            self.seat(batch)
        return False

    def refresh(self, batch: LiveBatch) -> bool:
        """Plans for later steps if that pays. Call it after the launches of a step, while the device works.

        Not between `prepare` and the launches: a plan may be for the chunks of prompts that the step after will bring.

        A plan pays where requests ended, or outgrew the present plan, or where steps have lost more time than a plan
        takes, because requests are served alone or could share more. docs/batches.md lists the cases.

        Args:
            batch: The running requests.

        Returns:
            Whether a plan was made, for the next `step` on. Else it takes the seats, if requests came, ended or moved.

        Raises:
            InputError, StrategyError, PlanError: As of `update`.
        """
        self.replanning.note_lateness(batch)
        if self.replanning.pays(batch):
            self._plan(batch, self.replanning.ahead(batch), self._options.strategy)
            return True
        if self.replanning.has_moved(batch):
            self.seat(batch)
        return False

    def seat(self, batch: LiveBatch) -> None:
        """Takes the running requests and their rows, without a new plan.

        Requests that came, moved or were forked since the last `update` are served alone, unless the plan serves them:
        in seats that it knows, if they are not much longer than planned and share what it assumes of the seat. Where an
        owner has ended, the plan reads the shared pages from its heir. Takes some microseconds, and a copy that nobody
        waits for.

        Args:
            batch: The running requests.

        Raises:
            InputError: As of `update`.
        """
        rows = check_batch(self.form, batch)
        self.program.seat(self.replanning.running(batch))
        self._rows = rows
        self.replanning.note_seats(batch)

    def step(self) -> None:
        """Reads the page table and lengths, for all calls up to the next step."""
        self.replanning.note_step()
        self.program.step()

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
        out: torch.Tensor | None = None, return_lse: bool = False, lse_base: str = "ln",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Computes attention of each request's query rows over the tokens that they see.

        Args:
            q: `[rows, num_qo_heads, head_dim]`, in the order of the batch, or where the page table's qo_indptr places
                the rows.
            k_cache: `[pages, page_size, num_kv_heads, head_dim]` in the shape's kv_layout; with pages of one token
                `[slots, num_kv_heads, head_dim]`.
            v_cache: The same with head_dim_v.
            out: Where the result goes; by default a new tensor.
            return_lse: Whether to return the log-sum-exp as well.
            lse_base: "ln" for the natural logarithm, "log2" for base 2.

        Returns:
            out `[rows, num_qo_heads, head_dim_v]` of q's type; with return_lse also the float32 log-sum-exp `[rows,
            num_qo_heads]`. A row without tokens or with impossible page ids gives 0, and -inf or its sink.

        Raises:
            InputError: A tensor does not fit, or q has fewer rows than the batch; before any launch.
        """
        self.replanning.calls += 1
        form = check_inputs.form_of(q, k_cache, v_cache, out, self._options.read)
        call = self._calls.get((form, lse_base)) if form is not None and isinstance(lse_base, str) else None
        if call is None:
            check_tensors(self.form, q, k_cache, v_cache, out, self._options.read)
        if out is None:
            out = torch.empty(*q.shape[:2], self._shape.head_dim_v, dtype=q.dtype, device=q.device)
        if call is None:
            scale = self._shape.head_dim**-0.5 if self._options.sm_scale is None else self._options.sm_scale
            call = self.program.bind(q, k_cache, v_cache, out, scale, check_inputs.lse_scale(lse_base))
            if form is not None:
                self._calls.keep(form, lse_base, call)
        if len(q) < self._rows:
            raise InputError("q", f"{len(q)} rows", f"is less than the batch's {self._rows}", "give one for each")
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        call(q, k_cache, v_cache, out, lse)
        return out if lse is None else (out, lse)

    @property
    def planned(self) -> BatchPlan | None:
        """The plan of the last `update`, with its problem, choice and schedule; None before the first one."""
        return self._planned

    @property
    def plan(self) -> Plan | None:
        """The plan of the last `update`: which rows read which tokens together; None before the first one."""
        return None if self._planned is None else self._planned.plan

    @property
    def choice(self) -> Choice | None:
        """The strategy of the last `update`, and the reason for it; None before the first one."""
        return None if self._planned is None else self._planned.choice

    @property
    def rows(self) -> int:
        """The rows of q that a call needs at least."""
        return self._rows

    def counters(self) -> dict[str, int]:
        """Counts steps, plans, and requests by the way in which they were served. Waits for the device.

        - steps: calls of `step`, and replays of graphs that captured one.
        - planned, new, refuted, outgrown, invalid: requests, summed over all steps. The plan served the planned ones.
          The others were served alone: the plan did not know the new ones, a claim about the pages of the refuted ones
          failed or they were too short, and the outgrown ones had more tokens than the plan has room for. The invalid
          ones had an impossible length, page id or number of query rows.
        - plans: calls of `update`, also those by `prepare` and `refresh`. plan_age: steps since the last one.
        - saved_bytes: bytes of K and V of a layer that the plan saves, compared with each request reading its own.
        """
        names = ("steps", "planned", "new", "outgrown", "refuted", "invalid")
        counts = dict(zip(names, self.program.counters.tolist(), strict=True))
        saved = 0 if self._planned is None else self._planned.saved_bytes
        age = int(self.program.plan_age)
        return {**counts, "plans": self.replanning.plans, "plan_age": age, "saved_bytes": saved}

    def _explanation(self) -> tuple[str, Explanation]:
        return batch_explanation(self._planned, self.form.scoring)

    def workspace_size(self) -> int:
        """Counts the bytes of device memory for tables and partial results, by sizes and `max_tokens` alone."""
        room = self.form.room
        return RequestTables.of(room).words * 4 + (room.slots + room.lone_partials) * self._shape.partial_bytes
