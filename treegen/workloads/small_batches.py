"""Small batches, as of interactive use: one to sixteen requests, which all keep running."""

from __future__ import annotations

import numpy as np

from treegen.workloads.served_batch import FOREVER, PAGE_SIZE, BatchRequest, ServedBatch, nobody

_APART = ((1, 300), (1, 2000), (1, 32000), (4, 1000), (4, 8000), (16, 500), (16, 2000))
"""Requests, and the fewest tokens of each."""
_OVER_PROMPT = ((4, 2048, 100), (16, 1024, 100), (8, 16384, 300))
"""Requests, tokens of the prompt that they share, in whole pages, and the fewest that each has besides."""
_MORE = 1.1  # the most tokens of a request over the fewest


def small_batches(seed: int) -> tuple[ServedBatch, ...]:
    """Makes the family `small`: batches such as `4x1000`, whose requests share nothing, and such as `4-over-2048`."""
    made = []
    for number, fewest in _APART:
        requests = [BatchRequest(own, FOREVER) for own in _lengths(number, fewest, seed)]
        made.append(ServedBatch(f"{number}x{fewest}", "small", PAGE_SIZE, tuple(requests), seed, nobody))
    for number, prompt, fewest in _OVER_PROMPT:
        first, *others = _lengths(number, fewest, seed)
        requests = [BatchRequest(prompt + first, FOREVER)]
        requests += [BatchRequest(prompt + own, FOREVER, 0, prompt) for own in others]
        name = f"{number}-over-{prompt}"
        made.append(ServedBatch(name, "small", PAGE_SIZE, tuple(requests), seed, nobody, grouped=True))
    return tuple(made)


def _lengths(number: int, fewest: int, seed: int) -> list[int]:
    source = np.random.default_rng((seed, 9, number, fewest))
    return [int(source.integers(fewest, int(_MORE * fewest) + 1)) for _ in range(number)]
