"""Memory that the ranks of a group share: whether they reach each other's, and the buffers of their direct merges.

The memory is symmetric memory of torch.distributed: each rank allocates the same, and the ranks exchange its handles.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from treegen.cost.communication import MOST_DIRECT_RANKS
from treegen.distributed.direct_states import BufferForm, Buffers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SMALLEST_ROOM = 4096
"""The fewest states that buffers have room for; about a megabyte for each rank."""
_LIMIT = timedelta(minutes=10)
"""How long ranks wait for each other where the group does not say it."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")

_reached: WeakKeyDictionary[ProcessGroup, bool] = WeakKeyDictionary()
_made: WeakKeyDictionary[ProcessGroup, list[tuple[Buffers, object]]] = WeakKeyDictionary()
"""Buffers, and what keeps their memory. Those that became too small stay, for CUDA graphs that use them."""


def reach_each_other(group: ProcessGroup, device: torch.device) -> bool:
    """Tells whether the ranks of a group can write into each other's memory; all ranks call it, and get one answer.

    The first call tries it. While a CUDA graph is captured, the answer is no if it has not been tried.
    """
    if device.type != "cuda" or not 1 < group.size() <= MOST_DIRECT_RANKS:
        return False
    if group not in _reached:
        if torch.cuda.is_current_stream_capturing():
            return False
        _reached[group] = _try(group, device)
    return _reached[group]


def buffers_for(group: ProcessGroup, states: int, dim: int, dtype: torch.dtype, device: torch.device) -> Buffers | None:
    """Returns buffers with room for this number of states; all ranks call it, after `reach_each_other` said yes.

    They are allocated if there are none yet, or if they are too small. That cannot be while a CUDA graph is captured,
    so the result is then None.
    """
    made = _made.setdefault(group, [])
    for buffers, _ in reversed(made):
        form = buffers.form
        if (form.dim, form.dtype) == (dim, dtype) and states <= form.capacity:
            return buffers
    if torch.cuda.is_current_stream_capturing():
        return None
    made.append(_allocated(group, BufferForm.for_states(group.size(), max(states, _SMALLEST_ROOM), dim, dtype), device))
    return made[-1][0]


def _allocated(group: ProcessGroup, form: BufferForm, device: torch.device) -> tuple[Buffers, object]:
    import torch.distributed as dist
    from torch.distributed import _symmetric_memory as symmetric

    memory = symmetric.empty(form.bytes, dtype=torch.uint8, device=device)
    memory.zero_()
    handle = symmetric.rendezvous(memory, group)
    addresses = [int(address) for address in handle.buffer_ptrs]
    limit = getattr(getattr(group._get_backend(device), "options", None), "_timeout", _LIMIT)
    limit_ns = int(limit / timedelta(microseconds=1)) * 1000
    buffers = Buffers(form, group.rank(), addresses, device, limit_ns)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # no rank writes before all have zeros
    torch.cuda.synchronize(device)
    return buffers, (memory, handle)


def _try(group: ProcessGroup, device: torch.device) -> bool:
    import torch.distributed as dist

    places: list[tuple[str, int]] = [("", 0)] * group.size()
    index = torch.cuda.current_device() if device.index is None else device.index
    dist.all_gather_object(places, (_host(), index), group=group)
    hosts, gpus = zip(*places, strict=True)
    seen = len(set(hosts)) == 1 and len(set(gpus)) == len(gpus) and max(gpus) < torch.cuda.device_count()
    able = seen and all(torch.cuda.can_device_access_peer(index, gpu) for gpu in gpus if gpu != index)
    if not _all_say(able, group, device):
        return False
    form, done = BufferForm.for_states(group.size(), _SMALLEST_ROOM, 128, torch.bfloat16), False
    with suppress(ImportError, AttributeError, TypeError, RuntimeError):  # torch has no such memory, or may not use it
        _made.setdefault(group, []).append(_allocated(group, form, device))
        done = True
    return _all_say(done, group, device)


def _host() -> str:
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{socket.gethostname()} {boot}"


def _all_say(said: bool, group: ProcessGroup, device: torch.device) -> bool:
    import torch.distributed as dist

    votes = torch.tensor([int(said)], device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes.item())
