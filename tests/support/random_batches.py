"""Random running batches, and what happens to them."""

from __future__ import annotations

import random

from treegen import LiveBatch
from treegen.ir.errors import TreeError


def random_batch(source: random.Random, page_size: int | None = None) -> LiveBatch:
    """Requests that came, ended, moved and grew; some share with others, directly or through others."""
    page_size = page_size or source.choice([1, 16, 128])
    batch, most = LiveBatch(page_size, max_seats=source.choice([1, 8, 64])), source.choice([1, 5, 40, 90])
    own = source.choice([1, 40, 400, 3000, 20000])
    for _ in range(2 * most):
        seats = batch.seats.tolist()
        if seats and (len(seats) >= most or source.random() < 0.3):
            batch.finish(source.choice(seats))
            continue
        above = source.choice(seats) if seats and source.random() < 0.8 else None
        shared = 0 if above is None else source.randint(0, int(batch.tokens[above]))
        batch.add(shared + source.choice([0, 1, page_size, source.randint(0, own)]), above, shared)
    if len(batch) and source.random() < 0.5:
        batch.moved(source.choice(batch.seats.tolist()))
    if len(batch) and source.random() < 0.5:
        batch.grow(source.randint(0, 40))
    return batch


def with_rows(source: random.Random, batch: LiveBatch) -> LiveBatch:
    """Gives some requests of the batch several query rows, such as drafts and chunks of prompts."""
    most, share = source.choice([2, 5, 17, 70, 300]), source.choice([0.1, 0.5, 1.0])
    for seat in batch.seats.tolist():
        if source.random() < share:
            batch.set_rows(seat, source.randint(1, most))
    return batch


def change(source: random.Random, batch: LiveBatch) -> None:
    """Does one thing that a server does; sometimes it does many."""
    seats = batch.seats.tolist()
    often, seldom = ["add", "replace", "finish"], ["fork", "grow", "move", "reorder", "share", "cut", "many"]
    event = source.choice([*often, *often, *seldom])
    try:
        if event == "add" or not seats:
            above = source.choice(seats) if seats and source.random() < 0.8 else None
            shared = 0 if above is None else source.randint(0, int(batch.tokens[above]))
            batch.add(shared + source.choice([1, 20, 400, 3000]), above, shared)
        elif event == "replace":  # by one that shares the same
            seat = source.choice(seats)
            tokens, owner, shared = (int(line[seat]) for line in (batch.tokens, batch.shared_with, batch.shared_tokens))
            batch.finish(seat)
            batch.add(tokens + source.choice([0, 10, 300, 600, 3000]), owner if owner >= 0 else None, shared)
        elif event == "fork":
            batch.fork(source.choice(seats))
        elif event == "finish":
            batch.finish(source.choice(seats))
        elif event == "grow":
            batch.grow(source.randint(1, 40))
        elif event == "move":
            batch.moved(source.choice(seats))
        elif event == "reorder":
            batch.reorder(dict(zip(seats, source.sample(range(len(seats)), len(seats)), strict=True)))
        elif event == "share":
            seat, other = source.choice(seats), source.choice(seats)
            batch.share(seat, other, source.randint(0, int(min(batch.tokens[seat], batch.tokens[other]))))
        elif event == "cut":
            seat = source.choice(seats)
            batch.set_tokens(seat, source.randint(0, int(batch.tokens[seat])))
        else:
            for seat in source.sample(seats, min(len(seats), source.choice([10, 80]))):
                batch.finish(seat)
                batch.add(source.randint(1, 500))
    except TreeError:  # the event is impossible for these requests
        return
