"""SequenceTree: branches of tokens that share pages of KV, and the batch of those that run.

prompt  [ page 4 | page 7 | 5 tokens of page 2 ]
          │         │        └─ copied to page 9 at the fork
fork    [ page 4 | page 7 | page 9 ... ]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import treegen.engine.shared_pages as shared_pages
from treegen.engine.branch import Branch
from treegen.engine.draft_trees import DraftTree, check_path
from treegen.engine.pool import KVPool
from treegen.engine.prefix import PrefixCache
from treegen.ir.errors import BranchError
from treegen.ir.live_batch import LiveBatch


class SequenceTree:
    """The running branches of a pool, and who shares pages with whom.

    Methods raise before anything changes, so a tree stays as it was.

    Args:
        pool: Holds the KV.
        max_branches: The most branches that run at a time.
        cache: Keeps pages of ended and preempted branches until their room is needed; None keeps none.
    """

    def __init__(self, pool: KVPool, max_branches: int, cache: PrefixCache | None = None) -> None:
        self.pool, self.max_branches, self.cache = pool, max_branches, cache
        self.live = LiveBatch(pool.page_tokens, max_seats=max_branches)
        """The branches as requests, for kernels of `treegen.compile_batch`."""
        self.branches: dict[int, Branch] = {}  # running ones, by number
        self._made = 0

    def __len__(self) -> int:
        return len(self.branches)

    def __getitem__(self, number: int) -> Branch:
        if number not in self.branches:
            raise BranchError("branch", number, "is not running", f"name one of {sorted(self.branches)}")
        return self.branches[number]

    @property
    def available(self) -> int:
        """The pages that are free, or that the cache alone holds."""
        return self.pool.free + (0 if self.cache is None else self.cache.evictable)

    def add(self, tokens: Sequence[int], label: tuple[int, ...] = ()) -> Branch:
        """Starts a branch with a prompt. Raises BranchError for an empty one, and where all branches run."""
        if not len(tokens):
            raise BranchError("tokens", list(tokens), "is empty", "give a prompt of at least one token")
        self._check_room()
        return self._started(Branch(self._made, label, len(tokens), list(tokens), seat=self.live.add(0)))

    def fork(self, number: int) -> Branch:
        """Starts a branch with the tokens and the label of another one.

        It shares the full pages, and copies the last, partial one in all layers. Without a free page for the copy, the
        tokens of the partial page become pending: their KV is computed again. Pages of one token are always full.
        Raises BranchError for a branch that does not run, and where all branches run.
        """
        return self.replace((), [number])[0]

    def replace(self, ended: Sequence[int], parents: Sequence[int]) -> list[Branch]:
        """Ends branches and starts forks of others, as `drop` and `fork` do, with one copy for all forks.

        A fork takes the seat of an ended branch, and the first tokens and pages that both have in common. Kernels keep
        their plans where the fork has all pages that others share with the ended branch.

        Args:
            ended: The branches that end.
            parents: A branch for each fork; several forks may have one parent.

        Returns:
            The forks. Raises BranchError for branches that do not run, and where more would run than may.
        """
        of_parents, ending = [self[number] for number in parents], [self[number] for number in ended]
        shared_pages.check_replaced(ended, parents)
        self._check_room(len(parents) - len(ended))
        shared_pages.tell_stored(self.live, of_parents)
        shared = shared_pages.shared_counts(self.live, ending)
        found = shared_pages.predecessors(ending, of_parents, self.pool.page_tokens)
        for number in {*ended} - {branch.number for branch in found if branch is not None}:
            self.drop(number)
        places = [self._place_for(*each, shared) for each in zip(found, of_parents, strict=True)]
        copied: list[tuple[int, int]] = []
        forks = [self._forked(*each, copied) for each in zip(of_parents, places, strict=True)]
        for fork, parent, place in zip(forks, of_parents, places, strict=True):
            if place.anew and place.seat >= 0:
                shared_pages.follow(self.live, fork, parent)
        if copied:
            self.pool.copy(*zip(*copied, strict=True))
        return forks

    def follow(self, forks: Sequence[tuple[int, int]]) -> list[Branch]:
        """Replaces branches by forks that the device has already made (see `row_forks`); returns the forks.

        forks: For each fork, the branch that it replaces and its parent. Both have stored the same number of tokens.
        """
        made, size = [], self.pool.page_tokens
        for branch, parent in ((self[ended], self[parent]) for ended, parent in forks):
            full, common = parent.stored // size, shared_pages.common_pages(branch, parent, size)
            pages, branch.pages = [*parent.pages[:full], *branch.pages[full:]], branch.pages[:full]
            if common < full:
                self.pool.retain(parent.pages[common:full])
                self._release(branch, common)
            tokens, branch.tokens = branch.tokens, []
            tokens[common * size :] = parent.tokens[common * size :]
            del self.branches[branch.number]
            fork = Branch(self._made, parent.label, parent.prompt, tokens, parent.stored, pages, branch.seat)
            made.append(self._started(fork))
        return made

    def _place_for(self, branch: Branch | None, parent: Branch, shared: Mapping[int, int]) -> shared_pages.ForkPlace:
        """Ends a branch for a fork of `parent`: releases the pages that the fork does not have, returns the others.

        shared: See `shared_pages.shared_counts`.
        """
        if branch is None:
            return shared_pages.ForkPlace([], [], -1, True)
        live, seat, size = self.live, branch.seat, self.pool.page_tokens
        common = shared_pages.common_pages(branch, parent, size)
        anew = branch.stored != parent.stored or common < parent.stored // size
        if anew:
            self._release(branch, common)
            branch.tokens, branch.pages = branch.tokens[: common * size], branch.pages[:common]
            if shared[branch.number] > common:
                live.moved(seat)  # otherwise the fork has all that others share with the branch, and plans stay right
        kept = branch.tokens if branch.label[:1] == parent.label[:1] else branch.tokens[:]  # lists stand for texts
        place = shared_pages.ForkPlace(kept, branch.pages, seat, anew)
        branch.tokens, branch.pages = [], []
        del self.branches[branch.number]
        return place

    def _forked(self, parent: Branch, place: shared_pages.ForkPlace, copied: list[tuple[int, int]]) -> Branch:
        """Starts a fork; notes the page to copy, and its copy."""
        size = self.pool.page_tokens
        full, partial = divmod(parent.stored, size)
        tokens, pages, seat, anew = place
        branch = Branch(self._made, parent.label, parent.prompt, tokens, parent.stored, pages, seat)
        known = min(len(pages), full)
        tokens[known * size :] = parent.tokens[known * size :]
        if anew:
            self.pool.retain(parent.pages[known:full])
            own = self._take(1) if partial and (self.pool.free or self.available) else []
            pages += [*parent.pages[known:full], *own]
            branch.stored -= 0 if own else partial
        if seat < 0:
            branch.seat = self.live.add(branch.stored, parent.seat, full * size)
        if branch.stored > full * size:
            copied.append((parent.pages[full], pages[full]))
        return self._started(branch)

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """Adds tokens to a branch; their KV is stored by later steps."""
        self[number].tokens += tokens

    def propose(self, number: int, drafts: DraftTree) -> None:
        """Adds drafts to a branch without drafts, for the next step."""
        branch = self[number]
        branch.tokens += drafts.tokens
        branch.draft_parents = list(drafts.parents)

    def keep_drafts(self, kept: Mapping[int, Sequence[int]], moves: bool = True) -> None:
        """Removes drafts, whose KV is stored; those that stay are usual tokens from then on.

        Args:
            kept: For each of these branches the numbers of the drafts that stay, each the parent of the next one.
            moves: Whether their KV moves to where it belongs, in all layers; if not, the device has moved it.

        Raises:
            BranchError: The drafts of a branch that should stay are no path from its last token.
        """
        size, source, target, first = self.pool.page_size, [], [], [0]
        for number, drafts in kept.items():
            check_path(number, drafts, self[number].draft_parents)
        for number, drafts in kept.items():
            branch = self[number]
            moved = branch.keep(drafts)
            source += [branch.slot(token, size) for token, _ in moved]
            target += [branch.slot(token, size) for _, token in moved]
            first += [len(source)] if moved else []
        if source and moves:
            self.pool.move(source, target, first)

    def drop(self, number: int) -> Branch:
        """Ends a branch and releases its pages; others keep the pages that they share with it. Returns the branch."""
        branch = self[number]
        self.live.finish(branch.seat)
        self._release(branch)
        del self.branches[number]
        return branch

    def clear(self) -> None:
        """Ends all branches. Their pages are then free or the cache's.

        Where Ctrl-C came in the middle of a method, so that pages and branches do not agree, all begin anew: every page
        is free, and the cache is empty.
        """
        try:
            for number in list(self.branches):
                self.drop(number)
            self.check()
            if not len(self.live) and not len(self.live.seats):
                return
        except (LookupError, ValueError):  # whatever a half-done change leads to; errors of treegen are ValueErrors
            self.branches.clear()
        self.pool.clear()
        self.cache = None if self.cache is None else PrefixCache(self.pool)
        self.live = LiveBatch(self.pool.page_tokens, max_seats=self.max_branches)

    def preempt(self, number: int) -> None:
        """Releases the pages of a branch, which keeps its tokens, without drafts: their KV is computed again later."""
        branch = self[number]
        self._release(branch)
        del branch.tokens[len(branch.tokens) - branch.drafts :]
        branch.pages, branch.stored, branch.draft_parents = [], 0, []
        self.live.moved(branch.seat)
        self.live.set_tokens(branch.seat, 0)

    def adopt(self, number: int) -> int:
        """Gives a branch without stored tokens the pages that are known for its first tokens, and returns their number.

        A running branch has them, or the cache. They are full pages, and never all tokens of the branch, because a
        model computes logits of the last one only with its query. Raises BranchError for a branch with pages.
        """
        branch, size = self[number], self.pool.page_tokens
        if branch.pages:
            raise BranchError("branch", number, "has pages", "preempt it first")
        pages, owner, tokens = shared_pages.known_pages(branch, self.branches.values(), self.cache, size)
        if pages:
            branch.pages, branch.stored = list(pages), len(pages) * size
            self.pool.retain(branch.pages)
            self.live.set_tokens(branch.seat, branch.stored)
            if tokens and pages[: tokens // size] == owner.pages[: tokens // size]:
                shared_pages.share(self.live, branch, owner, tokens)
        return branch.stored

    def pages_missing(self, counts: Mapping[int, int]) -> int:
        """Returns how many pages these branches need to store this many more tokens each."""
        return sum(more for _, more in self._missing(counts))

    def have_pages(self, counts: Mapping[int, int]) -> bool:
        """Says whether there are pages for these branches to store this many more tokens each."""
        return (missing := self.pages_missing(counts)) <= self.pool.free or missing <= self.available

    def reserve(self, counts: Mapping[int, int]) -> None:
        """Takes the pages that these branches need to store this many more tokens each. Raises PoolError."""
        missing = self._missing(counts)
        taken = iter(self._take(sum(more for _, more in missing)))
        for branch, more in missing:
            branch.pages += islice(taken, more)

    def store(self, counts: Mapping[int, int]) -> None:
        """Notes that the KV of this many more tokens of each branch is in its pages."""
        for branch, count in [(self[number], count) for number, count in counts.items()]:
            branch.stored += count

    def check(self) -> None:
        """Raises PoolError or BranchError unless pages and branches agree: free + held == all."""
        for branch in self.branches.values():
            if self.pool.pages_for(branch.stored) > len(branch.pages) or branch.stored > len(branch.tokens):
                reason = f"has {branch.stored} stored tokens in {len(branch.pages)} pages"
                raise BranchError("branch", branch.number, reason, "report this as a bug of treegen")
        if self.cache is not None:
            self.cache.check()
        cached = [] if self.cache is None else [self.cache.pages]
        self.pool.check([*(branch.pages for branch in self.branches.values()), *cached])

    def _missing(self, counts: Mapping[int, int]) -> list[tuple[Branch, int]]:
        """Returns the branches that need pages to store this many more tokens each, with the number of pages."""
        needed = ((self[number], self.pool.pages_for(self[number].stored + count)) for number, count in counts.items())
        return [(branch, pages - len(branch.pages)) for branch, pages in needed if pages > len(branch.pages)]

    def _take(self, count: int) -> list[int]:
        """Takes free pages, and before that evicts from the cache where there are too few."""
        if self.cache is not None and self.pool.free < count <= self.available:
            self.cache.evict(count - self.pool.free)
        return self.pool.take(count)

    def _release(self, branch: Branch, kept: int = 0) -> None:
        """Releases a branch's pages but for the first `kept` ones, after the cache has taken the full ones."""
        if self.cache is not None:
            known = min(branch.stored, len(branch.tokens) - branch.drafts)
            self.cache.insert(branch.tokens, branch.pages[: known // self.pool.page_tokens])
        self.pool.release(branch.pages[kept:])

    def _started(self, branch: Branch) -> Branch:
        self.branches[branch.number] = branch
        self._made += 1
        return branch

    def _check_room(self, more: int = 1) -> None:
        if len(self.branches) + more > self.max_branches:
            raise BranchError("branches", len(self.branches), "run already", "raise max_branches, or drop some")
