"""Bad tensors and arguments of a kernel call: one-line errors that name argument, value, reason and fix, before any
launch.
"""

import math
from collections.abc import Callable

import pytest
import torch

import treegen
from treegen import Shape, Tree, TreegenError
from treegen.backends.check_inputs import check_strides
from treegen.ir.errors import BackendError, InputError, ShapeError, StrategyError, TreeError
from treegen.runtime.call_options import CallOptions

TREE = Tree.parse("10(5,3)")


def good() -> dict[str, torch.Tensor]:
    """Tensors that fit TREE."""
    return {"q": torch.randn(2, 4, 16), "k_cache": torch.randn(18, 2, 16), "v_cache": torch.randn(18, 2, 16)}


BAD_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, object]], type[TreegenError], list[str]]] = {
    "q of rank 2": (lambda t: {**t, "q": t["q"][0]}, InputError, ["q = shape (4, 16)", "2 dimensions", "give [rows"]),
    "k of rank 2": (lambda t: {**t, "k_cache": t["k_cache"][0]}, InputError, ["k_cache", "2 dimensions"]),
    "v of rank 5": (lambda t: {**t, "v_cache": t["v_cache"][None, None]}, InputError, ["v_cache", "5 dimensions"]),
    "not a tensor": (lambda t: {**t, "q": [1.0]}, InputError, ["q = list", "is not a tensor"]),
    "heads do not divide": (lambda t: {**t, "q": torch.randn(2, 3, 16)}, InputError, ["q = 3 heads", "multiple of"]),
    "mixed types": (
        lambda t: {**t, "k_cache": t["k_cache"].half()},
        InputError,
        ["k_cache = torch.float16", "q's type"],
    ),
    "unsupported type": (lambda t: {n: x.double() for n, x in t.items()}, ShapeError, ["float64", "fp16, bf16, fp32"]),
    "meta tensor": (
        lambda t: {**t, "v_cache": t["v_cache"].to("meta")},
        InputError,
        ["v_cache = a meta tensor", "no values", "allocate it"],
    ),
    "q as Hugging Face has it": (
        lambda t: {**t, "q": t["q"][:, :, None]},
        InputError,
        ["q = shape (2, 4, 1, 16)", "[batch, heads, tokens, head_dim]", "q.transpose(1, 2).flatten(0, 1)"],
    ),
    "caches as Hugging Face has them": (
        lambda t: {**t, **{name: torch.randn(2, 2, 9, 16) for name in ("k_cache", "v_cache")}},
        InputError,
        ["q = 4 heads", "9 heads", "[batch, heads, tokens, head_dim]", "cache.transpose(1, 2).flatten(0, 1)"],
    ),
    "other head_dim": (lambda t: {**t, "q": torch.randn(2, 4, 32)}, InputError, ["head_dim 16", "q's 32"]),
    "k and v differ": (lambda t: {**t, "v_cache": t["v_cache"][:9]}, InputError, ["v_cache", "k_cache's (18, 2, 16)"]),
    "head_dim not of 8": (lambda t: {n: x[..., :12].contiguous() for n, x in t.items()}, ShapeError, ["head_dim = 12"]),
    "last dimension strided": (
        lambda t: {**t, "k_cache": torch.randn(18, 2, 32)[..., ::2]},
        InputError,
        ["k_cache = strides", "not contiguous in its last dimension", "k_cache.contiguous()"],
    ),
    "rows of another tree": (lambda t: {**t, "q": torch.randn(3, 4, 16)}, InputError, ["q = 3 rows", "the tree has 2"]),
    "out of wrong shape": (lambda t: {**t, "out": torch.empty(2, 4, 8)}, InputError, ["out", "needs (2, 4, 16)"]),
    "out of wrong type": (lambda t: {**t, "out": torch.empty(2, 4, 16).half()}, InputError, ["out", "torch.float32"]),
    "out strided": (lambda t: {**t, "out": torch.empty(2, 4, 32)[..., ::2]}, InputError, ["out", "not contiguous"]),
    "lse base": (lambda t: {**t, "lse_base": "e"}, InputError, ["lse_base = e", "ln, log2"]),
}


