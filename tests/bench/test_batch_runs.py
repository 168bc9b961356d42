"""Runs of the suite of batches without a GPU: what is checked, what is timed, and what the table says."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.small_batches import BATCH, CHUNKS, CPU, DRAFTS, case_of, settings
from treegen import BatchKernel, LiveBatch, Shape, cli
from treegen.backends import oracle
from treegen.bench import batch_results
from treegen.bench.batch_case import BATCH_HEADS, MLA_HEADS, BatchCase, BatchShapes
from treegen.bench.batch_providers import PlansAhead, TreegenBatches, TreegenExact
from treegen.bench.batch_results import BatchOutcome, BatchResult, StepTimes
from treegen.bench.batch_runs import BATCH_PROVIDERS, batch_providers_from, measure_batch, run_batches
from treegen.bench.flashinfer_batch_decode import FlashInferBatchDecode
from treegen.bench.flashinfer_batch_prefill import draft_mask
from treegen.bench.providers import UnavailableError
from treegen.ir.errors import FormatError, InputError
from treegen.ir.tree import Tree
from treegen.workloads.batch_pages import BatchPages
from treegen.workloads.batches import batches, chosen_batches
from treegen.workloads.served_batch import BatchRequest, ServedBatch


@dataclass
class Reference:
    """PyTorch's answer from the page table on the device; `off` is added from the plan number `late` on."""

    name: str = "treegen"
    replans: bool = True
    off: float = 0.0
    late: int = 0
    order_rows: bool = False
    planned: list[tuple[str, int]] = field(default_factory=list)

    def prepare(self, case: BatchCase) -> ReferenceServer:
        return ReferenceServer(self, case)


