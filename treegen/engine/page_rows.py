"""PageRows: the page table of a step, on the host and on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from treegen.engine.branch import Branch
from treegen.engine.prefix import common_prefix
from treegen.ir.arrays import Ints, Longs, ragged_ranges


class PageRows:
    """A page table, in whose rows branches list their pages. Only what has changed in a row is written.

    Attributes:
        host: int32 `[rows, width]`; the page table on the host.
        table: The same on the device.

    Args:
        rows: The rows of the table.
        width: The most pages of a branch.
        device: Where the table is read.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.host: Ints = np.zeros((rows, width), np.int32)
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self._listed: list[tuple[list[int], list[int]]] = [([], [])] * rows  # a branch's list, and what it held
        self._before: dict[int, tuple[list[int], list[int]]] = {}  # the same of rows that may have become forks

    def write(self, rows: Longs, branches: Sequence[Branch]) -> None:
        """Lists the pages of branches in these rows. A branch whose pages change otherwise than at the end gets a new
        list of pages.
        """
        begins, counts, pages, changed = [], [], [], []
        for row, branch in zip(rows.tolist(), branches, strict=True):
            own, held = self._listed[row]
            if own is not branch.pages or len(held) != len(own):
                known = len(held) if own is branch.pages else common_prefix(held, branch.pages)
                begins.append(row * self.host.shape[1] + known)
                counts.append(len(branch.pages) - known)
                pages += branch.pages[known:]
                changed.append((row, branch.pages))
        for row, _ in changed:
            self._listed[row] = [], []  # so that nothing is known of the row where Ctrl-C comes in the middle
        if pages:
            written = np.array([ragged_ranges(np.array(begins), np.array(counts)), pages])
            self.host.reshape(-1)[written[0]] = written[1]
            places, listed = torch.from_numpy(written).to(self.table.device, non_blocking=True)
            self.table.view(-1)[places] = listed.view(torch.int32)[::2]  # the low words
        for row, own in changed:
            self._listed[row] = own, own[:]

    def lose(self, rows: Longs) -> None:
        """Notes that the device has made some of these rows forks of others: what they hold is not known any more."""
        self._before = {row: self._listed[row] for row in rows.tolist()}
        for row in self._before:
            self._listed[row] = [], []

    def find(self, branches: Mapping[int, Branch], forks: Sequence[int]) -> None:
        """Notes what these rows hold.

        Args:
            branches: The branch in each row.
            forks: The rows that the device has made forks. Without a branch now, what they hold stays unknown.
        """
        for row in self._before.keys() - {*forks}:
            self._listed[row] = self._before[row]
        for row in branches.keys() & {*forks}:
            pages = branches[row].pages
            self.host[row, : len(pages)] = pages
            self._listed[row] = pages, pages[:]
        self._before = {}
