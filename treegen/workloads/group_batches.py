"""Batches of requests over common prompts: samples, beams, and requests that come and go over prompts that stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treegen.workloads.served_batch import FOREVER, PAGE_SIZE, BatchCourse, BatchRequest, ServedBatch, whole_pages


def group_batches(seed: int) -> tuple[ServedBatch, ...]:
    """Makes the family `groups`: samples, beams and few-shot branches over prompts."""
    return (
        samples_of("grpo-8x32", "groups", 8, 32, (1024, 2048), 2048, seed),
        samples_of("grpo-32x8", "groups", 32, 8, (512, 1536), 4096, seed),
        _beams("beams-32", 32, 4096, 512, seed),
        over_prompts("few-shot-128", "groups", [4096], 128, (16, 256), 256, seed),
    )


def samples_of(
    name: str, family: str, prompts: int, samples: int, prompt: tuple[int, int], output: int, seed: int
) -> ServedBatch:
    """Makes groups of samples over a prompt each (GRPO). Samples finish one by one; a whole group arrives when it fits.

    Groups are at different points of their decodings. The first group ends within 170 steps.

    samples: of each prompt. prompt: the fewest and the most tokens of a prompt. output: the most tokens of a sample.
    """
    source = np.random.default_rng((seed, 1, prompts))

    def group(first: int, done: int, source: np.random.Generator) -> list[BatchRequest]:
        shared = whole_pages(int(source.integers(prompt[0], prompt[1] + 1)))
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

    return ServedBatch(name, family, PAGE_SIZE, tuple(requests), seed, follow, grouped=True)


def _beams(name: str, width: int, prompt: int, history: int, seed: int) -> ServedBatch:
    """Makes a beam search over one prompt, `history` steps after it. In each step some beams end and others fork."""
    source = np.random.default_rng((seed, 2, width))
    requests = [BatchRequest(prompt + history, _lifetime(source))]
    for number in range(1, width):
        owner = int(source.integers(number))
        ago = 1 + int(source.exponential(history / 8))
        shared = whole_pages(max(prompt, prompt + history - ago))
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
    """Draws the steps until a beam ends: 31 of 32 beams end with a chance of 0.1 in each step, the others after 64."""
    return 1 + int(source.geometric(0.1)) if source.random() < 31 / 32 else 64


def over_prompts(
    name: str,
    family: str,
    prompts: Sequence[int],
    width: int,
    own: tuple[int, int],
    output: int,
    seed: int,
) -> ServedBatch:
    """Makes a batch of `width` requests that come and go over prompts that stay, the same number for each prompt.

    prompts: tokens of each prompt, in whole pages. own: the fewest and the most tokens that a joining request has
    besides its prompt. output: the mean number of steps of a request.
    """
    source = np.random.default_rng((seed, 3, width, PAGE_SIZE, *prompts))

    def request(prompt: int, owner: int | None, source: np.random.Generator) -> BatchRequest:
        tokens = prompt + int(source.integers(own[0], own[1] + 1))
        return BatchRequest(tokens, 1 + int(source.geometric(1 / output)), owner, prompt if owner is not None else 0)

    requests: list[BatchRequest] = []
    for number in range(width):
        place = number % len(prompts)
        made = request(prompts[place], place if number >= len(prompts) else None, source)
        requests.append(made if number >= len(prompts) else replace(made, steps=FOREVER))  # keeps the prompt alive

    def follow(course: BatchCourse) -> Sequence[BatchRequest]:
        arrived = []
        for number in range(course.joined, course.joined + course.free()):
            place = number % len(prompts)
            arrived.append(request(prompts[place], place, course.random))
        return arrived

    return ServedBatch(name, family, PAGE_SIZE, tuple(requests), seed, follow, grouped=True)
