"""Large batches, as of servers under load: 512 and 1,024 requests."""

from __future__ import annotations

from treegen.workloads.group_batches import over_prompts, samples_of
from treegen.workloads.served_batch import ServedBatch
from treegen.workloads.unshared_batches import apart


def large_batches(seed: int) -> tuple[ServedBatch, ...]:
    """Makes the family `large`: requests that share nothing, requests over one prompt, and groups of samples."""
    return (
        apart("512-apart", 512, (256, 4096), 300, seed, "large"),
        apart("1024-apart", 1024, (128, 1920), 400, seed, "large"),
        over_prompts("1024-over-1024", "large", [1024], 1024, (64, 1024), 300, seed),
        samples_of("64x16", "large", 64, 16, (512, 1536), 2048, seed),
    )
