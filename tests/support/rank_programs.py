"""What ranks do in tests of `treegen.distributed`: each function runs in all ranks, and fails by an assertion."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from support.forests import forest
from treegen.backends.merge_state import merge_states
from treegen.backends.oracle import OracleOptions, error, reference
from treegen.distributed import Merge, Parallel, compile, merge_across
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.scoring.options import ScoreOptions

STRATEGIES = ("query", "deft-node", "deft-flatten", "fasttree", "cohort", "auto")


def merges() -> None:
    """Merges random states, some of them empty, by both ways, and compares with merge_states."""
    group = dist.group.WORLD
    assert group is not None
    ranks, rank = group.size(), group.rank()
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        rows, heads, dim = (int(torch.randint(1, most, (1,), generator=generator)) for most in (9, 4, 40))
        heads *= ranks
        outs = torch.randn(rows, ranks, heads, dim, generator=generator)
        lses = 30 * torch.randn(rows, ranks, heads, generator=generator)
        empty = torch.rand(rows, ranks, heads, generator=generator) < 0.4
        empty[0] = True  # no rank saw a token of this row
        lses[empty] = -torch.inf
        outs[empty] = torch.nan  # whatever a state without tokens holds
        base = ("ln", "log2")[seed % 2]
        out, lse = merge_states(outs, lses, lse_base=base)
        own = slice(rank * heads // ranks, (rank + 1) * heads // ranks)
        for mode in ("exchange", "gather", "auto"):
            for wanted, part in (("all", slice(None)), ("own", own)):
                found = merge_across(
                    outs[:, rank], lses[:, rank], group, mode=mode, heads=wanted, lse_base=base
                )  # fmt: skip
                expected = out[:, part], lse[:, part]
                assert all(error(a, b) < 1e-6 for a, b in zip(found, expected, strict=True)), (seed, mode, wanted)
                again = merge_across(outs[:, rank], lses[:, rank], group, mode=mode, heads=wanted, lse_base=base)
                assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def random_trees(count: str) -> None:
    """Compares random trees, shapes, meshes and options with the oracle over the whole tree."""
    worst = 0.0
    meshes = _meshes()
    for seed in range(int(count)):
        source = random.Random(seed)
        mesh, names = meshes[source.randrange(len(meshes))]
        interleave = source.choice((1, 1, 2, 16))
        parallel = Parallel.over(mesh, interleave=interleave, replicate_kv=source.random() < 0.5, **names)
        tree = forest(
            nodes=source.randint(1, 12), most_tokens=source.choice((3, 20, 60)), seed=seed, roots=0.3,
            rows=source.choice(("leaves", "ends", "inside", "every", "mixed", "nothing")), kv="slots",
        )  # fmt: skip
        if not tree.num_rows:
            continue
        worst = max(worst, _compare(tree, parallel, source))
    assert worst < 1e-5, worst


def _meshes() -> list[tuple[Any, dict[str, str]]]:
    """The meshes of so many ranks: context, tensor, and both."""
    ranks = dist.get_world_size()
    line = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ranks",))
    meshes = [(line, {"context": "ranks"}), (line, {"tensor": "ranks"})]
    if ranks == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
        meshes.append((square, {"tensor": "tp", "context": "cp"}))
    return meshes


def _compare(tree: Tree, parallel: Parallel, source: random.Random) -> float:
    """Returns the larger error of out and lse against the oracle."""
    ranks = parallel.tensor_place[1]
    kv_heads = ranks if not parallel.replicate_kv else max(1, ranks // 2)
    latent = source.random() < 0.2 and kv_heads == 1
    shape = Shape(2 * ranks, kv_heads, 24, 16 if latent else 0, dtype="fp32", shared_kv=latent)
    generator = torch.Generator().manual_seed(source.randrange(1 << 30))
    q = torch.randn(tree.num_rows, shape.num_qo_heads, 24, generator=generator)
    k_cache = torch.randn(tree.kv.last_slot + 1 or 1, kv_heads, 24, generator=generator)
    v_cache = k_cache[..., :16] if latent else torch.randn(k_cache.shape, generator=generator)
    options = _options(shape, source, generator)
    wanted = source.choice(("all", "own")) if shape.num_qo_heads % (ranks * parallel.shard.size) == 0 else "all"
    kernel = compile(
        tree, parallel, shape=shape, strategy=source.choice(STRATEGIES), **options,
        merge=Merge(source.choice(("exchange", "gather")), wanted),
    )  # fmt: skip
    shard, heads = parallel.shard, parallel.query_heads(shape)
    slots = torch.from_numpy(tree.shard_slots(shard.rank, shard.size, shard.interleave).astype("int64"))
    if shard.size == 1:
        slots = torch.arange(len(k_cache))
    kv = parallel.kv_heads(shape)
    keys = k_cache[slots, kv] if len(slots) else k_cache[:1, kv]
    values = keys[..., :16] if latent else (v_cache[slots, kv] if len(slots) else v_cache[:1, kv])
    found = kernel(q[:, heads], keys, values, return_lse=True)
    scores = OracleOptions(scores=ScoreOptions(**options) if options else None)
    expected = reference(tree, q, k_cache, v_cache, scores)
    if wanted == "own":
        part = (heads.stop - heads.start) // shard.size
        heads = slice(heads.start + shard.rank * part, heads.start + (shard.rank + 1) * part)
    return max(error(a, b[:, heads]) for a, b in zip(found, expected, strict=True))


def _options(shape: Shape, source: random.Random, generator: torch.Generator) -> dict[str, Any]:
    """Random score options."""
    options: dict[str, Any] = {}
    if source.random() < 0.3:
        options["window_left"] = source.choice((0, 3, 17))
    if source.random() < 0.2:
        options["alibi_slopes"] = torch.rand(shape.num_qo_heads, generator=generator)
    if source.random() < 0.2:
        options["sinks"] = torch.randn(shape.num_qo_heads, generator=generator)
    if source.random() < 0.2:
        options["logits_soft_cap"] = 5.0
    if source.random() < 0.2:
        options["score_mod"] = lambda score, b, h, q_idx, kv_idx: score + h * 0.1 - (q_idx - kv_idx) * 0.01
    if source.random() < 0.2:
        options["mask_mod"] = lambda b, h, q_idx, kv_idx: (kv_idx + h + b) % 3 != 0
    return options
