"""merge_state and merge_states: two calls over disjoint parts of a tree's KV give what one call over all gives."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.forests import examples, forests
from treegen import KVRuns, Tree
from treegen.backends import oracle
from treegen.ir.errors import InputError

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def part(tree: Tree, kept: np.ndarray) -> Tree:
    """The same rows over the KV of some nodes alone: the others have no tokens."""
    tokens = np.where(kept, tree.tokens, 0)
    sees = np.where(kept[tree.row_node], tree.row_sees, 0)
    rows = list(zip(tree.row_node.tolist(), sees.tolist(), strict=True))
    kv = [tree.kv.slots(node) if kept[node] else [] for node in range(len(kept))]
    return Tree.from_parents(tree.parent, tokens, rows, KVRuns.from_slots(tokens, kv))


def tensors(tree: Tree, seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(seed)
    q = torch.randn(tree.num_rows, HEADS, HEAD_DIM, generator=source)
    caches = torch.randn(2, tree.kv.last_slot + 1, KV_HEADS, HEAD_DIM, generator=source)
    return q.to(dtype), *caches.to(dtype)


@examples(60)
@given(
    tree=forests(max_nodes=20, max_tokens=30, salt=71),
    parts=st.sampled_from((2, 1, 3, 5)),
    seed=st.integers(0, 2**31),
    lse_base=st.sampled_from(("ln", "log2")),
)
def test_parts_of_a_tree_give_the_whole(tree: Tree, parts: int, seed: int, lse_base: str) -> None:
    q, k, v = tensors(tree, seed)
    owner = np.random.default_rng(seed).integers(parts, size=len(tree.tokens))
    states = [
        treegen.compile(part(tree, owner == number), backend="torch")(q, k, v, return_lse=True, lse_base=lse_base)
        for number in range(parts)
    ]
    outs, lses = (torch.stack(tensors, 1) for tensors in zip(*states, strict=True))
    out, lse = treegen.merge_states(outs, lses, lse_base=lse_base)
    expected, expected_lse = oracle.reference(tree, q, k, v)
    assert out.dtype == lse.dtype == torch.float32
    assert oracle.error(out, expected) < oracle.TOLERANCE["fp32"]
    assert oracle.error(lse, expected_lse / (math.log(2) if lse_base == "log2" else 1)) < oracle.TOLERANCE["fp32"]
    if parts == 2:
        two = treegen.merge_state(*states[0], *states[1], lse_base=lse_base)
        assert torch.equal(two[0], out)
        assert torch.equal(two[1], lse)


def test_what_saw_nothing_counts_for_nothing() -> None:
    out_a, out_b = torch.randn(3, HEADS, HEAD_DIM), torch.full((3, HEADS, HEAD_DIM), math.nan)
    nothing = torch.full((3, HEADS), -math.inf)
    out, lse = treegen.merge_state(out_a, torch.full((3, HEADS), 70.5), out_b, nothing)
    assert torch.equal(out, out_a)
    assert bool((lse == 70.5).all())
    out, lse = treegen.merge_state(out_a, nothing, out_b, nothing)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, nothing)


def test_a_broken_state_shows() -> None:
    outs, lses = torch.randn(3, 2, HEADS, HEAD_DIM), torch.randn(3, 2, HEADS)
    lses[1, 0, 2] = math.nan
    out, lse = treegen.merge_states(outs, lses)
    broken = torch.zeros(3, HEADS, dtype=torch.bool)
    broken[1, 2] = True
    assert torch.equal(out.isnan().all(-1), broken)
    assert torch.equal(out.isnan().any(-1), broken)
    assert torch.equal(lse.isnan(), broken)
    lses[1, 1, 2] = -math.inf
    out, lse = treegen.merge_state(outs[:, 0], lses[:, 0], outs[:, 1], lses[:, 1])
    assert out[1, 2].isnan().all()
    assert lse[1, 2].isnan()


@pytest.mark.parametrize("lse", [-3e4, 3e4])
def test_far_scores_do_not_overflow(lse: float) -> None:
    outs = torch.randn(2, 2, HEADS, HEAD_DIM)
    out, merged = treegen.merge_states(outs, torch.full((2, 2, HEADS), lse))
    torch.testing.assert_close(out, outs.mean(1))
    torch.testing.assert_close(merged, torch.full((2, HEADS), lse + math.log(2)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    outs, lses = torch.randn(64, 7, HEADS, HEAD_DIM).to(dtype), 10 * torch.randn(64, 7, HEADS)
    out, lse = treegen.merge_states(outs, lses)
    exact = (lses.double().softmax(1)[..., None] * outs.double()).sum(1)
    assert out.dtype == dtype
    assert float((out.double() - exact).abs().max()) <= 0.51 * torch.finfo(dtype).eps * float(exact.abs().max())
    torch.testing.assert_close(lse, lses.logsumexp(1))


def test_in_compiled_code() -> None:
    outs, lses = torch.randn(5, 3, HEADS, HEAD_DIM), torch.randn(5, 3, HEADS)
    compiled = torch.compile(treegen.merge_states, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(outs, lses), treegen.merge_states(outs, lses), strict=True):
        torch.testing.assert_close(found, expected)


GOOD = {"outs": torch.zeros(3, 2, 4, 8), "lses": torch.zeros(3, 2, 4)}
BAD = {
    "not a tensor": ({"lses": [1.0]}, ["lses = list", "not a tensor"]),
    "one state": ({"outs": torch.zeros(3, 4, 8)}, ["outs = shape (3, 4, 8)", "3 dimensions", "states"]),
    "no states": ({"outs": torch.zeros(3, 0, 4, 8), "lses": torch.zeros(3, 0, 4)}, ["outs", "no states"]),
    "other type": ({"outs": torch.zeros(3, 2, 4, 8).double()}, ["outs = torch.float64", "fp16, bf16 or fp32"]),
    "lse of 16 bits": ({"lses": torch.zeros(3, 2, 4).half()}, ["lses = torch.float16", "not float32"]),
    "heads first": ({"lses": torch.zeros(4, 2, 3)}, ["lses = shape (4, 2, 3)", "give (3, 2, 4)"]),
    "elsewhere": ({"lses": torch.zeros(3, 2, 4, device="meta")}, ["lses = meta", "outs's device cpu"]),
    "base": ({"lse_base": "2"}, ["lse_base = 2", "ln, log2"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_states_are_refused(name: str) -> None:
    spoiled, pieces = BAD[name]
    with pytest.raises(InputError) as caught:
        treegen.merge_states(**{**GOOD, **spoiled})
    assert all(piece in str(caught.value) for piece in pieces), str(caught.value)


@pytest.mark.parametrize(
    ("name", "place", "other"),
    [
        ("out_b", 2, torch.zeros(3, 4, 16)),
        ("out_b", 2, torch.zeros(3, 4, 8).half()),
        ("lse_b", 3, torch.zeros(2, 4)),
        ("out_b", 2, None),
        ("lse_a", 1, 1.0),
        ("out_b", 2, torch.zeros(3, 4, 8, device="meta")),
    ],
)
def test_two_states_have_to_match(name: str, place: int, other: object) -> None:
    arguments: list[object] = [torch.zeros(3, 4, 8), torch.zeros(3, 4), torch.zeros(3, 4, 8), torch.zeros(3, 4)]
    arguments[place] = other
    with pytest.raises(InputError, match=f"^{name} = "):
        treegen.merge_state(*arguments)
