"""Histories of pages: a state machine grows, forks, preempts and ends branches as engines do, and steps run ahead.

A step here is a `Step` without a model: where it has a row, it writes a number that stands for the row's tokens. On the
CPU a call has ended when it returns, so that work on the pool is done in the order in which it is called: the order of
the one stream that engines use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from treegen import Shape
from treegen.engine import Branch, KVPool, PrefixCache, SequenceTree, Step
from treegen.engine.draft_trees import DraftTree
from treegen.engine.scheduling import schedule
from treegen.engine.shared_pages import share_by_prompt
from treegen.engine.tokens_ahead import UNKNOWN
from treegen.ir.errors import BranchError, PoolError

LAYERS, LONGEST, ROWS, DRAFTS = 2, 1000, 40, 4
TOKENS = st.integers(0, 1)
TREES = st.lists(st.tuples(TOKENS, st.integers(0, DRAFTS)), max_size=DRAFTS).map(
    lambda drafts: DraftTree(
        [token for token, _ in drafts], [back % (place + 1) - 1 for place, (_, back) in enumerate(drafts)]
    )
)
PROMPTS = st.builds(  # most begin alike, by some pages
    lambda begin, tail: [7] * begin + tail, st.integers(0, 40), st.lists(TOKENS, min_size=1, max_size=6)
)


def values_of(tokens: Sequence[int], parents: Sequence[int] = ()) -> list[float]:
    """A number for each token that stands for its KV, which depends on all tokens up to it.

    parents: for the last tokens, which are drafts: the number of the draft that each one follows.
    """
    given = len(tokens) - len(parents)
    values: list[float] = []
    for place, token in enumerate(tokens):
        before = place - 1 if place < given else given + parents[place - given]
        values.append(float(hash((int(values[before]) if before >= 0 else 0, token)) % (1 << 22)))
    return values


def path_to(draft: int, parents: Sequence[int]) -> list[int]:
    """The drafts from the first one to this one."""
    return [] if draft < 0 else [*path_to(parents[draft], parents), draft]


class PageHistories(RuleBasedStateMachine):
    """Branches of a pool, and the laws of their pages after everything that may happen to them."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]), room=st.integers(2, 12), seats=st.integers(2, 6), cached=st.booleans(),
        together=st.booleans(), prompts=st.lists(PROMPTS, min_size=1, max_size=3),
    )  # fmt: skip
    def begin(
        self, page_size: int, room: int, seats: int, cached: bool, together: bool, prompts: list[list[int]]
    ) -> None:
        pages = room * 5 if page_size == 1 else room
        self.pool = KVPool(Shape(2, 1, 16, dtype="fp32", page_size=page_size), LAYERS, pages)
        self.tree = SequenceTree(self.pool, seats, PrefixCache(self.pool) if cached else None)
        self.together, self.size, self.prompts = together, page_size, 0
        self.steps = {new: Step(self.tree, LONGEST, ROWS, max_new=new, max_tree=DRAFTS) for new in (1 + DRAFTS, ROWS)}
        self.shortened: set[int] = set()  # branches with fewer tokens than the live batch knows, until their next step
        self.sources: list[tuple[torch.Tensor, torch.Tensor]] = []  # what copies to the device read, and its contents
        for prompt in prompts[:seats]:
            self.add(prompt)

    @property
    def branches(self) -> list[Branch]:
        return list(self.tree.branches.values())

    def one(self, place: int) -> Branch:
        return self.branches[place % len(self.branches)]

    # What happens to branches

    @precondition(lambda self: len(self.tree) < self.tree.max_branches)
    @rule(prompt=PROMPTS)
    def add(self, prompt: list[int]) -> None:
        self.tree.add(prompt, (self.prompts,))
        self.prompts += 1

    @precondition(lambda self: 0 < len(self.tree) < self.tree.max_branches)
    @rule(place=st.integers(0, 5))
    def fork(self, place: int) -> None:
        parent = self.one(place)
        child = self.tree.fork(parent.number)
        assert (child.tokens, child.label, child.prompt) == (parent.tokens, parent.label, parent.prompt)
        assert child.stored == parent.stored or not self.tree.available
        assert not parent.stored % self.size or set(child.pages) & {parent.pages[-1]} == set()

    @precondition(lambda self: len(self.tree))
    @rule(ended=st.sets(st.integers(0, 5), max_size=3), parents=st.lists(st.integers(0, 5), max_size=4))
    def replace(self, ended: set[int], parents: list[int]) -> None:
        running = self.branches
        ending = [running[place] for place in ended if place < len(running)]
        going = [running[place] for place in parents if place < len(running) and place not in ended]
        del going[self.tree.max_branches - len(running) + len(ending) :]
        forks = self.tree.replace([branch.number for branch in ending], [branch.number for branch in going])
        for parent, child in zip(going, forks, strict=True):
            assert (child.tokens, child.label, child.prompt) == (parent.tokens, parent.label, parent.prompt)
            assert child.stored == parent.stored or not self.tree.available
            assert not parent.stored % self.size or {*child.pages} & {parent.pages[parent.stored // self.size]} == set()
        followed = {child.seat: child.number for child in forks}
        for branch in ending:
            if branch.number in self.shortened and branch.seat in followed:
                self.shortened.add(followed[branch.seat])
            self.shortened.discard(branch.number)
        assert not {*self.tree.branches} & {branch.number for branch in ending}

    @precondition(lambda self: len(self.tree))
    @rule(place=st.integers(0, 5), tokens=st.lists(TOKENS, min_size=1, max_size=3))
    def extend(self, place: int, tokens: list[int]) -> None:
        self.tree.extend(self.one(place).number, tokens)

    @precondition(lambda self: len(self.tree))
    @rule(place=st.integers(0, 5))
    def drop(self, place: int) -> None:
        branch = self.tree.drop(self.one(place).number)
        self.shortened.discard(branch.number)
        with pytest.raises(BranchError, match="is not running"):
            self.tree.fork(branch.number)

    @precondition(lambda self: len(self.tree))
    @rule(place=st.integers(0, 5), adopts=st.booleans())
    def preempt(self, place: int, adopts: bool) -> None:
        branch = self.one(place)
        self.tree.preempt(branch.number)
        self.shortened.discard(branch.number)
        if adopts:
            before = self.pool.free
            assert self.tree.adopt(branch.number) == branch.stored < len(branch.tokens)
            assert self.pool.free == before

    @precondition(lambda self: self.tree.cache is not None and self.tree.cache.evictable)
    @rule(count=st.integers(0, 30))
    def evict(self, count: int) -> None:
        assert self.tree.cache is not None
        able, before = self.tree.cache.evictable, self.pool.free
        assert self.tree.cache.evict(count) == self.pool.free - before == min(count, able)

    # Steps

    @precondition(lambda self: len(self.tree))
    @rule(rows=st.integers(1, ROWS), rounds=st.integers(1, 6), drafts=TREES, accepted=st.integers(-1, DRAFTS - 1),
          tokens=st.lists(TOKENS, min_size=2, max_size=2))  # fmt: skip
    def decode(self, rows: int, rounds: int, drafts: DraftTree, accepted: int, tokens: list[int]) -> None:
        """Steps of an engine, before which every branch gets a token, and some get a tree of drafts."""
        for _ in range(rounds):
            for place, branch in enumerate(self.branches):
                if not branch.pending:
                    branch.tokens.append(tokens[place % 2])
            self._propose(drafts, rows)
            if not self._step(rows):
                return
            for branch in self.branches:
                if branch.drafts:
                    path = path_to(min(accepted, branch.drafts - 1), branch.draft_parents)
                    if len(path) < branch.drafts:
                        self.shortened.add(branch.number)
                    kept = [branch.tokens[len(branch.tokens) - branch.drafts + draft] for draft in path]
                    before = branch.tokens[: len(branch.tokens) - branch.drafts]
                    self.tree.keep_drafts({branch.number: path})
                    assert branch.tokens == before + kept

    @precondition(lambda self: len(self.tree))
    @rule(tokens=st.lists(st.tuples(TOKENS, st.booleans()), min_size=6, max_size=6), rounds=st.integers(1, 3))
    def run_ahead(self, tokens: list[tuple[int, bool]], rounds: int) -> None:
        """Steps that are launched before the host knows their tokens; branches end by these while one is under way."""
        if not self._stores_all():
            return
        for _ in range(rounds):
            branches = self.branches
            counts = dict.fromkeys((branch.number for branch in branches), 1)
            if not branches or self.tree.pages_missing(counts) > self.tree.available:
                return
            chosen = [token for token, _ in tokens[: len(branches)]]
            known = [[*branch.tokens, token] for branch, token in zip(branches, chosen, strict=True)]
            for branch in branches:
                branch.tokens.append(UNKNOWN)
            self._take(counts, known)
            self._forget_unknown(branches)
            self._go_on(branches, tokens)

    @precondition(lambda self: len(self.tree) > 1)
    @rule(tokens=st.lists(st.tuples(TOKENS, st.booleans()), min_size=6, max_size=6), rounds=st.integers(1, 4),
          wanted=st.lists(st.lists(st.integers(0, 5), min_size=6, max_size=6), min_size=4, max_size=4))  # fmt: skip
    def fork_ahead(self, tokens: list[tuple[int, bool]], rounds: int, wanted: list[list[int]]) -> None:
        """Steps in which the device makes forks, before the host knows their parents."""
        if not self._stores_all():
            return
        share_by_prompt(self.tree.live, self.branches, self.size)
        for chosen in wanted[:rounds]:
            branches = sorted(self.branches, key=lambda branch: self.tree.live.row[branch.seat])
            counts = dict.fromkeys((branch.number for branch in branches), 1)
            if not branches or self.tree.pages_missing(counts) > self.tree.available:
                return
            parents = self._parents(branches, chosen[: len(branches)])
            known = [[*branches[parent].tokens, token] for parent, (token, _) in zip(parents, tokens, strict=False)]
            for branch in branches:
                branch.tokens.append(UNKNOWN)
            self._take(counts, known, parents)
            self._forget_unknown(branches)
            rows = self.tree.live.row.take([branch.seat for branch in branches]).tolist()
            forks = [place for place, parent in enumerate(parents) if parent != place]
            made = self.tree.follow([(branches[place].number, branches[parents[place]].number) for place in forks])
            for place, fork in zip(forks, made, strict=True):
                assert fork.seat == branches[place].seat
                branches[place] = fork
            self._go_on(branches, tokens)
            here = {
                row: branch for row, branch in zip(rows, branches, strict=True) if branch.number in self.tree.branches
            }
            self.steps[1 + DRAFTS].forked(here, [rows[place] for place in forks])
            self.pages_are_free_or_held()
            self.the_live_batch_is_true()

    def _stores_all(self) -> bool:
        """Takes steps until no branch has pending tokens; says whether there are pages for that."""
        for _ in range(10):
            if not any(branch.pending for branch in self.branches) or not self._step(ROWS):
                break
        return not any(branch.pending for branch in self.branches)

    @staticmethod
    def _forget_unknown(branches: list[Branch]) -> None:
        """Takes back the tokens of the step under way, which the host has now read."""
        for branch in branches:
            branch.tokens.pop()
            branch.stored -= 1

    def _go_on(self, branches: list[Branch], tokens: list[tuple[int, bool]]) -> None:
        """Gives each branch the token that was read, or ends it."""
        for branch, (token, ends) in zip(branches, tokens, strict=False):
            if ends:
                self.tree.drop(branch.number)
            else:
                branch.tokens.append(token)
                branch.stored += 1

    @staticmethod
    def _parents(branches: list[Branch], wanted: list[int]) -> list[int]:
        """The wanted parents that are like their forks, and go on in their own places."""

        def alike(place: int, other: int) -> bool:
            pair = branches[place], branches[other]
            return pair[0].label == pair[1].label and pair[0].stored == pair[1].stored

        known = [other % len(branches) for other in wanted]
        known = [other if alike(place, other) else place for place, other in enumerate(known)]
        return [other if known[other] == other else place for place, other in enumerate(known)]

    def _step(self, rows: int) -> bool:
        """Takes the step that is scheduled; says whether there is one."""
        try:
            counts, _ = schedule(self.tree, rows, self.together)
        except PoolError as error:
            self._refused(error)
            return False
        assert 0 < sum(counts.values()) <= max(rows, len(self.tree) * (1 + DRAFTS))
        assert self.tree.pages_missing(counts) <= self.tree.available
        self._take(counts, [self.tree[number].tokens for number in counts])
        return True

    def _propose(self, drafts: DraftTree, rows: int) -> None:
        """Appends drafts to branches that decode, where an engine has room for them."""
        able = [branch for branch in self.branches if branch.stored and branch.pending == 1]
        counts = {branch.number: 1 + len(drafts.tokens) for branch in able}
        young = [branch for branch in self.branches if not branch.stored and branch.pending == 1]
        fits = self.tree.pages_missing(counts) + len(young) <= self.tree.available
        if fits and rows >= len(self.tree) * (1 + DRAFTS):
            for branch in able:
                self.tree.propose(branch.number, drafts)

    def _take(self, counts: dict[int, int], known: list[list[int]], parents: Sequence[int] = ()) -> None:
        """Takes a step in which rows are of these tokens, and checks what it reads and where it writes.

        parents: those of rows that become forks.
        """
        decodes = all(count == 1 + self.tree[number].drafts for number, count in counts.items())
        step = self.steps[1 + DRAFTS if decodes else ROWS]
        stored = {number: self.tree[number].stored for number in counts}
        full = {number: [*self.tree[number].pages[: count // self.size]] for number, count in stored.items()}
        of_parents = [full[list(counts)[parent]] for parent in parents] or full.values()
        with self._copies_noted():
            last = step.begin(counts, parents=torch.tensor(parents) if parents else None)
        tokens_of = dict(zip(counts, known, strict=True))
        rows = [self.tree.live.row[self.tree[number].seat] for number in last]
        assert rows == sorted(rows)
        slots, values = [], []
        for number, row in zip(last, rows, strict=True):
            branch, count = self.tree[number], counts[number]
            end = last[number] + 1
            given = len(branch.tokens) - branch.drafts
            positions = [*range(given), *(given + len(path_to(draft, branch.draft_parents)) - 1
                                          for draft in range(branch.drafts))]  # fmt: skip
            assert step.positions[end - count : end].tolist() == positions[stored[number] :][:count]
            length = int(step.pages.seq_lens[row])
            assert length == stored[number] + count
            pages = step.pages.table[row, : self.pool.pages_for(length)].tolist()
            shared = dict(zip(counts, of_parents, strict=True))[number]
            assert pages == [*shared, *branch.pages[len(shared) : len(pages)]]
            assert parents or pages == step.host_table[row, : len(pages)].tolist()
            self._finds(pages, tokens_of[number][: stored[number]])
            own = step.slots[end - count : end].tolist()
            assert (
                own == [pages[place // self.size] * self.size + place % self.size for place in range(length)][-count:]
            )
            for page in {slot // self.size for slot in own}:  # nobody else reads what a step writes
                assert self.pool.holders[page] == 1
                assert self.tree.cache is None or page not in self.tree.cache.pages
            slots += own
            values += values_of(tokens_of[number], branch.draft_parents)[:length][-count:]
        assert len(set(slots)) == len(slots) == step.rows
        written = torch.tensor(values)[:, None, None].expand(-1, 1, 16)
        for layer in range(LAYERS):
            self.pool.write(layer, torch.tensor(slots), written + layer, written - layer)
        step.end()
        self.shortened -= counts.keys()

    @contextmanager
    def _copies_noted(self) -> Iterator[None]:
        """Notes the host's memory that copies to the device read: on a GPU they may be under way for long."""
        made = torch.from_numpy

        def noted(array: np.ndarray) -> torch.Tensor:
            tensor = made(array)
            self.sources.append((tensor, tensor.clone()))
            return tensor

        with mock.patch.object(torch, "from_numpy", noted):
            yield

    def _refused(self, error: PoolError) -> None:
        """The error is right about the pages that are missing, and an engine then drops all branches."""
        found = re.search(r"is less than the (\d+) that", str(error))
        assert found is not None
        assert int(found[1]) > self.pool.num_pages
        for branch in self.branches:
            self.tree.drop(branch.number)
        self.shortened.clear()

    # The laws

    @invariant()
    def pages_are_free_or_held(self) -> None:
        self.tree.check()
        held = {page for branch in self.branches for page in branch.pages}
        cached = set() if self.tree.cache is None else set(self.tree.cache.pages)
        assert self.pool.free + len(held | cached) == self.pool.num_pages
        assert self.tree.available == self.pool.num_pages - len(held)

    @invariant()
    def branches_find_the_kv_of_their_tokens(self) -> None:
        for branch in self.branches:
            self._finds(branch.pages, branch.tokens[: branch.stored])

    @invariant()
    def the_live_batch_is_true(self) -> None:
        live, by_seat = self.tree.live, {branch.seat: branch for branch in self.branches}
        assert sorted(by_seat) == live.seats.tolist()
        assert len({int(live.row[seat]) for seat in by_seat}) == len(live) == len(self.tree)
        for seat, branch in by_seat.items():
            known = int(live.tokens[seat])
            assert known == branch.stored or (known > branch.stored and branch.number in self.shortened)
            shared, owner = int(live.shared_tokens[seat]), int(live.shared_with[seat])
            assert (owner >= 0) == (shared > 0)
            if shared:
                assert not shared % self.size
                assert branch.pages[: shared // self.size] == by_seat[owner].pages[: shared // self.size]
                assert shared <= min(branch.stored, by_seat[owner].stored)

    @invariant()
    def the_host_leaves_alone_what_copies_may_read(self) -> None:
        assert all(torch.equal(tensor, contents) for tensor, contents in self.sources)

    def teardown(self) -> None:
        for branch in self.branches:
            self.tree.drop(branch.number)
        self.pages_are_free_or_held()
        assert self.tree.available == self.pool.num_pages
        if self.tree.cache is not None:
            self.tree.cache.evict(self.pool.num_pages)
            assert (len(self.tree.cache), self.pool.free) == (0, self.pool.num_pages)
            self.tree.check()

    def _finds(self, pages: list[int], tokens: list[int]) -> None:
        """These pages hold the KV of these tokens, in all layers."""
        expected = torch.tensor(values_of(tokens))
        for layer in range(LAYERS):
            keys, values = (
                cache[layer, pages].flatten(0, 1)[: len(tokens)] for cache in (self.pool.keys, self.pool.values)
            )
            assert torch.equal(keys[:, 0, 0], expected + layer)
            assert torch.equal(values[:, 0, 15], expected - layer)


def histories(count: int) -> None:
    run_state_machine_as_test(
        PageHistories,
        settings=settings(
            max_examples=count, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_histories_of_pages_keep_the_laws() -> None:
    histories(300)


@pytest.mark.full
def test_histories_of_pages_keep_the_laws_at_length() -> None:
    histories(5000)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_page_changes_hands_while_a_step_that_writes_it_is_under_way(in_order: bool) -> None:
    """The branch ends by its token, and a fork copies into the page that the step has a row too many in.

    What the fork finds is right because one stream does the step's work first; in another order it is not.
    """
    tree = SequenceTree(KVPool(Shape(2, 1, 16, dtype="fp32", page_size=4), 1, 3), 2)
    ended, going = tree.add([1, 2, 3, 4]), tree.add([5, 6])
    for branch in (ended, going):
        tree.reserve({branch.number: len(branch.tokens)})
        tree.store({branch.number: len(branch.tokens)})
    tree.pool.keys[:, going.pages] = 5.0
    step, queue = Step(tree, 8, 4), []
    for branch in (ended, going):
        branch.tokens.append(UNKNOWN)
    step.begin({ended.number: 1, going.number: 1})
    step.end()
    slots = step.slots[: step.rows].clone()
    queue.append(lambda: tree.pool.write(0, slots, torch.full((2, 1, 16), 9.0), torch.full((2, 1, 16), 9.0)))
    written = ended.pages[1]
    for branch in (ended, going):  # the tokens are read
        branch.tokens.pop()
        branch.stored -= 1
    tree.drop(ended.number)
    with mock.patch.object(tree.pool, "copy", lambda *pages: queue.append(lambda: KVPool.copy(tree.pool, *pages))):
        fork = tree.fork(going.number)
    assert fork.pages == [written]
    for work in queue if in_order else reversed(queue):
        work()
    assert (tree.pool.keys[0, fork.pages[0], :2] == 5.0).all() == in_order
