"""Draft rows: the device accepts drafts, and draws back the rows of the next step by those that it has rejected.

    host assumes     [ stored | last token | a b c ] [ next | drafts ]      the longest path of drafts accepted
    device finds     [ stored | last token | a ] [ next | drafts ]          one was: positions, slots, lengths less 2

The host learns later how many were accepted. It keeps pages for the longest path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from treegen.engine.branch import Branch
from treegen.engine.draft_trees import chain, draft_shape
from treegen.engine.pool import KVPool
from treegen.ir.arrays import Longs, ragged_ranges


class Accepted(NamedTuple):
    """What was accepted of drafts.

    counts: int64 `[branches]`; the accepted drafts. paths: int64 `[branches, deepest]`; their numbers, then -1.
    tokens: int64 `[branches, deepest + 1]`; their tokens and the one after them, then any.
    """

    counts: torch.Tensor
    paths: torch.Tensor
    tokens: torch.Tensor


class DraftPaths:
    """The paths of drafts that are a tree of the same shape for all branches.

    Attributes:
        deepest: The drafts of the longest path.
        is_chain: Whether each draft follows the one before.

    Args:
        parents: See DraftTree.
        device: Where drafts are accepted.
    """

    def __init__(self, parents: Sequence[int], device: torch.device) -> None:
        depths, sees = draft_shape(tuple(parents))
        self.deepest, self.is_chain = int(depths.max()), list(parents) == chain(len(parents))
        paths = np.full((1 + len(parents), self.deepest), -1)
        for draft in range(len(parents)):
            path = np.flatnonzero(sees[draft])
            paths[1 + draft, : len(path)] = path
        self._before = torch.tensor([1 + parent for parent in parents], device=device)  # the row that decides
        self._hidden = torch.from_numpy(~sees).to(device)
        order = depths * len(parents) - np.arange(len(parents))  # of paths to choose: long ones, then early ones
        self._order, self._paths = torch.from_numpy(order).to(device), torch.from_numpy(paths).to(device)

    def accept(self, drawn: torch.Tensor, drafts: torch.Tensor) -> Accepted:
        """Accepts the longest path of drafts that are the tokens that were drawn; of equal ones the first.

        Args:
            drawn: int64 `[branches, 1 + drafts]`; the tokens after the last token that is no draft, and after each
                draft.
            drafts: int64 `[branches, drafts]`.
        """
        right = drafts == drawn[:, self._before]
        known = (right[:, None] | self._hidden).all(-1)  # the draft, and all that it follows
        best, place = torch.where(known, self._order, 0).max(1)
        paths = self._paths[torch.where(best > 0, place + 1, 0)]
        counts = (paths >= 0).sum(1)
        tokens = torch.cat([drawn[:, :1], drawn.gather(1, paths.clamp(min=-1) + 1)], 1)
        return Accepted(counts, paths, tokens)


def move_drafts(
    pool: KVPool, table: torch.Tensor, table_rows: torch.Tensor, given: torch.Tensor, paths: torch.Tensor
) -> None:
    """Moves the KV of accepted drafts to where it belongs, in all layers; does not wait for the device.

    Args:
        pool: Holds the KV.
        table: int32 `[batch, pages]`; the page table.
        table_rows: int64 `[branches]`; the row of the table of each branch.
        given: int64 `[branches]`; its tokens before the drafts.
        paths: See Accepted.
    """
    places = torch.stack([paths.clamp(min=0), torch.arange(paths.shape[1], device=paths.device).expand_as(paths)])
    source, target = torch.where(paths < 0, pool.spare_slot, _slots(pool, table, table_rows, given[:, None] + places))
    pool.move_rows(source, target)


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
    each = slots.shape[1]
    places = seq_lens[table_rows, None] + torch.arange(-each, 0, device=behind.device)
    slots.copy_(_slots(pool, table, table_rows, places))


def _slots(pool: KVPool, table: torch.Tensor, table_rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns where tokens of branches are; places: `[..., branches, tokens]`."""
    pages = table[table_rows[:, None], places // pool.page_tokens]
    return pages.long() * pool.page_size + places % pool.page_size


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
        self._known = [(-1, 0)] * seats  # a branch, and how many of its tokens are written

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
            known = min(known, count) if own == branch.number else 0
            begins.append(branch.seat * width + known)
            news.append(count - known)
            tokens += branch.tokens[known:count]
            self._known[branch.seat] = branch.number, count
        if tokens:
            written = np.array([ragged_ranges(np.array(begins), np.array(news)), tokens])
            places, of_places = torch.from_numpy(written).to(self.tokens.device, non_blocking=True)
            self.tokens.view(-1)[places] = of_places.to(torch.int32)
