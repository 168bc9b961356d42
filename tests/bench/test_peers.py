"""Adapters of other attention kernels, against stand-ins with the peers' signatures that compute on the CPU."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given

from support.forests import examples, forests, visible_slots
from treegen import Shape, Tree
from treegen.backends import oracle
from treegen.bench.fasttree_peer import FastTreeArtifact, query_tiles
from treegen.bench.flashinfer_peer import FlashInferCascade, FlashInferDecode, FlashInferPrefill
from treegen.bench.providers import Provider, TimedCall, UnavailableError
from treegen.ir.tree.kv import KVRuns
from treegen.tuning.kernel_meter import Case

CPU = torch.device("cpu")
SHAPE = Shape(4, 2, 64, dtype="fp16")
PAGED = Shape(8, 2, 64, dtype="bf16", page_size=4)
TREE = Tree.parse("1,2,6/7,5,3")
SHUFFLED = TREE.with_kv([[20 + 3 * i for i in range(7)], *([90 - 7 * v - i for i in range(5)] for v in (0, 1)),
                         *([100 + 4 * v + i for i in range(3)] for v in range(6))])  # fmt: skip
FASTTREE = '''
import torch

calls = []


class FastTreeParams:
    TSQs, TSKs = [64, 16], [32, 128]

    def set_values(self, alpha, beta, gamma):
        self.costs = alpha, beta, gamma

    def set_kv_group_num(self, kv_group_num):
        self.group = kv_group_num

    def set_q_tile_sizes(self, TSQs):
        self.TSQs = TSQs

    def set_kv_tile_sizes(self, TSKs):
        self.TSKs = TSKs


def fasttree_preparation(
    tree_info, KV_ptrs, batch_size, num_qo_heads, num_kv_heads, head_dim, KV_SPLIT_SIZES, para_threshs1, para_threshs2,
    params,
):
    """One virtual node for every request: its whole path."""
    print("parallelisms")
    calls.append((params, dict(params.__dict__), KV_SPLIT_SIZES, para_threshs1, para_threshs2))
    assert KV_ptrs[0] == 0 and len(KV_ptrs) == len(tree_info) + 1
    assert [node.parent < 0 for node in tree_info] == [True] + [False] * (len(tree_info) - 1)
    assert [node.num_children for node in tree_info] == [
        sum(node.parent == v for node in tree_info) for v in range(len(tree_info))
    ]
    entries, offs, lens = [], [], []
    for request in range(batch_size):
        (leaf,) = (v for v, node in enumerate(tree_info) if not node.num_children and request in node.requests)
        path = []
        while leaf >= 0:
            assert request in tree_info[leaf].requests
            assert tree_info[leaf].seqlen == KV_ptrs[leaf + 1] - KV_ptrs[leaf]
            path, leaf = list(range(KV_ptrs[leaf], KV_ptrs[leaf + 1])) + path, tree_info[leaf].parent
        offs.append(len(entries))
        lens.append(len(path))
        entries += path
    params.set_q_tile_sizes([params.TSQs[0]] * 2)
    ints = [torch.tensor(x, dtype=torch.int32) for x in (entries + [-1] * 32, offs, lens)]
    mid = torch.empty(batch_size, num_qo_heads, head_dim)
    return (*ints, *ints, *ints, mid, mid, [0, batch_size], [0, 0]), [0] * len(tree_info)


def fasttree_decode(
    q, k_buffer, v_buffer, o, vnode_to_kv_entries, vnode_to_kv_offs, vnode_to_kv_lens, vnode_to_q_entries,
    vnode_to_q_offs, vnode_to_q_lens, req_to_vnode_entries, req_to_vnode_offs, req_to_vnode_lens, mid_o, mid_lse,
    phase_node_nums, phase_node_offsets, phase_q_tile_sizes, phase_kv_tile_sizes, sm_scale, logit_cap=-1,
):
    calls.append((phase_q_tile_sizes, phase_kv_tile_sizes))
    assert vnode_to_kv_entries.dtype == torch.int32 and (vnode_to_kv_entries[-32:] == -1).all()
    for row in range(len(q)):
        begin = vnode_to_kv_offs[row]
        slots = vnode_to_kv_entries[begin : begin + vnode_to_kv_lens[row]].long()
        k, v = (c[slots].repeat_interleave(q.shape[1] // c.shape[1], 1).float() for c in (k_buffer, v_buffer))
        weights = torch.einsum("hd,thd->ht", q[row].float(), k).mul(sm_scale).softmax(-1)
        o[row] = torch.einsum("ht,thd->hd", weights, v)
'''
NODE = """
class KVTreeNode:
    def __init__(self):
        self.parent = -1
        self.id = -1
        self.seqlen = 0
        self.num_children = 0
        self.requests = []
