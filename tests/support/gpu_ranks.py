"""Checks ranks on GPUs, where tests of several ranks have CPUs alone. From the root of the repository:

PYTHONPATH=.:tests torchrun --standalone --nproc-per-node 2 -m support.gpu_ranks [SEEDS]
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from support.engine_programs import CONTROLLERS, VOCABULARY, tokens_of
from support.rank_programs import random_trees, running_batches
from support.tiny_models import tiny
from treegen.cost.communication import Wanted
from treegen.distributed import Parallel, merge_across
from treegen.integrations import HFModel, divide_heads

WANTED: tuple[Wanted, ...] = ("all", "own")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REPLAYS = 2500
CALLS = 8
"""Direct merges of a graph."""


def states(source: random.Random, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of a rank, some of them empty; their sizes are those of all ranks."""
    ranks = dist.get_world_size()
    rows, heads = source.choice((1, 2, 7, 64, 300)), ranks * source.choice((1, 3, 16))
    dim, dtype = source.choice((8, 24, 64, 80, 128, 256, 512)), source.choice(DTYPES)
    generator = torch.Generator("cuda").manual_seed(source.randrange(1 << 30) + rank)
    out = torch.randn(rows, heads, dim, device="cuda", generator=generator).to(dtype)
    lse = 20 * torch.randn(rows, heads, device="cuda", generator=generator)
    empty = torch.rand(rows, heads, device="cuda", generator=generator) < 0.3
    return out.masked_fill(empty[..., None], torch.nan), lse.masked_fill(empty, -torch.inf)


def direct_merges(group: dist.ProcessGroup, seeds: int) -> None:
    """Direct merges have the bits of those by one collective."""
    for seed, wanted in itertools.product(range(seeds), WANTED):
        out, lse = states(random.Random(seed), dist.get_rank())
        direct, exchanged = (merge_across(out, lse, group, mode=mode, heads=wanted) for mode in ("direct", "exchange"))
        assert all(torch.equal(a, b) for a, b in zip(direct, exchanged, strict=True)), (seed, wanted)
    say(f"{2 * seeds} direct merges have the bits of exchanges")


def replayed_merges(group: dist.ProcessGroup) -> None:
    """Direct merges of a graph have their bits in each replay, while ranks are late in turn."""
    sets = [states(random.Random(7), dist.get_rank() + 100 * number) for number in range(CALLS)]
    sets = [(out + number, lse) for number, (out, lse) in enumerate(sets)]
    expected = [merge_across(out, lse, group, mode="exchange") for out, lse in sets]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    merge_across(*sets[0], group, mode="direct")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for (out, lse), right in zip(sets, expected, strict=True):
            for a, b in zip(merge_across(out, lse, group, mode="direct"), right, strict=True):
                wrong.add_((a != b).any())
    source, busy = random.Random(1), torch.ones(2048, 2048, device="cuda")
    for replay in range(REPLAYS):
        if source.random() < 0.1 and replay % dist.get_world_size() == dist.get_rank():
            torch.mm(busy, busy)
        graph.replay()
    assert int(wrong) == 0
    say(f"{REPLAYS * CALLS} replayed merges, none wrong")


def engines() -> None:
    """Tokens of engines on all ranks are those of an engine on one."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("ranks",))
    compared = 0
    for name, way in (("Llama", "tensor"), ("Llama", "context"), ("Mistral", "context")):
        model = HFModel(tiny(name, vocab_size=VOCABULARY).cuda())
        divided = model
        if way == "tensor":
            own = tiny(name, vocab_size=VOCABULARY).cuda()
            divide_heads(own, mesh)
            divided = HFModel(own)
        parallel = Parallel.over(mesh, **{way: "ranks"})
        for controller, make in CONTROLLERS.items():
            assert tokens_of(divided, make(), parallel=parallel) == tokens_of(model, make()), (name, way, controller)
            compared += 1
    say(f"{compared} engines on {dist.get_world_size()} ranks have the tokens of one")


def lost_rank() -> None:
    """Where other ranks do not come to a merge, rank 0 fails; the last check, since its GPU then serves no more."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    out, lse = torch.zeros(4, 8, 128, device="cuda"), torch.zeros(4, 8, device="cuda")
    merge_across(out, lse, group, mode="direct")
    dist.barrier()
    torch.cuda.synchronize()
    if dist.get_rank():
        time.sleep(20)
        os._exit(0)
    began = time.monotonic()
    try:
        merge_across(out, lse, group, mode="direct")
        torch.cuda.synchronize()
    except RuntimeError:
        print(f"without the other ranks, rank 0 failed after {time.monotonic() - began:.1f} s", flush=True)
        os._exit(0)
    os._exit(1)


def say(text: str) -> None:
    """Prints on rank 0."""
    if not dist.get_rank():
        print(text, flush=True)


def main() -> None:
    """Runs all checks."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    direct_merges(group, 6 * seeds)
    replayed_merges(group)
    random_trees(str(seeds), "cuda", "fp16")
    running_batches("8", "cuda", "fp16")
    engines()
    lost_rank()


if __name__ == "__main__":
    main()
