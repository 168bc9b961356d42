"""Programs of several ranks in tests: one process imports torch and treegen, and forks one for each rank."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path

from support.processes import finished

TIMEOUT = 20
"""Seconds that a rank waits for the others in a collective."""
_START = "import sys; from support.ranks import launch; sys.exit(launch(*sys.argv[1:]))"


def run_ranks(program: str, ranks: int, *arguments: str, seconds: int = 240) -> tuple[int, str]:
    """Runs a function in several ranks, connected by gloo; returns how many failed, and what they printed.

    program: a module of the tests and its function, `support.rank_programs:merges`, which is called with the arguments.
    """
    environment = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        return finished(_START, program, str(ranks), folder, *arguments, environment=environment, seconds=seconds)


def launch(program: str, ranks: str, folder: str, *arguments: str) -> int:
    """Forks the ranks, waits for them, and returns the number of those that failed."""
    import torch

    import treegen.distributed  # imported once, for all ranks

    assert treegen.distributed.Parallel
    torch.set_num_threads(1)
    module, _, name = program.partition(":")
    function = getattr(import_module(module), name)
    children = []
    for rank in range(int(ranks)):
        child = os.fork()
        if not child:
            code = 1
            try:
                _join(rank, int(ranks), Path(folder))
                function(*arguments)
                code = 0
            except BaseException:
                print(f"rank {rank}:", traceback.format_exc(), file=sys.stderr, flush=True)
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return sum(code != 0 for code in codes)


def _join(rank: int, ranks: int, folder: Path) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT))
    # a rank whose program ends early must not end the start of the others, who may still be connecting
    joined = store.add("joined", 1)
    while joined < ranks:
        time.sleep(0.002)
        joined = store.add("joined", 0)