"""


def attend(
    q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], table: dict[str, Any], request: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of rows over a request's tokens, read as FlashInfer documents its page tables; out and lse."""
    page_size = caches[0].shape[1]
    pages = table["indices"][table["indptr"][request] : table["indptr"][request + 1]]
    tokens = max(0, len(pages) - 1) * page_size + int(table["last_page_len"][request])
    groups = q.shape[1] // caches[0].shape[2]
    k, v = (cache[pages.long()].flatten(0, 1)[:tokens].repeat_interleave(groups, 1).double() for cache in caches)
    scores = torch.einsum("rhd,thd->rht", q.double(), k) * table["sm_scale"]
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return torch.einsum("rht,thd->rhd", weights, v), lse


class StandInDecode:
    """The part of BatchDecodeWithPagedKVCacheWrapper that the adapter uses."""

    made: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, workspace: torch.Tensor, kv_layout: str, *, use_tensor_cores: bool, backend: str) -> None:
        assert workspace.dtype == torch.uint8
        self.made.append({"layout": kv_layout, "tensor_cores": use_tensor_cores, "backend": backend})

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, **options: Any,
    ) -> None:  # fmt: skip
        assert {tensor.dtype for tensor in (indptr, indices, last_page_len)} == {torch.int32}
        self.table = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len, **options}
        self.planned = (num_qo_heads, num_kv_heads, head_dim, page_size, options["q_data_type"])

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        k, _ = paged_kv_cache
        assert self.planned == (q.shape[1], k.shape[2], q.shape[2], k.shape[1], q.dtype)
        for row in range(len(q)):
            out[row] = attend(q[row : row + 1], paged_kv_cache, self.table, row)[0][0]
        return out


class StandInPrefill:
    """The part of BatchPrefillWithPagedKVCacheWrapper that the adapter uses."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, *, backend: str) -> None:
        assert (workspace.dtype, kv_layout, backend) == (torch.uint8, "NHD", "fa2")

    def plan(
        self, qo_indptr: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, *, custom_mask: torch.Tensor,
        sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert page_size == 1
        assert custom_mask.dtype == torch.bool
        assert (last_page_len == 1).all()
        self.tables, self.mask, self.scale = (
            (qo_indptr.tolist(), indptr.tolist(), indices.long()),
            custom_mask,
            sm_scale,
        )

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        qo_indptr, indptr, indices = self.tables
        out, read = torch.empty_like(q), 0
        for request in range(len(indptr) - 1):
            slots = indices[indptr[request] : indptr[request + 1]]
            own = slice(qo_indptr[request], qo_indptr[request + 1])
            size = (own.stop - own.start) * len(slots)
            mask = self.mask[read : read + size].view(-1, len(slots))
            read += size
            groups = q.shape[1] // paged_kv_cache[0].shape[2]
            k, v = (cache[slots, 0].repeat_interleave(groups, 1).double() for cache in paged_kv_cache)
            scores = torch.einsum("rhd,thd->rht", q[own].double(), k) * self.scale
            weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
            out[own] = torch.einsum("rht,thd->rhd", weights, v).to(q.dtype)
        assert read == len(self.mask)
        return out


class StandInLevel:
    """A level's wrapper."""

    _backend = "auto"


class StandInCascade:
    """The part of MultiLevelCascadeAttentionWrapper that the adapter uses."""

    made: list[StandInCascade] = []  # noqa: RUF012

    def __init__(self, num_levels: int, workspace: torch.Tensor, kv_layout: str) -> None:
        assert kv_layout == "NHD"
        self._batch_prefill_wrappers = [StandInLevel() for _ in range(num_levels)]
        self.made.append(self)

    def plan(
        self, qo_indptr_arr: list[torch.Tensor], paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor], paged_kv_last_page_len: list[torch.Tensor], num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, sm_scale: float, q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        names = ("qo_indptr", "indptr", "indices", "last_page_len")
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        assert {len(array) for array in arrays} == {len(self._batch_prefill_wrappers)}
        self.levels = [dict(zip(names, level, strict=True)) for level in zip(*arrays, strict=True)]
        self.sm_scale = sm_scale
        self.planned = (num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type, kv_data_type)

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        k, v = paged_kv_cache
        assert self.planned == (q.shape[1], k.shape[2], q.shape[2], k.shape[1], q.dtype, v.dtype)
        outs, lses = [], []
        for level in self.levels:
            bounds = level["qo_indptr"].tolist()
            assert bounds[-1] == len(q)
            table = {**level, "sm_scale": self.sm_scale}
            parts = [attend(q[lo:hi], (k, v), table, request) for request, (lo, hi) in enumerate(pairwise(bounds))]
            outs.append(torch.cat([out for out, _ in parts]))
            lses.append(torch.cat([lse for _, lse in parts]))
        weights = torch.stack(lses).softmax(0)[..., None]
        return (weights * torch.stack(outs)).sum(0).to(q.dtype)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for flashinfer."""
    module: Any = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = StandInDecode
    module.MultiLevelCascadeAttentionWrapper = StandInCascade
    module.BatchPrefillWithPagedKVCacheWrapper = StandInPrefill
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(StandInDecode, "made", [])
    monkeypatch.setattr(StandInCascade, "made", [])
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A stand-in for a checkout of FastTree-Artifact."""
    (tmp_path / "kernel_bench").mkdir()
    (tmp_path / "kernel_bench" / "fasttree.py").write_text(FASTTREE)
    (tmp_path / "kernel_bench" / "kv_tree_simple.py").write_text(NODE)
    return tmp_path