@pytest.mark.parametrize(
    ("sizes", "strides", "kv_layout", "tokens", "wrong"),
    [
        ((9, 2, 8), (1 << 25, 8, 1), "NHD", 64, True),
        ((9, 2, 8), ((1 << 25) - 8, 8, 1), "NHD", 64, False),
        ((9, 2, 8), (1 << 24, 8, 1), "NHD", 128, True),
        ((9, 16, 2, 8), (1 << 40, 1 << 24, 8, 1), "NHD", 64, False),
        ((9, 256, 2, 8), (1 << 40, 1 << 24, 8, 1), "NHD", 64, True),
        ((9, 2, 256, 8), (1 << 40, 1 << 24, 8, 1), "HND", 64, False),
        ((1, 1 << 22, 2, 8), (1 << 32, 1 << 10, 8, 1), "NHD", 64, False),
        ((9, 1, 2, 8), (1 << 30, 8, 8, 1), "NHD", 64, True),
    ],
)
def test_tokens_of_a_tile_and_of_a_page_lie_within_int32(
    sizes: tuple[int, ...], strides: tuple[int, ...], kv_layout: str, tokens: int, wrong: bool
) -> None:
    far, near = torch.empty_strided(sizes, strides, device="meta"), torch.empty(sizes, device="meta")
    check_strides(tokens, near, near, kv_layout)
    for name, caches in (("k_cache", (far, near)), ("v_cache", (near, far))):
        if wrong:
            with pytest.raises(InputError, match=f"{name} = a token stride of"):
                check_strides(tokens, *caches, kv_layout)
        else:
            check_strides(tokens, *caches, kv_layout)


def test_a_kernel_refuses_tokens_of_full_tiles_too_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    long, tensors = Tree.parse("70(5,3)"), good()
    caches = {name: torch.randn(78, 2, 16) for name in ("k_cache", "v_cache")}
    monkeypatch.setattr("treegen.backends.check_inputs.INT32_MAX", 32 * 16 - 1)
    kernel = treegen.compile(long, backend="triton")
    with pytest.raises(InputError, match=r"k_cache = a token stride of 32: puts .* apart or more; lay tokens closer"):
        kernel(tensors["q"], **caches)
    assert treegen.compile(TREE, backend="triton").verify(**tensors).passed  # no tile is full
    limited = treegen.compile(TREE, backend="triton", max_rows=2)
    with pytest.raises(InputError, match="k_cache = a token stride of 32"):
        limited(**tensors)
    monkeypatch.undo()
    assert kernel.verify(tensors["q"], **caches).passed


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors_are_refused_before_any_launch(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, expected, pieces = BAD_TENSORS[name]
    kernel = treegen.compile(TREE, backend=backend)
    monkeypatch.setattr(CallOptions, "program", lambda *arguments: pytest.fail("launched"))
    with pytest.raises(expected) as caught:
        kernel(**spoil(good()))
    message = str(caught.value)
    assert "\n" not in message
    assert all(piece in message for piece in pieces), message


def test_a_refused_call_loses_nothing() -> None:
    kernel = treegen.compile(TREE)
    tensors = good()
    expected = kernel(**tensors)
    with pytest.raises(InputError):
        kernel(tensors["q"][0], tensors["k_cache"], tensors["v_cache"])
    assert torch.equal(kernel(**tensors), expected)


@pytest.mark.parametrize(
    ("arguments", "expected", "pieces"),
    [
        ({"strategy": "best"}, StrategyError, ["strategy = best", "query, medusa"]),
        ({"backend": "cuda"}, BackendError, ["backend = cuda", "triton, torch"]),
        ({"target": "h800x"}, BackendError, ["target = h800x", "h200"]),
        ({"shape": (32, 8, 128)}, InputError, ["shape", "treegen.Shape"]),
        ({"sm_scale": math.nan}, InputError, ["sm_scale = nan", "not a finite number"]),
    ],
)
def test_bad_compile_arguments(arguments: dict[str, object], expected: type[TreegenError], pieces: list[str]) -> None:
    with pytest.raises(expected) as caught:
        treegen.compile(TREE, **arguments)
    assert all(piece in str(caught.value) for piece in pieces), str(caught.value)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="window_right"):
        treegen.compile(TREE, window_right=3)
    with pytest.raises(TreeError, match="is not a Tree"):
        treegen.compile([1, 2])
    with pytest.raises(TreeError, match=r"is a text, not a Tree; give treegen\.Tree\.parse\(text\)"):
        treegen.compile(TREE).update("10(5,3)")


