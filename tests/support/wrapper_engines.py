"""Engines that give page tables to a wrapper by request: random events, and attention over each request's pages."""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from support.page_requests import Requests, csr
from treegen import TreeAttentionWrapper
from treegen.backends.find_sharing import SharingReader

HEADS, KV_HEADS, DIM = 4, 2, 16
PAGE = 4


class Engine:
    """A cache whose pages requests hold together, a table of who is in which row, and random events. What nobody holds
    is NaN.
    """

    def __init__(self, seed: int, rows: int, longest: int, page_size: int = PAGE) -> None:
        self.random, self.rows, self.longest, self.page_size = random.Random(seed), rows, longest, page_size
        count = 2 * rows * (longest // page_size + 2)
        generator = torch.Generator().manual_seed(seed)
        self.true = torch.randn(2, count, page_size, KV_HEADS, DIM, generator=generator)
        self.cache = torch.full_like(self.true, math.nan)
        self.free, self.held = self.random.sample(range(count), count), [0] * count
        self.batch: dict[int, tuple[list[int], int]] = {}  # by id, in order of rows
        self.next_id = 100

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def write(self, pages: list[int], begin: int, end: int) -> None:
        for token in range(begin, end):
            page, at = pages[token // self.page_size], token % self.page_size
            self.cache[:, page, at] = self.true[:, page, at]

    def more(self, pages: list[int], tokens: int) -> list[int]:
        """Holds these pages as well, and takes free ones until there is room for the tokens."""
        new = [self.free.pop(0) for _ in range(self.pages(tokens) - len(pages))]
        for page in (*pages, *new):
            self.held[page] += 1
        return [*pages, *new]

    def arrive(self, like: int | None = None) -> None:
        if len(self.batch) == self.rows:
            return
        shared: list[int] = []
        if like is not None:
            pages, tokens = self.batch[like]
            whole = tokens // self.page_size
            shared = pages[: self.random.choice([whole, self.random.randint(0, whole)])]
        begin = len(shared) * self.page_size
        tokens = min(begin + self.random.choice([0, 1, self.random.randint(1, 30)]), self.longest)
        pages = self.more(shared, tokens)
        self.write(pages, begin, tokens)
        self.batch[self.next_id] = pages, tokens
        self.next_id += 1

    def finish(self, name: int) -> None:
        for page in self.batch.pop(name)[0]:
            self.held[page] -= 1
            if not self.held[page]:
                self.free.append(page)
                self.cache[:, page] = math.nan

    def grow(self, name: int, count: int) -> None:
        pages, tokens = self.batch[name]
        after = min(tokens + count, self.longest)
        new = [self.free.pop(0) for _ in range(self.pages(after) - len(pages))]
        for page in new:
            self.held[page] += 1
        self.write([*pages, *new], tokens, after)
        self.batch[name] = [*pages, *new], after

    def step(self) -> None:
        """Most requests grow by a token; some come, go, fork or change places."""
        for name in list(self.batch):
            self.grow(name, self.random.choice([1, 1, 1, 0, 9]))
        names = list(self.batch)
        kind = self.random.choice(["none", "arrive", "share", "share", "finish", "turn", "permute"])
        if kind == "arrive" or not names:
            self.arrive()
        elif kind == "share":
            self.arrive(self.random.choice(names))
        elif kind in ("finish", "turn"):
            self.finish(self.random.choice(names))
            if kind == "turn":
                self.arrive(self.random.choice(list(self.batch)) if self.batch else None)
        elif kind == "permute":
            self.random.shuffle(names)
            self.batch = {name: self.batch[name] for name in names}

    @property
    def requests(self) -> Requests:
        return list(self.batch.values())

    def expected(self, q: torch.Tensor, window_left: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        """out and base-2 lse of every row over its own pages, in float64."""
        out = torch.zeros(q.shape, dtype=torch.float64)
        lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
        for row, (pages, tokens) in enumerate(self.requests):
            if not tokens:
                continue
            token = torch.arange(max(0, tokens - 1 - window_left) if window_left >= 0 else 0, tokens)
            page = torch.tensor(pages)[token // self.page_size]
            keys, values = self.cache[:, page, token % self.page_size].double()
            query = q[row].double().view(KV_HEADS, HEADS // KV_HEADS, DIM)
            scores = torch.einsum("hgd,thd->hgt", query, keys) * DIM**-0.5
            lse[row] = scores.logsumexp(-1).flatten() / math.log(2)
            out[row] = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values).flatten(0, 1)
        return out, lse


def tensors(made: Requests, page_size: int = PAGE) -> list[torch.Tensor]:
    """A page table as an engine has it on the device."""
    return [torch.tensor(part, dtype=torch.int32) for part in csr(made, page_size)]


def plan(wrapper: TreeAttentionWrapper, made: Requests, page_size: int = PAGE, **options: Any) -> None:
    options = {"q_data_type": "float32", **options}
    wrapper.plan(*tensors(made, page_size), HEADS, KV_HEADS, DIM, page_size, **options)


def check(wrapper: TreeAttentionWrapper, engine: Engine, seed: int = 0, window_left: int = -1) -> None:
    """Runs a layer and compares it."""
    q = torch.randn(len(engine.batch), HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    out, lse = wrapper.run_return_lse(q, (engine.cache[0], engine.cache[1]))
    expected_out, expected_lse = engine.expected(q, window_left)
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)


class LateReader(SharingReader):
    """A reader that is ready some questions later, as on a GPU."""

    started = 0

    def start(self, rows: int | None = None) -> None:
        super().start(rows)
        LateReader.started += 1
        self.asked = 0

    def ready(self) -> bool:
        self.asked += 1
        return self.asked > 3
