"""Memory that the ranks of a group share: whether they reach each other's, and the buffers of their direct merges.

The memory is symmetric memory of torch.distributed: each rank allocates the same, and the ranks exchange its handles.
Whatever may fail on one rank alone is followed by a vote, so that all ranks go on alike.
"""

from __future__ import annotations

import hashlib
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

from treegen.cost.communication import MOST_DIRECT_RANKS
from treegen.distributed.collectives import all_gather
from treegen.distributed.direct_states import BufferForm, Buffers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SMALLEST_ROOM = 4096
"""The fewest states that buffers have room for: 4.3 MB of each of two ranks, in bf16 and with 128 dims."""
_LIMIT = timedelta(minutes=10)
"""How long ranks wait for each other where the group does not say it."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ERRORS = (ImportError, AttributeError, TypeError, RuntimeError)
"""What torch raises where it has no such memory, has none left, or may not share it."""

_reached: WeakKeyDictionary[ProcessGroup, bool] = WeakKeyDictionary()
_kept: WeakKeyDictionary[ProcessGroup, list[tuple[Buffers, Mapped]]] = WeakKeyDictionary()
"""Buffers, and what keeps their memory. Those that became too small stay, for CUDA graphs that use them."""
_exchanges = 0
"""How often this process has exchanged handles. Torch counts that, too, and waits for ever if ranks do not agree."""


class Mapped(NamedTuple):
    """Memory of all ranks: that of this rank, where this process finds that of each, and what keeps it mapped."""

    memory: torch.Tensor
    addresses: tuple[int, ...]
    handle: object


def reach_each_other(group: ProcessGroup, device: torch.device) -> bool:
    """Tells whether the ranks of a group can write into each other's memory; all ranks call it, and get one answer.

    The first call tries it. While a CUDA graph is captured, the answer is no if it has not been tried.
    """
    if device.type != "cuda" or not 1 < group.size() <= MOST_DIRECT_RANKS:
        return False
    if group not in _reached:
        if torch.cuda.is_current_stream_capturing():
            return False
        with torch.cuda.device(device):
            form = BufferForm.for_states(group.size(), SMALLEST_ROOM, 128, torch.bfloat16)
            _reached[group] = see_each_other(group, device) and allocate(group, form, device) is not None
    return _reached[group]


def buffers_for(group: ProcessGroup, states: int, dim: int, dtype: torch.dtype, device: torch.device) -> Buffers | None:
    """Returns buffers with room for this number of states; all ranks call it, after `reach_each_other` said yes.

    They are allocated if there are none yet, or if they are too small. That cannot be while a CUDA graph is captured,
    so the result is then None. It is None as well where a rank cannot allocate them; the group then merges directly no
    more.
    """
    for buffers, _ in reversed(_kept.get(group, ())):
        form = buffers.form
        if (form.dim, form.dtype) == (dim, dtype) and states <= form.capacity:
            return buffers
    if torch.cuda.is_current_stream_capturing():
        return None
    with torch.cuda.device(device):
        made = allocate(group, BufferForm.for_states(group.size(), max(states, SMALLEST_ROOM), dim, dtype), device)
    if made is None:
        _reached[group] = False
    return made


def allocate(group: ProcessGroup, form: BufferForm, device: torch.device) -> Buffers | None:
    """Allocates buffers of zeros and keeps them; all ranks call it. Returns None on all of them if one cannot."""
    global _exchanges
    memory, mapped = None, None
    with suppress(*_ERRORS):
        memory = empty_memory(form, device)
    if not _all_are_ready(memory is not None, group, device) or memory is None:
        return None
    _exchanges += 1
    with suppress(*_ERRORS):
        mapped = map_memory(memory, group)
    if not _all_are_ready(mapped is not None, group, device) or mapped is None:
        return None
    options = getattr(group._get_backend(device), "options", None)
    limit = getattr(options, "_timeout", _LIMIT)
    limit_ns = int(limit / timedelta(microseconds=1)) * 1000
    buffers = Buffers(form, group.rank(), mapped.addresses, device, limit_ns)
    _kept.setdefault(group, []).append((buffers, mapped))
    return buffers


def empty_memory(form: BufferForm, device: torch.device) -> torch.Tensor:
    """Allocates memory of this rank that others can map, with zeros."""
    from torch.distributed import _symmetric_memory as symmetric

    return symmetric.empty(form.bytes, dtype=torch.uint8, device=device).zero_()


def map_memory(memory: torch.Tensor, group: ProcessGroup) -> Mapped:
    """Maps the memory of all ranks into this process; all ranks call it. Raises RuntimeError if it cannot be."""
    from torch.distributed import _symmetric_memory as symmetric

    handle = symmetric.rendezvous(memory, group)
    offset = int(getattr(handle, "offset", 0))
    addresses = tuple(int(address) + offset for address in handle.buffer_ptrs)
    if addresses[group.rank()] != memory.data_ptr() or not all(handle.buffer_ptrs):
        raise RuntimeError("the memory of some ranks has no address here")
    return Mapped(memory, addresses, handle)


def see_each_other(group: ProcessGroup, device: torch.device) -> bool:
    """Tells whether all ranks are processes of one host, and each sees and reaches the GPUs of all others."""
    every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    seen = [_number(str(getattr(each, "uuid", ""))) for each in every]
    index = torch.cuda.current_device()
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    own = torch.tensor([[_number(f"{socket.gethostname()} {boot}"), seen[index]]], device=device)
    of_all = own.new_empty(group.size(), 2)
    all_gather(of_all, own, group)
    hosts, gpus = of_all.T.tolist()
    others = [seen.index(gpu) for gpu in gpus if gpu in seen and gpu != seen[index]]
    alone = len(set(hosts)) == 1 and len(others) == len(set(others)) == len(gpus) - 1
    reached = alone and all(torch.cuda.can_device_access_peer(index, other) for other in others)
    return _all_are_ready(reached, group, device)


def _number(text: str) -> int:
    """Returns a number of 63 bits that stands for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _all_are_ready(ready: bool, group: ProcessGroup, device: torch.device) -> bool:
    """Tells whether all ranks are ready and have exchanged handles equally often, after what they do on the GPU."""
    import torch.distributed as dist

    votes = torch.tensor([int(ready), _exchanges, -_exchanges], device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    least, fewest, most = votes.tolist()
    return bool(least == 1 and fewest == -most)
