"""DraftSteps: steps of a small model that draft its most likely tokens after texts that grow, on the device.

    chain    step 1    [ KV of the text | its last two tokens ] ──▶ a
             step 2    [ KV of the text, its last token | the last token, a ] ──▶ b     and so on
    tree     step 1    [ KV of the text | its last tokens ] ──▶ a, b
             step 2    [ KV of the text | its last tokens, a, b ] ──▶ c after a, d after b

Every step has equally many rows, in a tree of the same shape, so plans and CUDA graphs serve all of them; rows of
drafts that are not known yet are not read. The last tokens are those whose KV may be missing: drafts of the step before
that were accepted. The host does not know how long texts are; it assumes the most, and the device draws back (see
`draft_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from treegen.engine.accounting import Accounting
from treegen.engine.attention_kernels import tree_kernels
from treegen.engine.branch import Branch
from treegen.engine.draft_trees import chain
from treegen.engine.forward import Forward, Model, StepSizes
from treegen.engine.pool import KVPool
from treegen.engine.prefix import PrefixCache
from treegen.engine.scheduling import schedule
from treegen.engine.sequences import SequenceTree
from treegen.engine.tokens_ahead import UNKNOWN
from treegen.ir.errors import InputError, PoolError

_NO_ROOM = -1
"""Stands for the branch of a text that has none."""


def widths_parents(widths: Sequence[int]) -> list[int]:
    """Returns the parents of drafts, those of each depth before deeper ones; `widths[d]` follow each at depth d."""
    parents, last = [], [-1]
    for width in widths:
        parents += [parent for parent in last for _ in range(width)]
        last = list(range(len(parents) - len(last) * width, len(parents)))
    return parents


class DraftSteps:
    """Drafts for texts, whose KV is kept from one call to the next.

    A text is known again by its list, to which tokens are appended between calls; one that is left out of a call is
    forgotten. Texts of one token (in trees: of no more than the depth) and texts that are too long for the model get no
    drafts. Where there is no room for all, the last ones get none, until others are forgotten.

    Attributes:
        parents: The parents of the drafts of a text.

    Args:
        model: The small model.
        widths: How many drafts follow each one at each depth.
        num_pages: Pages of the model's KV pool.
        page_size: Tokens of a page.
        max_texts: The most texts that have room at a time.
        max_rows: The most tokens of a step that computes new texts.
    """

    def __init__(
        self, model: Model, widths: Sequence[int], num_pages: int, page_size: int, max_texts: int, max_rows: int
    ) -> None:
        self._widths, self.parents = widths, widths_parents(widths)
        self._vocabulary = self._drafted = model.vocabulary
        self._is_chain = prod(widths) == 1
        self._last = 2 if self._is_chain else len(widths) + 1  # tokens whose KV may be missing, and the last one
        self._fed = 0 if self._is_chain else len(self.parents) - prod(widths)  # drafts that others follow
        self._rows = self._last + self._fed
        pool = KVPool(replace(model.shape, page_size=page_size), model.layers, num_pages, model.device)
        self._sequences = SequenceTree(pool, max_texts, PrefixCache(pool))
        most = min(model.max_tokens, num_pages * page_size)
        trees = 0 if self._is_chain else self._rows - 1
        sizes = StepSizes(most, max(max_rows, self._rows * max_texts), self._rows, trees)
        makers, captures = (tree_kernels(), tree_kernels()), model.device.type == "cuda"
        self._forward = Forward(model, self._sequences, sizes, makers, Accounting(), captures)
        self._held: list[tuple[Sequence[int], int]] = []  # texts, and the branch of each, or _NO_ROOM
        self._returned: dict[int, list[int]] = {}  # by branch, the drafts of the last call, where the host knows them

    def warm_up(self) -> None:
        """Captures the graphs of all numbers of texts, so that no call does. Texts of earlier calls are forgotten."""
        self._forget()
        self._forward.warm_up()

    def draft_within(self, vocabulary: int) -> None:
        """See `DraftModel.draft_within`."""
        if (most := max(self._widths)) > vocabulary:
            raise InputError("widths", most, f"is more than the {vocabulary} tokens of the large model", "give fewer")
        self._drafted = vocabulary

    def __call__(
        self, texts: Sequence[Sequence[int]], counts: Sequence[int], room: int, most: int, lengths: torch.Tensor,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Drafts tokens after each text, without waiting for the device where no text is new.

        Args:
            texts: The tokens of each text that the host knows; more may follow in a list.
            counts: How many of them are the text's.
            room: The most further tokens of a text, which the device alone knows.
            most: The most drafts of a text.
            lengths: int64 `[texts]` on the device; the tokens of each text.
            tokens: int32 `[texts, width]` on the device; not needed without further tokens.

        Returns:
            int64 `[texts, most]` on the device, in the order of `parents`; -1 where there are no drafts.
        """
        count = min(most, len(self.parents))
        try:
            self._hold(texts, counts, room + self._fed + len(self._widths))
            drafts = torch.full((len(texts), most), -1, device=lengths.device)
            order = self._order()
            if order:
                chosen = torch.tensor(order).to(lengths.device, non_blocking=True)
                ends, before = lengths[chosen], torch.arange(-self._last, 0, device=lengths.device)
                if tokens is None:
                    ends_of = [[*texts[place][counts[place] - self._last : counts[place]]] for place in order]
                    last = torch.tensor(ends_of).to(lengths.device, non_blocking=True)
                else:
                    last = tokens[chosen].gather(1, ends[:, None] + before).long()
                assumed = torch.tensor([counts[place] + room for place in order]).to(ends.device, non_blocking=True)
                branches = [self._sequences[self._held[place][1]] for place in order]
                known = [len(branch.tokens) for branch in branches]
                for branch in branches:
                    branch.tokens += [UNKNOWN] * room
                draft = self._chains if self._is_chain else self._trees
                drafts[chosen, :count] = draft(branches, count, last, assumed - ends)
                for branch, stored in zip(branches, known, strict=True):
                    del branch.tokens[stored:]
                    branch.stored, branch.draft_parents = stored, []
        except BaseException:  # also Ctrl-C: from then on it is unknown whose KV is stored
            self._forget()
            raise
        return drafts

    def listed(self, texts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        """Drafts at most `most` tokens after each text, and waits for them; returns them in the order of `parents`."""
        if not most:
            return [[] for _ in texts]
        counts, device = [len(text) for text in texts], self._sequences.pool.device
        rows = self(texts, counts, 0, most, torch.tensor(counts).to(device)).tolist() if texts else []
        drafts = [[token for token in row if token >= 0] for row in rows]
        self._returned = {number: own for (_, number), own in zip(self._held, drafts, strict=False) if own}
        return drafts

    def _chains(self, branches: Sequence[Branch], count: int, last: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        """Drafts chains for branches in the order of their rows.

        Args:
            branches: The branches, with all tokens that the host assumes.
            count: The drafts of each.
            last: int64 `[branches, last]`; their last tokens.
            behind: See `Step.begin`.

        Returns:
            int64 `[branches, count]`.
        """
        drafts: list[torch.Tensor] = []
        for _ in range(count):
            logits = self._step(branches, chain(self._rows - 1), last, behind)
            drafts.append(logits[:, -1].argmax(-1))
            last = torch.stack([last[:, -1], drafts[-1]], 1)
            for branch in branches:
                branch.tokens.append(UNKNOWN)
        return torch.stack(drafts, 1)

    def _trees(self, branches: Sequence[Branch], count: int, last: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        """The same for trees."""
        own = self._last - 1  # the row of the last token
        parents = [*chain(own), *(own + parent for parent in self.parents[: self._fed])]
        for branch in branches:
            branch.tokens += [UNKNOWN] * self._fed
        ids = torch.cat([last, last.new_zeros(len(branches), self._fed)], 1)
        drafts: list[torch.Tensor] = []
        begin, end = own, self._last  # the rows of the last depth
        for width in self._widths:
            logits = self._step(branches, parents, ids, behind)[:, begin:end]
            drafts.append(logits.topk(width).indices.flatten(1))
            begin, end = end, end + drafts[-1].shape[1]
            if end > self._rows or end - self._last >= count:
                break
            ids[:, begin:end] = drafts[-1]
        return torch.cat(drafts, 1)[:, :count]

    def _step(
        self, branches: Sequence[Branch], parents: Sequence[int], ids: torch.Tensor, behind: torch.Tensor
    ) -> torch.Tensor:
        """Computes the last rows of branches, with these tokens; all but the first of them are drafts with these
        parents. Returns logits `[branches, rows, vocabulary]`.
        """
        for branch in branches:
            branch.stored, branch.draft_parents = len(branch.tokens) - self._rows, [*parents]
        ids = ids.reshape(-1).clamp(max=self._vocabulary - 1)
        frontier = self._forward({each.number: self._rows for each in branches}, ids, behind=behind)
        return frontier.logits.view(len(branches), self._rows, -1)[..., : self._drafted]

    def _clamped(self, tokens: Sequence[int]) -> list[int]:
        """Returns tokens as the model reads them: its last one for those that it does not have."""
        return [min(token, self._vocabulary - 1) for token in tokens]

    def _order(self) -> list[int]:
        """Returns the places of the texts that have room, in the order of their rows."""
        places = [place for place, (_, number) in enumerate(self._held) if number >= 0]
        seats = [self._sequences[self._held[place][1]].seat for place in places]
        return [places[own] for own in self._sequences.live.row.take(seats).argsort().tolist()]

    def _hold(self, texts: Sequence[Sequence[int]], counts: Sequence[int], more: int) -> None:
        """Computes the KV of new texts, and makes sure of pages for `more` tokens of each text; forgets other texts."""
        sequences, most = self._sequences, self._forward.sizes.max_tokens - more
        known = {id(text): number for text, number in self._held}
        found = [known.pop(id(text), None) for text in texts]
        if any(number >= 0 for number in known.values()):  # there is room again
            found = [None if number == _NO_ROOM else number for number in found]
        held = [self._continued(*each) for each in zip(texts, counts, found, strict=True)]
        for number in sequences.branches.keys() - {*held}:
            sequences.drop(number)
        for place, (text, count) in enumerate(zip(texts, counts, strict=True)):
            if held[place] is None:
                fits = self._last <= count <= most and len(sequences) < sequences.max_branches
                held[place] = sequences.add(self._clamped(text[:count]), (place,)).number if fits else _NO_ROOM
        self._held = [(text, _NO_ROOM if number is None else number) for text, number in zip(texts, held, strict=True)]
        self._compute()
        count_of = {number: count for (_, number), count in zip(self._held, counts, strict=True) if number >= 0}
        for number in [number for number, count in count_of.items() if count > most]:
            self._leave_out(number)
        branches = sequences.branches
        while not sequences.have_pages({each: count_of[each] - branches[each].stored + more for each in branches}):
            self._leave_out(max(branches))
        for (text, number), count in zip(self._held, counts, strict=True):
            if number >= 0:  # only now: pages that were given up so far had the KV of what was stored
                branch = branches[number]
                branch.tokens += self._clamped(text[len(branch.tokens) : count])
                branch.stored = count

    def _continued(self, text: Sequence[int], count: int, number: int | None) -> int | None:
        """Returns the branch of a text, or None for a text that begins anew.

        Where more tokens were appended than the next step computes, and they are not the drafts, it gets them to be
        computed before.
        """
        if number is None or number < 0:
            return number
        branch = self._sequences[number]
        known = len(branch.tokens)
        if count < known:
            return None
        if (drafts := self._returned.pop(number, None)) is not None:
            right = [draft == token for draft, token in zip(drafts[:-1], text[known:count], strict=False)]
            stored = known + [*right, False].index(False) if self._is_chain else known
            if count - self._last > stored:
                branch.tokens += self._clamped(text[known:count])
                branch.stored = stored
        return number

    def _compute(self) -> None:
        """Computes the KV of new texts, as far as there are pages."""
        sequences = self._sequences
        while any(branch.pending for branch in sequences.branches.values()):
            try:
                counts, preempted = schedule(sequences, self._forward.step.max_rows, False)
            except PoolError:
                counts, preempted = {}, [max(sequences.branches)]
            for number in preempted:
                self._leave_out(number)
            if counts:
                self._forward(counts)

    def _leave_out(self, number: int) -> None:
        """Gives a text no room from now on."""
        self._sequences.drop(number)
        self._held = [(text, _NO_ROOM if own == number else own) for text, own in self._held]

    def _forget(self) -> None:
        """Forgets all texts, and what may not be stored of them."""
        self._held, self._returned = [], {}
        for branch in self._sequences.branches.values():
            branch.stored = 0
        self._sequences.clear()
