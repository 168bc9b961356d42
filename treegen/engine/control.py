"""Controllers: decide after each step how branches grow, fork and end, and which results there are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from treegen.engine.branch import Branch
from treegen.engine.draft_trees import DraftTree

Label = tuple[int, ...]
"""The number of a branch's prompt, and whatever else the controller tells branches of one prompt apart by."""


class Next(NamedTuple):
    """A next token of a branch, and the branch's label from then on."""

    token: int
    label: Label


class Continuation(NamedTuple):
    """What a branch has come to.

    label: the branch's label. tokens: the tokens after the prompt. score: the sum of their log-probabilities, by
    whatever the controller divides it; 0 where it counts none.
    """

    label: Label
    tokens: list[int]
    score: float = 0.0


class Frontier(NamedTuple):
    """Branches that the model has given logits for.

    branches: the branches. logits: `[branches, vocabulary]`, for the token after each branch's last one. A branch with
    drafts has a row for each of them and one before these, one after another: for the tokens after the last token that
    is no draft, and after each draft.
    """

    branches: Sequence[Branch]
    logits: torch.Tensor

    def agreed(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that was computed of the logits, on several ranks that of rank 0.

        Logits of ranks may differ in their last bits. A controller that decides by nothing else than such tensors has
        `agrees = True` in its class, which subclasses have to say again. Does not wait for the device; all ranks have
        to call it.
        """
        return numbers


class Growth(NamedTuple):
    """What follows from a frontier.

    grown: for each branch of the frontier, by its number, its next tokens. One extends it. Several fork it: each goes
    to a branch of its own. A branch without next tokens ends, unless it rests. results: results to return. accepted:
    for branches with drafts, the numbers of those that stay, each the parent of the next one; none by default. The
    others are removed before the next tokens follow. resting: branches without next tokens that wait for others (from
    `Selecting.commit`: that wait when their next token is stored). They keep their pages, and come back in the next
    frontier of their prompt, without drafts and with the same logits up to rounding. Only controllers with `together`
    may let branches rest, while others have next tokens or are not in the frontier yet.
    """

    grown: Mapping[int, Sequence[Next]]
    results: Iterable[Continuation]
    accepted: Mapping[int, Sequence[int]] = MappingProxyType({})
    resting: Collection[int] = ()


class Controller(Protocol):
    """Decides how branches grow."""

    @property
    def width(self) -> int:
        """The most branches of a prompt at a time."""

    @property
    def max_new_tokens(self) -> int:
        """The most tokens after a prompt."""

    @property
    def together(self) -> bool:
        """Whether a frontier has all branches of each of its prompts. If not, it has those that are ready."""

    def decide(self, frontier: Frontier) -> Growth:
        """Decides how the branches of a frontier go on."""


@runtime_checkable
class Drafting(Protocol):
    """A controller that proposes tokens which the next step checks, as `Speculate` does."""

    @property
    def max_draft(self) -> int:
        """The most drafts of a branch."""

    @property
    def draft_trees(self) -> bool:
        """Whether drafts may be trees. If not, each follows the one before."""

    def draft(self, branches: Sequence[Branch]) -> Iterable[DraftTree]:
        """Returns for each branch tokens that may follow its last one."""


@runtime_checkable
class WarmsUp(Protocol):
    """A controller or drafter with work that `Engine.warm_up` does ahead, as `DraftModel` has graphs to capture."""

    def warm_up(self) -> None:
        """Does the work."""


def warm_up(worker: object) -> None:
    """Does the work that a controller or drafter has to do ahead, if it is one that `WarmsUp`."""
    if isinstance(worker, WarmsUp) and callable(worker.warm_up):  # an attribute may have the name by chance
        worker.warm_up()


@runtime_checkable
class BeginsRuns(Protocol):
    """A controller that is told of each run before its first step, as `Sample` is, whose limits have to fit."""

    def begin_run(self, prompts: int, vocabulary: int) -> None:
        """Raises TreegenError where the controller does not serve this number of prompts, or of different tokens."""


@runtime_checkable
class Selecting(Protocol):
    """A controller that selects tokens on the device.

    The engine then launches a step before the host has read the tokens of the one before. On several ranks `selects`
    and `commit` have to follow from branches and tokens alone: a controller for which that is not so has an attribute
    `keeps_notes` that is True, and is asked to decide there.
    """

    @property
    def max_new_tokens(self) -> int:
        """The most tokens after a prompt; a branch ends there."""

    def selects(self, branches: Sequence[Branch]) -> bool:
        """Whether `select` serves these branches: each gets one token, and goes on with it or ends. If not, `decide`
        is asked.
        """

    def select(self, frontier: Frontier) -> torch.Tensor:
        """Returns the next token of each branch, int64 `[branches]` on the device, without waiting for it."""

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        """Decides, for each branch, whether it goes on with the token that was selected, or ends.

        With `together`, a branch that goes on may also be among those that rest: it does when the token is stored.
        """


@runtime_checkable
class SelectingDrafts(Protocol):
    """A controller that selects tokens and proposes drafts on the device, as `Speculate` does with `NGrams`.

    The engine then accepts the longest path of drafts that were selected (of equal ones the first), and launches a step
    before the host has read which that is. The controller is a `Drafting` one as well; all branches have drafts with
    the same parents, also those of `draft`. Kernels that read lengths on the host, and the deterministic mode, wait for
    `decide` instead. On several ranks `selects` and `commit` have to follow from branches and tokens alone, as in
    `Selecting`.
    """

    @property
    def max_new_tokens(self) -> int:
        """The most tokens after a prompt; a branch ends there."""

    @property
    def draft_parents(self) -> Sequence[int]:
        """The parents of the drafts of a branch; none where the controller always decides."""

    def selects(self, branches: Sequence[Branch]) -> bool:
        """Whether `select` serves these branches. If not, `decide` is asked."""

    def select(self, frontier: Frontier) -> torch.Tensor:
        """Returns the next token after each row, int64 `[rows]` on the device, without waiting for it.

        The host may not know the drafts of the branches.
        """

    def drafts_after(self, branches: Sequence[Branch], texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Returns the next drafts of branches, int64 `[branches, drafts]` on the device, without waiting for it.

        Args:
            branches: The branches, with the drafts that were accepted or rejected.
            texts: int32 `[branches, width]` on the device; the tokens of each branch, with accepted drafts and the one
                after them.
            lengths: int64 `[branches]` on the device; how many there are.
        """

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        """Decides, by the token that was selected after each row, whether each branch goes on, or ends.

        One that goes on keeps the path of drafts that the engine has accepted, and has the token after them next.
        """


class Selection(NamedTuple):
    """Next tokens that were selected on the device, and the branches that they continue.

    Each branch's place in the batch goes to the continuation of a branch of the same prompt and length: mostly to its
    own, otherwise it ends, and a fork of the other branch takes its place. A branch that others continue has a
    continuation in its own place as well.

    tokens: int64 `[branches]`; the next token in each place. parents: int64 `[branches]`; the branch that it continues.
    """

    tokens: torch.Tensor
    parents: torch.Tensor


@runtime_checkable
class SelectingForks(Protocol):
    """A controller that selects tokens on the device, and which branches fork and end for them, as `Beam` does.

    The engine then launches a step before the host has read what was selected. Kernels that read the page table on the
    host wait for `decide` instead, and so do several ranks unless the controller `agrees`; see `Frontier.agreed`.
    """

    @property
    def max_new_tokens(self) -> int:
        """The most tokens after a prompt; a branch ends there."""

    def selects(self, branches: Sequence[Branch]) -> bool:
        """Whether `select_forks` serves these branches. If not, `decide` is asked."""

    def select_forks(self, frontier: Frontier) -> Selection:
        """Selects the next token in the place of each branch, without waiting for it."""

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        """Decides on the host as `select_forks` did on the device, or ends all branches of a prompt.

        The first of several next tokens of a branch is the one in the branch's own place.
        """
