"""Histories of live batches: after every event the tree says what requests are, and what they share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.batch_model import EVENTS, Model
from support.forests import examples


@given(st.integers(0, 2**32), st.sampled_from((1, 1, 4, 16)), st.sampled_from(range(1, 40)))
@examples(120)
def test_histories(seed: int, page_size: int, events: int) -> None:
    """After every event the tree says what requests are, and shares what they shared before."""
    model = Model(seed, page_size)
    model.check()
    for _ in range(events):
        event = model.source.choice(EVENTS) if 0 < len(model.tokens) < 12 else None
        (event or (Model.finish if model.tokens else Model.add))(model)
        model.check()


@given(st.integers(0, 2**32), st.sampled_from((1, 4)), st.sampled_from(range(1, 30)))
@examples(60)
def test_what_was_found_some_events_ago(seed: int, page_size: int, events: int) -> None:
    """Requests that are still there share what they shared then, others nothing, and seats are who they are now."""
    model = Model(seed, page_size)
    for _ in range(events):
        event = model.source.choice(EVENTS) if 0 < len(model.tokens) < 12 else None
        (event or (Model.finish if model.tokens else Model.add))(model)
    batch, shared = model.batch, dict(model.shared)
    seats, epochs = batch.seats, batch.epoch[batch.seats]
    number = {int(other): index for index, other in enumerate(seats)}
    above = [number.get(int(other), -1) for other in batch.shared_with[seats]]
    parts, tokens = batch.shared_tokens[seats], batch.tokens[seats]
    for _ in range(model.source.randint(0, 6)):
        later = (Model.add, Model.finish, Model.moved, Model.reorder)
        (model.source.choice(later) if 0 < len(model.tokens) < 12 else Model.add)(model)
    same = {int(seat) for seat, epoch in zip(seats, epochs, strict=True) if model.epochs[int(seat)] == epoch}
    batch.found(seats, epochs, tokens, above, parts)
    model.shared = {pair: shared[pair] if {*pair} <= same else 0 for pair in model.shared}
    model.check()
