"""When plans are made for chunks of prompts: a chunk of 512 rows gains 512 tokens in each step."""

from __future__ import annotations

import pytest

import treegen.compiled.c_library as c_library
from support.planned_batches import alone, kernel_for
from treegen import LiveBatch
from treegen.runtime.batch_kernel import BatchKernel


@pytest.fixture(params=["C", "NumPy"], autouse=True)
def maker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts late requests."""
    if request.param == "NumPy":
        monkeypatch.setattr(c_library, "library", lambda: None)
    elif c_library.library() is None:
        pytest.skip("there is no C compiler")


def begun(rows: int) -> tuple[BatchKernel, LiveBatch, int]:
    """A kernel that has planned for a prompt's first chunk, of this many rows, and a request that decodes."""
    kernel, batch = kernel_for(2, 1 << 16, max_rows=8192), LiveBatch(page_size=16)
    batch.add(900)
    chunk = batch.add(rows, rows=rows)
    assert kernel.prepare(batch)
    return kernel, batch, chunk


def grow(batch: LiveBatch, chunk: int) -> None:
    """The tokens of the next step."""
    batch.grow()
    batch.grow(int(batch.rows[chunk]) - 1, [chunk])


@pytest.mark.parametrize(("rows", "waited"), [(512, 0), (2048, 0), (2100, 1), (4096, 1)])
def test_refresh_plans_before_chunks_have_outgrown_the_plan(rows: int, waited: int) -> None:
    """A plan has room for 2,048 more tokens. The kernel expects another chunk only after the second one."""
    kernel, batch, chunk = begun(rows)
    planned = 0
    for _ in range(6):
        kernel.refresh(batch)
        grow(batch, chunk)
        planned += kernel.prepare(batch)
        assert alone(kernel, batch) == []
    assert planned == waited


@pytest.mark.parametrize(("rows", "plans"), [(512, 1), (4096, 7)])
def test_prepare_plans_where_chunks_have_outgrown_the_plan(rows: int, plans: int) -> None:
    """A plan leaves room for 2,048 tokens."""
    kernel, batch, chunk = begun(rows)
    made = 0
    for _ in range(7):
        grow(batch, chunk)
        made += kernel.prepare(batch)
        assert alone(kernel, batch) == []
    assert made == plans


@pytest.mark.parametrize(("rows", "least", "most"), [(8, 0, 3), (128, 10, 25), (512, 38, 40)])
def test_plans_are_made_where_they_pay(rows: int, least: int, most: int) -> None:
    """The more rows, the more tokens come in a step."""
    kernel, batch, chunk = begun(rows)
    made = 0
    for _ in range(40):
        kernel.prepare(batch)
        made += kernel.refresh(batch)
        grow(batch, chunk)
    assert least <= made <= most


def test_prepare_leaves_a_short_chunk_alone() -> None:
    """Which costs the layers of a step less than a plan."""
    kernel, batch, chunk = begun(2)
    batch.grow(3000, [chunk])
    assert not kernel.prepare(batch)
    assert alone(kernel, batch) == [chunk]
