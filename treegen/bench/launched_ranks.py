"""Launched ranks: the processes that torchrun has started, as ranks that decode together."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from treegen.distributed import Parallel
from treegen.ir.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class LaunchedRanks:
    """The ranks of a run; by default this process alone.

    Attributes:
        parallel: How attention is divided.
        mesh: The ranks that divide heads.
        first: Whether this is rank 0.
        words: What is divided, for people.
    """

    parallel: Parallel | None = None
    mesh: DeviceMesh | None = None
    first: bool = True
    words: str = ""


@contextmanager
def launched_ranks(tensor: bool, context: bool) -> Iterator[LaunchedRanks]:
    """Joins the ranks that torchrun has started, each with a GPU of its own where there are some.

    Args:
        tensor: Whether they divide heads.
        context: Whether they divide tokens. Without either, this process is alone.

    Raises:
        InputError: Both are asked for, or torchrun has not started this process.
    """
    if tensor and context:
        raise InputError("--context-parallel", True, "does not go with --tensor-parallel", "give one of them")
    if not tensor and not context:
        yield LaunchedRanks()
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    on_gpu, joined = torch.cuda.is_available(), dist.is_initialized()
    try:
        if on_gpu:
            torch.cuda.set_device(dist.get_node_local_rank())
        if not joined:
            dist.init_process_group("nccl" if on_gpu else "gloo")
            atexit.register(gc.collect)  # a group of gloo that is freed later, with the interpreter, aborts it
    except (ValueError, RuntimeError) as cause:
        name, found = "--tensor-parallel" if tensor else "--context-parallel", str(cause).splitlines()[0]
        fix = "start it with torchrun --nproc-per-node 2 -m treegen run"
        raise InputError(name, True, f"needs several ranks: {found}", fix) from cause
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))
    named: dict[str, Any] = {"tensor" if tensor else "context": "ranks"}
    words = f", {'heads' if tensor else 'tokens'} divided among {dist.get_world_size()} ranks"
    yield LaunchedRanks(Parallel.over(mesh, **named), mesh if tensor else None, dist.get_rank() == 0, words)
    if not joined:  # after an error the process ends without waiting for other ranks, which may not come
        gc.collect()  # NCCL waits until graphs that captured its operations are gone, and engines have such graphs
        dist.destroy_process_group()
