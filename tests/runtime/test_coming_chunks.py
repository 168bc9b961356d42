"""Plans for the chunks of prompts that the next step will bring."""

from __future__ import annotations

from copy import copy

import pytest

from support.planned_batches import alone, kernel_for
from treegen import LiveBatch
from treegen.runtime.batch_kernel import BatchKernel


def begun(rows: int, tokens: int, max_tokens: int = 1 << 16) -> tuple[BatchKernel, LiveBatch, int]:
    """A kernel that has prepared a step with the second chunk of a prompt, beside a request that decodes. Either chunk
    has this many rows.
    """
    kernel, batch = kernel_for(2, max_tokens, max_rows=4096), LiveBatch(page_size=16)
    batch.add(900)
    chunk = batch.add(tokens - rows, rows=rows)
    kernel.prepare(batch)
    batch.grow(rows, [chunk])
    kernel.prepare(batch)
    return kernel, batch, chunk


def planned_tokens(kernel: BatchKernel, seat: int) -> int:
    """The tokens that the present plan was made for."""
    assert kernel.planned is not None
    requests = kernel.planned.tree.tree.requests
    assert requests is not None
    return int(requests.length[requests.seat == seat][0])


def test_plans_are_made_for_the_next_chunk() -> None:
    kernel, batch, chunk = begun(512, 1024)
    for step in range(3, 8):
        assert kernel.refresh(batch)
        assert planned_tokens(kernel, chunk) == 512 * step
        batch.grow(512, [chunk])
        batch.grow(1, [0])
        assert not kernel.prepare(batch)
        assert alone(kernel, batch) == []
    batch.set_rows(chunk, 1)  # the prompt is complete
    batch.grow()
    kernel.prepare(batch)
    kernel.refresh(batch)
    assert planned_tokens(kernel, chunk) == 512 * 7 + 1


def test_requests_that_get_fewer_tokens_than_rows_are_planned_as_they_are() -> None:
    """As where many drafts are refused."""
    kernel, batch, drafting = begun(100, 1000)
    batch.grow(3, [drafting])
    kernel.prepare(batch)
    for step in range(1, 6):
        kernel.refresh(batch)
        assert planned_tokens(kernel, drafting) <= 1000 + 3 * step
        batch.grow(3, [drafting])
        assert not kernel.prepare(batch)
        assert alone(kernel, batch) == []


def test_a_chunk_that_did_not_come_is_planned_for_before_the_step() -> None:
    kernel, batch, chunk = begun(512, 1024)
    assert kernel.refresh(batch)
    assert alone(kernel, batch) == [chunk]
    assert kernel.prepare(batch)
    assert alone(kernel, batch) == []
    kernel.refresh(batch)
    assert planned_tokens(kernel, chunk) == 1024


def test_a_chunk_that_came_lets_short_requests_wait() -> None:
    """They lose less than a step waits for."""
    kernel, batch = kernel_for(40, 1 << 16, max_rows=4096), LiveBatch(page_size=16)
    for _ in range(16):
        batch.add(900)
    chunk = batch.add(512, rows=512)
    kernel.prepare(batch)
    for _ in range(2):
        batch.grow(512, [chunk])
        assert not kernel.prepare(batch)
        kernel.refresh(batch)
    assert planned_tokens(kernel, chunk) == 2048
    batch.grow(512, [chunk])
    other = batch.add(500, rows=64)
    assert not kernel.prepare(batch)
    assert alone(kernel, batch) == [other]


def test_refresh_sees_that_drafts_have_grown_without_prepare() -> None:
    kernel, batch = kernel_for(2, 1 << 16, max_rows=4096), LiveBatch(page_size=16)
    drafting = batch.add(1000, rows=16)
    made = 0
    for _ in range(60):
        made += kernel.refresh(batch)
        kernel.replanning.note_step()
        batch.grow(16, [drafting])
    assert made > 4


def test_refresh_plans_once_for_a_chunk() -> None:
    kernel, batch, _ = begun(512, 1024)
    assert [kernel.refresh(batch) for _ in range(4)] == [True, False, False, False]


def test_chunks_of_other_sizes_are_not_expected() -> None:
    """Chunks vary where a step has a token budget, and decoding requests take a share of it."""
    kernel, batch, chunk = begun(512, 1024)
    for rows in (511, 507, 512, 509):
        batch.set_rows(chunk, rows)
        batch.grow(rows, [chunk])
        kernel.prepare(batch)
        kernel.refresh(batch)
        assert planned_tokens(kernel, chunk) == batch.tokens[chunk]


def test_prompts_of_one_chunk_bring_no_other() -> None:
    kernel, batch = kernel_for(2, 1 << 16, max_rows=4096), LiveBatch(page_size=16)
    chunk = batch.add(512, rows=512)
    kernel.prepare(batch)
    kernel.refresh(batch)
    assert planned_tokens(kernel, chunk) == 512


def test_chunks_of_another_batch_are_not_expected() -> None:
    kernel, batch, chunk = begun(512, 1024)
    other = copy(batch)
    assert kernel.refresh(other)
    assert planned_tokens(kernel, chunk) == 1024


def test_a_batch_that_is_ahead_is_planned_as_it_is() -> None:
    """A server may schedule a step while the one before runs."""
    kernel, batch, chunk = begun(512, 1024)
    batch.grow(512, [chunk])
    assert kernel.refresh(batch)
    assert planned_tokens(kernel, chunk) == 1536


def test_refresh_between_prepare_and_step_plans_for_that_step() -> None:
    kernel, batch, chunk = begun(512, 1024)
    for _ in range(5):
        kernel.replanning.note_step()
        batch.grow(512, [chunk])
        kernel.prepare(batch)
        kernel.refresh(batch)
        assert planned_tokens(kernel, chunk) <= batch.tokens[chunk]
        assert alone(kernel, batch) == []


def test_steps_may_be_seen_or_not() -> None:
    """Replays of graphs are not. Where some are and some are not, a chunk may be planned for later."""
    kernel, batch, chunk = begun(512, 1024)
    ahead = []
    for is_seen in (True, True, False, False, False):
        if is_seen:
            kernel.replanning.note_step()
        kernel.refresh(batch)
        ahead.append(planned_tokens(kernel, chunk) > batch.tokens[chunk])
        batch.grow(512, [chunk])
        kernel.prepare(batch)
    assert ahead == [True, True, False, True, True]


def test_refresh_before_every_step_plans_for_that_step() -> None:
    kernel, batch = kernel_for(2, 1 << 16, max_rows=4096), LiveBatch(page_size=16)
    chunk = batch.add(512, rows=512)
    for _ in range(5):
        kernel.refresh(batch)
        assert alone(kernel, batch) == []
        assert planned_tokens(kernel, chunk) <= batch.tokens[chunk]
        kernel.replanning.note_step()
        batch.grow(512, [chunk])


@pytest.mark.parametrize(("rows", "max_tokens"), [(512, 1500), (63, 1 << 16)])
def test_no_chunk_comes(rows: int, max_tokens: int) -> None:
    """Where a request would get more tokens than it may have, or where its rows are likely to be drafts."""
    kernel, batch, chunk = begun(rows, 1024, max_tokens)
    for _ in range(5):
        kernel.refresh(batch)
        assert planned_tokens(kernel, chunk) <= batch.tokens[chunk]
