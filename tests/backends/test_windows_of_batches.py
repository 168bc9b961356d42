"""Running batches with sliding windows: what step kernels let items read, and what they do with shorter requests."""

from __future__ import annotations

import pytest
import torch

from support.batch_events import Server
from support.batch_loops import Case, check_step, made
from support.step_tables import step_of
from treegen import Shape
from treegen.backends.request_program import RequestProgram
from treegen.runtime.batch_kernel import BatchKernel
from treegen.strategies import Strategy, cohort, query

WINDOW, PAGE = 37, 16
SHAPE = Shape(4, 2, 16, dtype="fp32", page_size=PAGE)


def served(case: Case, lengths: list[int], backend: str | None) -> tuple[Server, BatchKernel]:
    """A server with requests of these lengths that share nothing, and a kernel with a plan of them."""
    server, kernel = made(case, 1, backend)
    server.random.random = lambda: 1.0  # type: ignore[method-assign]
    for tokens in lengths:
        seat = server.batch.add(tokens)
        server.of_seat[seat] = [server.take() for _ in range(server.room(case.most_tokens))]
        server.length[seat] = tokens
        server.fill(server.of_seat[seat], 0, case.most_tokens)
    kernel.update(server.batch)
    return server, kernel


@pytest.mark.parametrize("strategy", [cohort(64), query(), cohort(64, shares=2)], ids=str)
def test_a_row_reads_its_window_and_a_part_of_a_page(strategy: Strategy) -> None:
    """Also where an item has rows of requests of other lengths, and where these have grown since the plan."""
    lengths = [390, 40, 200, 17, 333, 120]
    case = Case(SHAPE, "block", WINDOW, strategy, 6, 460)
    server, kernel = served(case, lengths, "triton")
    for more in (0, 1, 50):
        for seat, tokens in enumerate(lengths):
            server.length[seat] = tokens + more
        server.write()
        kernel.step()
        assert isinstance(kernel.program, RequestProgram)
        step = step_of(kernel.program, kernel.form.config, PAGE, positions=True)
        assert step.counters[2:] == [0, 0, 0, 0], "all requests are planned"
        for row, tokens in step.written().items():
            length = server.length[{int(server.batch.row[seat]): seat for seat in server.of_seat}[row]]
            begin = max(0, length - 1 - WINDOW)
            read = sorted(position for _, position in tokens)
            assert read == list(range(begin - begin % PAGE, length)), (more, length)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_request_that_lost_more_tokens_than_its_plan_allows_is_alone(backend: str) -> None:
    case = Case(SHAPE, "block", WINDOW, cohort(64), 3, 400)
    server, kernel = served(case, [300, 100], backend)
    assert kernel.planned is not None
    least, other = kernel.planned.schedule.least.tolist()
    assert 300 - max(kernel.form.config.tokens, PAGE) < least <= 300
    assert other <= 100
    q = torch.randn(server.query_rows, 4, 16, generator=torch.Generator().manual_seed(0))
    refuted = 0
    for length in (300, least, least - 1, WINDOW + 2, 5, 0, 350):
        server.length[0] = length
        lengths = server.write()
        kernel.step()
        refuted += length < least
        assert kernel.counters()["refuted"] == refuted, length
        check_step(server, case, kernel, lengths, f"{length} tokens", q)


def test_a_plan_is_made_for_what_windows_reach() -> None:
    """There are no more work items than for short requests, and saved bytes are counted within windows."""
    case = Case(SHAPE, "block", WINDOW, "auto", 6, 4096, sms=8)
    _, kernel = served(case, [4000, 3000, 50, 2500], "torch")
    _, short = served(case, [WINDOW + 1] * 4, "torch")
    assert kernel.planned is not None
    assert short.planned is not None
    assert len(kernel.planned.schedule.schedule.items) <= len(short.planned.schedule.schedule.items)
    unit = max(kernel.form.config.tokens, PAGE)
    tokens = kernel.planned.problem.tree.unique_tokens
    assert tokens <= 4 * (WINDOW + 1 + unit)
    assert kernel.planned.saved_bytes == 0
    left = sum([4000, 3000, 50, 2500]) - 4 * (WINDOW + 1)
    assert f"({left} of 9550 tokens are in no window)" in kernel.explain()
    assert f"unique tokens {tokens}," in kernel.explain()
