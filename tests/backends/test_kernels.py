"""Emitted Triton kernels in Triton's interpreter against the float64 oracle, over everything a kernel is
specialised for.
"""

import gc
import itertools
import math
import weakref

import pytest
import torch

import treegen
from support.attention_inputs import EVERY, tensors
from support.kv_caches import in_pages
from treegen import Shape, Tree
from treegen.backends import alignment, oracle
from treegen.backends.devices import captures
from treegen.backends.triton_program import ProgramRoom, TritonProgram
from treegen.ir.arena import ArenaSizes
from treegen.ir.errors import PerformanceWarning
from treegen.schedule.passes import single_loop
from treegen.strategies import (
    Strategy,
    cascade,
    cohort,
    deft_flatten,
    deft_node,
    deft_node_chunk,
    fasttree,
    query,
    specinfer,
)

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
UNMASKED = (query(), deft_node(), deft_node_chunk(64), fasttree(), cascade())
MASKED = (deft_flatten(128), deft_flatten(40), deft_flatten(48, "bits"), specinfer())
MATRIX = list(itertools.product(DTYPES, (False, True), (1, 16), (1, 3, 4, 8), (64, 80, 128)))


@pytest.mark.parametrize(
    ("dtype", "masked", "page_size", "group", "head_dim"),
    MATRIX,
    ids=lambda value: str(value),
)
def test_matches_the_oracle(
    dtype: str, masked: bool, page_size: int, group: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = MATRIX.index((dtype, masked, page_size, group, head_dim))
    if case // 2 % 2:
        monkeypatch.setattr(single_loop, "MOST_TILES", 0)
    tree = Tree.from_parents([-1, 0, 0, 1, -1], [70, 17, 0, 5, 3])
    tree, pages = in_pages(tree, page_size, seed=case)
    q, k, v = tensors(tree, pages, page_size, (group * 2, 2), head_dim, DTYPES[dtype], pad_pages=case % 2 == 0)
    strategies = MASKED if masked else UNMASKED
    kernel = treegen.compile(tree, strategy=strategies[case % len(strategies)], backend="triton")
    report = kernel.verify(q, k, v)
    assert report.passed, str(report)
    assert (kernel.schedule.configs[0].mask != "none") == masked


@pytest.mark.parametrize("strategy", EVERY, ids=str)
def test_more_rows_than_a_tile_and_rows_inside_nodes(strategy: Strategy) -> None:
    rows = [(0, sees) for sees in range(20)] + [(1, 5)] * 30 + [(2, 0), (2, 33), (1, 40)]
    tree = Tree.from_parents([-1, 0, 0], [20, 40, 33], rows=rows)
    q, k, v = tensors(tree, 93, 1, (4, 1), 64, torch.float32, pad_pages=False)
    report = treegen.compile(tree, strategy=strategy, backend="triton").verify(q, k, v)
    assert report.passed, str(report)


def test_more_query_heads_than_tile_rows() -> None:
    tree = Tree.parse("20(5,7)")
    q, k, v = tensors(tree, 32, 1, (80, 1), 64, torch.float16, pad_pages=False)
    report = treegen.compile(tree, strategy="deft-node", backend="triton").verify(q, k, v)
    assert report.passed, str(report)


@pytest.mark.parametrize("head_dim", [16, 96, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_other_head_dims(head_dim: int, dtype: str) -> None:
    tree = Tree.parse("40(5,7)")
    q, k, v = tensors(tree, 52, 1, (2, 1), head_dim, DTYPES[dtype], pad_pages=False)
    report = treegen.compile(tree, strategy="deft-flatten", backend="triton").verify(q, k, v)
    assert report.passed, str(report)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("offset", [-200.0, 0.0, 200.0])
def test_extreme_scores_stay_finite_and_right(backend: str, offset: float) -> None:
    tree = Tree.parse("70(20,33)+5")
    q, k, v = tensors(tree, 128, 1, (4, 2), 64, torch.float32, pad_pages=False)
    # One coordinate carries the offset: every score becomes about `offset`, and the rest spreads it.
    q[..., 0], k[..., 0] = 1.0, offset
    for strategy in ("query", "deft-node", "deft-flatten"):
        kernel = treegen.compile(tree, strategy=strategy, backend=backend, sm_scale=1.0)
        out, lse = kernel(q, k, v, return_lse=True)
        expected_out, expected_lse = oracle.reference(tree, q, k, v, oracle.OracleOptions(sm_scale=1.0))
        assert out.isfinite().all()
        assert oracle.error(out, expected_out) < 1e-4  # scores of magnitude 200 leave float32 five digits
        assert oracle.error(lse, expected_lse) < 1e-5


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("strategy", ["query", "deft-node", "deft-node-chunk", "deft-flatten", "fasttree"])
def test_a_row_that_sees_nothing_gives_zero_and_minus_infinity(backend: str, strategy: str) -> None:
    tree = Tree.from_parents([-1, -1, 1], [40, 0, 3], rows=[(0, 0), (1, 0), (0, 40), (2, 3)])
    q, k, v = tensors(tree, 43, 1, (2, 1), 64, torch.float32, pad_pages=False)
    out = torch.full_like(q, math.nan)
    out, lse = treegen.compile(tree, strategy=strategy, backend=backend)(q, k, v, out=out, return_lse=True)
    assert (out[:2] == 0).all()
    assert (lse[:2] == -math.inf).all()
    assert out[2:].isfinite().all()
    assert lse[2:].isfinite().all()


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_two_runs_are_bit_identical(backend: str) -> None:
    tree = Tree.parse("200(100(7*3),30*4)")
    q, k, v = tensors(tree, int(tree.tokens.sum()), 1, (8, 2), 64, torch.float16, pad_pages=False)
    kernel = treegen.compile(tree, strategy="deft-node-chunk", backend=backend)
    first, first_lse = kernel(q, k, v, return_lse=True)
    second, second_lse = kernel(q, k, v, return_lse=True)
    assert torch.equal(first, second)
    assert torch.equal(first_lse, second_lse)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("sm_scale", [0.0, 1e-30, 50.0])
@pytest.mark.parametrize("strategy", [cohort(), cohort(split=32)], ids=str)
def test_any_scale_that_is_not_negative(backend: str, sm_scale: float, strategy: Strategy) -> None:
    """Scores are compared before they are scaled: rows that see nothing of a tile stay apart at any scale."""
    tree = Tree.parse("90(20,9*3)")
    kernel = treegen.compile(tree, strategy=strategy, backend=backend, sm_scale=sm_scale)
    assert kernel.verify(*tensors(tree, 137, 1, (2, 1), 64, torch.float32, pad_pages=False)).passed


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_lse_in_both_bases(backend: str) -> None:
    tree = Tree.parse("30(5,9)")
    q, k, v = tensors(tree, 44, 1, (2, 2), 64, torch.float32, pad_pages=False)
    for strategy in ("query", "deft-node"):
        kernel = treegen.compile(tree, strategy=strategy, backend=backend)
        _, natural = kernel(q, k, v, return_lse=True)
        _, binary = kernel(q, k, v, return_lse=True, lse_base="log2")
        torch.testing.assert_close(binary, natural / math.log(2))
        assert oracle.error(natural, oracle.reference(tree, q, k, v)[1]) < 1e-5


@pytest.mark.parametrize("strategy", ["query", "deft-node"])
def test_surplus_blocks_of_a_larger_capacity_do_nothing(strategy: str) -> None:
    tree = Tree.parse("40(20,9*3)")
    q, k, v = tensors(tree, 87, 1, (2, 1), 64, torch.float32, pad_pages=False)
    kernel = treegen.compile(tree, strategy=strategy, backend="triton")
    size = kernel.schedule.size
    larger = ArenaSizes(
        tuple(3 * n for n in size.items), size.rows + 5, size.tiles + 5, size.packed_runs + 50, (9,), 70, 70
    )
    program = TritonProgram(kernel.schedule, Shape(2, 1, 64, dtype="fp32"), q.device, ProgramRoom(larger))
    out, lse = torch.full_like(q, math.nan), torch.full((4, 2), math.nan)
    program(q, k, v, out, lse, 0.125, 1.0)
    expected_out, expected_lse = kernel(q, k, v, return_lse=True)
    assert torch.equal(out, expected_out)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("strategy", ["query", "deft-node"])
def test_padded_and_unaligned_strides_are_right_and_said_once(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "warned_unaligned", False)
    tree = Tree.parse("40(20,9*3)")
    q, k, v = tensors(tree, 87, 1, (2, 1), 67 - 3, torch.float32, pad_pages=False)
    wide = torch.zeros(87, 1, 67)
    wide[..., 1:65] = k
    kernel = treegen.compile(tree, strategy=strategy, backend="triton")
    with pytest.warns(PerformanceWarning, match="not aligned to 16 bytes") as caught:
        out = kernel(q, wide[..., 1:65], v)
    assert caught[0].filename == __file__
    assert torch.equal(out, kernel(q, wide[..., 1:65], v))  # a second warning would be an error
    assert oracle.error(out, oracle.reference(tree, q, k, v)[0]) < 1e-5


def test_caches_beyond_two_to_the_31_elements() -> None:
    stride = 2**27
    storage = torch.empty(17 * stride, dtype=torch.float16)  # untouched pages of it take no memory
    k = storage.as_strided((17, 1, 64), (stride, 64, 1))
    tree = Tree.from_parents([-1, 0], [3, 2], kv=[[0, 16, 5], [15, 1]])
    generator = torch.Generator().manual_seed(0)
    for slot in (0, 1, 5, 15, 16):
        k[slot] = torch.randn(1, 64, generator=generator)
    q = torch.randn(1, 2, 64, generator=generator).half()
    for strategy in ("query", "deft-node"):
        report = treegen.compile(tree, strategy=strategy, backend="triton").verify(q, k, k)
        assert report.passed, str(report)


def test_update_serves_another_tree_with_the_same_kernels() -> None:
    first, second = Tree.parse("40(20,9*3)"), Tree.parse("45(20,12(15,9)*2)+30")
    kernel = treegen.compile(first, strategy="deft-node", backend="triton")
    assert kernel.verify(*tensors(first, 87, 1, (2, 1), 64, torch.float32, pad_pages=False)).passed
    source = kernel.source
    kernel.update(second)
    assert kernel.verify(*tensors(second, 167, 1, (2, 1), 64, torch.float32, pad_pages=False)).passed
    assert kernel.source == source


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_graphs_find_the_tables_that_they_were_captured_with(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = Tree.parse("40(20,9*3)"), Tree.parse("40(20,9*2)"), Tree.parse("40(20,9)")
    kernel, programs = treegen.compile(trees[0], strategy="deft-node", backend=backend), []
    for tree, captured in zip(trees, (True, False, False), strict=True):
        kernel.update(tree)
        monkeypatch.setattr(treegen.runtime.prepared_calls, "captures", lambda q, captured=captured: captured)
        kernel(*tensors(tree, 87, 1, (2, 1), 64, torch.float32, pad_pages=False))
        programs += map(weakref.ref, kernel.calls.prepared.programs.values())
        gc.collect()
    assert [program() is not None for program in programs] == [True, False, True]


@pytest.mark.parametrize(
    ("errors", "passed"), [((0, 1e-5), True), ((1e-2, 0), False), ((0, math.inf), False), ((math.nan, math.nan), False)]
)
def test_a_verification_is_true_where_it_passed(errors: tuple[float, float], passed: bool) -> None:
    report = oracle.Verification(*errors, tolerance=1e-3)
    assert bool(report) == report.passed == passed


def test_a_wrong_result_fails_an_assertion(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = treegen.compile(Tree.parse("20(5,9)"), backend="torch")
    given = torch.randn(2, 2, 64), *torch.randn(2, 34, 1, 64)
    assert kernel.verify(*given)
    monkeypatch.setattr(type(kernel), "__call__", lambda self, q, *_, **options: (q, q[..., 0]))
    assert not kernel.verify(*given)


def test_kernels_and_trees_have_short_reprs() -> None:
    tree = Tree.parse("1,512/10000,3")
    assert repr(tree) == "<treegen.Tree: 512 rows, 513 nodes, 11536 tokens>"
    kernel = treegen.compile(tree, strategy="deft-node", target="h200", backend="torch")
    assert repr(kernel) == (
        "<treegen.Kernel deft-node: 512 rows, 513 nodes, 11536 tokens; "
        "32:8 heads, head_dim 128, bf16 (assumed), h200, torch>"
    )
    fixed = treegen.compile(
        tree, strategy="query", shape=Shape(4, 2, 16, page_size=16), target="a100", backend="torch", max_rows=600
    )
    assert repr(fixed).endswith("; 4:2 heads, head_dim 16, bf16, page_size 16, a100, torch, at most 600 rows>")


def test_a_graph_is_captured_on_a_gpu_only() -> None:
    assert not captures(torch.zeros(1))
