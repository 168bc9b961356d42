"""Plans for the chunks of prompts that the next step will bring."""

from __future__ import annotations

import pytest

from support.planned_batches import alone, kernel_for
from treegen import LiveBatch
from treegen.runtime.batch_kernel import BatchKernel


def begun(rows: int, tokens: int, max_tokens: int = 1 << 16) -> tuple[BatchKernel, LiveBatch, int]:
    """A kernel that has prepared a step with a chunk of a prompt, beside a request that decodes."""
    kernel, batch = kernel_for(2, max_tokens, max_rows=4096), LiveBatch(page_size=16)
    batch.add(900)
    chunk = batch.add(tokens, rows=rows)
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


def test_requests_that_get_fewer_tokens_than_rows_are_known_after_one_step() -> None:
    """As where many drafts are refused."""
    kernel, batch, drafting = begun(100, 1000)
    wrong = 0
    for step in range(6):
        kernel.update(batch)
        if kernel.refresh(batch):
            wrong += planned_tokens(kernel, drafting) > 1000 + 3 * step
        batch.grow(3, [drafting])
        kernel.prepare(batch)
    assert wrong <= 1
    batch.grow(100, [drafting])
    kernel.prepare(batch)
    assert kernel.refresh(batch)
    assert planned_tokens(kernel, drafting) == 1000 + 18 + 200  # it got as many as it has rows


def test_a_chunk_that_did_not_come_is_planned_for_before_the_step() -> None:
    kernel, batch, chunk = begun(512, 1024)
    assert kernel.refresh(batch)
    assert alone(kernel, batch) == [chunk]
    assert kernel.prepare(batch)
    assert alone(kernel, batch) == []
    kernel.refresh(batch)
    assert planned_tokens(kernel, chunk) == 1024


def test_a_batch_that_is_ahead_is_planned_as_it_is() -> None:
    """A server may schedule a step while the one before runs."""
    kernel, batch, chunk = begun(512, 1024)
    batch.grow(512, [chunk])
    assert kernel.refresh(batch)
    assert planned_tokens(kernel, chunk) == 1536


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
        assert planned_tokens(kernel, chunk) == 1024
