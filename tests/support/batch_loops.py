"""A server's loop: random events, plans, steps and calls, with every row compared to float64 attention."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

import treegen
from support.batch_events import TORCH, Server
from treegen import Shape
from treegen.backends.check_inputs import KV_TORCH_DTYPES
from treegen.runtime.batch_kernel import BatchKernel
from treegen.strategies import Strategy, cohort, deft_flatten, deft_node_chunk, query
from treegen.target.targets import Target, target_from

UNTOUCHED = 777.0
"""What out holds before a call."""
OUT_ERROR = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 4e-3}
"""Relative error of out, and absolute error of lse, at most."""
STRATEGIES: tuple[str | Strategy, ...] = (
    cohort(64), cohort(16), cohort(64, split=64), cohort(64, split=100, split_shared_rows=2), cohort(32, split=50),
    query(), query(split=128), "auto", deft_flatten(block=32), deft_node_chunk(chunk=24),
)  # fmt: skip
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
HEADS = ((4, 2), (8, 1), (2, 2), (4, 1))
FORMS = ("block", "named", "ragged")

Scores = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Changes scores [heads, tokens], given positions [tokens] of the tokens and that of the row."""


@dataclass(frozen=True)
class Case:
    """A server and the kernel that serves it. window: of compile_batch; options: further arguments of compile_batch,
    which the reference takes as `scores` and `sinks`. layout: how the caches are laid out, beside the shape's layout.
    sms: of the target, from which the number of lone items follows.
    queries: query rows of a request at most, None without qo_indptr.
    """

    shape: Shape
    form: str = "block"
    window: int = -1
    strategy: str | Strategy = "auto"
    rows: int = 6
    most_tokens: int = 150
    options: dict[str, Any] = field(default_factory=dict)
    scores: Scores | None = None
    sinks: torch.Tensor | None = None
    scales: tuple[float, float] = (1.0, 1.0)
    layout: str = "dense"
    sms: int = 2
    queries: int | None = None


def any_case(seed: int, dtype: str = "fp32", queries: int | None = None) -> Case:
    """A case in which everything is chosen at random, but for the query rows of a request at most."""
    source = random.Random(seed)
    page_size = source.choice(PAGE_SIZES)
    layout = source.choice(["NHD", "HND"]) if page_size > 1 else "NHD"
    shape = Shape(*source.choice(HEADS), 16, dtype=dtype, page_size=page_size, kv_layout=layout)
    made = Case(
        shape, source.choice(FORMS), source.choice([-1, -1, 0, 37]), source.choice(STRATEGIES),
        source.choice([3, 6, 9, 12]), source.choice([150, 400]), queries=queries,
    )  # fmt: skip
    return replace(made, options={"mask_mod": causal}) if queries and source.random() < 0.5 else made


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A mask_mod that hides what no row sees anyway, so that plans leave it to the mask."""
    return kv_idx <= q_idx


def small(sms: int = 2) -> Target:
    """A target with few work items per plan: Triton's interpreter takes them one after another."""
    return replace(target_from("h200"), sms=sms)


def made(case: Case, seed: int, backend: str | None, device: str = "cpu") -> tuple[Server, BatchKernel]:
    """The server of a case and its kernel."""
    shape = replace(case.shape, kv_dtype=case.shape.dtype, shared_kv=False)
    server = Server(seed, shape, case.rows, case.most_tokens, device, case.form, case.queries)
    if case.shape.kv_dtype != case.shape.dtype:
        narrow = KV_TORCH_DTYPES[case.shape.kv_dtype]
        server.true_k, server.true_v = (t.to(narrow).to(t.dtype) for t in (server.true_k, server.true_v))
    if case.shape.shared_kv:
        server.true_v = server.true_k[..., : shape.head_dim_v].clone()
    kernel = treegen.compile_batch(
        case.shape, server.pages, max_tokens=case.most_tokens, strategy=case.strategy, backend=backend,
        target=small(case.sms) if device == "cpu" else None, window_left=case.window,
        max_rows=None if case.queries is None else server.query_rows, **case.options,
    )  # fmt: skip
    return server, kernel


