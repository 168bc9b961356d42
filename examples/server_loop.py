"""A server's decode loop: requests arrive, fork, grow and finish, and one kernel serves them from the page table."""

import random

import torch

import treegen

PAGE, ROWS, WIDTH, PAGES, HEADS, KV_HEADS, DIM = 16, 8, 20, 200, 4, 2, 32


def main() -> None:
    """Decodes 100 steps, and checks every request in every step."""
    table, lengths = torch.zeros(ROWS, WIDTH, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    shape = treegen.Shape(HEADS, KV_HEADS, DIM, dtype="fp32", page_size=PAGE)
    kernel = treegen.compile_batch(shape, treegen.PageTable(table, lengths, PAGES), max_tokens=WIDTH * PAGE)
    keys, values = torch.randn(2, PAGES, PAGE, KV_HEADS, DIM)
    source, batch = random.Random(0), treegen.LiveBatch(PAGE)
    pages: dict[int, list[int]] = {}  # by seat
    worst = 0.0
    for _ in range(100):
        for seat in batch.seats.tolist():
            if source.random() < 0.03 or batch.tokens[seat] == WIDTH * PAGE:
                batch.finish(seat)
                del pages[seat]
        free = [page for page in range(PAGES) if not any(page in own for own in pages.values())]
        if len(batch) < ROWS and source.random() < 0.3:
            if pages and source.random() < 0.5:
                parent = source.choice(sorted(pages))
                seat, full = batch.fork(parent), int(batch.tokens[parent]) // PAGE
                pages[seat] = pages[parent][:full] + [free.pop() for _ in pages[parent][full:]]
                keys[pages[seat]], values[pages[seat]] = keys[pages[parent]], values[pages[parent]]
            else:
                seat = batch.add(tokens=source.randrange(150))
                pages[seat] = [free.pop() for _ in range(-(-int(batch.tokens[seat]) // PAGE))]
        batch.grow()  # each request gets the token of this step
        for seat, own in pages.items():
            tokens, row = int(batch.tokens[seat]), int(batch.row[seat])
            own += [free.pop() for _ in range(-(-tokens // PAGE) - len(own))]
            table[row, : len(own)], lengths[row] = torch.tensor(own, dtype=torch.int32), tokens
        kernel.prepare(batch)  # serves new requests with the current plan
        kernel.step()
        q = torch.randn(ROWS, HEADS, DIM)
        out = kernel(q, keys, values)
        kernel.refresh(batch)  # plans for the next step, while a GPU still runs this one
        for seat, own in pages.items():
            tokens, row = int(batch.tokens[seat]), int(batch.row[seat])
            k, v = (c[own].flatten(0, 1)[:tokens].repeat_interleave(HEADS // KV_HEADS, 1) for c in (keys, values))
            weights = torch.einsum("hd,thd->ht", q[row], k).mul(DIM**-0.5).softmax(-1)
            worst = max(worst, float((out[row] - torch.einsum("ht,thd->hd", weights, v)).abs().max()))
    print(f"in 100 steps: {kernel.counters()}, largest error {worst:.1e}")
    if worst > 1e-5:
        raise SystemExit("the output is wrong")


if __name__ == "__main__":
    main()
