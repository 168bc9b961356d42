"""Times attention that is divided among GPUs, beside one GPU, and checks it.

    torchrun --standalone --nproc-per-node 2 benchmarks/several_gpus.py [--largest 1048576] [--json FILE]

Context parallelism: rows over one prefix, by `treegen.distributed.compile` in CUDA graphs, with direct merges and with
the collectives of NCCL.
Tensor parallelism: the heads of a 70B Llama on unshared requests. The output of each case is compared with that of one
GPU's kernel. Times are medians of graph replays of the slowest rank. The calls of a graph read different caches, so
that their KV is not in L2.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import treegen
from treegen.backends.oracle import error
from treegen.cost.communication import MODES, best_merge
from treegen.distributed import Merge, Parallel, compile, measure_link, merge_across
from treegen.distributed.collectives import all_gather, reduce_scatter

HEADS = treegen.Shape(32, 8, 128, dtype="bf16")
LLAMA_70B = treegen.Shape(64, 8, 128, dtype="bf16")
PREFIXES, ROWS = (8_192, 131_072, 1_048_576), (8, 16, 32, 64, 128, 256)
CALLS = 8  # in a graph
COLD = 1 << 27
"""Bytes of KV, well beyond L2, that are read before the same bytes are read again."""


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Captures a row of calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def replay_us(call: Callable[[], object], repeats: int = 15) -> float:
    """Returns the median microseconds of a call in a graph of several, of the slowest rank."""
    return replays_us({"call": call}, repeats)["call"]


def replays_us(calls: Mapping[str, Callable[[], object]], repeats: int = 15) -> dict[str, float]:
    """Returns the median microseconds of each call in a graph of several, of the slowest rank; they take turns."""
    graphs = {name: captured(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats + 2):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            dist.barrier()
            graph.replay()  # after the barrier, so that ranks begin together
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / CALLS)
    slowest = torch.tensor([median(each[2:]) for each in times.values()], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(times, slowest.tolist(), strict=True))


def prefix_tree(tokens: int, rows: int) -> treegen.Tree:
    """Makes a tree of one node that all rows see."""
    return treegen.Tree.from_parents([-1], [tokens], rows=[(0, tokens)] * rows)


def normal(*sizes: int, seed: int) -> torch.Tensor:
    """Returns the same standard-normal numbers on all ranks."""
    device = torch.device("cuda", torch.cuda.current_device())
    return torch.randn(*sizes, generator=torch.Generator(device).manual_seed(seed), device=device, dtype=torch.bfloat16)


def own_tokens(cache: torch.Tensor, tree: treegen.Tree, parallel: Parallel) -> torch.Tensor:
    """Returns the rank's tokens of a cache."""
    shard = parallel.shard
    slots = torch.from_numpy(tree.shard_slots(shard.rank, shard.size, shard.interleave).astype("int64")).cuda()
    return cache[slots]


