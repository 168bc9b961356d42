"""Pages and branches: who shares and copies what, what the cache gives back, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treegen import Shape
from treegen.engine import KVPool, PrefixCache, SequenceTree
from treegen.engine.prefix import common_prefix
from treegen.ir.errors import BranchError, PoolError


def made(pages: int = 12, page_size: int = 4, branches: int = 6, cached: bool = False) -> SequenceTree:
    pool = KVPool(Shape(2, 1, 16, dtype="fp32", page_size=page_size), 2, pages)
    return SequenceTree(pool, branches, PrefixCache(pool) if cached else None)


def value_of(tokens: list[int]) -> float:
    """A number that stands for the KV of the last of these tokens, which depends on all of them."""
    return float(hash(tuple(tokens)) % (1 << 24))


def store(tree: SequenceTree, number: int, count: int) -> None:
    """Stores the KV of a branch's next tokens, as a step of a model does."""
    tree.reserve({number: count})
    branch, size = tree[number], tree.pool.page_size
    for place in range(branch.stored, branch.stored + count):
        slot = torch.tensor([branch.pages[place // size] * size + place % size])
        value = torch.full((1, 1, 16), value_of(branch.tokens[: place + 1]))
        for layer in range(2):
            tree.pool.write(layer, slot, value + layer, value - layer)
    tree.store({number: count})
    tree.live.set_tokens(branch.seat, branch.stored)


def check(tree: SequenceTree) -> None:
    """The law, and that each branch finds the KV of its own tokens in its pages, in all layers."""
    tree.check()
    assert tree.pool.free + np.count_nonzero(tree.pool.holders) == tree.pool.num_pages
    for branch in tree.branches.values():
        expected = torch.tensor([value_of(branch.tokens[: place + 1]) for place in range(branch.stored)])
        for layer in range(2):
            keys, values = (
                cache[layer, branch.pages].flatten(0, 1)[: branch.stored]
                for cache in (tree.pool.keys, tree.pool.values)
            )
            assert torch.equal(keys[:, 0, 0], expected + layer)
            assert torch.equal(values[:, 0, 15], expected - layer)
    assert len(tree.live) == len(tree)


def test_a_fork_shares_full_pages_and_copies_the_last_one() -> None:
    tree = made()
    first = tree.add(list(range(10)))
    store(tree, first.number, 10)
    second = tree.fork(first.number)
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert tree.pool.holders[first.pages].tolist() == [2, 2, 1]
    assert tree.live.shared_tokens[second.seat] == 8
    tree.drop(first.number)
    check(tree)


def test_forks_take_the_places_of_ended_branches() -> None:
    """Three branches with the same full pages: one ends for a fork of another, without new pages, plans or claims."""
    tree = made(branches=3)
    first = tree.add(list(range(10)))
    store(tree, first.number, 10)
    second, third = tree.fork(first.number), tree.fork(first.number)
    for branch in (first, second, third):
        tree.extend(branch.number, [20 + branch.number])
        store(tree, branch.number, 1)
    live, free = tree.live, tree.pool.free
    known = live.changes, live.moves, live.epoch.tolist()
    pages = third.pages[:]
    (fork,) = tree.replace([third.number], [second.number])
    assert (fork.tokens, fork.seat, fork.pages) == (second.tokens, third.seat, pages)
    assert (live.changes, live.moves, live.epoch.tolist(), tree.pool.free) == (*known, free)
    check(tree)
    with pytest.raises(BranchError, match=r"parents = \[0\]: end as well; fork branches that go on"):
        tree.replace([first.number], [first.number])
    with pytest.raises(BranchError, match="names a branch twice"):
        tree.replace([second.number] * 2, [first.number] * 2)
    with pytest.raises(BranchError, match="run already"):
        tree.replace([], [first.number])
    check(tree)


def test_forks_of_other_prompts_have_lists_of_their_own() -> None:
    """Drafters know a text by its list; within a prompt a fork may take over an ended branch's."""
    tree = SequenceTree(KVPool(Shape(4, 2, 16, page_size=64), 1, 9, torch.device("cpu")), 4)
    lists = []
    for label, tokens in (((0,), [1, 2, 3]), ((1,), [4, 5, 6]), ((1, 1), [7, 8, 9])):
        branch = tree.add(tokens, label)
        tree.reserve({branch.number: 3})
        tree.store({branch.number: 3})
        lists.append(branch.tokens)
    (fork,) = tree.replace([0], [1])
    assert fork.tokens == [4, 5, 6]
    assert fork.tokens is not lists[0]
    (other,) = tree.replace([2], [1])
    assert other.tokens == [4, 5, 6]
    assert other.tokens is lists[2]


def test_forks_beside_ended_branches_with_other_pages() -> None:
    """What ended is free, the forks share with their parent, and one page is left for the copies of two forks."""
    tree = made(pages=6, branches=3)
    first, second = tree.add(list(range(10))), tree.add([7] * 9)
    for branch, count in ((first, 10), (second, 8)):
        store(tree, branch.number, count)
    tree.extend(first.number, [3])
    one, two = tree.replace([second.number], [first.number] * 2)
    assert (one.stored, two.stored) == (10, 10)
    pages = two.pages[:]
    (three,) = tree.replace([two.number], [one.number])
    assert (three.seat, three.pages) == (two.seat, pages)
    check(tree)
    tight = made(pages=4, branches=3)
    parent = tight.add(list(range(10)))
    store(tight, parent.number, 10)
    assert [fork.stored for fork in tight.replace([], [parent.number] * 2)] == [10, 8]
    check(tight)


def test_plans_know_forks_in_the_places_of_branches_with_other_pages() -> None:
    """All share 8 tokens and have another full page each. A fork in a place has these 8, so a plan stays right; in the
    place of a branch that shares its third page as well it has not all that was shared.
    """
    tree = made(branches=4, pages=20)
    first = tree.add(list(range(9)))
    store(tree, first.number, 8)
    others = [tree.fork(first.number) for _ in range(2)]
    for branch in (first, *others):
        tree.extend(branch.number, [20 + branch.number] * 5)
        store(tree, branch.number, 5)
    epochs = tree.live.epoch.tolist()
    (fork,) = tree.replace([others[0].number], [others[1].number])
    assert (fork.seat, fork.pages[:3]) == (others[0].seat, others[1].pages[:3])
    assert fork.pages[3] != others[1].pages[3]
    assert tree.live.epoch.tolist() == epochs
    assert tree.live.shared_tokens[fork.seat] == 12
    check(tree)
    (again,) = tree.replace([fork.number], [first.number])
    assert again.pages[:3] == first.pages[:3]
    assert tree.live.epoch[again.seat] == epochs[again.seat] + 1
    check(tree)


def test_a_fork_without_a_free_page_computes_the_partial_page_again() -> None:
    tree = made(pages=3)
    first = tree.add(list(range(10)))
    store(tree, first.number, 10)
    second = tree.fork(first.number)
    assert (second.stored, second.pending, second.pages) == (8, 2, first.pages[:2])
    check(tree)


def test_pages_of_one_token_are_never_copied() -> None:
    tree = made(page_size=1)
    first = tree.add([5, 6, 7])
    store(tree, first.number, 3)
    assert tree.fork(first.number).pages == first.pages


def test_a_prompt_takes_over_what_another_branch_has_stored() -> None:
    tree = made()
    first = tree.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    store(tree, first.number, 9)
    assert [tree.adopt(tree.add(tokens).number) for tokens in ([1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5, 6, 7, 8], [9])] == [
        4,
        4,
        0,
    ]
    check(tree)


def test_the_cache_gives_pages_back_when_their_room_is_needed() -> None:
    """Two prompts end; a third one begins as the first, and what it needs besides is taken from the second."""
    tree = made(pages=6, cached=True)
    for tokens in (list(range(9)), [7] * 8):
        branch = tree.add(tokens)
        store(tree, branch.number, len(tokens))
        tree.drop(branch.number)
    assert tree.cache is not None
    assert (len(tree.cache), tree.pool.free, tree.available) == (4, 2, 6)
    third = tree.add(list(range(21)))
    assert tree.adopt(third.number) == 8
    assert tree.available == 4
    store(tree, third.number, 13)
    check(tree)
    assert tree.cache.match([7] * 8) == []
    assert tree.cache.match(list(range(30))) == third.pages[:2]
    assert tree.available == 0


def test_the_cache_keeps_what_was_used_last() -> None:
    tree = made(pages=8, cached=True)
    for tokens in ([1] * 4, [2] * 4, [3] * 4):
        branch = tree.add([*tokens, 9])
        store(tree, branch.number, 4)
        tree.drop(branch.number)
    assert tree.cache is not None
    assert tree.cache.match([1] * 4) != []
    assert tree.cache.evict(1) == 1
    assert [bool(tree.cache.match([token] * 4)) for token in (1, 2, 3)] == [True, False, True]


def test_pages_are_evicted_one_by_one_in_the_order_of_their_use() -> None:
    """What is used, or cached, between two evictions goes after what was older at the first one."""
    tree = made(pages=12, cached=True)

    def cached(token: int, pages: int) -> None:
        branch = tree.add([token] * 4 * pages + [9])
        store(tree, branch.number, 4 * pages)
        tree.drop(branch.number)

    for token in (1, 2, 3):
        cached(token, 2)
    assert tree.cache is not None
    found = []
    for between in (lambda: None, lambda: tree.cache.match([2] * 8), lambda: cached(4, 1), lambda: cached(3, 3)):
        between()
        assert tree.cache.evict(1) == 1
        found.append([len(tree.cache.pages)])
    assert [len(tree.cache.match([token] * 12)) for token in (1, 2, 3, 4)] == [0, 1, 3, 1]
    tree.check()


def test_a_branch_that_ends_has_used_the_pages_that_it_shared() -> None:
    """Its first pages are in the cache already; what was cached after them was used longer ago."""
    tree = made(pages=8, cached=True)
    for tokens in ([1] * 8, [2] * 4):
        branch = tree.add([*tokens, 9])
        store(tree, branch.number, len(tokens))
        tree.drop(branch.number)
    again = tree.add([1] * 9)
    assert tree.cache is not None
    assert tree.adopt(again.number) == 8
    tree.cache.match([2] * 4)
    tree.drop(again.number)
    assert tree.cache.evict(1) == 1
    assert [len(tree.cache.match([token] * 8)) for token in (1, 2)] == [2, 0]


def test_what_is_refused() -> None:
    tree = made(pages=2, branches=1)
    with pytest.raises(BranchError, match="is empty"):
        tree.add([])
    branch = tree.add(list(range(9)))
    with pytest.raises(BranchError, match="run already"):
        tree.add([1])
    with pytest.raises(BranchError, match="run already"):
        tree.fork(branch.number)
    with pytest.raises(BranchError, match="is not running; name one of"):
        tree.drop(7)
    with pytest.raises(PoolError, match="pages = 3: is more than the 2 free pages of 2; drop branches"):
        tree.reserve({branch.number: 9})
    pool = tree.pool
    for act in (pool.retain, pool.release):
        with pytest.raises(PoolError, match="is free"):
            act([1])
    pages = pool.take(2)
    with pytest.raises(PoolError, match="is in 0 branches and the cache, and has 1 holders"):
        tree.check()
    pool.release(pages)
    pool.holders[0] = 1
    with pytest.raises(PoolError, match="is free 1 times and held 1 times"):
        pool.check()
    for arguments in ((0, 4), (2, 0), (2, True)):
        with pytest.raises(PoolError):
            KVPool(Shape(2, 1, 16), *arguments)
    with pytest.raises(PoolError, match="another layout"):
        KVPool(Shape(2, 1, 16, page_size=4, kv_layout="HND"), 1, 4)


def test_common_prefixes() -> None:
    assert [common_prefix(*pair) for pair in (([], [1]), ([1, 2], [1, 2, 3]), ([1, 2, 3], [1, 9]))] == [0, 2, 1]
