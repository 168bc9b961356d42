"""A batch of decoding requests as a server runs it: who shares which tokens, and how the batch changes by step.

A batch is made from seeds, so it is the same on every machine. It holds counts only: no pages and no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

PAGE_SIZE = 16
"""Tokens of a page in most batches of the suite."""
FOREVER = 1 << 30
"""Steps of a request that never finishes."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request at the moment when it joins the batch.

    Args:
        tokens: Tokens of its context, those of its queries included.
        steps: Decoding steps until it finishes.
        shared_with: The number of a running request that begins with the same `shared_tokens` tokens, in the same
            pages; None where it shares nothing.
        shared_tokens: A multiple of the batch's page size.
        queries: Query rows in every step: the last tokens of the context.
        grows: Tokens that the context gains in a step.
    """

    tokens: int
    steps: int
    shared_with: int | None = None
    shared_tokens: int = 0
    queries: int = 1
    grows: int = 1


@dataclass(frozen=True, slots=True)
class BatchEvents:
    """The changes between two steps, in this order: `finished` requests leave, the others grow, `arrived` ones join.

    Requests are numbered in the order in which they join, from 0. An arrival may share tokens with any request that
    still runs after the finished ones have left, and with earlier arrivals of the same step.
    """

    finished: tuple[int, ...]
    arrived: tuple[BatchRequest, ...]


@dataclass(frozen=True, slots=True)
class ServedBatch:
    """A batch at its first step; `events` gives its further course.

    Args:
        name: The batch's name in tables and on the command line.
        family: The family of the suite that the batch belongs to.
        page_size: Tokens of a page.
        requests: The requests of the first step.
        seed: Decides who arrives.
        follow: Returns the requests that arrive in a step.
        draft: Parents of the token tree that every request verifies in each step, -1 for its root; empty for plain
            decoding. The tree's tokens are the last of the context.
        mla: Whether caches have one latent KV head.
        grouped: Whether requests come in groups that share their first tokens, as one level of a cascade needs it.
    """

    name: str
    family: str
    page_size: int
    requests: tuple[BatchRequest, ...]
    seed: int
    follow: Callable[[BatchCourse], Sequence[BatchRequest]]
    draft: tuple[int, ...] = ()
    mla: bool = False
    grouped: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all requests at the first step; a shared token counts once per request."""
        return sum(request.tokens for request in self.requests)

    @property
    def unique_tokens(self) -> int:
        """Tokens of all requests at the first step; a shared token counts once."""
        return sum(request.tokens - request.shared_tokens for request in self.requests)

    def events(self, steps: int) -> list[BatchEvents]:
        """Returns the events before each of `steps` steps; the same on every call."""
        course = BatchCourse(self)
        return [course.next_events() for _ in range(steps)]


class BatchCourse:
    """The running requests of a batch, step by step."""

    def __init__(self, batch: ServedBatch) -> None:
        self.random = np.random.default_rng((batch.seed, 1))
        self.batch = batch
        self.page_size = batch.page_size
        self.step = 0
        self.running: dict[int, BatchRequest] = {}
        """Running requests by number, with `tokens` and `steps` as they are now."""
        self.joined = 0
        """The number of the next request to join."""
        for request in batch.requests:
            self._join(request)

    def next_events(self) -> BatchEvents:
        """Advances by a step and returns its events."""
        self.step += 1
        finished = tuple(number for number, request in self.running.items() if request.steps <= 0)
        for number in finished:
            del self.running[number]
        for number, request in self.running.items():
            self.running[number] = replace(request, tokens=request.tokens + request.grows, steps=request.steps - 1)
        arrived = tuple(self.batch.follow(self))
        for request in arrived:
            self._join(request)
        return BatchEvents(finished, arrived)

    def in_pages(self, tokens: int) -> int:
        """Rounds `tokens` down to whole pages."""
        return whole_pages(tokens, self.page_size)

    def free(self) -> int:
        """Counts the places left by finished requests: requests at the first step minus running ones."""
        return len(self.batch.requests) - len(self.running)

    def _join(self, request: BatchRequest) -> None:
        self.running[self.joined] = request
        self.joined += 1


def whole_pages(tokens: int, page_size: int = PAGE_SIZE) -> int:
    """Rounds `tokens` down to whole pages."""
    return tokens - tokens % page_size


def nobody(course: BatchCourse) -> Sequence[BatchRequest]:
    """Lets no request arrive."""
    return ()