def in_layers(
    kernel: Callable[..., object], q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **how: Any
) -> Callable[[], object]:
    """Returns calls of a kernel that read one copy of the caches after another."""
    copies = min(CALLS, max(1, COLD // (keys.nbytes + values.nbytes)))
    caches = cycle([(keys, values), *((keys.clone(), values.clone()) for _ in range(copies - 1))])
    return lambda: kernel(q, *next(caches), **how)


def prefix_case(tokens: int, rows: int, parallel: Parallel, link: Any) -> dict[str, Any]:
    """Times rows over one prefix on one GPU and on all."""
    tree = prefix_tree(tokens, rows)
    k_cache, v_cache = normal(tokens, 8, 128, seed=1), normal(tokens, 8, 128, seed=2)
    q = normal(rows, 32, 128, seed=3)
    alone = treegen.compile(tree, shape=HEADS)
    expected = alone(q, k_cache, v_cache, return_lse=True)
    found: dict[str, Any] = {"tokens": tokens, "rows": rows}
    calls: dict[str, Callable[[], object]] = {"one": in_layers(alone, q, k_cache, v_cache)}
    keys, values = own_tokens(k_cache, tree, parallel), own_tokens(v_cache, tree, parallel)
    for mode in MODES:
        for heads in ("all", "own"):
            kernel = compile(tree, parallel, shape=HEADS, merge=Merge(mode, heads))
            out, lse = kernel(q, keys, values, return_lse=True)
            part = slice(None)
            if heads == "own":
                part = slice(16 * parallel.shard.rank, 16 * parallel.shard.rank + 16)
            found[f"error {mode} {heads}"] = max(
                error(a, b[:, part]) for a, b in zip((out, lse), expected, strict=True)
            )  # fmt: skip
            calls[f"{mode} {heads}"] = in_layers(kernel, q, keys, values)
    calls["local"] = in_layers(kernel.local, q, keys, values, return_lse=True)
    found |= replays_us(calls, 30)
    found["predicted merge"] = best_merge("all", rows, HEADS, parallel.shard.size, link, 4000.0).time_us
    found["predicted one"], found["predicted local"] = alone.estimate.time_us, kernel.local.estimate.time_us
    return found


def collectives_case(rows: int, group: Any) -> dict[str, Any]:
    """Times the collectives of a merge alone, on tensors of the same sizes."""
    ranks = group.size()
    lse, lses = torch.zeros(rows, 32, device="cuda"), torch.zeros(ranks * rows, 32, device="cuda")
    chunk = rows * 32 * (128 * 2 + 4)
    own, of_all = (torch.zeros(size, dtype=torch.uint8, device="cuda") for size in (chunk, chunk * ranks))
    scaled, part = torch.zeros(ranks * rows, 16, 128, device="cuda"), torch.zeros(rows, 16, 128, device="cuda")
    out = torch.zeros(rows, 32, 128, dtype=torch.bfloat16, device="cuda")
    sums = torch.zeros(rows, 32, device="cuda")
    sent = torch.zeros(chunk // ranks * ranks, dtype=torch.uint8, device="cuda")
    calls: dict[str, Callable[[], object]] = {
        "all-gather lse": lambda: all_gather(lses, lse, group),
        "all-gather states": lambda: all_gather(of_all, own, group),
        "all-to-all states": lambda: dist.all_to_all_single(torch.empty_like(sent), sent, group=group),
        "reduce-scatter": lambda: reduce_scatter(part, scaled, group),
        "all-reduce": lambda: dist.all_reduce(scaled[:rows], group=group),
    }
    for mode in MODES:
        for heads in ("all", "own"):
            how: dict[str, Any] = {"mode": mode, "heads": heads}
            calls[f"merge {mode} {heads}"] = partial(merge_across, out, sums, group, **how)
    return {"rows": rows, **replays_us(calls, 60)}


def tensor_case(parallel: Parallel) -> dict[str, Any]:
    """Times a layer of a 70B Llama's attention: 64 requests of 4,096 tokens, 8 prompts x 16 samples."""
    found = {}
    trees = {
        "unshared": treegen.Tree.parse("64*4096"),
        "groups": treegen.Tree.from_levels([8, 128], [2048, 512]),
    }
    heads, kv_heads = parallel.query_heads(LLAMA_70B), parallel.kv_heads(LLAMA_70B)
    for name, tree in trees.items():
        tokens = int(tree.tokens.sum())
        k_cache, v_cache = normal(tokens, 8, 128, seed=1), normal(tokens, 8, 128, seed=2)
        q = normal(tree.num_rows, 64, 128, seed=3)
        alone = treegen.compile(tree, shape=LLAMA_70B)
        kernel = compile(tree, parallel, shape=LLAMA_70B)
        own_q = q[:, heads].contiguous()
        keys, values = k_cache[:, kv_heads].contiguous(), v_cache[:, kv_heads].contiguous()
        wrong = error(kernel(own_q, keys, values), alone(q, k_cache, v_cache)[:, heads])
        one = replay_us(lambda alone=alone, q=q, k=k_cache, v=v_cache: alone(q, k, v))
        two = replay_us(lambda kernel=kernel, q=own_q, k=keys, v=values: kernel(q, k, v))
        found[name] = {"one": one, "two": two, "error": wrong}
    return found


def peers_case(tokens: int, rows: int, mesh: Any) -> dict[str, Any]:
    """Times what others have for the same work: FlashInfer's merge of states, and torch's context parallelism."""
    found: dict[str, Any] = {}
    outs, lses = normal(rows, 2, 32, 128, seed=1), torch.randn(rows, 2, 32, device="cuda")
    try:
        from flashinfer import merge_states

        found["flashinfer merge_states (one GPU, no link)"] = replay_us(lambda: merge_states(outs, lses))
    except Exception as cause:  # whatever keeps it from running here
        found["flashinfer merge_states"] = f"{type(cause).__name__}: {cause}"[:120]
    try:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._context_parallel._attention import _cp_options

        _cp_options.enable_load_balance = False  # it serves causal masks, with a query for each key
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        q = normal(1, 32, rows, 128, seed=3)
        k, v = (normal(1, 32, tokens, 128, seed=seed) for seed in (1, 2))  # its SDPA has no grouped heads here
        divided = context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2])
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.no_grad(), divided:
            times = []
            for _ in range(8):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                dist.barrier()
                begin.record()
                scaled_dot_product_attention(q, k, v)
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1e3)
        found["torch context_parallel, 32 KV heads"] = median(times[3:])
    except Exception as cause:
        found["torch context_parallel"] = f"{type(cause).__name__}: {cause}"[:120]
    return found


def main() -> None:
    """Runs the cases and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=PREFIXES[-1], help="the most tokens of a prefix")
    parser.add_argument("--json", type=Path, help="writes all figures to this file")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl", timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("ranks",))
    tokens, heads = Parallel.over(mesh, context="ranks"), Parallel.over(mesh, tensor="ranks")
    group = tokens.groups[0]
    link = measure_link(group, torch.device("cuda", torch.cuda.current_device()))
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "ranks": dist.get_world_size(),
        "link": str(link),
        "collectives": [collectives_case(rows, group) for rows in (8, 64, 256)],
        "prefixes": [prefix_case(size, 64, tokens, link) for size in PREFIXES if size <= arguments.largest],
        "rows": [prefix_case(8_192, rows, tokens, link) for rows in ROWS],
        "tensor": tensor_case(heads), "peers": peers_case(min(131_072, arguments.largest), 64, mesh),
    }  # fmt: skip
    if dist.get_rank() == 0:
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(figures, indent=1))
        show(figures)
    dist.destroy_process_group()


def show(figures: dict[str, Any]) -> None:
    """Prints the figures."""
    print(figures["device"], figures["torch"], figures["link"])
    for case in figures["collectives"]:
        print(" ", {name: round(value, 1) for name, value in case.items()})
    for case in figures["prefixes"] + figures["rows"]:
        one = case["one"]
        best, least = (min(case[f"{mode} {heads}"] for mode in MODES) for heads in ("all", "own"))
        print(
            f"  {case['tokens']:>8} tokens {case['rows']:>4} rows: one {one:.1f}, all heads {best:.1f} "
            f"({one / best:.2f}x), own heads {least:.1f} ({one / least:.2f}x), local {case['local']:.1f}"
        )
        print("     ", {name: round(value, 5 if "error" in name else 1) for name, value in case.items()})
    print(" ", figures["tensor"])
    print(" ", figures["peers"])


if __name__ == "__main__":
    main()
