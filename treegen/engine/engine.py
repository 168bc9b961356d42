"""Engine: runs a model and a controller over a pool until all branches have ended.

    schedule ──▶ step.begin ──▶ model: layers, step.attend ──▶ step.end ──▶ controller.decide ──▶ extend, fork, drop

Branches that decode come first in a step, prompts in chunks after them, under a budget of rows. Older branches go
before younger ones. Where pages run out, the youngest branch is preempted: it keeps its tokens, and their KV is
computed again later. A prompt takes over the pages that a running branch has for the same first tokens.

Where the controller selects tokens on the device, the next step is launched before the host has read them.

On several ranks each rank has such an engine, with the same branches. The controller of rank 0 decides for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import index

from treegen.backends.devices import on_device
from treegen.backends.kept_tensors import for_kept_tensors
from treegen.distributed.parallel import Parallel
from treegen.engine.accounting import Accounting
from treegen.engine.ahead import AroundSteps, ahead_of, run_ahead
from treegen.engine.argument_checks import (
    check_controller,
    check_deterministic,
    check_model,
    check_options,
    checked_step_rows,
)
from treegen.engine.attention_kernels import KernelMaker, tree_kernels
from treegen.engine.branch import Branch
from treegen.engine.context_kernels import context_kernels
from treegen.engine.control import BeginsRuns, Continuation, Controller, Drafting, Growth, warm_up
from treegen.engine.engine_checks import check_resting, checked_prompts
from treegen.engine.forward import Forward, Model, StepSizes
from treegen.engine.growth_checks import check_form, check_growth
from treegen.engine.invariant_kernels import invariant_kernels
from treegen.engine.led_controllers import led
from treegen.engine.pool import KVPool
from treegen.engine.prefix import PrefixCache
from treegen.engine.proposals import propose
from treegen.engine.rank_checks import check_context, check_engines, check_parallel, check_prompts, check_step
from treegen.engine.sampling import Sampling
from treegen.engine.scheduling import schedule
from treegen.engine.sequences import SequenceTree
from treegen.engine.tokens_ahead import TokensAhead
from treegen.engine.waiting import WaitingBranches
from treegen.ir.errors import BranchError
from treegen.ir.scalars import plain_number
from treegen.strategies import Strategy

CHUNK_ROWS = 2048
"""The most tokens of a step with prompts, by default.

