"""Batches of agents over one system prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treegen.workloads.group_batches import over_prompts
from treegen.workloads.served_batch import FOREVER, PAGE_SIZE, BatchCourse, BatchRequest, ServedBatch, whole_pages


def agent_batches(seed: int) -> tuple[ServedBatch, ...]:
    """Makes the family `agents`: agents over a system prompt alone, and over templates below it."""
    return (
        over_prompts("agents-64", "agents", [8192], 64, (256, 2048), 150, seed),
        over_prompts("agents-long-16", "agents", [32768], 16, (512, 4096), 300, seed),
        _templates("templates-96", 4096, [1024] * 8, 12, (128, 1024), 150, seed),
        _templates("templates-256", 2048, [512, 1024, 1536, 2048] * 4, 16, (64, 768), 200, seed),
    )


def _templates(
    name: str, system: int, templates: Sequence[int], agents: int, own: tuple[int, int], output: int, seed: int
) -> ServedBatch:
    """Makes a batch with one system prompt, templates that extend it, and `agents` requests for each template.

    system: tokens of the system prompt. templates: tokens that each template adds. own and output: as in over_prompts.
    """
    source = np.random.default_rng((seed, 4, system, agents))
    sub = [whole_pages(system) + whole_pages(tokens) for tokens in templates]
    # The first request of each template stays, so its number is the number of the template.
    requests = [
        BatchRequest(
            tokens + int(source.integers(own[0], own[1] + 1)), FOREVER, 0 if place else None, system * (place > 0)
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
