"""Rows that become forks on the device: the kernel, the places that continuations take, and what kernels are told."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from treegen.engine import Branch, KVPool
from treegen.engine.fork_places import in_places
from treegen.engine.row_forks import fork_rows, launch_forks
from treegen.engine.shared_pages import share_by_prompt
from treegen.ir.live_batch import LiveBatch
from treegen.ir.shape import Shape


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("stored", [0, 1, 8, 11])
@pytest.mark.parametrize(("kv_heads", "dims"), [(2, (16, 16)), (3, (40, 24)), (8, (128, 64))])
def test_a_fork_has_its_parents_pages_and_a_copy_of_the_last_one(
    kv_heads: int, dims: tuple[int, int], stored: int, page_size: int
) -> None:
    """Row 2 is a fork of row 0, and row 1 names a parent that there is not. Interpreted, and by PyTorch."""
    pool = KVPool(Shape(kv_heads, kv_heads, *dims, dtype="bf16", page_size=page_size), 2, 60)
    for cache in (pool.keys, pool.values):
        cache.copy_(torch.randn(cache.shape))
    table = torch.arange(60, dtype=torch.int32).view(5, 12)
    rows, lengths = torch.tensor([3, 0, 4]), torch.full((5,), stored + 1, dtype=torch.int32)
    full, partial = divmod(stored, page_size)
    expected = [table.clone(), pool.keys.clone(), pool.values.clone()]
    expected[0][4, :full] = table[3, :full]
    if partial:
        for cache in expected[1:]:
            cache[:, table[4, full]] = cache[:, table[3, full]]
    before = [table.clone(), pool.keys.clone(), pool.values.clone()]
    for forked in (fork_rows, launch_forks):
        for tensor, own in zip((table, pool.keys, pool.values), before, strict=True):
            tensor.copy_(own)
        forked(pool, table, lengths, rows, torch.tensor([0, 7, 0]))
        for tensor, wanted in zip((table, pool.keys, pool.values), expected, strict=True):
            assert torch.equal(tensor, wanted)


@given(data=st.data(), prompts=st.integers(1, 3), width=st.integers(1, 6))
def test_continuations_take_the_places_of_beams_that_end(data: st.DataObject, prompts: int, width: int) -> None:
    count = prompts * width
    places = np.array(data.draw(st.permutations(range(count)))).reshape(prompts, width)
    beams = np.array([data.draw(st.lists(st.integers(0, width - 1), min_size=width, max_size=width))
                      for _ in range(prompts)])  # fmt: skip
    tokens = 100 + np.arange(count).reshape(prompts, width)
    chosen, parents = (each.tolist() for each in in_places(*map(torch.from_numpy, (places, beams, tokens))))
    of_parents = np.take_along_axis(places, beams, 1)
    assert sorted(zip(chosen, parents, strict=True)) == sorted(zip(tokens.flat, of_parents.flat, strict=True))
    for own, first in ((own, token) for own, token in zip(of_parents.flat, tokens.flat, strict=True)):
        assert parents[own] == own
        assert chosen[own] <= first  # the first continuation of a beam, whose token is the least, stays in its place


@given(data=st.data())
def test_branches_of_a_prompt_share_what_all_of_them_have(data: st.DataObject) -> None:
    """Whatever was known before: chains of branches, also of several prompts that begin alike."""
    size, live, branches = 2, LiveBatch(2, max_seats=8), []
    for number in range(data.draw(st.integers(1, 7))):
        other = data.draw(st.sampled_from(branches)) if branches else None
        pages = [] if other is None else other.pages[: data.draw(st.integers(0, len(other.pages)))]
        known = len(pages)
        pages = [*pages, *range(100 * number, 100 * number + data.draw(st.integers(0, 3)))]
        seat = live.add(size * len(pages), None if other is None else other.seat, size * known)
        branches.append(Branch(number, (number % 2,), 1, [], size * len(pages), pages, seat))
    share_by_prompt(live, branches, size)
    for prompt in (0, 1):
        own = [branch for branch in branches if branch.label[0] == prompt]
        common = next((place for place in range(10) if len({tuple(each.pages[: place + 1]) for each in own}) > 1
                       or any(len(each.pages) <= place for each in own)), 0)  # fmt: skip
        told = [(int(live.shared_with[each.seat]), int(live.shared_tokens[each.seat])) for each in own]
        seats = [each.seat for each in own]
        sharing = [each.seat for each in branches if live.shared_with[each.seat] in seats]  # of both prompts
        assert all(live.shared_tokens[seat] <= common * size for seat in sharing)
        if common and len(own) > 1:
            assert sum(tokens >= common * size for _, tokens in told) >= len(own) - 1
    by_seat = {branch.seat: branch for branch in branches}
    for branch in branches:
        owner, pages = int(live.shared_with[branch.seat]), int(live.shared_tokens[branch.seat]) // size
        assert owner < 0 or branch.pages[:pages] == by_seat[owner].pages[:pages]
