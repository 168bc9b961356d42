"""Batches of requests that share nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treegen.workloads.served_batch import PAGE_SIZE, BatchCourse, BatchRequest, ServedBatch


def unshared_batches(seed: int) -> tuple[ServedBatch, ...]:
    """Makes the family `unshared`."""
    return (
        apart("unshared-even-128", 128, (2048, 2048), 128, seed),
        apart("unshared-ragged-64", 64, (1024, 16384), 200, seed),
        apart("unshared-ragged-256", 256, (256, 4096), 200, seed),
        apart("unshared-long-8", 8, (32768, 32768), 100, seed),
    )


def equal_batches(seed: int) -> tuple[ServedBatch, ...]:
    """Makes the family `equal`: requests of one length, a few more than thread blocks that an H200 or H100 has for a KV
    head with 32:8, 16:2 or 8:1 heads.

    Their last requests have to be shared among thread blocks; otherwise one block reads each of them alone.
    """
    sizes = ((34, 8192), (40, 2048), (67, 4096), (133, 2048), (150, 2048), (265, 1024))
    return tuple(apart(f"{width}x{tokens}", width, (tokens, tokens), 300, seed, "equal") for width, tokens in sizes)


def apart(
    name: str,
    width: int,
    tokens: tuple[int, int],
    output: int,
    seed: int,
    family: str = "unshared",
    page: int = PAGE_SIZE,
) -> ServedBatch:
    """Makes a batch of `width` requests that share nothing.

    A request that finishes is replaced about 4 steps later. tokens: the fewest and the most of a request. output: the
    mean number of its steps. page: tokens of a page.
    """
    source = np.random.default_rng((seed, 5, width, *tokens))

    def request(source: np.random.Generator) -> BatchRequest:
        return BatchRequest(int(source.integers(tokens[0], tokens[1] + 1)), 1 + int(source.geometric(1 / output)))

    def follow(course: BatchCourse) -> Sequence[BatchRequest]:
        arriving = int(course.random.binomial(course.free(), 0.25))
        return [request(course.random) for _ in range(arriving)]

    requests = tuple(request(source) for _ in range(width))
    return ServedBatch(name, family, page, requests, seed, follow)
