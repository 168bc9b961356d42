"""What ranks do in tests of `treegen.distributed`: each function runs in all ranks, and fails by an assertion."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from support.forests import forest
from treegen.backends.check_inputs import TORCH_DTYPES
from treegen.backends.merge_state import merge_states
from treegen.backends.oracle import TOLERANCE, OracleOptions, error, reference
from treegen.backends.page_table import PageTable
from treegen.cost.communication import MODES, Mode
from treegen.distributed import Merge, Parallel, compile, compile_batch, measure_link, merge_across
from treegen.distributed.agreement import check_agreement
from treegen.distributed.measured_links import link_of
from treegen.ir.live_batch import LiveBatch
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.scoring.options import ScoreOptions

STRATEGIES = ("query", "deft-node", "deft-flatten", "fasttree", "cohort", "auto")
WAYS: dict[str, tuple[Mode, ...]] = {"cpu": ("exchange", "gather"), "cuda": MODES}
"""The modes of merges that ranks with such devices have."""


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


def links() -> None:
    """Measures the link: all ranks get the same figures, and "auto" takes them."""
    group = dist.group.WORLD
    assert group is not None
    link = measure_link(group, torch.device("cpu"))
    check_agreement(group, {"link": link})
    assert link_of(group) is link
    assert link.latency_us > 0
    assert link.gigabytes > 0
    merge_across(torch.zeros(2, 2, 8), torch.zeros(2, 2), group)


def random_trees(count: str, device: str = "cpu", dtype: str = "fp32", first: str = "0") -> None:
    """Compares random trees, shapes, meshes and options with the oracle over the whole tree.

    Takes `count` seeds from `first` on. On a GPU calls are also captured: replays give the bits of calls.
    """
    worst, compared = 0.0, 0
    meshes = _meshes(device)
    for seed in range(int(first), int(first) + int(count)):
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
        worst, compared = max(worst, _compare(tree, parallel, source, device, dtype)), compared + 1
        assert worst < TOLERANCE[dtype], (seed, worst)
    print(f"rank {dist.get_rank()}: {compared} trees, errors at most {worst:.1e}")


def _meshes(device: str) -> list[tuple[Any, dict[str, str]]]:
    """The meshes of all ranks: context, tensor, and with four ranks both."""
    ranks = dist.get_world_size()
    line = init_device_mesh(device, (ranks,), mesh_dim_names=("ranks",))
    meshes = [(line, {"context": "ranks"}), (line, {"tensor": "ranks"})]
    if ranks == 4:
        square = init_device_mesh(device, (2, 2), mesh_dim_names=("tp", "cp"))
        meshes.append((square, {"tensor": "tp", "context": "cp"}))
    return meshes


def _compare(tree: Tree, parallel: Parallel, source: random.Random, device: str, dtype: str) -> float:
    """Returns the larger error of out and lse against the oracle."""
    ranks = parallel.tensor_place[1]
    kv_heads = ranks if not parallel.replicate_kv else max(1, ranks // 2)
    latent = source.random() < 0.2 and kv_heads == 1
    shape = Shape(2 * ranks, kv_heads, 24, 16 if latent else 0, dtype=dtype, shared_kv=latent)
    generator = torch.Generator().manual_seed(source.randrange(1 << 30))

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device, TORCH_DTYPES[dtype])

    q = normal(tree.num_rows, shape.num_qo_heads, 24)
    k_cache = normal(tree.kv.last_slot + 1 or 1, kv_heads, 24)
    v_cache = k_cache[..., :16] if latent else normal(*k_cache.shape)
    options = _options(shape, source, generator, device)
    wanted = source.choice(("all", "own")) if shape.num_qo_heads % (ranks * parallel.shard.size) == 0 else "all"
    kernel = compile(
        tree, parallel, shape=shape, strategy=source.choice(STRATEGIES), **options,
        merge=Merge(source.choice(WAYS[device]), wanted),
    )  # fmt: skip
    shard, heads = parallel.shard, parallel.query_heads(shape)
    slots = torch.from_numpy(tree.shard_slots(shard.rank, shard.size, shard.interleave).astype("int64")).to(device)
    if shard.size == 1:
        slots = torch.arange(len(k_cache), device=device)
    kv = parallel.kv_heads(shape)
    keys = k_cache[slots, kv] if len(slots) else k_cache[:1, kv]
    values = keys[..., :16] if latent else (v_cache[slots, kv] if len(slots) else v_cache[:1, kv])
    found = kernel(q[:, heads], keys, values, return_lse=True)
    if device == "cuda":
        _check_replay(lambda: kernel(q[:, heads], keys, values, return_lse=True), found)
    scores = OracleOptions(scores=ScoreOptions(**options) if options else None)
    expected = reference(tree, q, k_cache, v_cache, scores)
    if wanted == "own":
        part = (heads.stop - heads.start) // shard.size
        heads = slice(heads.start + shard.rank * part, heads.start + (shard.rank + 1) * part)
    return max(error(a, b[:, heads]) for a, b in zip(found, expected, strict=True))


def _check_replay(call: Callable[[], Any], expected: Any) -> None:
    """Captures a call, with its collectives, and compares a replay's tensors with those of a plain call."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call()
    for tensor in replayed:
        tensor.fill_(7.0)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(replayed, expected, strict=True))


