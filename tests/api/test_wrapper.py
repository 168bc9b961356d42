"""The wrapper: page tables in, attention out, with the layouts and the life of FlashInfer's wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.forests import examples
from support.page_requests import Requests, csr, requests
from support.wrapper_calls import DIM, HEADS, KV_HEADS, POOL, check, pages, queries
from treegen.api.wrapper import TreeAttentionWrapper
from treegen.ir.errors import InputError, ShapeError, TreeError


def laid_out(k: torch.Tensor, v: torch.Tensor, layout: str, joined: bool) -> Any:
    """The same cache as an engine would hold it."""
    if layout == "HND":
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    return torch.stack([k, v], 1) if joined else (k, v)


def planned(made: Requests, page_size: int, layout: str = "NHD", **options: Any) -> TreeAttentionWrapper:
    wrapper = TreeAttentionWrapper(torch.empty(1), layout)
    options = {"q_data_type": torch.float32, **options}
    wrapper.plan(*csr(made, page_size), HEADS, KV_HEADS, DIM, page_size, **options)
    return wrapper


def serve(seed: int, count: int, page_size: int, sharing: float, layout: str, joined: bool) -> None:
    """Random requests in a random cache, each beside the oracle."""
    made = requests(seed, count, page_size, 4, sharing, POOL)
    wrapper = planned(made, page_size, layout)
    k, v = pages(page_size, seed)
    q = queries(made, seed)
    out, lse = wrapper.run_return_lse(q, laid_out(k, v, layout, joined))
    check(made, page_size, q, k, v, out, lse)


BATCHES = given(
    seed=st.integers(0, 2**32 - 1),
    count=st.sampled_from(range(16)),
    page_size=st.sampled_from((1, 16, 32, 64)),
    sharing=st.sampled_from((0.8, 0.0, 1.0)),
    layout=st.sampled_from(("NHD", "HND")),
    joined=st.booleans(),
)
test_random_page_tables = examples(60)(BATCHES(serve))
test_many_random_page_tables = pytest.mark.full(examples(500)(BATCHES(serve)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_kernels_take_the_layouts(dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Requests = [([3, 5, 1], 40), ([3, 5, 2, 9], 60), ([3, 5], 30), ([], 0), ([7], 1)]
    monkeypatch.setattr("treegen.runtime.prepared_calls.backend_for", lambda device, wanted: "triton")
    wrapper = planned(made, 16, layout, q_data_type=dtype)
    k, v = pages(16, dtype=dtype)
    q = queries(made, dtype=dtype)
    for joined in (False, True):
        out, lse = wrapper.run(q, laid_out(k, v, layout, joined), return_lse=True)
        assert wrapper.kernel.backend == "triton"
        check(made, 16, q, k, v, out, lse)


def test_a_step_replans_and_keeps_the_kernel() -> None:
    made = requests(5, 8, 16, 3, 0.7, POOL)
    wrapper = planned(made, 16)
    kernel, (k, v) = wrapper.kernel, pages(16)
    grown = [(listed, tokens + (tokens % 16 > 0)) for listed, tokens in made]
    for step in (grown, made[:3], []):
        wrapper.plan(*csr(step, 16), HEADS, KV_HEADS, DIM, 16, q_data_type="float32")
        q = queries(step)
        check(step, 16, q, k, v, *wrapper.run_return_lse(q, (k, v)))
        assert wrapper.kernel is kernel
    wrapper.begin_forward(*csr(made, 16), HEADS, KV_HEADS, DIM, 16, q_data_type="float32", sm_scale=0.5)
    assert wrapper.kernel is not kernel
    out = wrapper.run(queries(made), (k, v))
    scaled = treegen.compile(wrapper.kernel.tree, shape=wrapper.kernel.shape, sm_scale=0.5)(queries(made), k, v)
    assert torch.equal(out, scaled)


def test_windows_and_soft_caps() -> None:
    made = requests(2, 6, 16, 3, 0.7, POOL)
    (k, v), q = pages(16), queries(made)
    options = {"window_left": 5, "logits_soft_cap": 2.0}
    wrapper = planned(made, 16, **options)
    kernel = wrapper.kernel
    assert kernel.verify(q, k, v).passed
    expected = treegen.compile(kernel.tree, shape=kernel.shape, **options)(q, k, v)
    assert torch.equal(wrapper.run(q, (k, v), window_left=5), expected)
    assert not torch.allclose(planned(made, 16).run(q, (k, v)), expected, atol=1e-2)
    wrapper.plan(*csr(made, 16), HEADS, KV_HEADS, DIM, 16, q_data_type="float32", **options)
    assert wrapper.kernel is kernel


def test_results_go_where_they_are_wanted() -> None:
    made = requests(2, 6, 16, 3, 0.7, POOL)
    wrapper, (k, v), q = planned(made, 16), pages(16), queries(made)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    found_out, found_lse = wrapper.run(q, (k, v), out=out, lse=lse, return_lse=True)
    assert found_out is out
    assert found_lse is lse
    check(made, 16, q, k, v, out, lse)
    assert torch.equal(wrapper.run(q, (k, v)), out)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"kv_layout": "HDN"}, "kv_layout"),
        ({"paged_kv_indices_buffer": torch.empty(1)}, "paged_kv_indices_buffer"),
        ({"max_items": 7}, "max_items"),
        ({"backend": "trtllm-gen"}, "backend"),
        ({"jit_args": [1]}, "jit_args"),
    ],
)
def test_wrappers_that_cannot_be_are_refused(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(InputError) as caught:
        TreeAttentionWrapper(**options)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode"),
        ({"window_left": -2}, "window_left"),
        ({"logits_soft_cap": -30.0}, "logits_soft_cap"),
        ({"q_len_per_req": 2}, "q_len_per_req"),
        ({"rope_theta": 1e4}, "rope_theta"),
        ({"o_data_type": "bfloat16"}, "o_data_type"),
        ({"kv_data_type": "float16"}, "kv_dtype"),
        ({"q_data_type": "int8"}, "q_data_type"),
        ({"data_type": "float16"}, "kv_dtype"),
        ({"fixed_split_size": 512}, "fixed_split_size"),
        ({"disable_split_kv": True}, "disable_split_kv"),
    ],
)
def test_plans_that_cannot_be_are_refused(options: dict[str, Any], argument: str) -> None:
    with pytest.raises((InputError, ShapeError)) as caught:
        planned([([1], 3)], 16, **options)
    assert caught.value.argument == argument


def test_further_arguments_of_flashinfer() -> None:
    made: Requests = [([1, 2], 20)]
    (k, v), q = pages(16), queries(made)
    others = {"data_type": "float32", "block_tables": None, "seq_lens": [20], "fixed_split_size": -1}
    wrapper = planned(made, 16, **others, disable_split_kv=False)
    assert torch.equal(wrapper.run(q, (k, v), sinks=None), planned(made, 16).run(q, (k, v)))
    with pytest.raises(TypeError, match="unexpected keyword argument 'page_table'"):
        planned(made, 16, page_table=1)


def test_a_refused_plan_leaves_the_one_before() -> None:
    made: Requests = [([1, 2], 20)]
    wrapper, (k, v), q = planned(made, 16), pages(16), queries(made)
    before = wrapper.run(q, (k, v))
    with pytest.raises(TreeError):
        wrapper.plan([0, 2], [1, -2], [4], HEADS, KV_HEADS, DIM, 16, q_data_type="float32")
    with pytest.raises(InputError):
        wrapper.plan(*csr(made, 16), HEADS, KV_HEADS, DIM, 16, window_left=-5)
    assert torch.equal(wrapper.run(q, (k, v)), before)


def test_calls_that_cannot_be_are_refused() -> None:
    made: Requests = [([1, 2], 20)]
    k, v = pages(16)
    q = queries(made)
    with pytest.raises(InputError, match="plan"):
        TreeAttentionWrapper().run(q, (k, v))
    with pytest.raises(InputError, match="plan"):
        _ = TreeAttentionWrapper().kernel
    wrapper = planned(made, 16)
    calls: list[tuple[str, Any, dict[str, Any]]] = [
        ("paged_kv_cache", torch.stack([k, v]), {}),
        ("paged_kv_cache", k, {}),
        ("paged_kv_cache", (k, v, v), {}),
        ("paged_kv_cache's v", (k, v[0]), {}),
        ("paged_kv_cache's k", (None, v), {}),
        ("k_scale", (k, v), {"k_scale": 0.5}),
        ("window_left", (k, v), {"window_left": 4}),
        ("enable_pdl", (k, v), {"enable_pdl": True}),
        ("sinks", (k, v), {"sinks": torch.zeros(4)}),
        ("lse", (k, v), {"lse": torch.empty(1, HEADS)}),
        ("lse", (k, v), {"lse": torch.empty(2, HEADS), "return_lse": True}),
        ("out", (k, v), {"out": torch.empty(2, HEADS, DIM)}),
    ]
    for argument, cache, options in calls:
        with pytest.raises(InputError) as caught:
            wrapper.run(q, cache, **options)
        assert caught.value.argument == argument
    with pytest.raises(InputError):
        wrapper.run(q.double(), (k, v))
    with pytest.raises(InputError):
        wrapper.run(q[:0], (k, v))
    with pytest.raises(TypeError):
        wrapper.plan(*csr(made, 16), HEADS, KV_HEADS, DIM, 16, alibi_slopes=None)