class ReferenceServer(PlansAhead):
    def __init__(self, provider: Reference, case: BatchCase) -> None:
        self.provider, self.case, self.begun = provider, case, 0
        self.order: Any = None

    def plan(self, pages: BatchPages) -> None:
        self.provider.planned.append((pages.batch.name, len(pages.rows)))
        if self.provider.order_rows:
            self.order = np.arange(len(pages.lengths))[::-1]

    def begin(self) -> None:
        self.begun += 1

    def attend(self, layer: int) -> torch.Tensor:
        case = self.case
        out = torch.full((case.query_rows, 4, 16), math.nan)
        k_cache, v_cache = (cache.flatten(0, 1) for cache in case.cache(layer))
        rows = range(len(case.seq_lens)) if self.order is None else self.order
        for place, row in enumerate(rows):
            tokens = torch.arange(int(case.seq_lens[row]))
            slots = case.page_table[row][tokens // 4].long() * 4 + tokens % 4
            q = case.q[place].view(2, 2, 16)
            scores = torch.einsum("hgd,thd->hgt", q, k_cache[slots]) / 4
            if len(tokens):
                out[place] = torch.einsum("hgt,thd->hgd", scores.softmax(-1), v_cache[slots]).flatten(0, 1)
        late = len(self.provider.planned) > self.provider.late
        return out + (self.provider.off if late else 0.0)


def test_a_right_provider_is_measured() -> None:
    provider = Reference()
    outcome = measure_batch(provider, case_of(BATCH), settings())
    assert (outcome.status, outcome.detail) == ("right", "")
    assert outcome.error is not None
    assert outcome.error < 1e-5
    assert outcome.run_us == 10.0
    assert outcome.step is not None
    assert outcome.plan is not None
    assert 0 < outcome.plan.p50 <= outcome.step.p50 <= outcome.step.p99
    names = [name for name, _ in provider.planned]
    assert names == ["tiny, apart", "tiny, groups", *["tiny"] * 6]
    assert measure_batch(Reference(order_rows=True), case_of(BATCH), settings()).status == "right"


def test_a_wrong_provider_is_not_timed() -> None:
    at_once = measure_batch(Reference(off=0.1), case_of(BATCH), settings())
    assert (at_once.status, at_once.run_us, at_once.step) == ("wrong", None, None)
    assert at_once.detail.endswith("at the first step")
    later = measure_batch(Reference(off=0.1, late=5), case_of(BATCH), settings())
    assert (later.status, later.run_us) == ("wrong", None)
    assert later.detail.endswith("after 5 steps")
    assert measure_batch(Reference(off=math.nan), case_of(BATCH), settings()).error == math.inf


@pytest.mark.parametrize("batch", [BATCH, DRAFTS, CHUNKS], ids=lambda batch: batch.name)
def test_exact_kernels_agree_with_the_reference(batch: ServedBatch) -> None:
    """Also for several queries: the trees of drafts and chunks see what the page table's tokens say."""
    outcome = measure_batch(TreegenExact("query"), case_of(batch), settings())
    assert (outcome.status, outcome.detail) == ("right", "")
    assert outcome.step is None
    assert outcome.first_plan_ms is not None


def test_batch_invariant_kernels_agree_with_the_reference() -> None:
    """They serve steps too, but no chunks."""
    provider = TreegenBatches(batch_invariant=True)
    outcome = measure_batch(provider, case_of(BATCH), settings())
    assert (provider.name, outcome.status, outcome.detail) == ("batch-invariant", "right", "")
    assert outcome.step is not None
    assert measure_batch(provider, case_of(CHUNKS), settings()).status == "unavailable"


def test_latent_caches() -> None:
    batch = replace(BATCH, mla=True)
    shape = Shape(4, 1, 24, 16, dtype="fp32", page_size=4, shared_kv=True)
    assert measure_batch(TreegenExact("query"), case_of(batch, shape), settings()).status == "right"


def test_what_cannot_be_served_is_told() -> None:
    outcome = measure_batch(FlashInferBatchDecode(True), case_of(BATCH), settings())
    assert (outcome.status, outcome.detail) == ("unavailable", "FlashInfer takes fp16 and bf16, not fp32")
    outcome = measure_batch(TreegenBatches(batch_invariant=True), case_of(DRAFTS), settings())
    assert (outcome.status, outcome.detail) == (
        "unavailable",
        "batch-invariant mode takes one query row per request",
    )

    class Broken(Reference):
        def prepare(self, case: BatchCase) -> ReferenceServer:
            raise ValueError("broken")

    assert measure_batch(Broken(), case_of(BATCH), settings()).detail == "ValueError: broken"


def test_the_live_kernel_follows_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    refreshed = []

    class Kernel(BatchKernel):
        def refresh(self, batch: LiveBatch) -> bool:
            lengths = {int(batch.row[seat]): int(batch.tokens[seat]) for seat in batch.seats.tolist()}
            assert lengths == {row: int(case.seq_lens[row]) for row in lengths}
            assert len(lengths) == int((case.seq_lens > 0).sum())
            refreshed.append(self)
            return super().refresh(batch)

    monkeypatch.setattr("treegen.api.compile_batch.BatchKernel", Kernel)
    case = case_of(BATCH, steps=20)
    outcome = measure_batch(TreegenBatches(), case, settings(20))
    assert (outcome.status, outcome.detail) == ("right", "")
    assert len(refreshed) == 2 + 1 + 20
    assert 3 <= refreshed[0].counters()["plans"] < len(refreshed)


def test_the_live_kernel_serves_chunks_and_drafts() -> None:
    """One reads a chunk of its prompt while others decode; requests accept some of their drafts, chains or trees."""
    chains = replace(
        CHUNKS, requests=(BatchRequest(12, 99, queries=4, grows=2), BatchRequest(9, 3, queries=4, grows=3))
    )
    for batch in (CHUNKS, chains, DRAFTS):
        case = case_of(batch, steps=12)
        assert case.qo_indptr is not None
        outcome = measure_batch(TreegenBatches(), case, settings(12))
        assert (outcome.status, outcome.detail) == ("right", "")
        assert int(case.qo_indptr[-1]) == int(case.start.pages(batch).queries.sum())


def test_draft_masks() -> None:
    mask = draft_mask((-1, 0, 0, 1))
    tree = Tree.from_parents([-1], [8]).with_drafts([-1, 0, 0, 1], stored=True)
    assert [np.flatnonzero(row).tolist() for row in mask] == [(tree.slots(row)[4:] - 4).tolist() for row in range(4)]


def test_shapes() -> None:
    made = batches(None)
    usual, latent = made[0], next(batch for batch in made if batch.mla)
    assert [f"{one.num_qo_heads}:{one.num_kv_heads}" for one in BatchShapes(BATCH_HEADS).of(usual)] == list(BATCH_HEADS)
    assert [f"{one.num_qo_heads}:{one.num_kv_heads}" for one in BatchShapes(["9:3"]).of(latent)] == list(MLA_HEADS)
    assert {(one.head_dim, one.head_dim_v, one.page_size) for one in BatchShapes(["9:3"]).of(latent)} == {
        (576, 512, 64)
    }


def test_runs_make_results() -> None:
    providers = [Reference(), Reference("flashinfer-a"), Reference("flashinfer-b"), TreegenExact("query")]
    found = list(run_batches([BATCH], BatchShapes(["4:2"], 16, "fp32"), providers, settings(), CPU, gbps=1000.0))
    (result,) = found
    assert (result.batch, result.family, result.heads, result.requests) == ("tiny", "groups", "4:2 x16 fp32", 5)
    assert (result.tokens, result.unique_tokens) == (71, 55)
    assert result.floor_us == pytest.approx((55 * 2 * 2 * 16 * 4 + 5 * 4 * 32 * 4) / 1e6)
    assert [outcome.status for outcome in result.outcomes] == ["right"] * 4


def test_caches_in_8_bits() -> None:
    """The reference reads the same narrow caches, and the floor counts their bytes."""
    shapes = BatchShapes(["4:2"], 64, "bf16", "e4m3")
    (result,) = run_batches([BATCH], shapes, [TreegenBatches()], settings(), CPU, gbps=1000.0)
    (found,) = result.outcomes
    assert (found.status, result.heads) == ("right", "4:2 x64 KV e4m3")
    assert result.floor_us == pytest.approx((55 * 2 * 2 * 64 * 1 + 5 * 4 * 128 * 2) / 1e6)


def outcome(name: str, run: float, step: float, status: Any = "right") -> BatchOutcome:
    times = StepTimes(step, 2 * step, step)
    return BatchOutcome(name, status, 1e-4, run, 0.5, StepTimes(0.25, 0.5, 0.3), times)


RESULTS = [
    BatchResult(
        name, family, 0, "32:8", 16, 4, 100, 50, 200, 32, 12.0,
        (outcome("treegen", 10, 1), outcome("flashinfer-a", run, 4), outcome("flashinfer-b", 15, 2),
         outcome("flashinfer-c", 1, 1, "wrong"), BatchOutcome("flashinfer-mla", "unavailable", detail="apart")),
    )
    for name, family, run in (("one", "traces", 20), ("two", "groups", 5))
]  # fmt: skip


def test_the_table() -> None:
    rows = batch_results.batch_table(RESULTS)
    assert rows[0][:8] == ["batch", "heads", "floor", "exact", "invariant", "run us", "FI", "x"]
    assert rows[1] == [
        *("one", "32:8", "12.0", "-", "-", "10.0", "15.0", "1.50", "0.25", "0.25"),
        *("1.00", "2.00", "2.00", "2.00", "4.00", "2.00"),
    ]
    assert rows[2][5:8] == ["10.0", "5.0", "0.50"]
    summary = {row[0]: row[1:] for row in batch_results.batch_summary(RESULTS)}
    assert summary["all"] == ["2", "0.87", "0.50", "2.00", "2.00", "2.00", "2.00"]
    assert summary["traces"][:3] == ["1", "1.50", "1.50"]
    assert batch_results.batch_problems(RESULTS) == ["flashinfer-mla unavailable: apart: one 32:8 and 1 more"]


def test_step_times() -> None:
    times = StepTimes.of([float(number) for number in range(1, 201)])
    assert (times.p50, times.p99, times.mean) == (100.5, 198.0, 100.5)
    assert StepTimes.of([3.0]) == StepTimes(3.0, 3.0, 3.0)


def test_results_survive_their_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "b.json"
    batch_results.save_batches(path, {"device": "none"}, RESULTS)
    assert batch_results.load_batches(path) == ({"device": "none"}, RESULTS)
    assert cli.main(["bench", "--table", "batches", "--from", str(path)]) == 1  # an output was wrong
    assert capsys.readouterr().out.splitlines()[-1].startswith("two")
    value = json.loads(path.read_text())
    for wrong in ({}, {**value, "format": "other"}, {**value, "results": [{"batch": "1"}]}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(FormatError):
            batch_results.load_batches(path)


def test_bad_arguments_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, problem in (
        (["--table", "trees"], "trees"),
        (["--table", "batches", "1,2/3,4"], "excludes trees"),
        (["--table", "batches", "--family", "nobody"], "nobody"),
        (["--table", "batches", "--providers", "nobody"], "nobody"),
        (["--table", "batches", "--heads", "8"], "heads"),
        (["--table", "batches", "--head-dim", "64", "--head-dim", "80"], "takes one --head-dim"),
        (["--table", "batches", "--dtype", "fp16", "--dtype", "bf16"], "one --dtype"),
        (["--table", "batches", "--page-size", "16"], "no --page-size"),
        (["--table", "batches", "--dtype", "int4"], "int4"),
        (["--table", "batches", "--kv-dtype", "fp8"], "kv_dtype = fp8"),
        (["--table", "batches", "--kv-dtype", "e4m3", "--dtype", "fp32"], "kv_dtype = e4m3"),
        (["--kv-dtype", "e4m3"], "kv_dtype = e4m3: is about batches"),
        (["--window-left", "127"], "window_left = 127: is about batches"),
        (["--table", "batches", "--family", "unshared-long-8"], "cpu"),
    ):
        assert cli.main(["bench", *arguments]) == 2
        error = capsys.readouterr().err
        assert problem in error
        assert error.count("\n") == 1


def test_choices() -> None:
    assert [batch.name for batch in chosen_batches(None, None)] == [batch.name for batch in batches(None)]
    assert len(chosen_batches(None, "groups, unshared-long-8")) == 5
    assert [batch.name for batch in chosen_batches(None, "1-1024/2048-32, trees", 3)][4] == "1-1024/2048-32"
    with pytest.raises(InputError, match="unshared"):
        chosen_batches(None, "traces")
    assert [provider.name for provider in batch_providers_from(",".join(BATCH_PROVIDERS))] == list(BATCH_PROVIDERS)
    assert len(set(BATCH_PROVIDERS)) == len(BATCH_PROVIDERS)
    with pytest.raises(UnavailableError):
        FlashInferBatchDecode(True).prepare(case_of(BATCH))
    assert oracle.TOLERANCE["fp32"] < 1e-4
