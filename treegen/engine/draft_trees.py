"""Trees of draft tokens: which drafts a query row sees, and at which positions they are.

    last token ─┬─ 0 ─┬─ 2      parents [-1, -1, 0, 0], depths [1, 1, 2, 2]
                │     └─ 3
                └─ 1            stored in the order of their numbers; draft 3 sees 0 and itself

Drafts lie behind the branch's tokens in the order of their numbers, whatever their positions are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from treegen.engine.branch import Branch
from treegen.ir.arrays import INT32_MAX, Ints, Longs, is_integer
from treegen.ir.errors import BranchError

_SHIFT, _BITS = 5, 32
"""A word has 2^5 bits."""


class DraftTree(NamedTuple):
    """Tokens that may follow a branch's last token.

    tokens: a token for each draft. parents: the number of the draft that each one follows, -1 for the last token of the
    branch; less than the draft's own number.
    """

    tokens: Sequence[int]
    parents: Sequence[int]

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """Returns drafts that follow one another."""
        return cls(tokens, chain(len(tokens)))

    def filled(self, count: int, token: int) -> DraftTree:
        """Appends this token, each behind the last draft, until there are `count` drafts."""
        missing = count - len(self.tokens)
        if missing <= 0:
            return self
        return DraftTree([*self.tokens, *[token] * missing], [*self.parents, *range(len(self.tokens) - 1, count - 1)])

    def first(self, count: int) -> DraftTree:
        """Returns the first `count` drafts; a draft comes after the one that it follows."""
        return self if len(self.tokens) <= count else DraftTree(self.tokens[:count], self.parents[:count])


class DraftShape(NamedTuple):
    """What follows from the parents of drafts.

    depths: `[drafts]`; 1 for those that follow the last token. sees: `[drafts, drafts]`; whether a draft sees another
    one: itself, and those that it follows.
    """

    depths: Longs
    sees: npt.NDArray[np.bool_]


def chain(drafts: int) -> list[int]:
    """Returns the parents of drafts that follow one another."""
    return list(range(-1, drafts - 1))


def chains(lengths: Sequence[int]) -> list[int]:
    """Returns the parents of drafts in chains of these lengths, one chain after another."""
    parents: list[int] = []
    for length in lengths:
        parents += [-1, *range(len(parents), len(parents) + length - 1)]
    return parents


def check_path(number: int, drafts: Sequence[int], parents: Sequence[int]) -> None:
    """Raises BranchError unless these drafts of branch `number` follow one another, the first of them the last token.

    parents: those of all its drafts.
    """
    known = all(is_integer(draft) and 0 <= draft < len(parents) for draft in drafts)
    if not known or [parents[draft] for draft in drafts] != [-1, *drafts][: len(drafts)]:
        reason = f"has drafts with parents {list(parents)}, of which {list(drafts)} should stay"
        raise BranchError("accepted", number, reason, "accept drafts that follow one another from the first")


@lru_cache(maxsize=256)
def draft_shape(parents: tuple[int, ...]) -> DraftShape:
    """Returns the depths of drafts, and which drafts each one sees."""
    depths, sees = np.ones(len(parents), np.int64), np.eye(len(parents), dtype=np.bool_)
    for draft, parent in enumerate(parents):
        if parent >= 0:
            depths[draft] += depths[parent]
            sees[draft] |= sees[parent]
    return DraftShape(depths, sees)


def longest_path(drawn: Sequence[int], drafts: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Returns the numbers of the drafts of the longest path that was drawn; of equal ones the first.

    Args:
        drawn: The tokens after the last token that is no draft, and after each draft.
        drafts: The drafts.
        parents: See DraftTree.
    """
    depths: list[int] = []  # 0 for those that were not drawn
    for draft, parent in zip(drafts, parents, strict=True):
        before = 0 if parent < 0 else depths[parent]
        follows = (parent < 0 or before > 0) and drawn[parent + 1] == draft
        depths.append(before + 1 if follows else 0)
    path: list[int] = []
    draft = depths.index(max(depths)) if any(depths) else -1
    while draft >= 0:
        path.insert(0, draft)
        draft = parents[draft]
    return path


