"""Trees by request: each node is a part of one request's tokens, and each request grows at its own end.

A request is cut where others branch off, and its last node is its open tail:

    request 0   [ 0 ........ 32 | 32 ... 48 | 48 ..>     nodes 0, 1, 2
    request 1                   |           [ 48 ..>     node 3, below node 1
    request 2                   [ 32 ..>                 node 4, below node 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from treegen.ir.arrays import (
    INT32_MAX,
    Ints,
    IntsLike,
    Longs,
    frozen,
    int32_array,
    int32_ramp,
    largest,
    number,
    offsets,
    positive_int,
    ramp,
    stable_order,
    stacked,
)
from treegen.ir.errors import TreeError
from treegen.ir.tree.kv import KVRuns
from treegen.ir.tree.page_tables import TreeParts
from treegen.ir.tree.preorder import depth_first, last_below
from treegen.ir.tree.request_kv import RequestKV
from treegen.ir.tree.topology import Ranks, Topology, derive_ranked, ranks_of, topology_of_nodes

OF_NODES, OF_ROWS, OF_REQUESTS, OF_SPANS = 11, 3, 5, 5
"""How many columns `of_columns` takes."""
_HALF = 32  # bits of a key's lower half, which holds tokens


Made: TypeAlias = tuple[TreeParts, Topology, RequestKV]
"""The parts of a tree by request, its topology, and the places of its tokens."""


def from_requests(
    seq_lens: IntsLike,
    shared_with: IntsLike | None = None,
    shared_tokens: IntsLike | None = None,
    page_size: int = 1,
) -> Made:
    """See Tree.from_requests. Requests have their numbers as seats."""
    page_size = positive_int("page_size", page_size, TreeError)
    length = int32_array("seq_lens", seq_lens, low=0)
    seat, none = int32_ramp(len(length)), frozen(np.zeros(len(length)))
    if (shared_with is None) != (shared_tokens is None):
        missing = "shared_with" if shared_with is None else "shared_tokens"
        raise TreeError(missing, None, "is missing", "give shared_with and shared_tokens, or neither")
    if shared_with is None or shared_tokens is None:
        return of_requests(length, frozen(none - 1), none, seat, none, page_size)
    above, whole = claimed_sharing(length, shared_with, shared_tokens, page_size)
    return of_requests(length, above, whole, seat, none, page_size)


def claimed_sharing(
    length: Ints, shared_with: IntsLike, shared_tokens: IntsLike, page_size: int
) -> tuple[Longs, Longs]:
    """Returns the sharing of requests as `of_requests` takes it: in whole pages, with the owner of the last one.

    Raises TreeError as Tree.from_requests.
    """
    requests = len(length)
    above = _one_each("shared_with", shared_with, requests, low=-1, high=requests - 1).astype(np.int64)
    shared = _one_each("shared_tokens", shared_tokens, requests)
    sharing = (above >= 0).nonzero()[0]
    _check_lengths(length, shared, sharing, sharing)
    _check_lengths(length, shared, sharing, above.take(sharing))
    whole = np.zeros(requests, np.int64)
    whole[sharing] = shared.take(sharing) // page_size * page_size
    if np.count_nonzero(whole) < len(sharing):
        above[whole == 0] = -1
    return nearest_owners(above, whole), whole


def of_queries(
    queries: Ints, length: Ints, above: Ints | Longs, shared: Ints | Longs, seat: Ints, epoch: Ints, page_size: int
) -> Made:
    """Returns the tree of `of_requests` with a row for each of the last `queries[i]` tokens of request i, at least one.

    A request with several rows does not share the tokens of its rows, neither with its owner nor with others.
    """
    several = queries > 1
    most = np.where(several, np.maximum(length - queries, 0), length)
    most -= most % page_size
    sharing = (above >= 0).nonzero()[0]
    owner, parts = above.take(sharing), np.zeros(len(above), np.int64)
    parts[sharing] = np.minimum(shared.take(sharing), np.minimum(most.take(sharing), most.take(owner)))
    owners = nearest_owners(np.where(parts > 0, above, -1), parts)
    known = frozen(np.where(several, np.maximum(length, queries), length))
    made, _, requests = of_requests(known, owners, parts, seat, epoch, page_size)

    node, behind = made.row_node.repeat(queries), offsets(queries)[1:].repeat(queries) - 1
    sees = frozen(made.tokens.take(node) - (behind - ramp(len(node))))
    rows = made._replace(row_node=frozen(node), row_sees=sees)
    ranks = ranks_of(node, *rows[1:4])
    return rows, derive_ranked(*rows[:4], ranks), replace(requests, queries=queries)


def of_requests(
    length: Ints, above: Ints | Longs, shared: Ints | Longs, seat: Ints, epoch: Ints, page_size: int
) -> Made:
    """Returns the tree of requests whose sharing is known to be right.

    above: `[requests]`; the request whose first tokens each one begins with, -1 for none. shared: `[requests]`; the
    number of these tokens, a multiple of page_size, 0 for none. The other request shares fewer tokens itself.
    """
    requests = len(length)
    if not requests:
        return _of_nothing(page_size)
    half, one = number(_HALF), number(1)
    sharing = (above >= 0).nonzero()[0]
    owners, parts = above.take(sharing).astype(np.int64), shared.take(sharing)
    flat = largest(above.take(owners)) < 0 if len(owners) else True  # nearly always: owners share with no request
    order = _depth_first_of_flat(requests, sharing, owners, parts) if flat else _depth_first(above, shared // page_size)
    place = np.empty(requests, np.int64)
    place[order] = ramp(requests)

    # From here on requests are in depth-first order. A key is a place to branch off: a request, and a number of tokens.
    owned, sharer = place.take(owners), place.take(sharing)
    keys = (owned << half) + parts
    by_key = keys.argsort(kind="stable") if flat else _by_pairs(owned, parts // page_size, requests)
    keys, sharer = keys.take(by_key), sharer.take(by_key)
    new = np.empty(len(keys), np.bool_)
    new[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    cuts = keys.compress(new)
    cut, tokens_of_cut = cuts >> half, cuts & number((1 << _HALF) - 1)
    counts = np.bincount(cut, minlength=requests) + one
    request, begin = ramp(requests).repeat(counts), offsets(counts)
    tail, begin = begin[1:] - one, begin[:-1]
    # Before the node that ends at a cut are those of all earlier cuts, and the tails of all earlier requests.
    ending = cut + ramp(len(cut))
    last = sharer if flat else _last_sharers(place, sharing, owners).take(sharer)

    of_nodes = np.empty((OF_NODES, len(request)), np.int32)
    node, start, tokens, rank_lo, rank_hi, owner, first, end, parent, rank_own, slot = of_nodes
    node[:], start[:], rank_lo[:] = int32_ramp(len(request)), 0, request
    owner[:] = seat.take(order).take(request)
    rank_own[:-1], rank_own[-1:] = rank_lo[1:], requests
    np.subtract(node, 1, out=parent)
    parent[begin] = -1
    hung = ending.take(new.cumsum() - one)  # the node that each sharer extends
    parent[begin.take(sharer)] = hung
    # Of several sharers of a node the last one, or its last descendant, is the last request below it.
    np.add(rank_lo, 1, out=rank_hi)
    rank_hi[hung] = last + one
    first[begin], first[ending + one] = shared.take(order), tokens_of_cut
    end[ending], end[tail] = tokens_of_cut, np.maximum(length.take(order), first.take(tail) + number(1))
    np.subtract(end, first, out=tokens)
    end[tail] = 0  # open
    slots = offsets(tokens)
    if slots.item(-1) > INT32_MAX:
        raise TreeError("seq_lens", slots.item(-1), "total exceeds 2^31 - 1 tokens", "split the batch")
    slot[:] = slots[:-1]
    row_node = tail.take(place)
    of_rows = stacked(row_node, tokens.take(row_node), order)
    known = {"unique_tokens": slots.item(-1)} | ({"levels": largest(counts)} if flat else {})
    return of_columns(page_size, frozen(of_nodes), of_rows, stacked(seat, epoch, above, shared, length), known)


def of_columns(
    page_size: int,
    of_nodes: Ints,
    of_rows: Ints,
    of_requests: Ints,
    known: Mapping[str, int],
    queries: Ints | None = None,
    of_spans: Ints | None = None,
) -> Made:
    """Makes a tree of its read-only columns.

    Args:
        page_size: Tokens of a page.
        of_nodes: `[OF_NODES, nodes]`; node, start, tokens, rank_lo, rank_hi, owner, first, end, parent, rank_own, slot.
        of_rows: `[OF_ROWS, rows]`; row_node, row_sees, row_of_rank.
        of_requests: `[OF_REQUESTS, requests]`; seat, epoch, above, shared_tokens, length.
        known: What is known of the topology, see `topology_of_nodes`.
        queries: See RequestKV.
        of_spans: `[OF_SPANS, spans]`; node, start, stop, lo, hi. None where each node is one span.
    """
    parent, slot, length = of_nodes[8], of_nodes[10], of_nodes[2]
    topology = topology_of_nodes(of_nodes[:5], parent, of_nodes[9], of_rows[2], known, of_spans)
    parts = TreeParts(parent, length, of_rows[0], of_rows[1], KVRuns(frozen(int32_ramp(len(slot) + 1)), slot, length))
    return parts, topology, RequestKV(page_size, of_nodes[5:8], of_requests, queries)


def _of_nothing(page_size: int) -> Made:
    """Returns the tree of no requests: one root without tokens or rows, which no seat owns."""
    root, none = np.zeros(1, np.int64), frozen(np.empty(0))
    parts = TreeParts(frozen(root - 1), frozen(root), none, none, KVRuns.contiguous(root))
    topology = derive_ranked(*parts[:4], Ranks(frozen(np.zeros(2)), none, True))
    return parts, topology, RequestKV(page_size, stacked(parts.parent, 0, 1), none.reshape(5, 0))


def _one_each(argument: str, values: IntsLike, requests: int, low: int = 0, high: int = INT32_MAX) -> Ints:
    """Returns a checked array with an entry for each request. Raises TreeError."""
    array = int32_array(argument, values, low=low, high=high)
    if len(array) != requests:
        reason = f"does not match {requests} requests"
        raise TreeError(argument, f"{len(array)} entries", reason, "give one per request")
    return array


def _check_lengths(length: Ints, shared: Ints, sharing: Longs, other: Longs) -> None:
    """Raises TreeError if one of the `sharing` requests shares more tokens than its `other` request has."""
    tokens = length.take(other)
    beyond = shared.take(sharing) > tokens
    if np.count_nonzero(beyond):
        index = int(beyond.argmax())
        request = int(sharing[index])
        reason = f"is more than the {tokens[index]} tokens of request {other[index]}"
        raise TreeError(f"shared_tokens[{request}]", int(shared[request]), reason, "lower it")


def nearest_owners(above: Longs, shared: Longs) -> Longs:
    """Returns the nearest request up each chain of `above` that shares fewer tokens itself.

    Raises TreeError for a chain without an end.
    """
    sharing = (above >= 0).nonzero()[0]
    low = sharing.compress(shared.take(sharing) <= shared.take(above.take(sharing)))
    if not len(low):  # shared tokens fall along every chain, so each one ends
        return above
    _check_chains_end(above)
    above = above.copy()
    while len(low):
        above[low] = above[above[low]]
        low = low[shared[low] <= shared[above[low]]]
    return above


def _check_chains_end(above: Longs) -> None:
    """Raises TreeError for a request that shares with itself, directly or through others. By pointer doubling."""
    reached = above
    for _ in range(len(above).bit_length()):
        reached = np.where(reached >= 0, reached[reached], -1)
    if (reached >= 0).any():
        request = int((reached >= 0).argmax())
        fix = "let one request of it share with none of the others"
        raise TreeError(f"shared_with[{request}]", int(above[request]), "leads into a cycle", fix)


def _depth_first_of_flat(requests: int, sharing: Longs, owners: Longs, parts: Ints | Longs) -> Longs:
    """Returns `_depth_first` of requests whose owners share with no request.

    sharing: the requests that share; request `sharing[i]` shares `parts[i]` tokens with `owners[i]`.
    """
    keys = ramp(requests) << number(_HALF)
    keys[sharing] = (owners << number(_HALF)) + (number(INT32_MAX + 1) - parts)
    return keys.argsort(kind="stable")


def _depth_first(above: Ints | Longs, pages: Ints | Longs) -> Longs:
    """Returns requests in depth-first order: each one before its sharers, and of these the one that shares most first.

    If a request's nodes are neighbours, nodes are then in depth-first order, too. pages: those that each one shares.
    """
    most = largest(pages)
    by_parts = stable_order(most - pages, most + 1)
    place = np.empty(len(above) + 1, np.int64)
    place[by_parts], place[-1] = ramp(len(above)), -1  # -1, for no request, stays -1
    order = np.empty(len(above), np.int64)
    order[depth_first(frozen(place.take(above.take(by_parts))))] = by_parts
    return order


def _by_pairs(owner: Longs, pages: Ints | Longs, requests: int) -> Longs:
    """Returns the stable order that sorts places to branch off, by owner and then by pages."""
    by_pages = stable_order(pages, largest(pages) + 1)
    return by_pages.take(stable_order(owner.take(by_pages), requests))


def _last_sharers(place: Longs, sharing: Longs, owners: Longs) -> Longs:
    """Returns for each place in depth-first order the last request that shares with it, directly or through others."""
    parent = np.full(len(place), -1)
    parent[place.take(sharing)] = place.take(owners)
    return last_below(parent)
