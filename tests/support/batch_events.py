"""A server's cache and page table, and random events in the life of its batch; what kernels give is compared with
attention in float64 over each request's own pages. What no request may read holds NaN, or impossible page ids.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict

import numpy as np
import torch

from treegen import Shape
from treegen.backends.page_table import PageTable
from treegen.ir.live_batch import LiveBatch

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Server:
    """Pages of a cache with reference counts, a page table in one of three forms, and the requests of a batch.

    The kernel learns about requests from a LiveBatch, `say`, and the page table is the truth. queries: the most query
    rows of a request; None where each has one, and the page table has no qo_indptr.
    """

    def __init__(
        self,
        seed: int,
        shape: Shape,
        rows: int,
        most_tokens: int,
        device: str = "cpu",
        form: str = "block",
        queries: int | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.shape, self.rows, self.most_tokens, self.device, self.form = shape, rows, most_tokens, device, form
        self.page_size = shape.page_size
        width = -(-most_tokens // self.page_size)
        self.num_pages = 2 * rows * width + 8
        self.free = list(range(self.num_pages))
        self.random.shuffle(self.free)
        self.held = [0] * self.num_pages
        self.width = width
        pages = (self.num_pages, shape.page_size, shape.num_kv_heads)
        dtype = TORCH[shape.dtype]
        generator = torch.Generator(device="cpu").manual_seed(seed)
        self.true_k = torch.randn(*pages, shape.head_dim, generator=generator).to(dtype).to(device)
        self.true_v = torch.randn(*pages, shape.head_dim_v, generator=generator).to(dtype).to(device)
        self.k, self.v = torch.full_like(self.true_k, math.nan), torch.full_like(self.true_v, math.nan)
        self.batch = LiveBatch(page_size=self.page_size, max_seats=rows)
        self.of_seat: dict[int, list[int]] = {}  # pages
        self.length: dict[int, int] = {}
        self.most_queries, self.query_rows = queries or 1, rows * (queries or 1)
        self.queries: defaultdict[int, int] = defaultdict(lambda: 1)  # by seat
        self.rows_of = {row: range(row, row + 1) for row in range(rows)}  # of q, by rows of the batch
        self.changed = True  # whether a plan may be wanted
        pool = rows + 3
        self.named = form == "named"
        entries = pool * width if form != "ragged" else rows * width
        self.table = torch.empty(entries, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.table_rows = torch.zeros(rows, dtype=torch.int32, device=device) if self.named else None
        self.indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device) if form == "ragged" else None
        self.qo_indptr = None if queries is None else torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.row_of_pool = list(range(pool))
        self.pages = PageTable(
            self.table if form == "ragged" else self.table.view(pool, width),
            self.seq_lens,
            self.num_pages,
            self.table_rows,
            self.indptr,
            self.qo_indptr,
        )

    def take(self) -> int:
        """A free page."""
        page = self.free.pop(0)
        self.held[page] = 1
        return page

    def drop(self, pages: list[int]) -> None:
        """Gives pages back, with NaN in those that nobody holds."""
        for page in pages:
            self.held[page] -= 1
            if not self.held[page]:
                self.free.append(page)
                self.k[page] = math.nan
                self.v[page] = math.nan

    def fill(self, pages: list[int], begin: int, end: int) -> None:
        """Writes the tokens `begin:end` of a request."""
        for token in range(begin, end):
            page, at = pages[token // self.page_size], token % self.page_size
            self.k[page, at], self.v[page, at] = self.true_k[page, at], self.true_v[page, at]

    def room(self, tokens: int) -> int:
        """Pages for so many tokens."""
        return -(-tokens // self.page_size)

    def arrive(self, shared_with: int | None = None, lie: bool = False) -> None:
        """A request comes, which begins like another one or not."""
        if len(self.batch) >= self.rows:
            return
        tokens = self.random.choice([0, 1, self.page_size, self.random.randint(1, self.most_tokens // 2)])
        pages: list[int] = []
        shared = 0
        if shared_with is not None:
            full = self.length[shared_with] // self.page_size
            shared = self.random.randint(0, full) * self.page_size
            tokens = min(shared + self.random.randint(0, 3 * self.page_size + 5), self.most_tokens - 1)
            pages = self.of_seat[shared_with][: shared // self.page_size]
            for page in pages:
                self.held[page] += 1
        pages = pages + [self.take() for _ in range(self.room(tokens) - len(pages))]
        claimed = shared
        if lie and shared_with is not None:  # more than is true
            claimed = min(tokens, self.length[shared_with]) // self.page_size * self.page_size
        if shared_with is not None:  # as far as the host knows how long that one is
            claimed = min(claimed, int(self.batch.tokens[shared_with]) // self.page_size * self.page_size)
        with_whom = shared_with if claimed else None
        queries = self.random.randint(1, self.most_queries)
        seat = self.batch.add(tokens, with_whom, claimed, self.free_row(), queries)
        self.of_seat[seat], self.length[seat], self.queries[seat] = pages, tokens, queries
        self.fill(pages, shared, tokens)

    def free_row(self) -> int:
        """Some free place in the batch."""
        used = set(self.batch.row.tolist())
        return self.random.choice([row for row in range(self.rows) if row not in used])

    def fork(self, seat: int) -> None:
        """A request branches in the middle of a page, which is copied."""
        if len(self.batch) >= self.rows:
            return
        new = self.batch.fork(seat, row=self.free_row(), rows=self.queries[seat])
        full = self.length[seat] // self.page_size
        pages = self.of_seat[seat][:full]
        for page in pages:
            self.held[page] += 1
        pages = pages + [self.take() for _ in range(self.room(self.length[seat]) - full)]
        self.of_seat[new], self.length[new], self.queries[new] = pages, self.length[seat], self.queries[seat]
        self.fill(pages, full * self.page_size, self.length[seat])

    def grow(self, seat: int, tokens: int) -> None:
        """A request gets tokens."""
        before = self.length[seat]
        after = min(before + tokens, self.most_tokens)
        pages = self.of_seat[seat]
        pages += [self.take() for _ in range(self.room(after) - len(pages))]
        self.length[seat] = after
        self.fill(pages, before, after)
        if self.random.random() < 0.7:  # the host may know it or not
            self.batch.grow(after - before, [seat])

    def finish(self, seat: int) -> None:
        """A request ends."""
        self.batch.finish(seat)
        self.drop(self.of_seat.pop(seat))
        del self.length[seat]
        self.queries.pop(seat, None)

    def move(self, seat: int, told: bool) -> None:
        """A request resumes in other pages."""
        old, length = self.of_seat[seat], self.length[seat]
        pages = [self.take() for _ in old]
        self.of_seat[seat] = pages
        self.fill(pages, 0, length)
        self.drop(old)
        if told:
            self.batch.moved(seat)

    def replace_shared(self) -> None:
        """One page that requests share is another one for one of them."""
        for seat in self.random.sample(sorted(self.of_seat), len(self.of_seat)):
            shared = [i for i, page in enumerate(self.of_seat[seat]) if self.held[page] > 1]
            if shared:
                place = self.random.choice(shared)
                page = self.take()
                old = self.of_seat[seat][place]
                self.of_seat[seat] = [*self.of_seat[seat]]
                self.of_seat[seat][place] = page
                begin = place * self.page_size
                self.fill(self.of_seat[seat], begin, min(begin + self.page_size, self.length[seat]))
                self.drop([old])
                return

    def roll_back(self, seat: int) -> None:
        """A request loses tokens, which may be shared ones; the host may not know it."""
        length = self.length[seat]
        after = self.random.choice([self.random.randint(0, length), max(0, length - self.random.randint(1, 20))])
        pages = self.of_seat[seat]
        keep = self.room(after)
        self.of_seat[seat] = pages[:keep]
        self.drop(pages[keep:])
        if keep and after % self.page_size and self.held[pages[keep - 1]] == 1:
            self.k[pages[keep - 1], after % self.page_size :] = math.nan
            self.v[pages[keep - 1], after % self.page_size :] = math.nan
        self.length[seat] = after
        self.batch.set_tokens([seat], [after]) if self.random.random() < 0.5 else None

    def change_queries(self, seat: int) -> None:
        """A request has another number of query rows; the host may not know it."""
        self.queries[seat] = self.random.randint(1, self.most_queries)
        if self.random.random() < 0.7:
            self.batch.set_rows(seat, self.queries[seat])

    def event(self) -> None:
        """Something happens."""
        seats = sorted(self.of_seat)
        some = self.random.choice(seats) if seats else None
        kinds = ["arrive", "grow", "grow", "grow"]
        if some is not None:
            kinds += ["share", "lie", "fork", "finish", "owner", "permute", "move", "moved", "replace", "back"]
            kinds += ["queries", "queries"] if self.qo_indptr is not None else []
        kind = self.random.choice(kinds)
        if kind == "arrive":
            self.arrive()
        elif kind == "grow":
            for seat in self.random.sample(seats, self.random.randint(0, len(seats))):
                self.grow(seat, self.random.randint(1, 40))
        elif some is None:
            return
        elif kind in ("share", "lie"):
            self.arrive(some, lie=kind == "lie")
        elif kind == "fork":
            self.fork(some)
        elif kind == "finish":
            self.finish(some)
        elif kind == "owner":  # its seat and table row are used again at once
            self.finish(some)
            self.arrive()
        elif kind == "permute":
            rows = self.random.sample(range(self.rows), len(seats))
            self.batch.reorder(dict(zip(seats, rows, strict=True)))
            self.random.shuffle(self.row_of_pool)
        elif kind in ("move", "moved"):
            self.move(some, told=kind == "moved")
        elif kind == "replace":
            self.replace_shared()
        elif kind == "queries":
            self.change_queries(some)
        elif kind == "back":
            self.roll_back(some)

    def write(self) -> dict[int, int]:
        """Writes page table and lengths as an engine would; everything else is garbage. Returns lengths by row, -1 for
        requests whose page ids are impossible.
        """
        garbage = [-1, self.num_pages, 2**31 - 1, -(2**31), 0, 5]
        table = np.array([self.random.choice(garbage) for _ in range(self.table.numel())], np.int32)
        lengths = np.array([self.random.choice([0, 7, -3, 2**30]) for _ in range(self.rows)], np.int32)
        expected: dict[int, int] = {}
        row_seat = {int(self.batch.row[seat]): seat for seat in self.of_seat}
        named = np.array([self.random.choice([0, 1]) for _ in range(self.rows)], np.int32)
        ends = [0]
        for row in range(self.rows):
            pages = self.of_seat[row_seat[row]] if row in row_seat else []
            begin = ends[-1] if self.indptr is not None else row * self.width
            if self.named:
                named[row] = self.row_of_pool[row]
                begin = self.row_of_pool[row] * self.width
            table[begin : begin + len(pages)] = pages
            ends.append(ends[-1] + len(pages))
            if self.qo_indptr is not None:  # rows without a request have some, too, where there is room
                begin_query = self.rows_of[row - 1].stop if row else 0
                queries = self.queries[row_seat[row]] if row in row_seat else self.random.choice([0, 0, 1])
                self.rows_of[row] = range(begin_query, begin_query + queries)
            if row in row_seat:
                lengths[row] = expected[row] = self.length[row_seat[row]]
                if pages and self.random.random() < 0.02:
                    table[begin + self.random.randrange(len(pages))] = self.random.choice([-1, self.num_pages, 2**30])
                    expected[row] = -1
        self.table.copy_(torch.from_numpy(table))
        self.seq_lens.copy_(torch.from_numpy(lengths))
        if self.table_rows is not None:
            self.table_rows.copy_(torch.from_numpy(named))
        if self.qo_indptr is not None:
            starts = [rows.start for rows in self.rows_of.values()]
            self.qo_indptr.copy_(torch.tensor([*starts, self.rows_of[self.rows - 1].stop], dtype=torch.int32))
        if self.indptr is not None:
            self.indptr.copy_(torch.tensor(ends, dtype=torch.int32))
        return expected

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The caches in the shape's layout."""
        if self.shape.page_size == 1:
            return self.k[:, 0], self.v[:, 0]
        if self.shape.kv_layout == "HND":
            return tuple(cache.transpose(1, 2).contiguous() for cache in (self.k, self.v))  # type: ignore[return-value]
        return self.k, self.v

    def seen(self, lengths: dict[int, int]) -> dict[int, tuple[int, int]]:
        """By query row, the row of the batch that it is of, and the tokens that it sees; as `lengths` has them."""
        return {
            place: (row, length if length < 0 else max(length - len(self.rows_of[row]) + number + 1, 0))
            for row, length in lengths.items()
            for number, place in enumerate(self.rows_of[row])
        }

    def expected(
        self, q: torch.Tensor, lengths: dict[int, int], sm_scale: float, window_left: int = -1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse of every query row of a request, NaN elsewhere, in float64."""
        heads, kv_heads = self.shape.num_qo_heads, self.shape.num_kv_heads
        out = torch.full((self.query_rows, heads, self.shape.head_dim_v), math.nan, dtype=torch.float64)
        lse = torch.full((self.query_rows, heads), math.nan, dtype=torch.float64)
        row_seat = {int(self.batch.row[seat]): seat for seat in self.of_seat}
        for place, (row, length) in self.seen(lengths).items():
            if length <= 0:
                out[place], lse[place] = 0, -math.inf
                continue
            begin = max(0, length - 1 - window_left) if window_left >= 0 else 0
            token = torch.arange(begin, length)
            page = torch.tensor(self.of_seat[row_seat[row]])[token // self.page_size]
            keys, values = (c[page, token % self.page_size].double().cpu() for c in (self.k, self.v))
            query = q[place].double().cpu().view(kv_heads, heads // kv_heads, -1)
            scores = torch.einsum("hgd,thd->hgt", query, keys) * sm_scale
            lse[place] = scores.logsumexp(-1).flatten()
            out[place] = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values).flatten(0, 1)
        return out, lse