def _options(shape: Shape, source: random.Random, generator: torch.Generator, device: str) -> dict[str, Any]:
    """Random score options."""
    options: dict[str, Any] = {}
    if source.random() < 0.3:
        options["window_left"] = source.choice((0, 3, 17))
    if source.random() < 0.2:
        options["alibi_slopes"] = torch.rand(shape.num_qo_heads, generator=generator).to(device)
    if source.random() < 0.2:
        options["sinks"] = torch.randn(shape.num_qo_heads, generator=generator).to(device)
    if source.random() < 0.2:
        options["logits_soft_cap"] = 5.0
    if source.random() < 0.2:
        options["score_mod"] = lambda score, b, h, q_idx, kv_idx: score + h * 0.1 - (q_idx - kv_idx) * 0.01
    if source.random() < 0.2:
        options["mask_mod"] = lambda b, h, q_idx, kv_idx: (kv_idx + h + b) % 3 != 0
    return options


def running_batches(count: str, device: str = "cpu", dtype: str = "fp32") -> None:
    """Decodes random batches, whose requests share prompts, in context parallelism, and compares with the oracle."""
    worst = 0.0
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    for seed in range(int(count)):
        source = random.Random(seed)
        parallel = Parallel.over(mesh, context="cp", interleave=source.choice((1, 2)))
        worst = max(worst, _decoded(parallel, source, device, dtype))
        assert worst < TOLERANCE[dtype], (seed, worst)
    print(f"rank {dist.get_rank()}: {count} batches, errors at most {worst:.1e}")


def _decoded(parallel: Parallel, source: random.Random, device: str, dtype: str) -> float:
    """Returns the largest error along some decoding steps of requests that share a prompt."""
    page_size, rows, steps, tail = source.choice((2, 4)), source.randint(1, 5), 4, 6
    shared = source.randint(0, 4) * page_size * parallel.shard.size
    lengths = [shared + source.randint(1, tail) for _ in range(rows)]
    most = max(lengths) + steps
    shape = Shape(4, 2, 16, dtype=dtype, page_size=page_size)
    generator = torch.Generator().manual_seed(source.randrange(1 << 30))

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device, TORCH_DTYPES[dtype])

    keys, values = normal(2, rows, most, 2, 16)
    keys[:, :shared], values[:, :shared] = keys[:1, :shared], values[:1, :shared]
    width = -(-most // page_size)  # the same on all ranks, so that their random numbers are
    own_shared = parallel.tokens(shared) // page_size
    table = torch.arange(rows * width, dtype=torch.int32, device=device).view(rows, width)
    table[1:, :own_shared] = table[0, :own_shared]
    k_cache, v_cache = normal(2, rows * width, page_size, 2, 16)
    held = torch.tensor([parallel.shard.position(number) for number in range(parallel.tokens(most))], device=device)
    for cache, tokens in ((k_cache, keys), (v_cache, values)):
        for row in range(rows):
            number = torch.arange(len(held), device=device)
            cache[table[row, number // page_size].long(), number % page_size] = tokens[row, held.long()]
    seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
    positions = torch.zeros(rows, dtype=torch.int32, device=device)
    window = source.choice((-1, -1, 3, 11))
    kernel = compile_batch(
        shape, PageTable(table, seq_lens, rows * width), parallel, max_tokens=most, positions=positions,
        window_left=window, merge=Merge(source.choice((*WAYS[device], "auto"))),
    )  # fmt: skip
    batch = LiveBatch(page_size=page_size)
    for length in lengths:
        first = 0 if len(batch) else None
        batch.add(parallel.tokens(length), first, 0 if first is None else parallel.tokens(shared))
    worst = 0.0
    for step in range(steps):
        now = torch.tensor(lengths, device=device) + step
        seq_lens.copy_(parallel.tokens(now))
        positions.copy_(now - 1)
        kernel.prepare(batch)
        kernel.step()
        q = normal(rows, 4, 16)
        found = kernel(q, k_cache, v_cache, return_lse=True)
        kernel.refresh(batch)
        for row, length in enumerate(now.tolist()):
            tree = Tree.from_parents([-1], [length])
            options = OracleOptions(scores=ScoreOptions(window_left=window))
            expected = reference(tree, q[row : row + 1], keys[row], values[row], options)
            worst = max(worst, *(error(a[row : row + 1], b) for a, b in zip(found, expected, strict=True)))
        batch.set_tokens(batch.seats, parallel.tokens(now + 1).tolist())
    return worst
