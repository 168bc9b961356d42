"""Warming by crews in tests: hosts are cache folders, compilers do nothing, and a meter stands for the GPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from support.crews import codes, crew_in, forked
from support.h200 import H200
from support.meters import Favourite
from treegen import Shape, Tree, cli
from treegen.bench.providers import Provider
from treegen.bench.results import ProviderOutcome
from treegen.codegen.emit import Source
from treegen.distributed.warm_together import WarmWork, warm_together
from treegen.target.targets import Target
from treegen.tuning import compile_pool, warm
from treegen.tuning.compile_pool import Compiled
from treegen.tuning.tune import Tuning

SHAPE = Shape(32, 8, 128, dtype="fp16")
TREES = [(text, Tree.parse(text)) for text in ("1,8/500,20", "64*300", "1,4,16/512,256,64", "1,256/1000,50")]


def compile_none(
    kernels: Iterable[tuple[Source, Shape]],
    target: Target,
    processes: int | None = None,
    on_variant: Callable[[Compiled], None] | None = None,
) -> list[Compiled]:
    """Takes kernels as compile_all does, and notes them in the cache folder of the host."""
    outcomes = []
    for source, shape in kernels:
        with Path(os.environ["TREEGEN_CACHE_DIR"], "kernels").open("a") as file:
            file.write(f"{source.digest} {shape}\n")
        outcomes.append(Compiled(source, shape, 0.1))
        if on_variant:
            on_variant(outcomes[-1])
    return outcomes


def warm_rank(folder: Path, run: str, rank: int, ranks: int, again: bool) -> None:
    """Warms as a rank of two on each host, whose cache is a folder of its own. Rank 0 writes what it returns."""
    host = str(rank // 2)
    os.environ["TREEGEN_CACHE_DIR"] = str(folder / host)
    (folder / host).mkdir(exist_ok=True)
    (folder / run).mkdir(exist_ok=True)
    compile_pool.compile_all = compile_none  # type: ignore[assignment]
    work = WarmWork(
        warm.kernels_of([SHAPE], H200),
        warm.jobs_of(TREES, [SHAPE], H200),
        H200,
        Tuning(most=1, meter=Favourite(noted=str(folder / run / "calls"))),
        again,
    )
    with crew_in(folder / run, rank, ranks, host, lease_s=20) as crew:
        hosts, warmed = warm_together(crew, work, rank % 2)
    if rank == 0:
        found = [(each.host, len(each.compiled), each.taken, each.problem) for each in hosts]
        value = {"hosts": found, "where": [each.where for each in warmed], "ranks": [each.rank for each in warmed]}
        print(json.dumps({run: value}), flush=True)


def hosts(folder: str) -> None:
    """Two hosts with two ranks each warm; then a third host joins, for which nothing is measured; then again."""
    for run, ranks, again in (("first", 4, False), ("third host", 6, False), ("again", 4, True)):
        children = [
            forked(
                lambda rank=rank, run=run, ranks=ranks, again=again: warm_rank(Path(folder), run, rank, ranks, again)
            )
            for rank in range(ranks)
        ]
        assert codes(children) == [0] * ranks


def commands(folder: str) -> int:
    """The commands warm and bench as a rank of torchrun, with stand-ins for the compiler and the GPU."""
    from treegen.backends import devices
    from treegen.bench import bench_runs
    from treegen.tuning import timing, tune

    def measured(provider: Provider, *_: object) -> ProviderOutcome:
        return ProviderOutcome(provider.name, "right", 0.0, 10.0)

    compile_pool.compile_all = compile_none  # type: ignore[assignment]
    tune.Tuning = partial(Tuning, meter=Favourite())  # type: ignore[assignment,misc]
    devices.devices_of = lambda target: [0, 1]  # type: ignore[assignment]
    trees = [text for text, _ in TREES]
    code = cli.main(["warm", *trees, "--dtype", "fp16"])
    torch.cuda.is_available = lambda: True
    devices.current_target = lambda: H200  # type: ignore[assignment]
    devices.default_device = bench_runs.default_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    bench_runs.measure = measured
    bench_runs.machine = lambda gbps: {"copy_gbps": gbps}
    timing.copy_gbps = lambda: 4000.0
    return code + cli.main(["bench", *trees, "--heads", "4:2", "--head-dim", "16", "--json", f"{folder}/results.json"])


if __name__ == "__main__":
    sys.exit(commands(*sys.argv[1:]))
