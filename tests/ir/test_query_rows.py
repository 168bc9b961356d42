"""Several query rows of a request: they see its last tokens one by one."""

from __future__ import annotations

import pickle

from support.request_checks import SHAPE, TARGET, by_request
from treegen import LiveBatch
from treegen.ir.verify import verify
from treegen.strategies import cohort
from treegen.target.problem import Problem


def test_query_rows() -> None:
    """They belong to a request; other numbers of them make plans out of date."""
    batch = LiveBatch(16, max_seats=1)
    batch.add(100, rows=4)
    batch.fork(0, rows=2)
    batch.add(3)
    assert batch.rows.tolist()[:3] == [4, 2, 1]
    before = batch.changes, batch.moves
    batch.set_rows([1, 2], [2, 1])
    assert (batch.changes, batch.moves) == before
    batch.set_rows([0, 2], 5)
    assert (batch.changes, batch.moves) == (before[0] + 1, before[1] + 1)
    assert batch.rows.tolist() == [5, 2, 5, 1]
    batch.finish(0)
    assert batch.add(9) == 0
    assert batch.rows[0] == 1


def test_trees_of_several_query_rows() -> None:
    """A request's rows see its last tokens one by one. What it shares ends before them, also for others."""
    batch = LiveBatch(16)
    batch.add(66, rows=5)
    for shared in (48, 64, 64):
        batch.add(70, 0, shared)
    batch.share(3, 1, 64)
    batch.set_rows(1, 30)
    tree = batch.tree()
    rows = [(0, 62 + number) for number in range(5)] + [(1, 41 + number) for number in range(30)] + [(2, 70), (3, 70)]
    sees = tree.topology.prefix[tree.row_node] + tree.row_sees
    requests = by_request(tree)
    assert requests.queries is not None
    assert list(zip(requests.seat.repeat(requests.queries).tolist(), sees.tolist(), strict=True)) == rows
    verify(cohort(64).plan(Problem(tree, SHAPE, TARGET)), tree)
    # Seat 0 has 61 tokens before its rows, and seat 1 has 40.
    assert by_request(tree).shared_with.tolist() == [-1, 0, 0, 0]
    assert by_request(tree).shared_tokens.tolist() == [0, 32, 48, 32]
    again = by_request(pickle.loads(pickle.dumps(tree)))
    assert again.queries is not None
    assert again.queries.tolist() == [5, 30, 1, 1]


def test_more_query_rows_than_tokens() -> None:
    """The first rows see nothing, and have a place in plans for when they do."""
    batch = LiveBatch(16)
    batch.add(3, rows=5)
    tree = batch.tree()
    assert tree.row_sees.tolist() == [1, 2, 3, 4, 5]
    assert by_request(tree).length.tolist() == [5]
