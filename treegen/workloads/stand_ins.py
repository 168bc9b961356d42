"""Stand-ins: batches that a kernel of fixed capacity serves before the batch that is measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treegen.workloads.served_batch import FOREVER, ServedBatch, nobody, whole_pages


def stand_ins(batch: ServedBatch) -> tuple[ServedBatch, ServedBatch]:
    """Makes two batches with the same number of requests, none longer than those of `batch`.

    They show that a captured graph serves other batches than the one that it was captured for. Both have the batch's
    page size, draft and query rows, and no request arrives or finishes.

    Returns:
        A batch without sharing, and a batch of groups of eight requests that share half of their tokens.
    """
    source = np.random.default_rng((batch.seed, 2))
    page, count = batch.page_size, len(batch.requests)
    shortest = max(request.queries for request in batch.requests) + page
    usual = max(shortest + 1, batch.unique_tokens // count)
    forms = [replace(request, shared_with=None, shared_tokens=0, steps=FOREVER) for request in batch.requests]
    apart, groups = [], []
    for number, form in enumerate(forms):
        tokens = int(source.integers(max(shortest, usual // 2), usual + 1))
        apart.append(replace(form, tokens=tokens))
        owner = number - number % 8
        if owner == number:
            groups.append(replace(form, tokens=tokens))
        else:
            shared = min(tokens, groups[owner].tokens) // 2
            groups.append(replace(form, tokens=tokens, shared_with=owner, shared_tokens=whole_pages(shared, page)))
    return (
        replace(batch, name=f"{batch.name}, apart", requests=tuple(apart), follow=nobody, grouped=False),
        replace(batch, name=f"{batch.name}, groups", requests=tuple(groups), follow=nobody, grouped=True),
    )