def test_a_kernel_serves_the_shape_of_its_first_call_only() -> None:
    kernel = treegen.compile(TREE)
    assert "assum" in kernel.explain()
    kernel(**good())
    assert kernel.shape == Shape(4, 2, 16, dtype="fp32")
    assert "assum" not in kernel.explain()
    with pytest.raises(InputError, match="compile another kernel"):
        kernel(*(tensor.half() for tensor in good().values()))
    given = treegen.compile(TREE, shape=Shape(4, 2, 16, dtype=torch.bfloat16))
    with pytest.raises(InputError, match="compile another kernel"):
        given(**good())


def test_shapes_that_differ_in_pages_or_types_alone_are_told_apart() -> None:
    shape = Shape(4, 2, 16, dtype="fp32", page_size=3)
    q, (k, v) = good()["q"], torch.randn(2, 6, 3, 2, 16)
    kernel = treegen.compile(TREE, shape=shape)
    with pytest.raises(
        InputError, match="k_cache, v_cache = page_size 1: the kernel serves page_size 3; compile anoth"
    ):
        kernel(**good())
    assert kernel.verify(q, k, v)
    unpaged = treegen.compile(TREE, shape=Shape(4, 2, 16, dtype="fp32"))
    with pytest.raises(
        InputError, match="k_cache, v_cache = page_size 3: the kernel serves page_size 1; compile anoth"
    ):
        unpaged(q, k, v)
    heads_first = torch.randn(2, 2, 2, 4, 16)  # of 4 tokens, which might be heads
    with pytest.raises(InputError, match=r"num_kv_heads 4, page_size 2: .*; of \[batch, heads, tokens, head_dim\]"):
        unpaged(q, *heads_first)
    fp8 = treegen.compile(TREE, shape=Shape(4, 2, 16, dtype="fp16", kv_dtype="e4m3"))
    with pytest.raises(InputError, match="v_cache = kv_dtype fp16: the kernel serves kv_dtype e4m3"):
        fp8(*(tensor.half() for tensor in good().values()))


def test_a_shape_tells_what_differs_from_its_defaults() -> None:
    assert str(Shape(4, 2, 16)) == "4:2 heads, head_dim 16, bf16"
    paged = Shape(4, 2, 16, dtype="fp16", page_size=16, kv_layout="HND")
    assert str(paged) == "4:2 heads, head_dim 16, fp16, page_size 16, HND"
    other = Shape(4, 1, 64, 32, kv_dtype="e5m2", partial_dtype="bf16", shared_kv=True)
    assert str(other) == "4:1 heads, head_dim 64 (v 32), bf16, KV e5m2, partials bf16, shared KV"


def test_slots_outside_the_cache_and_nan_are_found_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = treegen.compile(TREE)
    tensors = good()
    kernel.check_inputs(**tensors)
    with pytest.raises(InputError, match="refers to slot 17"):
        kernel.check_inputs(tensors["q"], tensors["k_cache"][:17], tensors["v_cache"][:17])
    spoiled = good()
    spoiled["v_cache"][12, 1, 3] = math.nan
    with pytest.raises(InputError, match=r"v_cache = NaN: slot 12"):
        kernel.check_inputs(**spoiled)
    monkeypatch.setenv("TREEGEN_CHECK", "1")
    with pytest.raises(InputError, match=r"v_cache = NaN: slot 12"):
        kernel(**spoiled)


def test_no_rows_and_no_tokens() -> None:
    empty = Tree.from_parents([-1, 0], [4, 2], rows=[])
    out, lse = treegen.compile(empty)(torch.randn(0, 4, 16), *list(good().values())[1:], return_lse=True)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)
    blank = Tree.from_parents([-1], [0])
    out, lse = treegen.compile(blank)(torch.randn(1, 4, 16), *list(good().values())[1:], return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
