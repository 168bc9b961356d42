"""Fixed batches of decoding requests as servers run them: who shares which tokens, and how the batch changes by step.

The suite has 16 batches in four families (traces, groups, agents, unshared) and five special ones. A batch is made from
seeds, so it is the same everywhere. It holds counts only: no page, no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from treegen.ir.errors import FormatError, InputError
from treegen.text_files import parsed_json, read_text
from treegen.workloads import generate

FAMILIES = ("traces", "groups", "agents", "unshared", "special")
PAGE_SIZE = 16
TRACE_BLOCK = 512
"""Tokens of a block of the recorded traces."""
_FOREVER = 1 << 30
"""Steps of a request that does not finish by itself."""
_CHUNK = 512
"""Prompt tokens that chunked prefill computes in a step."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request when it joins the batch.

    tokens: length of its context, its queries' tokens included. shared_with: number of a running request with the same
    first `shared_tokens` tokens, in the same pages; None: it shares nothing. shared_tokens is a multiple of the batch's
    page size. steps: decoding steps until it finishes. queries: its query rows in every step, the last tokens of its
    context. grows: tokens that its context grows by in a step.
    """

    tokens: int
    steps: int
    shared_with: int | None = None
    shared_tokens: int = 0
    queries: int = 1
    grows: int = 1


@dataclass(frozen=True, slots=True)
class BatchEvents:
    """What happens between two steps, in this order: `finished` requests leave, the others grow, `arrived` ones join.

    Requests are numbered in the order in which they join, the batch's first ones from 0. Arrivals share tokens with
    requests that run after the finished ones have left, with earlier arrivals of the same step among them.
    """

    finished: tuple[int, ...]
    arrived: tuple[BatchRequest, ...]


@dataclass(frozen=True, slots=True)
class ServedBatch:
    """A batch at its first step, and by `events` its further course.

    draft: parents of the token tree that every request verifies in each step, -1 for its root, empty for plain
    decoding; the tree's tokens are the last of the context. mla: caches of one latent KV head. grouped: requests come
    in groups that share their first run of tokens, which can be a level of a cascade. follow: chooses who arrives, see
    `events`.
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
        """Tokens of all requests at the first step; a shared token counts once for each."""
        return sum(request.tokens for request in self.requests)

    @property
    def unique_tokens(self) -> int:
        """Tokens at the first step; a shared token counts once."""
        return sum(request.tokens - request.shared_tokens for request in self.requests)

    def events(self, steps: int) -> list[BatchEvents]:
        """What happens before each of `steps` steps; the same on every call."""
        course = BatchCourse(self)
        return [course.next_events() for _ in range(steps)]


class BatchCourse:
    """The running requests of a batch as its steps go by."""

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
        """Goes on by a step."""
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
        """`tokens` rounded down to whole pages."""
        return tokens - tokens % self.page_size

    def free(self) -> int:
        """How many requests fewer than at the first step are running."""
        return len(self.batch.requests) - len(self.running)

    def _join(self, request: BatchRequest) -> None:
        self.running[self.joined] = request
        self.joined += 1


def batches(data: Path | None, seed: int = 0) -> tuple[ServedBatch, ...]:
    """The suite: four batches of each family and five special ones, in the order of FAMILIES.

    data: the folder of the recorded traces; without it the family `traces` is left out. seed: 0 is the suite, others
    are batches of the same kinds and sizes for checks on what nothing was tuned for. Raises FormatError for a trace
    file that cannot be read.
    """
    recorded = () if data is None else _traces(data, seed)
    return (*recorded, *_groups(seed), *_agents(seed), *_unshared(seed), *_special(seed))


def chosen_batches(made: Sequence[ServedBatch], names: str | None) -> tuple[ServedBatch, ...]:
    """The batches of some families or of some names, listed with commas; None: all. Raises InputError."""
    if names is None:
        return tuple(made)
    wanted = [name.strip() for name in names.split(",")]
    known = {key for batch in made for key in (batch.name, batch.family)}
    for name in wanted:
        if name not in known:
            families = ", ".join(dict.fromkeys(batch.family for batch in made))
            raise InputError("family", name, "has no batches", f"use some of {families}, or a batch's name")
    return tuple(batch for batch in made if batch.name in wanted or batch.family in wanted)


