"""Special batches: several query rows per request, caches of one latent KV head, and pages of one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treegen.workloads import generate
from treegen.workloads.served_batch import PAGE_SIZE, BatchCourse, BatchRequest, ServedBatch
from treegen.workloads.unshared_batches import apart

_CHUNK = 512
"""Prompt tokens that chunked prefill computes in a step."""


def special_batches(seed: int) -> tuple[ServedBatch, ...]:
    """Makes the family `special`."""
    latent = apart("mla-64", 64, (1024, 8192), 200, seed, "special", 64)
    single = apart("pages-of-one-64", 64, (512, 4096), 200, seed, "special", 1)
    return (
        _mixed("mixed-64", 60, 4, (1024, 8192), seed),
        _drafts("drafts-8", 8, seed),
        _chains("chains-32", 32, 8, seed),
        replace(latent, mla=True),
        single,
    )


def _mixed(name: str, decoding: int, prefilling: int, tokens: tuple[int, int], seed: int) -> ServedBatch:
    """Makes a batch of decoding requests and of requests whose prompts are prefilled in chunks, 512 tokens a step.

    A request whose prompt is complete is replaced by another one that is prefilled. tokens: the fewest and the most of
    a request.
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
    """Makes a batch in which every request verifies a token tree of 64 drafts per step; three of them are accepted."""
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
    """Makes a batch in which every request verifies a chain of drafts per step; three of them are accepted.

    queries: query rows of a request: its last token and the drafts.
    """
    source = np.random.default_rng((seed, 8, width))

    def request(source: np.random.Generator) -> BatchRequest:
        length = int(source.integers(2048, 8193)) + queries
        return BatchRequest(length, 1 + int(source.geometric(1 / 100)), queries=queries, grows=3)

    def follow(course: BatchCourse) -> Sequence[BatchRequest]:
        return [request(course.random) for _ in range(course.free())]

    return ServedBatch(name, "special", PAGE_SIZE, tuple(request(source) for _ in range(width)), seed, follow)
