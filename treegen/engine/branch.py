"""Branch: a running sequence of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Branch:
    """A running sequence.

    Attributes:
        number: Its number in the tree; never given twice.
        label: The prompt's number, and what the controller tells branches of one prompt apart by.
        prompt: Tokens of the prompt that it began with.
        tokens: All its tokens, the prompt's included.
        stored: The first tokens whose KV is in the pages. The others are fed to the model in the next steps.
        pages: Its pages, in the order of its tokens.
        seat: Its seat in the live batch.
        draft_parents: For each of its last tokens that are drafts, the number of the draft that it follows, -1 for the
            token before the drafts. The step that stores them checks them.
    """

    number: int
    label: tuple[int, ...]
    prompt: int
    tokens: list[int]
    stored: int = 0
    pages: list[int] = field(default_factory=list)
    seat: int = -1
    draft_parents: list[int] = field(default_factory=list)

    @property
    def drafts(self) -> int:
        """The number of its last tokens that are drafts."""
        return len(self.draft_parents)

    @property
    def pending(self) -> int:
        """Tokens whose KV is not stored yet."""
        return len(self.tokens) - self.stored

    @property
    def new_tokens(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt :]

    def keep(self, drafts: Sequence[int]) -> list[tuple[int, int]]:
        """Makes these drafts usual tokens, in this order, and removes the others.

        Returns for each token that moves its number before and after; its KV moves with it.
        """
        begin = len(self.tokens) - self.drafts
        self.stored += len(drafts) - self.drafts
        self.tokens[begin:] = [self.tokens[begin + draft] for draft in drafts]
        self.draft_parents = []
        return [(begin + draft, begin + place) for place, draft in enumerate(drafts) if draft != place]

    def slot(self, token: int, page_size: int) -> int:
        """Returns where the KV of a token is, `page * page_size + offset`, if this rank holds all tokens."""
        return self.pages[token // page_size] * page_size + token % page_size
