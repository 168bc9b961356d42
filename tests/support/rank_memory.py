"""Ranks that allocate memory for direct merges. Where one of them cannot, all go on alike."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from treegen.distributed import peer_memory
from treegen.distributed.direct_states import BufferForm
from treegen.distributed.peer_memory import Mapped, allocate, buffers_for, reach_each_other, see_each_other

CPU = torch.device("cpu")


def failing(*_: object) -> NoReturn:
    """Has no memory."""
    raise torch.OutOfMemoryError("no memory today")


def votes() -> None:
    """Lets one rank after another fail, and ranks exchange handles unequally often; three ranks."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    form = BufferForm.for_states(group.size(), 100, 16, torch.bfloat16)
    few = dist.new_group([0, 1])

    def empty(form: BufferForm, device: torch.device) -> torch.Tensor:
        return torch.zeros(form.bytes, dtype=torch.uint8, device=device)

    def mapped(memory: torch.Tensor, group: dist.ProcessGroup) -> Mapped:
        return Mapped(memory, (memory.data_ptr(),) * group.size(), None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_memory, "empty_memory", empty)
        patch.setattr(peer_memory, "map_memory", mapped)
        made = allocate(group, form, CPU)
        assert made is not None
        assert (made.form, made.rank) == (form, rank)
        assert buffers_for(group, form.capacity, 16, torch.bfloat16, CPU) is made
        for name in ("empty_memory", "map_memory"):
            for unlucky in range(group.size()):
                with pytest.MonkeyPatch.context() as worse:
                    if rank == unlucky:
                        worse.setattr(peer_memory, name, failing)
                    assert allocate(group, form, CPU) is None, (name, unlucky)
        assert allocate(group, form, CPU) is not None
        if rank < 2:
            assert allocate(few, form, CPU) is not None
        assert allocate(group, form, CPU) is None  # torch would wait for handles that never come
        assert (rank == 2) or allocate(few, form, CPU) is not None
    assert not reach_each_other(group, CPU)


def sights() -> None:
    """Tells ranks of one host whose GPUs reach each other from all others; three ranks, each with GPUs in its order."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    gpus = [f"GPU-{(rank + place) % 3}" for place in range(3)]  # this rank's own is the first that it sees

    def seen(**differing: object) -> bool:
        """What all ranks say; rank 1 has other functions."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "device_count", lambda: len(gpus))
            patch.setattr(torch.cuda, "current_device", lambda: 0)
            patch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=gpus[gpu]))
            patch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: own != other)
            for name, value in differing.items() if rank == 1 else ():
                patch.setattr(socket if name == "gethostname" else torch.cuda, name, value)
            return see_each_other(group, CPU)

    assert seen()
    assert not seen(can_device_access_peer=lambda own, other: False)
    assert not seen(gethostname=lambda: "elsewhere")
    assert not seen(device_count=lambda: 2)  # it does not see the GPU of rank 0
    assert not seen(current_device=lambda: 2)  # that of rank 0
    assert not seen(get_device_properties=lambda gpu: SimpleNamespace())  # of an older torch
