"""Draft rows: the device accepts drafts, and draws back the rows of the next step by those that it has rejected.

    host assumes     [ stored | last token | a b c ] [ next | drafts ]      all drafts of the step before accepted
    device finds     [ stored | last token | a ] [ next | drafts ]          one was: positions, slots, lengths less 2

The host learns later how many were accepted. It keeps pages for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from treegen.engine.branch import Branch
from treegen.engine.pool import KVPool
from treegen.ir.arrays import Longs, ragged_ranges


def accepted_counts(drawn: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Returns how many drafts of each branch are the tokens that were drawn, up to the first that is not.

    Args:
        drawn: int64 `[branches, 1 + drafts]`; the tokens after the last token that is no draft, and after each draft.
        drafts: int64 `[branches, drafts]`; chains of drafts.

    Returns:
        int64 `[branches]`.
    """
    return (drawn[:, :-1] == drafts).long().cumprod(1).sum(1)


def draw_back(
    pool: KVPool, table: torch.Tensor, seq_lens: torch.Tensor, table_rows: torch.Tensor, behind: torch.Tensor,
    tokens: tuple[torch.Tensor, torch.Tensor],
) -> None:  # fmt: skip
    """Puts the new tokens of branches, and their ends, this many tokens before where the host has put them.

    Args:
        pool: Holds the KV.
        table: int32 `[batch, pages]`; the page table.
        seq_lens: int32 `[batch]`; the tokens of each row of the table.
        table_rows: int64 `[branches]`; the row of the table of each branch of the step.
        behind: int64 `[branches]`; by how many tokens each branch is shorter than the host assumes.
        tokens: int64, each `[new tokens]`: the positions and the slots, equally many of each branch.
    """
    positions, slots = (each.view(len(behind), -1) for each in tokens)
    seq_lens.index_add_(0, table_rows, -behind.to(torch.int32))
    positions -= behind[:, None]
    pages = table[table_rows[:, None], positions // pool.page_tokens]
    slots.copy_(pages.long() * pool.page_size + positions % pool.page_size)


class DraftTexts:
    """The texts of branches on the device, by the branches' seats. Only what is new of them is written.

    Attributes:
        tokens: int32 `[seats, width]`; the width grows with the texts.

    Args:
        seats: The number of seats.
        device: Where the texts are.
    """

    def __init__(self, seats: int, device: torch.device) -> None:
        self.tokens = torch.zeros(seats, 0, dtype=torch.int32, device=device)
        self._known: list[tuple[list[int], int]] = [([], 0)] * seats  # a branch's list, and how many of it are written

    def write(self, branches: Sequence[Branch], counts: Longs, room: int) -> None:
        """Writes the first tokens of branches.

        Args:
            branches: The branches.
            counts: `[branches]`; the tokens of each to write. They do not change any more.
            room: Further tokens of each that there has to be room for.
        """
        seats, width = self.tokens.shape
        if (needed := int(counts.max()) + room) > width:
            wider = self.tokens.new_zeros(seats, 2 * needed)
            wider[:, :width] = self.tokens
            self.tokens, width = wider, 2 * needed
        begins, news, tokens = [], [], []
        for branch, count in zip(branches, counts.tolist(), strict=True):
            own, known = self._known[branch.seat]
            known = min(known, count) if own is branch.tokens else 0
            begins.append(branch.seat * width + known)
            news.append(count - known)
            tokens += branch.tokens[known:count]
            self._known[branch.seat] = branch.tokens, count
        if tokens:
            written = np.array([ragged_ranges(np.array(begins), np.array(news)), tokens])
            places, of_places = torch.from_numpy(written).to(self.tokens.device, non_blocking=True)
            self.tokens.view(-1)[places] = of_places.to(torch.int32)