def stand_ins(batch: ServedBatch) -> tuple[ServedBatch, ServedBatch]:
    """Two batches of as many requests, none longer: one without sharing, one of groups of eight that share a half.

    A capacity kernel serves them before it is measured. They have the batch's page size, draft and queries.
    """
    source = np.random.default_rng((batch.seed, 2))
    page, count = batch.page_size, len(batch.requests)
    shortest = max(request.queries for request in batch.requests) + page
    usual = max(shortest + 1, batch.unique_tokens // count)
    forms = [replace(request, shared_with=None, shared_tokens=0, steps=_FOREVER) for request in batch.requests]
    apart, groups = [], []
    for number, form in enumerate(forms):
        tokens = int(source.integers(max(shortest, usual // 2), usual + 1))
        apart.append(replace(form, tokens=tokens))
        owner = number - number % 8
        if owner == number:
            groups.append(replace(form, tokens=tokens))
        else:
            shared = min(tokens, groups[owner].tokens) // 2
            groups.append(replace(form, tokens=tokens, shared_with=owner, shared_tokens=shared - shared % page))
    return (
        replace(batch, name=f"{batch.name}, apart", requests=tuple(apart), follow=_nobody, grouped=False),
        replace(batch, name=f"{batch.name}, groups", requests=tuple(groups), follow=_nobody, grouped=True),
    )


def _nobody(course: BatchCourse) -> Sequence[BatchRequest]:
    """No request arrives."""
    return ()


# Traces


def _traces(data: Path, seed: int) -> tuple[ServedBatch, ...]:
    conversation, synthetic = (_recorded(data / f"mooncake_{name}.json") for name in ("conversation", "synthetic"))
    return (
        _trace("trace-32", conversation, 32, 100, seed),
        _trace("trace-128", conversation, 128, 300, seed),
        _trace("trace-256", conversation, 256, 0, seed),
        _trace("trace-synthetic-64", synthetic, 64, 200, seed),
    )


def _recorded(path: Path) -> list[dict[str, Any]]:
    """The requests of a recorded trace. Raises FormatError."""
    requests = parsed_json(read_text(path), path)
    try:
        if all(entry["len"] > 0 and entry["out"] > 0 and isinstance(entry["blocks"], list) for entry in requests):
            return list(requests)
    except (TypeError, KeyError) as cause:
        raise FormatError("path", str(path), f"is no trace of requests ({cause})", "name a recorded trace") from cause
    raise FormatError("path", str(path), "has requests without tokens", "name a recorded trace")


def _trace(name: str, recorded: list[dict[str, Any]], width: int, first: int, seed: int) -> ServedBatch:
    """A server that runs `width` requests of a trace at once, from request `first` on; each finishes by its own output.

    A request that arrives shares the blocks at its beginning with the running request that has the most of them.
    """
    source = np.random.default_rng((seed, 0, width))
    first = (first + 101 * seed) % len(recorded)
    order = recorded[first:] + recorded[:first]
    known: dict[int, dict[str, Any]] = {}

    def request(entry: dict[str, Any], running: dict[int, dict[str, Any]], done: int) -> BatchRequest:
        owner, shared = None, 0
        for number, other in running.items():
            common = _common(entry, other)
            if common > shared:
                owner, shared = number, common
        return BatchRequest(entry["len"] + 1 + done, max(1, entry["out"] - done), owner, shared)

    requests = []
    for number, entry in enumerate(order[:width]):
        requests.append(request(entry, known, int(source.integers(entry["out"]))))
        known[number] = entry

    def follow(course: BatchCourse) -> Sequence[BatchRequest]:
        running = {number: order[number % len(order)] for number in course.running}
        arrived = []
        for number in range(course.joined, course.joined + course.free()):
            entry = order[number % len(order)]
            arrived.append(request(entry, running, 0))
            running[number] = entry
        return arrived

    return ServedBatch(name, "traces", PAGE_SIZE, tuple(requests), seed, follow)


def _common(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Tokens that two recorded requests begin with alike, in whole pages."""
    blocks = 0
    for a, b in zip(one["blocks"], other["blocks"], strict=False):
        if a != b:
            break
        blocks += 1
    tokens = min(blocks * TRACE_BLOCK, one["len"], other["len"])
    return int(tokens - tokens % PAGE_SIZE)


# Groups: samples, beams and few-shot branches over prompts


def _groups(seed: int) -> tuple[ServedBatch, ...]:
    return (
        _samples("grpo-8x32", 8, 32, (1024, 2048), 2048, seed),
        _samples("grpo-32x8", 32, 8, (512, 1536), 4096, seed),
        _beams("beams-32", 32, 4096, 512, seed),
        _over_prompts("few-shot-128", "groups", [4096], 128, (16, 256), 256, seed),
    )


def _samples(name: str, prompts: int, samples: int, prompt: tuple[int, int], output: int, seed: int) -> ServedBatch:
    """GRPO: groups of samples over a prompt. Samples finish one by one; where a whole group has room, one arrives.

    Groups are at different points of their decodings; the first ends within 170 steps.
    """
    source = np.random.default_rng((seed, 1, prompts))

    def group(first: int, done: int, source: np.random.Generator) -> list[BatchRequest]:
        shared = _whole(int(source.integers(prompt[0], prompt[1] + 1)), PAGE_SIZE)
        found: list[BatchRequest] = []
        for _ in range(samples):
            length = max(done + 1, round(output * float(source.beta(2, 2))))
            owner = first if found else None
            found.append(BatchRequest(shared + 1 + done, length - done, owner, shared if found else 0))
        return found

    requests: list[BatchRequest] = []
    for place in range(prompts):
        requests += group(len(requests), int(source.integers(output // 2)) if place else output // 2, source)
    for place in range(samples):
        requests[place] = replace(requests[place], steps=20 + 150 * place // samples)

    def follow(course: BatchCourse) -> Sequence[BatchRequest]:
        return group(course.joined, 0, course.random) if course.free() >= samples else ()

    return ServedBatch(name, "groups", PAGE_SIZE, tuple(requests), seed, follow, grouped=True)


def _beams(name: str, width: int, prompt: int, history: int, seed: int) -> ServedBatch:
    """Beam search of one prompt, `history` steps after it. In each step some beams end and others fork."""
    source = np.random.default_rng((seed, 2, width))
    requests = [BatchRequest(prompt + history, _lifetime(source))]
    for number in range(1, width):
        owner = int(source.integers(number))
        ago = 1 + int(source.exponential(history / 8))
        shared = _whole(max(prompt, prompt + history - ago), PAGE_SIZE)
        requests.append(BatchRequest(prompt + history, _lifetime(source), owner, shared))

    def follow(course: BatchCourse) -> Sequence[BatchRequest]:
        numbers = list(course.running)
        arrived = []
        for _ in range(course.free()):
            owner = numbers[int(course.random.integers(len(numbers)))]
            tokens = course.running[owner].tokens
            arrived.append(BatchRequest(tokens, _lifetime(course.random), owner, course.in_pages(tokens - 1)))
        return arrived

    return ServedBatch(name, "groups", PAGE_SIZE, tuple(requests), seed, follow, grouped=True)


def _lifetime(source: np.random.Generator) -> int:
    """Steps until a beam ends: a tenth of all in each step, and one of 32 stays."""
    return 1 + int(source.geometric(0.1)) if source.random() < 31 / 32 else 64


def _over_prompts(
    name: str,
    family: str,
    prompts: Sequence[int],
    width: int,
    own: tuple[int, int],
    output: int,
    seed: int,
    page: int = PAGE_SIZE,
) -> ServedBatch:
    """Requests that come and go over prompts which stay: `width` in all, each prompt with equally many.

    prompts: their lengths, in whole pages. own: least and most tokens of a request of its own when it joins. output:
    its mean number of steps.
    """
    source = np.random.default_rng((seed, 3, width, page, *prompts))

    def request(prompt: int, owner: int | None, source: np.random.Generator) -> BatchRequest:
        tokens = prompt + int(source.integers(own[0], own[1] + 1))
        return BatchRequest(tokens, 1 + int(source.geometric(1 / output)), owner, prompt if owner is not None else 0)

    requests: list[BatchRequest] = []
    for number in range(width):
        place = number % len(prompts)
        made = request(prompts[place], place if number >= len(prompts) else None, source)
        requests.append(made if number >= len(prompts) else replace(made, steps=_FOREVER))  # it keeps the prompt alive

    def follow(course: BatchCourse) -> Sequence[BatchRequest]:
        arrived = []
        for number in range(course.joined, course.joined + course.free()):
            place = number % len(prompts)
            arrived.append(request(prompts[place], place, course.random))
        return arrived

    return ServedBatch(name, family, page, tuple(requests), seed, follow, grouped=True)


# Agents


def _agents(seed: int) -> tuple[ServedBatch, ...]:
    return (
        _over_prompts("agents-64", "agents", [8192], 64, (256, 2048), 150, seed),
        _over_prompts("agents-long-16", "agents", [32768], 16, (512, 4096), 300, seed),
        _templates("templates-96", 4096, [1024] * 8, 12, (128, 1024), 150, seed),
        _templates("templates-256", 2048, [512, 1024, 1536, 2048] * 4, 16, (64, 768), 200, seed),
    )


def _templates(
    name: str, system: int, templates: Sequence[int], agents: int, own: tuple[int, int], output: int, seed: int
) -> ServedBatch:
    """Agents over one system prompt of `system` tokens and sub-prompts of `templates` tokens, `agents` for each."""
    source = np.random.default_rng((seed, 4, system, agents))
    sub = [_whole(system, PAGE_SIZE) + _whole(tokens, PAGE_SIZE) for tokens in templates]
    # The first request of each template stays, so that its number is the template's.
    requests = [
        BatchRequest(
            tokens + int(source.integers(own[0], own[1] + 1)), _FOREVER, 0 if place else None, system * (place > 0)
        )
        for place, tokens in enumerate(sub)
    ]

    def request(number: int, source: np.random.Generator) -> BatchRequest:
        place = number % len(sub)
        tokens = sub[place] + int(source.integers(own[0], own[1] + 1))
        return BatchRequest(tokens, 1 + int(source.geometric(1 / output)), place, sub[place])

    requests += [request(number, source) for number in range(len(sub), len(sub) * agents)]

    def follow(course: BatchCourse) -> Sequence[BatchRequest]:
        return [request(number, course.random) for number in range(course.joined, course.joined + course.free())]

    return ServedBatch(name, "agents", PAGE_SIZE, tuple(requests), seed, follow, grouped=True)


# Unshared


def _unshared(seed: int) -> tuple[ServedBatch, ...]:
    return (
        _apart("unshared-even-128", 128, (2048, 2048), 128, seed),
        _apart("unshared-ragged-64", 64, (1024, 16384), 200, seed),
        _apart("unshared-ragged-256", 256, (256, 4096), 200, seed),
        _apart("unshared-long-8", 8, (32768, 32768), 100, seed),
    )


def _apart(
    name: str,
    width: int,
    tokens: tuple[int, int],
    output: int,
    seed: int,
    family: str = "unshared",
    page: int = PAGE_SIZE,
) -> ServedBatch:
    """Requests that share nothing, of least and most `tokens`; one that finishes is replaced about 4 steps later."""
    source = np.random.default_rng((seed, 5, width, *tokens))

    def request(source: np.random.Generator) -> BatchRequest:
        return BatchRequest(int(source.integers(tokens[0], tokens[1] + 1)), 1 + int(source.geometric(1 / output)))

    def follow(course: BatchCourse) -> Sequence[BatchRequest]:
        arriving = int(course.random.binomial(course.free(), 0.25))
        return [request(course.random) for _ in range(arriving)]

    requests = tuple(request(source) for _ in range(width))
    return ServedBatch(name, family, page, requests, seed, follow)


# Special: several queries a request, other caches, other pages


def _special(seed: int) -> tuple[ServedBatch, ...]:
    latent = _apart("mla-64", 64, (1024, 8192), 200, seed, "special", 64)
    single = _apart("pages-of-one-64", 64, (512, 4096), 200, seed, "special", 1)
    return (
        _mixed("mixed-64", 60, 4, (1024, 8192), seed),
        _drafts("drafts-8", 8, seed),
        _chains("chains-32", 32, 8, seed),
        replace(latent, mla=True),
        single,
    )


def _mixed(name: str, decoding: int, prefilling: int, tokens: tuple[int, int], seed: int) -> ServedBatch:
    """Chunked prefill beside decoding: requests whose prompts are computed 512 tokens a step, then decoded.

    A request whose prompt is complete is replaced by another one that is prefilled.
    """
    source = np.random.default_rng((seed, 6, decoding))

    def decode(length: int, source: np.random.Generator) -> BatchRequest:
        return BatchRequest(length, 1 + int(source.geometric(1 / 200)))

    def prefill(source: np.random.Generator, done: int = 0) -> BatchRequest:
        chunks = max(done + 1, int(source.integers(tokens[0], tokens[1] + 1)) // _CHUNK)
        return BatchRequest((done + 1) * _CHUNK, chunks - done - 1, queries=_CHUNK, grows=_CHUNK)

    requests = [decode(int(source.integers(tokens[0], tokens[1] + 1)), source) for _ in range(decoding)]
    requests += [prefill(source, int(source.integers(4))) for _ in range(prefilling)]

    def follow(course: BatchCourse) -> Sequence[BatchRequest]:
        chunked = sum(request.queries > 1 for request in course.running.values())
        arrived = [prefill(course.random) for _ in range(prefilling - chunked)]
        length = int(course.random.integers(tokens[0], tokens[1] + 1))
        return arrived + [decode(length, course.random) for _ in range(course.free() - len(arrived))]

    return ServedBatch(name, "special", PAGE_SIZE, tuple(requests), seed, follow)


def _drafts(name: str, width: int, seed: int) -> ServedBatch:
    """Requests that verify a draft of 64 tokens in every step, of which three are accepted."""
    source = np.random.default_rng((seed, 7, width))
    tree = generate.speculative(seed, 64, 1)
    draft = tuple(int(parent) - 1 for parent in tree.parent[1:])  # node 0 is the context

    def request(source: np.random.Generator) -> BatchRequest:
        length = int(source.integers(2048, 8193)) + len(draft)
        return BatchRequest(length, 1 + int(source.geometric(1 / 100)), queries=len(draft), grows=3)

    def follow(course: BatchCourse) -> Sequence[BatchRequest]:
        return [request(course.random) for _ in range(course.free())]

    requests = tuple(request(source) for _ in range(width))
    return ServedBatch(name, "special", PAGE_SIZE, requests, seed, follow, draft=draft)


def _chains(name: str, width: int, queries: int, seed: int) -> ServedBatch:
    """Requests that verify a chain of drafts behind their last token in every step, of which three are accepted."""
    source = np.random.default_rng((seed, 8, width))

    def request(source: np.random.Generator) -> BatchRequest:
        length = int(source.integers(2048, 8193)) + queries
        return BatchRequest(length, 1 + int(source.geometric(1 / 100)), queries=queries, grows=3)

    def follow(course: BatchCourse) -> Sequence[BatchRequest]:
        return [request(course.random) for _ in range(course.free())]

    return ServedBatch(name, "special", PAGE_SIZE, tuple(request(source) for _ in range(width)), seed, follow)


def _whole(tokens: int, page_size: int) -> int:
    return tokens - tokens % page_size
