"""DraftChains: chains of a small model's most likely tokens after texts that grow, drafted on the device.

    step 1    [ KV of the text | the text's last two tokens ] ──▶ a
    step 2    [ KV of the text, the last token | the last token, a ] ──▶ b      and so on

Every step computes two rows of each text, so plans and CUDA graphs serve all of them. The first one also stores what
the step before could not: where all drafts were accepted, the last of them has no KV yet. The host does not know how
long texts are; it assumes the most, and the device draws back (see `draft_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from treegen.ir.errors import PoolError

_ROWS = 2
"""Rows of a text in each step."""
_NO_ROOM = -1
"""Stands for the branch of a text that has none."""


class DraftChains:
    """Drafts for texts, whose KV is kept from one call to the next.

    A text is known again by its list, to which tokens are appended between calls; one that is left out of a call is
    forgotten. Texts of one token, and texts that are too long for the model, get no drafts. Where there is no room for
    all, the last ones get none, until others are forgotten.

    Args:
        model: The small model.
        depth: The most drafts of a text.
        num_pages: Pages of the model's KV pool.
        page_size: Tokens of a page.
        max_texts: The most texts that have room at a time.
        max_rows: The most tokens of a step that computes new texts.
    """

    def __init__(
        self, model: Model, depth: int, num_pages: int, page_size: int, max_texts: int, max_rows: int
    ) -> None:  # fmt: skip
        pool = KVPool(replace(model.shape, page_size=page_size), model.layers, num_pages, model.device)
        self._sequences = SequenceTree(pool, max_texts, PrefixCache(pool))
        sizes = StepSizes(min(model.max_tokens, num_pages * page_size), max(max_rows, _ROWS * max_texts), _ROWS)
        makers, captures = (tree_kernels(), tree_kernels()), model.device.type == "cuda"
        self._forward = Forward(model, self._sequences, sizes, makers, Accounting(), captures)
        self._depth = depth
        self._held: list[tuple[Sequence[int], int]] = []  # texts, and the branch of each, or _NO_ROOM

    def warm_up(self) -> None:
        """Captures the graphs of all numbers of texts, so that no call does. Texts of earlier calls are forgotten."""
        self._forget()
        self._forward.warm_up()

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
            int64 `[texts, most]` on the device; -1 where there are no drafts.
        """
        depth = min(most, self._depth)
        try:
            self._hold(texts, counts, room + depth, depth if depth < most else None)
            drafts = torch.full((len(texts), most), -1, device=lengths.device)
            order = self._order()
            if order:
                chosen = torch.tensor(order).to(lengths.device, non_blocking=True)
                ends = lengths[chosen]
                if tokens is None:
                    pairs = [[*texts[place][counts[place] - _ROWS : counts[place]]] for place in order]
                    last = torch.tensor(pairs).to(lengths.device, non_blocking=True)
                else:
                    last = tokens[chosen].gather(1, ends[:, None] + torch.arange(-_ROWS, 0, device=ends.device)).long()
                assumed = torch.tensor([counts[place] + room for place in order]).to(ends.device, non_blocking=True)
                branches = [self._sequences[self._held[place][1]] for place in order]
                drafts[chosen, :depth] = self._drafted(branches, room, depth, last, assumed - ends)
        except BaseException:  # also Ctrl-C: what is stored of which text is not known any more
            self._forget()
            raise
        return drafts

    def _drafted(
        self, branches: Sequence[Branch], room: int, depth: int, last: torch.Tensor, behind: torch.Tensor
    ) -> torch.Tensor:
        """Drafts for branches in the order of their rows; see __call__.

        last: int64 `[branches, 2]`; their last tokens. behind: int64 `[branches]`; by how many tokens they are shorter
        than the host assumes.
        """
        counts = {branch.number: _ROWS for branch in branches}
        known, drafts = [len(branch.tokens) for branch in branches], []
        for branch in branches:
            branch.tokens += [UNKNOWN] * room
            branch.draft_parents = chain(_ROWS - 1)  # so that the step has rows for several tokens
        for _ in range(depth):
            for branch in branches:
                branch.stored = len(branch.tokens) - _ROWS
            logits = self._forward(counts, last.reshape(-1), behind=behind).logits
            drafts.append(logits.view(len(branches), _ROWS, -1)[:, -1].argmax(-1))
            last = torch.stack([last[:, -1], drafts[-1]], 1)
            for branch in branches:
                branch.tokens.append(UNKNOWN)
        for branch, count in zip(branches, known, strict=True):
            del branch.tokens[count:]
            branch.stored, branch.draft_parents = count, []
        return torch.stack(drafts, 1)

    def _order(self) -> list[int]:
        """Returns the places of the texts that have room, in the order of their rows."""
        places = [place for place, (_, number) in enumerate(self._held) if number >= 0]
        seats = [self._sequences[self._held[place][1]].seat for place in places]
        return [places[own] for own in self._sequences.live.row.take(seats).argsort().tolist()]

    def _hold(self, texts: Sequence[Sequence[int]], counts: Sequence[int], more: int, stored: int | None) -> None:
        """Computes the KV of texts, and takes pages for so many more tokens; forgets other texts.

        stored: drafts of a text whose KV is stored, but for the last one's, where more may have been accepted.
        """
        sequences, most = self._sequences, self._forward.sizes.max_tokens - more
        known = {id(text): number for text, number in self._held}
        found = [known.pop(id(text), None) for text in texts]
        if any(number >= 0 for number in known.values()):  # there is room again
            found = [None if number == _NO_ROOM else number for number in found]
        held = [self._grown(*each, stored) for each in zip(texts, counts, found, strict=True)]
        for number in sequences.branches.keys() - {*held}:
            sequences.drop(number)
        for place, (text, count) in enumerate(zip(texts, counts, strict=True)):
            if held[place] is None:
                fits = _ROWS <= count <= most and len(sequences) < sequences.max_branches
                held[place] = sequences.add(text[:count], (place,)).number if fits else _NO_ROOM
        self._held = [(text, _NO_ROOM if number is None else number) for text, number in zip(texts, held, strict=True)]
        self._compute()
        for branch in [each for each in sequences.branches.values() if len(each.tokens) > most]:
            self._leave_out(branch.number)
        while not sequences.have_pages(dict.fromkeys(sequences.branches, more)):
            self._leave_out(max(sequences.branches))

    def _grown(self, text: Sequence[int], count: int, number: int | None, stored: int | None) -> int | None:
        """Appends what is new of a text to its branch; returns its number, or None for a text that begins anew."""
        if number is None or number < 0:
            return number
        branch = self._sequences[number]
        known = len(branch.tokens)
        if count < known:
            return None
        branch.tokens += text[known:count]
        branch.stored = count if stored is None else min(count, known + stored - 1)
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
        """Forgets all texts."""
        self._held = []
        self._sequences.clear()