def check(provider: Provider, tree: Tree, shape: Shape = SHAPE) -> TimedCall:
    """A case's output is right in the caller's row order, every time."""
    case = Case.of(tree, shape, CPU)
    expected, _ = oracle.reference(tree, case.q, case.k_cache, case.v_cache)
    call = provider.prepare(case)
    for _ in range(2):
        out = call()
        assert out.dtype == case.q.dtype
        assert oracle.error(out, expected) < oracle.TOLERANCE[shape.dtype]
    return call


def refuses(provider: Provider, reason: str, tree: Tree = TREE, shape: Shape = SHAPE) -> None:
    with pytest.raises(UnavailableError, match=reason) as raised:
        provider.prepare(Case.of(tree, shape, CPU))
    assert "\n" not in str(raised.value)


def paged_tree(tokens: list[int]) -> Tree:
    counts = [-(-count // PAGED.page_size) for count in tokens]
    free = iter(range(sum(counts))[::-1])
    pages = [[next(free) for _ in range(count)] for count in counts]
    return Tree.from_parents([-1, 0, 0], tokens, kv=KVRuns.from_pages(tokens, pages, PAGED.page_size))


# FlashInfer


@pytest.mark.parametrize(
    "provider",
    [FlashInferDecode(), FlashInferCascade(), FlashInferCascade("fa2"), FlashInferPrefill()],
    ids=lambda p: p.name,
)
def test_flashinfer_serves_trees(provider: Provider, flashinfer: ModuleType) -> None:
    check(provider, TREE)
    check(provider, SHUFFLED)
    if isinstance(provider, FlashInferPrefill):
        refuses(provider, "page size of 1", paged_tree([8, 3, 6]), PAGED)
        check(provider, Tree.from_token_tree([(0,), (1,), (0, 0), (0, 1), (1, 0)], 20))
    else:
        check(provider, paged_tree([8, 3, 6]), PAGED)
    unequal = Tree.from_parents([-1, -1, 0, 2], [4, 3, 0, 2], rows=[(3, 2), (0, 2), (1, 3), (2, 0), (3, 1)])
    check(provider, unequal)


@pytest.mark.parametrize(
    "provider", [FlashInferDecode(), FlashInferCascade(), FlashInferPrefill()], ids=lambda provider: provider.name
)
def test_flashinfer_serves_random_forests(provider: Provider, flashinfer: ModuleType) -> None:
    @given(tree=forests(max_nodes=12, max_tokens=12, salt=2))
    @examples(25)
    def serve(tree: Tree) -> None:
        if tree.num_rows and all(visible_slots(tree, row) for row in range(tree.num_rows)):
            check(provider, tree)
        else:
            refuses(provider, "sees nothing|has no rows", tree)

    serve()


def test_flashinfer_decode_uses_tensor_cores_from_a_group_of_four(flashinfer: ModuleType) -> None:
    for heads in ((4, 2), (8, 2), (28, 4)):
        FlashInferDecode().prepare(Case.of(TREE, Shape(*heads, 64, dtype="fp16"), CPU))
    assert StandInDecode.made == [
        {"layout": "NHD", "tensor_cores": cores, "backend": "fa2"} for cores in (False, True, True)
    ]


def test_flashinfer_cascade_sets_every_levels_backend(flashinfer: ModuleType) -> None:
    for provider, backend in ((FlashInferCascade(), "auto"), (FlashInferCascade("fa2"), "fa2")):
        provider.prepare(Case.of(TREE, SHAPE, CPU))
        assert [level._backend for level in StandInCascade.made[-1]._batch_prefill_wrappers] == [backend] * 3
    assert FlashInferCascade().name == "flashinfer-cascade"
    assert FlashInferCascade("fa2").name == "flashinfer-cascade-fa2"


def test_flashinfer_refuses_what_it_cannot_serve(flashinfer: ModuleType) -> None:
    for provider in (FlashInferDecode(), FlashInferCascade()):
        refuses(provider, "fp16 and bf16, not fp32", shape=Shape(4, 2, 64, dtype="fp32"))
        refuses(provider, "not 80", shape=Shape(4, 2, 80, dtype="fp16"))
        refuses(provider, "row 1 sees nothing", Tree.from_parents([-1, 0], [0, 3], rows=[(1, 2), (0, 0)]))
        refuses(provider, "has no rows", Tree.from_parents([-1], [3], rows=[]))
        refuses(provider, "page_size = 4: token 0 .* in KV slot 7", TREE.with_kv(
            [range(7, 14), range(100, 105), range(200, 205), *(range(300 + 4 * v, 303 + 4 * v) for v in range(6))]
        ), PAGED)  # fmt: skip
    refuses(FlashInferDecode(), "page_size = 4: token 7 of request 0", paged_tree([7, 3, 6]), PAGED)
    check(FlashInferCascade(), paged_tree([7, 3, 6]), PAGED)


def test_flashinfer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for provider in (FlashInferDecode(), FlashInferCascade(), FlashInferPrefill()):
        refuses(provider, "^flashinfer is not installed$")
    (tmp_path / "flashinfer.py").write_text("import surely_missing")
    refuses(FlashInferDecode(), "^flashinfer cannot be imported: No module named 'surely_missing'$")


# FastTree


@pytest.mark.parametrize("planner_tiles", [False, True])
def test_fasttree_serves_trees(checkout: Path, planner_tiles: bool) -> None:
    provider = FastTreeArtifact(checkout, planner_tiles=planner_tiles)
    check(provider, TREE)
    check(provider, SHUFFLED)
    check(provider, paged_tree([7, 3, 6]), PAGED)
    twice = Tree.from_parents([2, 2, -1], [3, 4, 5], rows=[(1, 4), (0, 3), (1, 4)])  # the root is not the first node
    check(provider, twice)


def test_fasttree_is_called_as_its_benchmark_calls_it(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from treegen.bench import fasttree_peer

    modules, path, loaded = set(sys.modules), list(sys.path), []
    load = fasttree_peer.load_file
    monkeypatch.setattr(fasttree_peer, "load_file", lambda path: loaded.append(load(path)) or loaded[-1])
    for planner_tiles, expected in ((False, ([16, 4], [32, 32])), (True, ([16, 16], [32, 32]))):
        provider = FastTreeArtifact(str(checkout), planner_tiles=planner_tiles)
        check(provider, TREE, Shape(8, 2, 64, dtype="fp16"))
        kernels = loaded[-2]
        (_, parameters, *limits), *launches = kernels.calls
        assert parameters == {"costs": (0.66, 0.33, 0.1), "group": 4, "TSQs": [16, 4], "TSKs": [32, 32]}
        assert limits == [[1024, 128], [132, 528], [132, 132]]
        assert launches == [expected] * 3
    assert capsys.readouterr().out == ""
    assert (set(sys.modules), sys.path) == (modules, path)
    assert FastTreeArtifact(checkout).name == "fasttree-artifact"
    assert FastTreeArtifact(checkout, planner_tiles=True).name == "fasttree-artifact-planner-tiles"


def test_fasttree_tiles_by_group() -> None:
    assert [query_tiles(group) for group in (1, 4, 16)] == [(64, 16), (16, 4), (4, 1)]
    assert [query_tiles(group) for group in (2, 8, 32, 128)] == [(32, 8), (8, 2), (2, 1), (1, 1)]


def test_fasttree_refuses_what_it_cannot_serve(checkout: Path, tmp_path: Path) -> None:
    provider = FastTreeArtifact(checkout)
    refuses(provider, "fp16 and bf16, not fp32", shape=Shape(4, 2, 64, dtype="fp32"))
    refuses(provider, "not 80", shape=Shape(4, 2, 80, dtype="fp16"))
    refuses(provider, "power of two", shape=Shape(6, 2, 64, dtype="fp16"))
    refuses(provider, "a forest of 2", Tree.from_parents([-1, -1], [3, 4]))
    refuses(provider, "node 1 has none", Tree.from_parents([-1, 0, 1], [3, 0, 4]))
    refuses(provider, "row 1 is inside a node", Tree.from_parents([-1, 0], [3, 4], rows=[(1, 4), (0, 3)]))
    refuses(provider, "row 0 is inside a node", Tree.from_parents([-1, 0], [3, 4], rows=[(1, 3)]))
    refuses(provider, "leaf 2 has none", Tree.from_parents([-1, 0, 0], [3, 4, 4], rows=[(1, 4)]))
    refuses(FastTreeArtifact(tmp_path / "other"), "no fasttree.py in .*other")
