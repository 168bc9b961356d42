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

    def slot(self, token: int, page_size: int) -> int:
        """Returns where the KV of a token is, `page * page_size + offset`, if this rank holds all tokens."""
        return self.pages[token // page_size] * page_size + token % page_size


def predecessors(ended: Sequence[Branch], parents: Sequence[Branch], page_size: int) -> list[Branch | None]:
    """Chooses for each fork an ended branch with as many stored tokens and the same full pages as its parent.

    Args:
        ended: The branches that end; each is chosen once at most.
        parents: The parent of each fork.
        page_size: Tokens of a page.

    Returns:
        An ended branch for each fork, or None.
    """
    able: dict[tuple[int, int], list[Branch]] = {}
    for branch in ended:
        able.setdefault(_full_pages(branch, page_size), []).append(branch)
    found: list[Branch | None] = []
    for parent in parents:
        same = able.get(_full_pages(parent, page_size))
        found.append(same.pop() if same else None)
    return found


def _full_pages(branch: Branch, page_size: int) -> tuple[int, int]:
    """Returns the stored tokens and the last full page: whoever shares a page shares all pages before it."""
    full = branch.stored // page_size
    return branch.stored, branch.pages[full - 1] if full else -1
