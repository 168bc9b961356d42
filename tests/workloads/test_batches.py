"""The suite's batches: the same from the same seeds, true to what they claim, and consistent over 200 steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from treegen.ir.errors import FormatError, InputError
from treegen.ir.tree import Tree
from treegen.workloads.batch_pages import BatchPages, BatchSizes
from treegen.workloads.batches import FAMILIES, batches, chosen_batches
from treegen.workloads.served_batch import BatchRequest, ServedBatch
from treegen.workloads.stand_ins import stand_ins
from treegen.workloads.tree_batches import FASTTREE_TREES, fasttree_batches, tree_batch

STEPS = 200
MADE = batches(None)
HELD_OUT = batches(None, seed=1)
SIZES = {
    "trace-32": (32, 300_000, 700_000),
    "trace-128": (128, 1_000_000, 2_500_000),
    "trace-256": (256, 2_000_000, 4_000_000),
    "grpo-8x32": (256, 300_000, 900_000),
    "agents-64": (64, 530_000, 660_000),
    "unshared-ragged-64": (64, 350_000, 750_000),
    "unshared-ragged-256": (256, 400_000, 700_000),
    "unshared-long-8": (8, 262_144, 262_144),
    "beams-32": (32, 147_456, 147_456),
    "few-shot-128": (128, 524_288, 560_000),
}


def check_pages(pages: BatchPages) -> None:
    """Every running row has its pages, and a page has as many owners as rows list it."""
    counted = np.zeros(len(pages.owners), np.int64)
    for row in pages.rows.tolist():
        ids = pages.table[row, : pages.held[row]]
        assert len(np.unique(ids)) == len(ids)
        counted[ids] += 1
        # A token is stored only in pages of the row itself: the page it writes to next is not shared.
        if pages.lengths[row] % pages.page_size:
            assert pages.owners[ids[-1]] == 1
    assert np.array_equal(counted, pages.owners)
    free = pages.free_pages
    assert len(free) + int((counted > 0).sum()) == len(counted)
    assert not counted[free].any()


def follow(batch: ServedBatch, steps: int = STEPS) -> BatchPages:
    """The pages after some steps; consistent at every tenth of them."""
    events = batch.events(steps)
    pages = BatchPages(batch, BatchSizes.of(batch, events))
    check_pages(pages)
    cells = np.full(pages.table.size, -1, np.int32)
    claims(pages)
    for step, each in enumerate(events):
        pages.apply(each)
        claims(pages)
        where, ids = pages.taken_writes()
        cells[where] = ids
        if step % 10 == 0 or step == steps - 1:
            check_pages(pages)
            for row in pages.rows.tolist():
                held = pages.held[row]
                assert np.array_equal(cells.reshape(pages.table.shape)[row, :held], pages.table[row, :held])
    return pages


def claims(pages: BatchPages) -> None:
    """Arrivals have the pages that they claim to share, and no page more."""
    for arrival in pages.change.arrived:
        if arrival.shared_row is not None and pages.lengths[arrival.shared_row]:
            shared = arrival.request.shared_tokens // pages.page_size
            own, other = pages.table[arrival.row], pages.table[arrival.shared_row]
            assert np.array_equal(own[:shared], other[:shared])
            held = pages.held[arrival.row]
            assert not np.isin(own[shared:held], other[: pages.held[arrival.shared_row]]).any()


@pytest.mark.parametrize("batch", [*MADE, *HELD_OUT], ids=lambda batch: f"{batch.name}-{batch.seed}")
def test_pages_stay_consistent(batch: ServedBatch) -> None:
    follow(batch)


def test_traces(data_dir: Path) -> None:
    made = batches(data_dir)[:4]
    assert [batch.family for batch in made] == ["traces"] * 4
    for batch in made:
        check_size(batch)
        follow(batch, 60)
        assert sum(len(each.finished) for each in batch.events(STEPS)) > len(batch.requests) // 20
        assert batch.unique_tokens < batch.tokens
    again, other = batches(data_dir)[:4], batches(data_dir, seed=1)[:4]
    assert [batch.requests for batch in again] == [batch.requests for batch in made]
    assert [batch.events(40) for batch in again] == [batch.events(40) for batch in made]
    assert all(a.requests != b.requests for a, b in zip(made, other, strict=True))
    assert [len(batches(data_dir)), len({batch.name for batch in batches(data_dir)})] == [21, 21]


def test_they_are_deterministic() -> None:
    again = batches(None)
    assert [batch.requests for batch in again] == [batch.requests for batch in MADE]
    assert [batch.events(STEPS) for batch in again] == [batch.events(STEPS) for batch in MADE]
    assert all(a.requests != b.requests for a, b in zip(MADE, HELD_OUT, strict=True) if "beams" not in a.name)
    assert [(a.name, len(a.requests)) for a in MADE] == [(a.name, len(a.requests)) for a in HELD_OUT]


def test_families() -> None:
    families = [batch.family for batch in MADE]
    assert families == [family for family in FAMILIES[1:] for _ in range(4 + (family == "special"))]
    for batch in MADE:
        check_size(batch)
        if batch.family == "unshared":
            assert batch.unique_tokens == batch.tokens
        if batch.family in ("groups", "agents"):
            assert batch.grouped
            assert batch.unique_tokens < 0.8 * batch.tokens


def test_small_batches() -> None:
    made = chosen_batches(None, "small")
    assert [len(batch.requests) for batch in made] == [1, 1, 1, 4, 4, 16, 16, 4, 16, 8]
    for batch in made:
        number, _, tokens = batch.name.partition("-over-" if batch.grouped else "x")
        assert len(batch.requests) == int(number)
        for request in batch.requests[1:] if batch.grouped else batch.requests:
            shared = int(tokens) if batch.grouped else 0
            assert request.shared_tokens == shared
            assert int(tokens) <= request.tokens <= 1.2 * int(tokens)
        assert all(not (each.finished or each.arrived) for each in batch.events(20))
    assert not any(batch.family == "small" for batch in batches(None))
    assert made != chosen_batches(None, "small", seed=1)


def test_large_batches() -> None:
    made = chosen_batches(None, "large")
    assert [len(batch.requests) for batch in made] == [512, 1024, 1024, 1024]
    assert [batch.unique_tokens < 0.8 * batch.tokens for batch in made] == [batch.grouped for batch in made]
    assert [batch.grouped for batch in made] == [False, False, True, True]
    assert not any(batch.family == "large" for batch in batches(None))


def test_equal_batches() -> None:
    """A few requests more than the 33 thread blocks of a KV head with 8 of them, or half or all of 264 with one."""
    made = chosen_batches(None, "equal")
    for batch in made:
        requests, tokens = map(int, batch.name.split("x"))
        assert [request.tokens for request in batch.requests] == [tokens] * requests
        assert min(requests % blocks for blocks in (33, 132, 264)) < 20
        assert not batch.grouped
    assert not any(batch.family == "equal" for batch in batches(None))


def test_trees_as_batches() -> None:
    """Each row has the tokens of its path; rows beside one another share the whole pages that their nodes fill."""
    for batch, text in zip(fasttree_batches(0), FASTTREE_TREES, strict=True):
        tree = Tree.parse(text)
        assert len(batch.requests) == tree.num_rows
        assert batch.tokens == tree.num_rows * sum(map(int, text.split("/")[1].split(",")))
        assert 0 <= batch.unique_tokens - tree.unique_tokens < batch.page_size * tree.num_rows
    shared = [request.shared_tokens for request in tree_batch("20(30*2,5*2)").requests]
    assert shared == [0, 16, 16, 16]
    deep = tree_batch("16(16(1*2)*2)")
    assert [(request.tokens, request.shared_with, request.shared_tokens) for request in deep.requests] == [
        (33, None, 0), (33, 0, 32), (33, 0, 16), (33, 2, 32)
    ]  # fmt: skip
    follow(deep)


def check_size(batch: ServedBatch) -> None:
    if batch.name in SIZES:
        requests, least, most = SIZES[batch.name]
        assert len(batch.requests) == requests
        assert least <= batch.tokens <= most


@pytest.mark.parametrize("batch", [*MADE, *chosen_batches(None, "large")], ids=lambda batch: batch.name)
def test_requests_come_and_go(batch: ServedBatch) -> None:
    """No batch runs empty or beyond its first size, and in all of them requests leave and join."""
    events = batch.events(STEPS)
    running = len(batch.requests) + np.cumsum([len(each.arrived) - len(each.finished) for each in events])
    assert running.min() >= 0.7 * len(batch.requests)
    assert running.max() <= len(batch.requests)
    assert sum(len(each.finished) for each in events) >= 4
    assert sum(len(each.arrived) for each in events) >= 4


def test_groups_share_their_first_tokens() -> None:
    grpo = next(batch for batch in MADE if batch.name == "grpo-8x32")
    pages = follow(grpo, 1)
    groups = pages.groups()
    assert sorted(len(rows) for rows, _ in groups) == [32] * 8
    assert all(1024 - 16 <= tokens <= 2048 for _, tokens in groups)
    for rows, tokens in groups:
        assert (pages.owners[pages.table[rows[0], : tokens // 16]] == 32).all()
    alone = follow(next(batch for batch in MADE if batch.name == "unshared-long-8"), 1)
    assert [tokens for _, tokens in alone.groups()] == [0] * 8


def test_stand_ins_have_the_same_sizes() -> None:
    for batch in MADE:
        apart, groups = stand_ins(batch)
        assert len(apart.requests) == len(groups.requests) == len(batch.requests)
        assert apart.unique_tokens == apart.tokens <= batch.unique_tokens + len(batch.requests) * 1100
        assert groups.unique_tokens < groups.tokens
        follow(apart, 2)
        follow(groups, 2)


def test_what_does_not_fit_is_told() -> None:
    batch = ServedBatch("two", "unshared", 16, (BatchRequest(40, 5), BatchRequest(40, 5, 0, 32)), 0, lambda course: ())
    sizes = BatchSizes.of(batch, batch.events(3))
    assert (sizes.rows, sizes.width, sizes.pages, sizes.queries) == (2, 3, 4, 2)
    BatchPages(batch, sizes)
    with pytest.raises(InputError, match="fewer rows"):
        BatchPages(batch, replace(sizes, rows=1))
    with pytest.raises(InputError, match="fewer pages"):
        BatchPages(batch, replace(sizes, pages=3))
    with pytest.raises(InputError, match="whole pages"):
        BatchPages(replace(batch, requests=(BatchRequest(40, 5), BatchRequest(40, 5, 0, 24))), sizes)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="does not exist"):
        batches(tmp_path)
    for text in ('[{"len": 3}]', "[3]", '[{"len": 0, "out": 1, "blocks": []}]'):
        (tmp_path / "mooncake_conversation.json").write_text(text)
        with pytest.raises(FormatError, match="trace"):
            batches(tmp_path)
