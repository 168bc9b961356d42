"""Trees by request without what lies before all windows: windows of later lengths reach nothing that is lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treegen.ir.live_batch import LiveBatch
from treegen.ir.positions import windowed_requests
from treegen.ir.tree import Tree
from treegen.ir.tree.topology import derive

PAGE = 4


@st.composite
def batches(draw: st.DrawFn) -> LiveBatch:
    """Requests that share pages with one another, with gaps between seats, some with several query rows."""
    live = LiveBatch(PAGE, max_seats=4)
    for _ in range(draw(st.integers(1, 7))):
        seats = live.seats.tolist()
        tokens, rows = draw(st.integers(0, 60)), draw(st.sampled_from((1, 1, 3, 9)))
        other = draw(st.sampled_from([None, *seats]))
        shared = 0 if other is None else draw(st.integers(0, int(live.tokens[other])))
        live.add(max(tokens, shared), other, shared, rows=rows)
        if len(seats) > 1 and draw(st.integers(0, 5)) == 0:
            live.finish(draw(st.sampled_from(seats)))
    return live


def positions_on_path(tree: Tree, row: int) -> set[int]:
    """The positions of the tokens on a row's path, those behind the row included."""
    assert tree.requests is not None
    node, found = int(tree.row_node[row]), set()
    while node >= 0:
        first = int(tree.requests.first[node])
        found |= set(range(first, first + int(tree.tokens[node])))
        node = int(tree.parent[node])
    return found


@given(batches(), st.integers(0, 50), st.sampled_from((PAGE, 2 * PAGE, 32)))
def test_windows_reach_nothing_that_is_lost(live: LiveBatch, window_left: int, unit: int) -> None:
    whole = live.tree()
    tree = windowed_requests(whole, window_left, unit)
    if tree is whole:
        return
    assert tree.requests is not None
    assert tree.requests.least is not None
    queries = np.ones(len(live), int) if tree.requests.queries is None else tree.requests.queries
    begin = 0
    for request, (rows, least) in enumerate(zip(queries.tolist(), tree.requests.least.tolist(), strict=True)):
        path = positions_on_path(tree, begin)
        length = int(whole.row_sees[begin + rows - 1]) + int(whole.requests.first[whole.row_node[begin]])  # type: ignore[union-attr]
        assert least <= length
        for shorter in range(max(least, rows), length + 1):
            first = shorter - rows  # the position of the first query row
            assert set(range(max(0, first - window_left), shorter)) <= path, (request, shorter)
        if least > rows:  # one token less, and the first row's window reaches a token that is lost
            assert least - rows - window_left - 1 not in path
        begin += rows


@given(batches(), st.integers(0, 50), st.sampled_from((PAGE, 32)))
def test_nodes_lose_whole_units_that_no_row_sees(live: LiveBatch, window_left: int, unit: int) -> None:
    whole = live.tree()
    tree = windowed_requests(whole, window_left, unit)
    requests = whole.requests
    assert requests is not None
    own = requests.first[whole.row_node] + whole.row_sees - 1
    topology = whole.topology
    by_rank, left = own[topology.row_of_rank], []
    for node, (lo, hi) in enumerate(zip(topology.rank_lo.tolist(), topology.rank_hi.tolist(), strict=True)):
        first, tokens = int(requests.first[node]), int(whole.tokens[node])
        unseen = min(max(int(by_rank[lo:hi].min()) - window_left - first, 0), tokens)
        left.append(tokens if unseen == tokens else unseen // unit * unit)
    assert (tree is whole) == (not any(left))
    assert tree.requests is not None
    kept = np.flatnonzero(whole.tokens > left)
    assert tree.tokens.tolist() == (whole.tokens - left)[kept].tolist()
    assert tree.requests.first.tolist() == (requests.first + left)[kept].tolist()
    assert tree.requests.of_nodes[[0, 2]].tolist() == requests.of_nodes[[0, 2]][:, kept].tolist()
    for node, parent in zip(kept.tolist(), tree.parent.tolist(), strict=True):  # the nearest ancestor with tokens
        up = int(whole.parent[node])
        while up >= 0 and up not in kept:
            up = int(whole.parent[up])
        assert parent == (-1 if up < 0 else int(np.searchsorted(kept, up)))


@given(batches(), st.integers(0, 50))
def test_the_topology_is_that_of_the_shorter_nodes(live: LiveBatch, window_left: int) -> None:
    tree = windowed_requests(live.tree(), window_left, PAGE)
    expected = derive(tree.parent, tree.tokens, tree.row_node, tree.row_sees)
    assert tree.topology.spans.table.tolist() == expected.spans.table.tolist()
    for name in ("rank_lo", "rank_own", "rank_hi", "row_of_rank", "tokens"):
        assert getattr(tree.topology, name).tolist() == getattr(expected, name).tolist(), name
    assert tree.unique_tokens == expected.unique_tokens
    assert tree.kv.length.tolist() == tree.tokens.tolist()
    assert tree.num_rows == 0 or (tree.tokens > 0).all()


def test_a_batch_without_requests_and_one_within_its_windows_stay_whole() -> None:
    live = LiveBatch(PAGE)
    for tokens, window_left, whole in ((0, 3, True), (20, 16, True), (20, 15, False)):
        if tokens and not len(live):
            live.add(tokens)
        tree = live.tree()
        assert (windowed_requests(tree, window_left, PAGE) is tree) == whole