def caches_of(server: Server, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The server's caches as the kernel takes them."""
    keys, values = server.caches()
    if case.shape.kv_dtype != case.shape.dtype:
        narrow = KV_TORCH_DTYPES[case.shape.kv_dtype]
        keys, values = keys.to(narrow), values.to(narrow)
    if case.layout == "unaligned":  # each page begins at an odd number of elements
        keys, values = (_spread(cache, 3) for cache in (keys, values))
    elif case.layout == "joined":  # keys and values of a page lie side by side, as in vLLM
        keys, values = torch.stack([keys, values], 1).unbind(1)
    if case.shape.shared_kv:
        values = keys[..., : case.shape.head_dim_v]
    return keys, values


def _spread(cache: torch.Tensor, further: int) -> torch.Tensor:
    """The same values, with pages further apart."""
    page = cache[0].numel()
    memory = torch.full((len(cache) * (page + further),), math.nan, dtype=cache.dtype, device=cache.device)
    strides = (page + further, *cache[0].stride())
    spread = memory.as_strided(cache.shape, strides)
    spread.copy_(cache)
    return spread


def reference(
    server: Server, case: Case, q: torch.Tensor, lengths: dict[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of every query row of a request, in float64."""
    plain = case.scores is None and case.sinks is None and case.scales == (1.0, 1.0)
    if plain:
        return server.expected(q, lengths, case.shape.head_dim**-0.5, case.window)
    shape = case.shape
    out = torch.full((server.query_rows, shape.num_qo_heads, shape.head_dim_v), math.nan, dtype=torch.float64)
    lse = torch.full((server.query_rows, shape.num_qo_heads), math.nan, dtype=torch.float64)
    seat_of = {int(server.batch.row[seat]): seat for seat in server.of_seat}
    for place, (row, length) in server.seen(lengths).items():
        begin = max(0, length - 1 - case.window) if case.window >= 0 else 0
        token = torch.arange(begin, max(length, begin))
        page = torch.tensor(server.of_seat[seat_of[row]], dtype=torch.long)[token // server.page_size]
        keys, values = (c[page, token % server.page_size].double().cpu() for c in (server.k, server.v))
        query_row = q[place].double().cpu().view(shape.num_kv_heads, shape.group, -1)
        scores = torch.einsum("hgd,thd->hgt", query_row, keys) * (shape.head_dim**-0.5 * case.scales[0])
        scores = scores.flatten(0, 1)
        if case.scores is not None:
            scores = case.scores(scores, token, length - 1)
        weighed = scores if case.sinks is None else torch.cat([scores, case.sinks.double().cpu()[:, None]], 1)
        lse[place] = weighed.logsumexp(-1) if weighed.shape[1] else -math.inf
        weights = (scores - lse[place][:, None]).exp() if len(token) else scores
        by_head = weights.view(shape.num_kv_heads, shape.group, -1)
        out[place] = torch.einsum("hgt,thd->hgd", by_head, values * case.scales[1]).flatten(0, 1)
    return out, lse


def check_step(
    server: Server, case: Case, kernel: BatchKernel, lengths: dict[int, int], shown: str, q: torch.Tensor
) -> None:
    """Calls the kernel, and compares every row."""
    keys, values = caches_of(server, case)
    dims = (*q.shape[:2], case.shape.head_dim_v)
    out = torch.full(dims, UNTOUCHED, dtype=q.dtype, device=q.device)
    found, lse = kernel(q, keys, values, out=out, return_lse=True)
    assert found is out
    expected, expected_lse = reference(server, case, q, lengths)
    most = OUT_ERROR[case.shape.dtype] * (1 if q.device.type == "cpu" else 4)  # GPUs take exponentials roughly
    seen = server.seen(lengths)
    for row in range(len(q)):
        where = f"{shown}, query row {row} of (row, length) {seen.get(row)}"
        if row not in seen:
            assert bool((out[row] == UNTOUCHED).all()), where
            continue
        if seen[row][1] <= 0 and case.sinks is None:
            assert not bool(out[row].any()), where
            assert bool(torch.isneginf(lse[row]).all()), where
            continue
        error = (out[row].double().cpu() - expected[row]).abs().max() / max(1.0, float(expected[row].abs().max()))
        assert error < most, f"{where}: out error {error}"
        error = (lse[row].double().cpu() - expected_lse[row]).abs().max()
        assert error < most, f"{where}: lse error {error}"


def serve(case: Case, seed: int, steps: int, backend: str | None, device: str = "cpu") -> Counter[str]:
    """Runs a server's loop; returns the kernel's counters.

    Half of the servers begin with a batch at work. Those with odd seeds leave it to `prepare` and `refresh` when to
    plan, for steps of few layers or many.
    """
    source = random.Random(seed + 1_000_000)
    server, kernel = made(case, seed, backend, device)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    shape = case.shape
    kinds: Counter[str] = Counter()
    for _ in range(source.choice([0, 2 * case.rows])):
        server.event()
    for step in range(steps):
        for _ in range(source.randint(1, 3)):
            server.event()
        plans = step == 0 or source.random() < 0.4
        kernel.replanning.calls = 10 ** (step % 7)  # layers of the step before
        if seed % 2:
            kernel.prepare(server.batch)
        elif plans:
            kernel.update(server.batch)
        else:
            kernel.seat(server.batch)
        lengths = server.write()
        kernel.step()
        q = torch.randn(server.query_rows, shape.num_qo_heads, shape.head_dim, generator=generator)
        q = q.to(TORCH[shape.dtype]).to(device)
        shown = f"seed {seed}, step {step}, {case.strategy}, {shape}, {case.form}, window {case.window}"
        check_step(server, case, kernel, lengths, shown, q)
        if seed % 2:
            kernel.refresh(server.batch)
        kinds["requests"] += len(lengths)
        kinds["impossible"] += sum(length < 0 for length in lengths.values())
    counted = Counter(kernel.counters())
    assert counted["steps"] == steps
    known = sum(counted[name] for name in ("planned", "new", "refuted", "outgrown", "invalid"))
    assert known == kinds["requests"]
    assert counted["invalid"] == kinds["impossible"]
    return counted


def by_position(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A score_mod that knows where a row and a token are."""
    return score - 0.01 * (q_idx - kv_idx)


def _positional(scores: torch.Tensor, token: torch.Tensor, position: int) -> torch.Tensor:
    return scores - 0.01 * (position - token)


def _capped(scores: torch.Tensor, token: torch.Tensor, position: int) -> torch.Tensor:
    return 5.0 * torch.tanh(scores / 5.0)


def _sloped(scores: torch.Tensor, token: torch.Tensor, position: int, slopes: torch.Tensor) -> torch.Tensor:
    return scores - slopes.double()[:, None] * (position - token)


def scored_cases(dtype: str = "fp32") -> dict[str, Case]:
    """One case for each option of scores, in pages of several sizes."""
    shape = partial(Shape, 4, 2, 16, dtype=dtype)
    slopes, sinks = torch.tensor([0.5, 0.25, 0.1, 0.05]), torch.tensor([0.5, -1.0, 2.0, 0.0])
    split = cohort(32, split=50)
    sloped = partial(_sloped, slopes=slopes)
    return {
        "cap": Case(shape(page_size=16), strategy=split, options={"logits_soft_cap": 5.0}, scores=_capped),
        "alibi": Case(shape(page_size=8), "named", strategy=split, options={"alibi_slopes": slopes}, scores=sloped),
        "score_mod": Case(shape(), "ragged", 37, split, options={"score_mod": by_position}, scores=_positional),
        "large pages": Case(shape(page_size=128), "block", 37, options={"score_mod": by_position}, scores=_positional),
        "sinks": Case(shape(page_size=4), "block", -1, split, options={"sinks": sinks}, sinks=sinks),
        "sinks in windows": Case(shape(page_size=64), "named", 37, options={"sinks": sinks}, sinks=sinks),
    }


def shaped_cases() -> dict[str, Case]:
    """One case for each kind of shape and cache that is not the usual one."""
    split = cohort(32, split=50)
    scaled = {"k_scale": 0.5, "v_scale": 2.0}
    fp8 = partial(Shape, 4, 2, 16, dtype="bf16")
    return {
        "wide keys": Case(Shape(4, 2, 32, 16, dtype="fp32", page_size=16), strategy=split),
        "latent": Case(Shape(4, 1, 48, 32, dtype="fp32", page_size=16, shared_kv=True), strategy=split),
        "mla": Case(Shape(16, 1, 576, 512, dtype="bf16", page_size=64, shared_kv=True), strategy=split, rows=4),
        "mla, 64 heads": Case(Shape(64, 1, 576, 512, dtype="bf16", page_size=16, shared_kv=True), rows=4),
        "group of 80": Case(Shape(80, 1, 16, dtype="fp32", page_size=16), strategy=split, rows=4),
        "group of 3": Case(Shape(6, 2, 16, dtype="fp32", page_size=16), strategy=split),
        "narrow partials": Case(Shape(4, 2, 16, dtype="bf16", page_size=8, partial_dtype="bf16"), strategy=split),
        "fp16": Case(Shape(4, 2, 16, dtype="fp16", page_size=16), "named", strategy=split),
        "bf16": Case(Shape(4, 2, 16, dtype="bf16", page_size=32), "ragged", 37, split),
        "e4m3": Case(fp8(kv_dtype="e4m3", page_size=16), "block", -1, split, options=scaled, scales=(0.5, 2.0)),
        "e5m2": Case(fp8(kv_dtype="e5m2"), "ragged", 37, split, options=scaled, scales=(0.5, 2.0)),
        "e4m3 in words": Case(Shape(4, 2, 64, dtype="bf16", kv_dtype="e4m3", page_size=16), strategy=split),
        "e5m2 in words": Case(Shape(8, 1, 64, dtype="fp16", kv_dtype="e5m2", page_size=16), "named", strategy=split),
        "unaligned pages": Case(Shape(4, 2, 16, dtype="fp32", page_size=16, kv_layout="HND"), layout="unaligned"),
        "unaligned slots": Case(Shape(4, 2, 16, dtype="fp32"), strategy=split, layout="unaligned"),
        "joined caches": Case(Shape(4, 2, 16, dtype="fp32", page_size=16), strategy=split, layout="joined"),
        "values of 256 dims in windows": Case(Shape(4, 2, 256, dtype="bf16", page_size=16), window=37, rows=4),
        "head dim 80": Case(Shape(4, 2, 80, dtype="fp32", page_size=64), "named", strategy=split),
    }
