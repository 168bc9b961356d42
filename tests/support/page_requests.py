"""Random requests, and their page tables in engines' forms."""

from __future__ import annotations

import random

import numpy as np

Requests = list[tuple[list[int], int]]
"""Pages and tokens of every request."""


def requests(seed: int, count: int, page_size: int, longest: int, sharing: float, pool: int) -> Requests:
    """Requests that begin like earlier ones, end inside their pages, repeat others, are empty, or use any pages."""
    source = random.Random(seed)
    made: Requests = []
    for _ in range(count):
        pages: list[int] = []
        if made and source.random() < sharing:
            earlier = source.choice(made)[0]
            pages = earlier[: source.randint(0, len(earlier))]
        if source.random() < 0.8:
            pages = pages + [source.randrange(pool) for _ in range(source.randint(0, longest))]
        tokens = (len(pages) - 1) * page_size + source.randint(1, page_size) if pages else 0
        made.append((pages, tokens))
    return made


def csr(made: Requests, page_size: int) -> tuple[list[int], list[int], list[int]]:
    """FlashInfer's form."""
    indptr = np.cumsum([0, *(len(pages) for pages, _ in made)]).tolist()
    last = [(tokens - 1) % page_size + 1 if tokens else 0 for _, tokens in made]
    return indptr, [page for pages, _ in made for page in pages], last


def blocks(made: Requests, padding: int) -> tuple[np.ndarray, list[int]]:
    """vLLM's form."""
    width = max((len(pages) for pages, _ in made), default=0) + 1
    table = [[*pages, *[padding] * (width - len(pages))] for pages, _ in made]
    return np.array(table, np.int64).reshape(len(made), width), [tokens for _, tokens in made]


def slots(pages: list[int], tokens: int, page_size: int) -> list[int]:
    return [page * page_size + offset for page in pages for offset in range(page_size)][:tokens]
