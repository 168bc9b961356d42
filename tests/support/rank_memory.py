"""Ranks that allocate memory for direct merges, some of which cannot: all of them go on alike."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from treegen.distributed import peer_memory
from treegen.distributed.direct_states import BufferForm
from treegen.distributed.peer_memory import Mapped, allocate, buffers_for, reach_each_other

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
