"""The live batch: requests that come, grow, share and end, and what is refused."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest

from support.request_checks import by_request
from treegen import LiveBatch
from treegen.ir.errors import TreeError


def test_a_copy_of_a_batch_goes_its_own_way() -> None:
    batch = LiveBatch(page_size=16, max_seats=2)
    first = batch.add(100)
    batch.fork(first, 64)
    for again in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert (len(again), again.changes, again.moves) == (2, 2, 2)
        again.grow(5)
        again.add(7)
        np.testing.assert_array_equal(by_request(again.tree()).length, [105, 105, 7])
        np.testing.assert_array_equal(by_request(again.tree()).shared_tokens, [0, 64, 0])
    np.testing.assert_array_equal(by_request(batch.tree()).length, [100, 100])


def test_reuse_of_seats_and_rows() -> None:
    batch = LiveBatch(max_seats=1)
    assert [batch.add(5, row=7), batch.add(5), batch.add(5)] == [0, 1, 2]
    assert batch.row.tolist() == [7, 0, 1, -1]
    batch.finish(1)
    assert batch.fork(0) == 1
    assert batch.row.tolist() == [7, 0, 1, -1]
    assert batch.epoch.tolist() == [1, 2, 1, 0]
    batch.grow(2)
    batch.grow(1, np.int64(2))
    batch.set_tokens(0, 3)
    assert batch.tokens.tolist() == [3, 7, 8, 0]
    batch.moved(batch.seats[1])
    assert batch.epoch.tolist() == [1, 3, 1, 0]
    assert repr(batch) == "<treegen.LiveBatch: 3 requests, page_size 1>"


Call = Callable[[LiveBatch], object]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda batch: batch.add(-1), "tokens = -1: is outside"),
        (lambda batch: batch.add(1.5), "tokens = 1.5: is not an integer"),
        (lambda batch: batch.add(True), "tokens = True: is not an integer"),
        (lambda batch: batch.add(2**31), "tokens = 2147483648: is outside"),
        (lambda batch: batch.add(8, shared_tokens=4), "shared_tokens = 4: are shared with no seat"),
        (lambda batch: batch.add(8, 1, 4), "shared_with = 1: is the seat of no running request"),
        (lambda batch: batch.add(8, 0, 9), "is more than the 8 tokens that the request has"),
        (lambda batch: batch.add(80, 0, 41), "is more than the 40 tokens that seat 0 has"),
        (lambda batch: batch.add(8, row=2), "row = 2: is taken by seat 2"),
        (lambda batch: batch.add(8, row=-2), "row = -2: is outside"),
        (lambda batch: batch.fork(1), "seat = 1: is the seat of no running request"),
        (lambda batch: batch.fork(99), "seat = 99: is the seat of no running request"),
        (lambda batch: batch.fork(0, 41), "shared_tokens = 41: is more than the 40"),
        (lambda batch: batch.finish(1), "seat = 1: is the seat of no running request"),
        (lambda batch: batch.finish(-1), "seat = -1: is outside"),
        (lambda batch: batch.moved([0, 1]), r"seats\[1\] = 1: is the seat of no running request"),
        (lambda batch: batch.moved([0, 0]), "names seat 0 twice"),
        (lambda batch: batch.share(0, 0, 4), "shared_with = 0: is the seat itself"),
        (lambda batch: batch.share(0, 3, 4), "shared_with = 3: shares with seat 0 itself"),
        (lambda batch: batch.share(0, 2, 31), "is more than the 30 tokens that seat 2"),
        (lambda batch: batch.share(0, None, 4), "shared_tokens = 4: are shared with no seat"),
        (lambda batch: batch.grow(-1), "tokens = -1: is outside"),
        (lambda batch: batch.grow([1, 1]), "tokens = 2 entries: does not match 3 seats"),
        (lambda batch: batch.grow(1, [1]), r"seats\[0\] = 1: is the seat of no running request"),
        (lambda batch: batch.grow(2**31 - 1), r"is more than 2\^31 - 1 for seat 0"),
        (lambda batch: batch.set_tokens([0], [-1]), r"tokens\[0\] = -1: is outside"),
        (lambda batch: batch.set_tokens([7], [1]), r"seats\[0\] = 7: is the seat of no running request"),
        (lambda batch: batch.add(8, rows=0), "rows = 0: is outside 1"),
        (lambda batch: batch.add(8, rows=1.0), "rows = 1.0: is not an integer"),
        (lambda batch: batch.set_rows(0, 0), "rows = 0: is outside 1"),
        (lambda batch: batch.set_rows([0, 2], [1, 0]), r"rows\[1\] = 0: is outside 1"),
        (lambda batch: batch.set_rows([0, 2], [1]), "rows = 1 entries: does not match 2 seats"),
        (lambda batch: batch.set_rows(1, 3), r"seats\[0\] = 1: is the seat of no running request"),
        (lambda batch: batch.reorder({0: 2}), "gives row 2 to two requests"),
        (lambda batch: batch.reorder({1: 5}), r"seats\[0\] = 1: is the seat of no running request"),
        (lambda batch: batch.reorder({0: -5}), r"rows\[0\] = -5"),
        (lambda batch: batch.reorder([0, 0, 1]), "rows = 3 entries: has no row for seat 3"),
        (lambda batch: batch.reorder([0, 0, -1, 2]), r"rows\[2\] = -1: is outside"),
    ],
)
def test_errors_of_live_batches(call: Call, match: str) -> None:
    """Of batches of the seats 0, 2 and 3, the last of which shares 32 tokens with the first; they change nothing."""
    batch = LiveBatch(16, max_seats=4)
    for tokens in (40, 20, 30):
        batch.add(tokens)
    batch.finish(1)
    batch.add(1, row=9)
    batch.fork(0)
    batch.finish(1)
    assert batch.seats.tolist() == [0, 2, 3]
    names = ("row", "rows", "epoch", "tokens", "shared_with", "shared_tokens", "changes", "moves")
    before = [np.array(getattr(batch, name)).tolist() for name in names]
    with pytest.raises(TreeError, match=match):
        call(batch)
    assert [np.array(getattr(batch, name)).tolist() for name in names] == before
    assert len(batch) == 3


@pytest.mark.parametrize("argument", ["page_size", "max_seats"])
def test_sizes_of_live_batches(argument: str) -> None:
    with pytest.raises(TreeError, match=f"{argument} = 0: is not a positive integer"):
        LiveBatch(**{argument: 0})


def test_the_heir_is_the_one_that_shares_most() -> None:
    batch = LiveBatch()
    batch.add(100)
    batch.fork(0, 40)
    for shared in (60, 80, 80, 70):
        batch.fork(1, shared)
    assert batch.shared_with.tolist()[:6] == [-1, 0, 1, 1, 1, 1]
    batch.finish(1)
    assert batch.shared_with.tolist()[:6] == [-1, -1, 3, 0, 3, 3]
    assert batch.shared_tokens.tolist()[:6] == [0, 0, 60, 40, 80, 70]


def test_what_shares_less_goes_up_to_the_owner() -> None:
    """A claim of more tokens than others share with the seat: these share with the one that owns them."""
    batch = LiveBatch()
    for _ in range(3):
        batch.add(100)
    for shared in (10, 20, 30):
        batch.fork(2, shared)
    batch.share(1, 0, 15)
    batch.share(2, 1, 20)
    assert batch.shared_with.tolist()[:6] == [-1, 0, 1, 0, 1, 2]
    assert batch.shared_tokens.tolist()[:6] == [0, 15, 20, 10, 20, 30]
    batch.share(2, 1, 0)
    assert batch.shared_with.tolist()[:6] == [-1, 0, -1, 0, 1, 2]


def test_what_was_found_has_an_entry_for_each_seat() -> None:
    batch = LiveBatch()
    batch.add(5)
    batch.add(5)
    for arguments, match in (
        (([0, 1], [1, 1], [5, 5], [-1, 0], [0]), "shared_tokens"),
        (([0, 1], [1, 1], [5, 5], [-1, 0], [0, 9]), "shared_tokens"),
        (([0, 1], [1], [5, 5], [-1, 0], [0, 3]), "epochs"),
        (([0, 1], [1, 1.5], [5, 5], [-1, 0], [0, 3]), r"epochs\[1\] = 1.5"),
        (([0, 64], [1, 1], [5, 5], [-1, 0], [0, 3]), "seats"),
        (([0, 0], [1, 1], [5, 5], [-1, 0], [0, 3]), "names seat 0 twice"),
        (([0, 1], [1, 1], 5, [-1, 0], [0, 3]), "tokens = 5: has to be one-dimensional"),
        (([0, 1], [1, 1], [5, 5], [-1, 0], np.array(3)), "shared_tokens = .*: has to be one-dimensional"),
        ((np.ma.array([0, 1], mask=[0, 1]), [1, 1], [5, 5], [-1, 0], [0, 3]), "seats = a masked array"),
    ):
        with pytest.raises(TreeError, match=match):
            batch.found(*arguments)
    batch.found([0, 1], [1, 1], [7, 5], [-1, 0], [0, 3])
    assert (batch.tokens[:2].tolist(), batch.shared_tokens[:2].tolist()) == ([7, 5], [0, 3])


def test_copies_have_requests_of_their_own() -> None:
    batch = LiveBatch(page_size=16)
    batch.add(10)
    made = copy.copy(batch)
    made.add(20)
    batch.add(30)
    batch.add(5)
    assert (len(made), made.tokens[:2].tolist()) == (2, [10, 20])
    assert (len(batch), batch.tokens[:3].tolist()) == (3, [10, 30, 5])


def test_events_take_the_lowest_free_seat_and_row() -> None:
    """Also after copies, reorders, and more seats."""
    source, batch = random.Random(2), LiveBatch(max_seats=2)
    for _ in range(400):
        seats, before = batch.seats.tolist(), batch.row.tolist()
        event = source.choice(["add", "add", "named", "finish", "reorder", "copy", "grow"])
        if event in ("add", "named"):
            named = max(before) + source.randint(1, 3) if event == "named" else None
            seat = batch.add(5, row=named)
            assert seat == (before.index(-1) if -1 in before else len(before))
            assert batch.row[seat] == (min({*range(len(before) + 1)} - {*before}) if named is None else named)
        elif event == "finish" and seats:
            batch.finish(source.choice(seats))
        elif event == "reorder":
            batch.reorder(dict(zip(seats, source.sample(range(2 * len(seats)), len(seats)), strict=True)))
        elif event == "copy":
            batch = copy.copy(batch)
        elif event == "grow":
            batch.grow(2)
        if len(batch):
            taken = int(batch.row.max())
            with pytest.raises(TreeError, match="is taken"):
                batch.add(1, row=taken)


def test_requests_grow_up_to_the_last_token() -> None:
    batch = LiveBatch()
    first, second = batch.add(2**31 - 9), batch.add(5)
    batch.grow(7)
    for tokens in (2, 2**31 - 1):
        with pytest.raises(TreeError, match="2\\^31"):
            batch.grow(tokens)
    batch.grow()
    assert batch.tokens[[first, second]].tolist() == [2**31 - 1, 13]
    batch.finish(first)
    batch.grow(2)
    batch.set_tokens(second, 2**31 - 1)
    with pytest.raises(TreeError, match="2\\^31"):
        batch.grow()
