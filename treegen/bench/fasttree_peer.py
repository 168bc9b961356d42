"""FastTree's published kernels (PanZaifeng/FastTree-Artifact, MLSys 2025) as a provider, loaded from a checkout.

The adapter calls the planner and the decode function of the checkout as kernel_bench/benchmark.py does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treegen.bench.providers import TimedCall, UnavailableError
from treegen.ir.arrays import INT32_MAX, offsets, ragged_ranges
from treegen.ir.tree import Tree
from treegen.tuning.kernel_meter import Case

# Defaults of kernel_bench/benchmark.py: alpha, beta and gamma, tiles, splits and thresholds of the planner.
_COSTS = (0.66, 0.33, 0.1)
_KV_TILES = (32, 32)
_KV_SPLITS = (1024, 128)
_THRESHOLDS = ((132, 528), (132, 132))
_HEAD_DIMS = (16, 32, 64, 128, 256)


def query_tiles(group: int) -> tuple[int, int]:
    """Returns the rows of a large and of a small tile for a number of query heads per KV head.

    The published numbers (kernel_bench/run_benchmark.sh) are (64, 16) for a group of 1, (16, 4) for 4 and (4, 1) for
    16: tiles of 64 and 16 head rows. Other groups get the same numbers of head rows, at least one row.
    """
    return max(1, 64 // group), max(1, 16 // group)


class FastTreeArtifact:
    """The planner and the kernels of kernel_bench in a checkout.

    Args:
        checkout: The folder of the checkout.
        planner_tiles: Whether to launch the tiles that the planner chose. The published benchmark launches the tiles
            that the planner started from; where the planner chose the large tile for everything, its result then lacks
            rows.
    """

    def __init__(self, checkout: str | Path, *, planner_tiles: bool = False) -> None:
        self.name = "fasttree-artifact-planner-tiles" if planner_tiles else "fasttree-artifact"
        self._folder = Path(checkout) / "kernel_bench"
        self._planner_tiles = planner_tiles

    def prepare(self, case: Case) -> TimedCall:
        """See Provider. The call writes to an output of its own."""
        _check(case)
        kernels = load_file(self._folder / "fasttree.py")
        nodes, kv_ptrs, slot_of_token = _nodes(case.tree, load_file(self._folder / "kv_tree_simple.py"))
        shape, q = case.shape, case.q
        query, kv = list(query_tiles(shape.group)), list(_KV_TILES)
        parameters = kernels.FastTreeParams()
        parameters.set_values(*_COSTS)
        parameters.set_kv_group_num(shape.group)
        parameters.set_q_tile_sizes(list(query))
        parameters.set_kv_tile_sizes(list(kv))
        heads = shape.num_qo_heads, shape.num_kv_heads, shape.head_dim
        limits = list(_KV_SPLITS), *(list(pair) for pair in _THRESHOLDS)
        with contextlib.redirect_stdout(io.StringIO()):
            planned, _ = kernels.fasttree_preparation(nodes, kv_ptrs, case.tree.num_rows, *heads, *limits, parameters)
        # The planner numbers tokens node after node; its kernel takes any KV slot per token, and -1 after the last.
        tokens, *rest = planned
        slots = torch.tensor(slot_of_token, dtype=torch.int32, device=tokens.device)
        entries = torch.where(tokens >= 0, slots[tokens.clamp(min=0).long()], -1)
        partials = max(value.numel() for value in rest if isinstance(value, torch.Tensor))
        if partials > INT32_MAX:
            raise UnavailableError(f"its kernels address with 32 bits; partial results have {partials} elements")
        if self._planner_tiles:
            query, kv = parameters.TSQs, parameters.TSKs
        caches = [cache if cache.dim() == 3 else cache.flatten(0, 1) for cache in (case.k_cache, case.v_cache)]
        out, scale = torch.empty_like(q), shape.head_dim**-0.5

        def call() -> torch.Tensor:
            kernels.fasttree_decode(q, *caches, out, entries, *rest, query, kv, scale)
            return out

        call()  # compiles, outside of any capture
        return call


def _check(case: Case) -> None:
    shape, tree = case.shape, case.tree
    if shape.dtype not in ("fp16", "bf16"):
        raise UnavailableError(f"FastTree's kernels take fp16 and bf16, not {shape.dtype}")
    if shape.head_dim not in _HEAD_DIMS:
        raise UnavailableError(f"FastTree's kernels take head dims {_HEAD_DIMS}, not {shape.head_dim}")
    if shape.group & (shape.group - 1):
        raise UnavailableError(f"FastTree's kernels need a power of two of query heads per KV head, not {shape.group}")
    roots = int((tree.parent < 0).sum())
    if roots != 1:
        raise UnavailableError(f"FastTree's planner takes one tree, not a forest of {roots}")
    if (tree.tokens == 0).any():
        raise UnavailableError(f"FastTree's planner needs tokens in every node; node {tree.tokens.argmin()} has none")
    leaf = np.ones(len(tree.parent), bool)
    leaf[tree.parent[tree.parent >= 0]] = False
    odd = np.flatnonzero(~leaf[tree.row_node] | (tree.row_sees != tree.tokens[tree.row_node]))
    if len(odd):
        raise UnavailableError(f"FastTree's planner takes rows that see a whole leaf; row {odd[0]} is inside a node")
    bare = np.flatnonzero(leaf & (np.bincount(tree.row_node, minlength=len(leaf)) == 0))
    if len(bare):
        raise UnavailableError(f"FastTree's planner needs a row at every leaf; leaf {bare[0]} has none")
    largest = max(case.q.numel(), case.k_cache.numel())
    if largest > INT32_MAX:
        raise UnavailableError(f"FastTree's kernels address with 32 bits; a tensor has {largest} elements")


def _nodes(tree: Tree, module: Any) -> tuple[list[Any], list[int], Any]:
    """Returns the tree as nodes of the planner, the offsets of their tokens, and the KV slot of every token.

    The planner needs the root first; the other nodes keep their order. Requests are the caller's rows.
    """
    topology = tree.topology
    order = np.argsort(tree.parent >= 0, kind="stable")
    number = np.argsort(order)
    children = np.bincount(tree.parent[tree.parent >= 0], minlength=len(order))
    nodes = []
    for place, index in enumerate(order.tolist()):
        node = module.KVTreeNode()
        above = int(tree.parent[index])
        node.id, node.parent = place, -1 if above < 0 else int(number[above])
        node.seqlen, node.num_children = int(tree.tokens[index]), int(children[index])
        below = slice(topology.rank_lo[index], topology.rank_hi[index])
        node.requests = np.sort(topology.row_of_rank[below]).tolist()
        nodes.append(node)
    tokens = tree.tokens[order]
    slot_of_token = ragged_ranges(tree.kv.start, tree.kv.length)
    slots = slot_of_token[ragged_ranges(offsets(tree.tokens)[order], tokens)]
    return nodes, offsets(tokens).tolist(), slots


def load_file(path: Path) -> Any:
    """Loads a single module of the checkout without changing sys.path or sys.modules."""
    if not path.is_file():
        raise UnavailableError(f"no {path.name} in {path.parent}")
    spec = importlib.util.spec_from_file_location(f"fasttree_artifact_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
