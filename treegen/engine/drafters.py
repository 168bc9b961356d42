"""Drafters: propose tokens that may follow, for `Speculate` to check."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch.nn.functional import pad

from treegen.backends.kept_tensors import for_kept_tensors
from treegen.engine.argument_checks import check_model
from treegen.engine.branch import Branch
from treegen.engine.draft_steps import DraftSteps
from treegen.engine.draft_trees import DraftTree, chains
from treegen.engine.engine import CHUNK_ROWS
from treegen.engine.forward import Model
from treegen.ir.arrays import positive_int, set_positive_ints
from treegen.ir.errors import InputError

_OF_EARLIER = 2
"""The most drafts after an earlier occurrence. Texts that are copied follow the latest one for long."""


class Drafter(Protocol):
    """Proposes tokens that may follow texts."""

    @property
    def trees(self) -> bool:
        """Whether drafts may be trees. If not, each follows the one before."""

    def __call__(self, texts: Sequence[Sequence[int]], most: int) -> Iterable[DraftTree]:
        """Returns for each text at most `most` drafts."""


@runtime_checkable
class DeviceDrafter(Protocol):
    """A drafter that can work on the device, so that the engine need not wait for the texts."""

    def fixed_parents(self, most: int) -> list[int]:
        """Returns the parents that drafts of all calls have; none where their shape follows from the texts.

        Where a call gives fewer drafts than `most`, the text's last token follows them, as a chain.
        """

    def drafts_after(
        self, branches: Sequence[Branch], texts: torch.Tensor, lengths: torch.Tensor, most: int
    ) -> torch.Tensor:
        """Returns the drafts of a call, int64 `[texts, most]`, without waiting for the device.

        Args:
            branches: The branches; the host knows their tokens up to the drafts of the step before.
            texts: int32 `[texts, width]`; the tokens of each branch, with the drafts that were accepted and the token
                after them.
            lengths: int64 `[texts]`; the tokens of each.
            most: The drafts of a text.
        """


@dataclass(frozen=True, slots=True)
class NGrams:
    """Drafts what followed a text's last tokens where they occurred before (prompt lookup).

    With several occurrences, drafts are chains side by side: up to two tokens after each earlier occurrence, and the
    rest after the latest one. So their tree has the same shape in each step. The text's last token stands in place of
    drafts that there are not.

    The lists of the last call are kept, so that the next call reads only what was appended to them.

    Args:
        longest: The most last tokens to look for. Fewer are looked for where they do not occur.
        occurrences: How many of the latest occurrences to take. One is best where texts are copied, as in edits and
            quotations; several may be better where a text goes on differently each time.

    Raises:
        InputError: A number is not at least 1.
    """

    longest: int = 3
    occurrences: int = 1
    _texts: dict[int, tuple[Sequence[int], array[int]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # by the identity of a text: the text, and its tokens

    def __post_init__(self) -> None:
        set_positive_ints(self, ("longest", "occurrences"), InputError)

    @property
    def trees(self) -> bool:
        """See Drafter."""
        return self.occurrences > 1

    def __call__(self, texts: Sequence[Sequence[int]], most: int) -> list[DraftTree]:
        """See Drafter."""
        lengths, known = self._lengths(most), dict(self._texts)
        self._texts.clear()
        for text in texts:
            own, words = known.get(id(text), (None, array("i")))
            if own is not text or len(words) > len(text):
                words = array("i")
            words.extend(text[len(words) :])
            self._texts[id(text)] = text, words
        found = [self._texts[id(text)][1] for text in texts]
        return [DraftTree(self._followers(own, lengths), chains(lengths if own else ())) for own in found]

    def fixed_parents(self, most: int) -> list[int]:
        """See DeviceDrafter."""
        return chains(self._lengths(most))

    def drafts_after(
        self, branches: Sequence[Branch], texts: torch.Tensor, lengths: torch.Tensor, most: int
    ) -> torch.Tensor:
        """See DeviceDrafter."""
        width, of_chains = texts.shape[1], self._lengths(most)
        count = min(len(of_chains), width)
        last = lengths[:, None] - 1
        place = torch.arange(width, device=texts.device)
        alike = place < last  # tokens at which an occurrence of the last tokens ends
        found = last.new_full((len(texts), count), -1)  # the latest of those that are the longest
        for length in range(1, min(self.longest, width) + 1):
            wanted = texts.gather(1, (last - length + 1).clamp(min=0))
            alike[:, length - 1 :] &= texts[:, : width - length + 1] == wanted
            alike[:, : length - 1] = False
            ends = torch.where(alike, place, -1)
            latest = ends.amax(1, keepdim=True) if count == 1 else ends.topk(count).values
            found = torch.where(latest[:, :1] >= 0, latest, found)
        ends_of = pad(found, (0, len(of_chains) - count), value=-1).chunk(len(of_chains), 1)
        after = [torch.arange(1, 1 + length, device=texts.device) for length in of_chains]
        following = [torch.where(end < 0, last, end + step) for end, step in zip(ends_of, after, strict=True)]
        places = torch.cat(following, 1)
        return texts.gather(1, torch.where(places <= last, places, last)).long()

    def _lengths(self, most: int) -> list[int]:
        """Returns the drafts of each chain."""
        count = min(self.occurrences, most)
        if not count:
            return []
        earlier = min(_OF_EARLIER, most // count)
        return [most - earlier * (count - 1), *[earlier] * (count - 1)]

    def _followers(self, text: array[int], lengths: Sequence[int]) -> list[int]:
        """Returns the drafts of chains of these lengths; none after an empty text."""
        if not text or not lengths:
            return []
        found = self._found(text, max(lengths))
        drafts: list[int] = []
        for chain, length in enumerate(lengths):
            own = found[chain][:length] if chain < len(found) else ()
            drafts += [*own, *[text[-1]] * (length - len(own))]
        return drafts

    def _found(self, text: array[int], most: int) -> list[Sequence[int]]:
        """Returns up to `most` tokens after each of the latest occurrences of the last tokens, the latest first."""
        size, data = text.itemsize, text.tobytes()
        for length in range(min(self.longest, len(text) - 1), 0, -1):
            wanted = data[-length * size :]
            places: list[int] = []
            end = len(data) - size  # of the occurrences to look for
            while len(places) < self.occurrences and (place := data.rfind(wanted, 0, end)) >= 0:
                end = place + len(wanted) - 1
                if place % size == 0:  # not in the middle of a token
                    places.append(place // size)
            if places:
                return [text[place + length : place + length + most] for place in places]
        return []


class DraftModel:
    """Drafts the most likely tokens of a smaller model.

    It drafts on the device, where the KV of texts stays from one call to the next; a text is known again by its list.
    Texts of one token (in trees: of no more than the depth) and texts that are too long for the model get no drafts,
    nor do the last ones where there is no room for all.

    Args:
        model: The smaller model; it has the vocabulary of the large one. The sizes may differ, as those of padded ones
            do: the model drafts no token that the large one lacks, and reads those that it lacks as its last one.
        widths: How many tokens to follow at each depth: (1, 1, 1) drafts three tokens one after another, (4, 2, 1) a
            tree of 4 + 8 + 8 drafts.
        num_pages: Pages of its KV pool.
        page_size: Tokens of a page.
        max_texts: The most texts that get drafts at a time.

    Raises:
        InputError: There are no widths, or one is out of range; or the model is none.
        TreegenError: As of `Engine`.
    """

    @for_kept_tensors()
    def __init__(
        self, model: Model, widths: Sequence[int] = (1, 1, 1, 1), *, num_pages: int, page_size: int = 16,
        max_texts: int = 64,
    ) -> None:  # fmt: skip
        check_model(model)
        if not isinstance(widths, Sequence) or not widths:
            raise InputError("widths", widths, "is no list of numbers", "give a number for each depth, as (1, 1, 1)")
        for depth, width in enumerate(widths):
            if positive_int(f"widths[{depth}]", width, InputError) > model.vocabulary:
                reason = f"is more than the {model.vocabulary} tokens of the model"
                raise InputError(f"widths[{depth}]", width, reason, "give fewer")
        self.trees = prod(widths) > 1
        self._steps = DraftSteps(model, tuple(map(int, widths)), num_pages, page_size, max_texts, CHUNK_ROWS)

    @property
    def drafts(self) -> int:
        """The drafts of a text."""
        return len(self._steps.parents)

    def warm_up(self) -> None:
        """Captures the CUDA graphs of the model, so that no step does; without a GPU it does nothing."""
        self._steps.warm_up()

    def draft_within(self, vocabulary: int) -> None:
        """Drafts the first tokens of the vocabulary alone, this many, from now on.

        Raises:
            InputError: More of them are followed at a depth.
        """
        self._steps.draft_within(vocabulary)

    def fixed_parents(self, most: int) -> list[int]:
        """See DeviceDrafter."""
        return self._steps.parents[:most] if most <= self.drafts else []

    def drafts_after(
        self, branches: Sequence[Branch], texts: torch.Tensor, lengths: torch.Tensor, most: int
    ) -> torch.Tensor:
        """See DeviceDrafter."""
        counts = [len(branch.tokens) - branch.drafts for branch in branches]
        known = [branch.tokens for branch in branches]
        drafts = self._steps(known, counts, 1 + branches[0].drafts, most, lengths, texts)
        return torch.where(drafts < 0, texts.gather(1, lengths[:, None] - 1), drafts)

    def __call__(self, texts: Sequence[Sequence[int]], most: int) -> list[DraftTree]:
        """See Drafter."""
        drafts = self._steps.listed(texts, most)
        return [DraftTree(own, self._steps.parents[: len(own)]) for own in drafts]