class DraftMask:
    """Tensors of fixed addresses that say which drafts the query rows of a step see.

    Attributes:
        first: int32 `[rows]`; the tokens before the drafts of a row's branch. All tokens that a row of no draft sees by
            its position are before that.
        seen: int32 `[rows, words]`; a bit for each of `most` drafts, the lowest of the first word for draft 0: whether
            the row sees it.
        most: The most drafts of a branch.

    Args:
        rows: The most query rows.
        most: The most drafts of a branch.
        device: Where the tensors are.
    """

    def __init__(self, rows: int, most: int, device: torch.device) -> None:
        self.first = torch.full((rows,), INT32_MAX, dtype=torch.int32, device=device)
        self.seen = torch.zeros(rows, -(-most // _BITS), dtype=torch.int32, device=device)
        self.most = most
        self._late: torch.Tensor | None = None
        self._ages: torch.Tensor | None = None
        self._drafts: Sequence[tuple[int, int, tuple[int, ...]]] = ()

    @property
    def mask_mod(self) -> Callable[..., Any]:
        """The mask, as `treegen.compile_batch` takes it."""
        return partial(_sees, self.first, self.seen)

    def window_mod(self, window_left: int) -> Callable[..., Any]:
        """Returns the mask of layers with a sliding window, which goes by positions.

        A draft lies behind its position, by at most the number of drafts. So the kernel needs a window that is longer
        by that, of places.

        Args:
            window_left: As in `treegen.compile_batch`.
        """
        if self._late is None or self._ages is None:
            self._late = torch.zeros_like(self.first)
            self._ages = torch.zeros(len(self.first), self.most, dtype=torch.int32, device=self.first.device)
            self._fill_windows(self._late, self._ages)
        first, late, ages = self.first, self._late, self._ages

        def within(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            draft = kv_idx - first[b]
            age = torch.where(draft < 0, q_idx - late[b] - kv_idx, ages[b, torch.clamp(draft, min=0)])
            return (age <= window_left) & (kv_idx <= q_idx)

        return within

    def place(self, branches: Sequence[Branch], ends: Longs, positions: Longs) -> None:
        """Sets the mask of a step, and the positions of drafts that are no chain.

        Args:
            branches: The branches of the step.
            ends: `[branches]`; the end of each branch's rows.
            positions: `[rows]`; as if all drafts were chains.
        """
        trees = []
        for branch, end in zip(branches, ends.tolist(), strict=True):
            if branch.draft_parents != chain(branch.drafts):
                parents, begin = tuple(branch.draft_parents), len(branch.tokens) - branch.drafts
                positions[end - branch.drafts : end] = begin - 1 + draft_shape(parents).depths
                trees.append((end - branch.drafts, begin, parents))
        self.fill(trees)

    def draw_back(self, behind: torch.Tensor, rows: int) -> None:
        """Notes that branches are shorter than the step's mask says, whose rows are equally many.

        Args:
            behind: int64 `[branches]` on the device; by how many tokens.
            rows: The rows of each branch.
        """
        self.first[: len(behind) * rows].view(-1, rows).sub_(behind[:, None])

    def fill(self, drafts: Sequence[tuple[int, int, tuple[int, ...]]]) -> None:
        """Sets the mask of a step.

        Args:
            drafts: For each branch whose drafts are no chain: the row of its first draft, the number of tokens before
                the drafts, and their parents.
        """
        if not drafts and not self._drafts:
            return
        first, seen = np.full(self.first.shape, INT32_MAX, np.int32), np.zeros(self.seen.shape, np.int32)
        for row, tokens, parents in drafts:
            rows = slice(row, row + len(parents))
            first[rows] = tokens
            seen[rows] = _words(draft_shape(parents).sees, seen.shape[1])
        self.first.copy_(torch.from_numpy(first), non_blocking=True)
        self.seen.copy_(torch.from_numpy(seen), non_blocking=True)
        self._drafts = drafts
        if self._late is not None and self._ages is not None:
            self._fill_windows(self._late, self._ages)

    def _fill_windows(self, late: torch.Tensor, ages: torch.Tensor) -> None:
        """Sets how far rows lie behind their positions, and how much deeper they are than drafts on their paths."""
        behind, deeper = np.zeros(late.shape, np.int32), np.full(ages.shape, INT32_MAX, np.int32)
        for row, _, parents in self._drafts:
            rows, shape = slice(row, row + len(parents)), draft_shape(parents)
            behind[rows] = np.arange(1, len(parents) + 1) - shape.depths
            deeper[rows, : len(parents)] = np.where(shape.sees, shape.depths[:, None] - shape.depths, INT32_MAX)
        late.copy_(torch.from_numpy(behind), non_blocking=True)
        ages.copy_(torch.from_numpy(deeper), non_blocking=True)


def _sees(first: torch.Tensor, seen: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The mask_mod: row b sees the tokens before its drafts, and those drafts that are on its path.

    It hides all tokens after a row, so plans need not.
    """
    draft = kv_idx - first[b]
    place = torch.clamp(draft, min=0)
    word = _word(seen, b, place >> _SHIFT, 0, seen.shape[1])
    return ((draft < 0) | (((word >> (place & (_BITS - 1))) & 1) == 1)) & (kv_idx <= q_idx)


def _word(seen: torch.Tensor, b: Any, number: Any, begin: int, end: int) -> Any:
    """Returns word `number` of row b, one of begin..end. Kernels load all words of a row before their loops."""
    if end - begin == 1:
        return seen[b, begin]
    middle = (begin + end) // 2
    return torch.where(
        number < middle, _word(seen, b, number, begin, middle), _word(seen, b, number, middle, end)
    )  # fmt: skip


def _words(seen: npt.NDArray[np.bool_], words: int) -> Ints:
    """Packs truth values `[rows, drafts]` into bits of words `[rows, words]`."""
    packed = np.zeros((len(seen), 4 * words), np.uint8)
    bits = np.packbits(seen, axis=1, bitorder="little")
    packed[:, : bits.shape[1]] = bits
    return packed.view("<i4")