On an H200, a prompt of 4,000 tokens and Llama-3-8B's shape take 431 ms in steps of 512 tokens, which wait for the host,
and 163 ms in steps of 2,048.
"""
CHUNK_ROWS_APART = 512
"""The same where each query row is a request of its own, whose tables and partial results take more memory."""


class Engine:
    """Decodes prompts with a model, in branches that share the KV of their common tokens.

    Args:
        model: The model, for instance `treegen.integrations.HFModel`.
        controller: Decides how branches grow.
        num_pages: Pages of the KV pool. Those of the longest prompt and of the new tokens of all its branches are
            enough; with more, more branches run before some are preempted.
        page_size: Tokens of a page, a power of two up to 128; of each rank, where ranks divide tokens.
        max_branches: The most branches that run at a time.
        max_rows: The most tokens of a step; by default 2,048, or 512 if deterministic or if ranks divide tokens, and at
            least those of all branches with their drafts.
        strategy: Who reads which KV together, as in `treegen.compile_batch`.
        deterministic: Whether the bits of attention depend on a branch's own tokens alone, by the batch-invariant mode
            of kernels, whatever other branches, pages, chunks of prompts and preemptions there are. Partial results
            take memory for `max_rows` rows. Logits have equal bits as well if the rest of the model computes rows
            alike in batches of any size.
        prefix_cache: Whether pages of branches that have ended are kept, until their room is needed, for prompts that
            begin with the same tokens.
        cuda_graphs: Whether to capture steps in which every branch gets one token, and those with prompts of up
            to 512 rows; by default where the model is on a GPU. The first step of each number of rows takes longer;
            `warm_up` does that ahead.
        make_kernel: Makes the kernels of these steps in place of the strategy's, to compare them. Steps with chunks of
            prompts use the strategy's.
        parallel: How attention is divided among ranks. All of them make an engine, with the same arguments, and call
            its methods with the same prompts. The model has the rank's heads.

    Raises:
        TreegenError: A number is out of range, or the controller needs more branches than run at a time.
        RankError: Ranks have other arguments or other models; all ranks raise it.
    """

    @for_kept_tensors()
    def __init__(
        self,
        model: Model,
        controller: Controller,
        *,
        num_pages: int,
        page_size: int = 16,
        max_branches: int = 64,
        max_rows: int | None = None,
        strategy: str | Strategy = "auto",
        deterministic: bool = False,
        prefix_cache: bool = True,
        cuda_graphs: bool | None = None,
        make_kernel: KernelMaker | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        check_model(model)
        check_parallel(parallel, model)
        check_controller(controller)
        check_options(model.device.type, {"prefix_cache": prefix_cache, "cuda_graphs": cuda_graphs}, make_kernel)
        num_pages, page_size, max_branches = map(plain_number, (num_pages, page_size, max_branches))
        max_rows = plain_number(max_rows)
        options = {
            "num_pages": num_pages, "page_size": page_size, "max_branches": max_branches, "max_rows": max_rows,
            "strategy": strategy, "deterministic": deterministic, "prefix_cache": prefix_cache,
            "cuda_graphs": cuda_graphs,
        }  # fmt: skip
        check_engines(parallel, model, controller, options)
        drafts, trees = 0, False
        if isinstance(controller, Drafting):
            drafts, trees = controller.max_draft, controller.draft_trees
        apart = deterministic or (parallel is not None and parallel.shard.size > 1)
        chunk = CHUNK_ROWS_APART if apart else CHUNK_ROWS
        max_rows = checked_step_rows(controller, drafts, max_branches, max_rows, chunk)
        check_deterministic(deterministic, strategy, make_kernel)
        check_context(parallel, trees, deterministic, make_kernel)
        self.model, self.controller, self.parallel = model, controller, parallel
        shape = replace(model.shape, page_size=page_size)
        self.pool = KVPool(shape, model.layers, num_pages, model.device, None if parallel is None else parallel.shard)
        self.sequences = SequenceTree(self.pool, max_branches, PrefixCache(self.pool) if prefix_cache else None)
        most = min(model.max_tokens, num_pages * self.pool.page_tokens)
        self.accounting = Accounting()
        """What the engine has done, and where its time went."""
        kernels = invariant_kernels if deterministic else tree_kernels(strategy)
        if parallel is not None and self.pool.shard.size > 1:
            kernels = context_kernels(parallel, strategy)
        captures = model.device.type == "cuda" if cuda_graphs is None else cuda_graphs
        sizes = StepSizes(most, max_rows, 1 + drafts, drafts if trees else 0)
        self.forward = Forward(
            model, self.sequences, sizes, (kernels, make_kernel or kernels), self.accounting, captures
        )
        self._waiting: deque[tuple[int, list[int]]] = deque()
        self._undecided = WaitingBranches(self.sequences)
        self._results: list[list[Continuation]] = []

    @for_kept_tensors()
    def run(self, prompts: Sequence[Sequence[int]]) -> list[list[Continuation]]:
        """Decodes prompts until all their branches have ended.

        Args:
            prompts: The tokens of each prompt: a list, an array, or a tensor on the host.

        Returns:
            For each prompt its results, in the order of their labels, and those of equal labels as they ended.

        Raises:
            BranchError: Branches run already, or a prompt is empty, too long, or has other tokens than the model; all
                before any launch. Or a decision of the controller cannot be followed; all branches are dropped.
            PoolError: One branch alone needs more pages than the pool has. All branches are dropped.
            RankError: Ranks have other prompts, with `TREEGEN_CHECK=1`; or the controller of rank 0, which decides for
                all, failed.
        """
        if len(self.sequences):
            raise BranchError("branches", len(self.sequences), "are running", "wait until they have ended")
        most = self.forward.sizes.max_tokens
        checked = checked_prompts(prompts, most, most - self.max_prompt_tokens, self.model)
        if isinstance(self.controller, BeginsRuns):
            self.controller.begin_run(len(checked), self.forward.vocabulary)
        check_prompts(self.parallel, checked)
        self._results = [[] for _ in checked]
        controller = led(self.controller, self.parallel)
        drafting = controller if isinstance(controller, Drafting) else None
        ahead = ahead_of(controller, self.forward)
        try:
            self._waiting.extend(enumerate(checked))
            with on_device(self.pool.device):
                while self._waiting or len(self.sequences):
                    self._admit()
                    self._advance(controller, drafting, ahead)
        finally:  # also when somebody stops it in the middle
            self._waiting.clear()
            self._undecided.clear()
            self.sequences.clear()
        return [sorted(results, key=lambda each: each.label) for results in self._results]

    @property
    def waiting(self) -> int:
        """The prompts of the run that have not begun."""
        return len(self._waiting)

    @property
    def max_prompt_tokens(self) -> int:
        """The most tokens of a prompt: those of a sequence without the new ones, and the drafts of a tree."""
        return self.forward.sizes.max_tokens - self.controller.max_new_tokens - self.forward.sizes.max_tree

    def _admit(self) -> None:
        """Starts waiting prompts while all branches of one more would fit."""
        while self._has_room():
            number, prompt = self._waiting.popleft()
            self.sequences.add(prompt, (number,))

    def _has_room(self) -> bool:
        """Says whether a prompt waits and all its branches would fit."""
        if not self._waiting:
            return False
        running = {branch.label[0] for branch in self.sequences.branches.values()}
        return (len(running) + 1) * self.controller.width <= self.sequences.max_branches

    def _advance(self, controller: Controller, drafting: Drafting | None, ahead: TokensAhead | None) -> None:
        """Takes one step of the model, and does what the controller decides.

        drafting: the controller, if it proposes drafts. ahead: how to run ahead of it, if it selects on the device.
        """
        if drafting is not None:
            with self.accounting.part("control"):
                propose(drafting, self.sequences, self.forward.sizes.max_tokens, self.forward.vocabulary)
        with self.accounting.part("pages"):
            together, width, most = controller.together, controller.width, controller.max_new_tokens
            counts, preempted = schedule(self.sequences, self.forward.step.max_rows, together, width, most)
            self._undecided.forget(preempted)
            self.accounting.preempted += len(preempted)
            check_step(self.parallel, counts, self.sequences)
        frontier = self.forward(counts)
        with self.accounting.part("control"):
            if ahead is not None:
                undecided = self._undecided
                around = AroundSteps(undecided.are_all_but, lambda: not self._has_room(), self._grow, undecided.rest)
                frontier = run_ahead(ahead, frontier, around)
            if controller.together:
                frontier = self._undecided.complete(*frontier)
            if frontier.branches:
                growth = check_form("decide()", controller.decide(frontier))
                check_resting(frontier, growth, controller.together, len(self.sequences) > len(frontier.branches))
                self._undecided.rest_after(frontier, growth)
                self._grow(frontier.branches, growth)

    @for_kept_tensors()
    def warm_up(self) -> None:
        """Captures the graphs of all numbers of rows, also those of a draft model, and compiles what draws tokens where
        the controller has a `sampling`, so that no step does. Without graphs nothing is compiled.

        Raises:
            BranchError: Branches are running.
        """
        sampling = getattr(self.controller, "sampling", None)
        with on_device(self.pool.device):
            logits = self.forward.warm_up()
            if logits is not None and isinstance(sampling, Sampling):
                sampling.select(logits, [(0,)], [0])
            warm_up(self.controller)

    def _grow(
        self, ready: Sequence[Branch], growth: Growth, places: Mapping[tuple[int, int], Branch] | None = None
    ) -> None:
        """Does what the controller has decided about branches.

        places: Where the device has moved drafts and made the forks, the branches that these replace; see `ahead.Grow`.
        """
        grown, results, accepted = growth.grown, growth.results, growth.accepted
        most = self.controller.max_new_tokens
        check_growth(self.sequences, ready, growth, len(self._results), self.forward.vocabulary, most)
        kept = {each.number: accepted.get(each.number, ()) for each in ready if each.drafts}
        self.sequences.keep_drafts(kept, moves=places is None)
        ended = [each.number for each in ready if not grown[each.number] and each.number not in growth.resting]
        forked = [(branch.number, token) for branch in ready for token, _ in grown[branch.number][1:]]
        if places is None:
            forks = iter(self.sequences.replace(ended, [parent for parent, _ in forked]))
        else:
            forks = iter(self.sequences.follow([(places[fork].number, fork[0]) for fork in forked]))
            for number in {*ended} & self.sequences.branches.keys():
                self.sequences.drop(number)
        for branch in ready:
            for place, (token, label) in enumerate(grown[branch.number]):
                own = next(forks) if place else branch
                own.tokens.append(index(token))
                own.label = label
        for result in results:
            self._results[result.label[0]].append(result)
