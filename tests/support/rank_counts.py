"""Ranks that count the bytes of tensors which merge_across hands to torch.distributed, and compare with the account."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from treegen.cost.communication import Collective, merge_cost
from treegen.cost.known_links import link_named
from treegen.distributed import merge_across
from treegen.ir.shape import Shape

SIZES = ((1, 4, 8, "bf16"), (5, 8, 40, "fp16"), (3, 4, 24, "fp32"), (64, 32, 128, "bf16"))
"""Rows, heads, head_dim and type."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_COUNTED: dict[str, tuple[str, Callable[[int, int], int], int]] = {
    # The collective, the bytes that a rank sends for those of a tensor, and that tensor's place in a call.
    "all_gather_into_tensor": ("all-gather", lambda size, ranks: size * (ranks - 1), 1),
    "all_gather_single": ("all-gather", lambda size, ranks: size * (ranks - 1), 1),
    "all_to_all_single": ("all-to-all", lambda size, ranks: size * (ranks - 1) // ranks, 1),
    "reduce_scatter_tensor": ("reduce-scatter", lambda size, ranks: size * (ranks - 1) // ranks, 1),
    "reduce_scatter_single": ("reduce-scatter", lambda size, ranks: size * (ranks - 1) // ranks, 1),
    "all_reduce": ("all-reduce", lambda size, ranks: 2 * (size * (ranks - 1) // ranks), 0),
}
_OTHERS = ("all_gather", "all_to_all", "broadcast", "gather", "scatter", "reduce", "reduce_scatter", "send", "recv",
           "isend", "irecv", "batch_isend_irecv", "all_gather_object", "broadcast_object_list")  # fmt: skip


def counted_bytes() -> None:
    """Merges states of several sizes in every way, and compares what is sent with the account."""
    group = dist.group.WORLD
    assert group is not None
    sent: list[tuple[str, int]] = []
    running: list[str] = []
    for name, (collective, bytes_of, place) in _COUNTED.items():
        if hasattr(dist, name):
            setattr(dist, name, _counting(getattr(dist, name), collective, bytes_of, place, sent, running))
    for name in _OTHERS:
        setattr(dist, name, _refused(name))
    checked = 0
    for (rows, heads, dim, dtype), mode, wanted in product(SIZES, ("exchange", "gather"), ("all", "own")):
        out = torch.randn(rows, heads, dim).to(_DTYPES[dtype])
        lse = torch.randn(rows, heads)
        sent.clear()
        merge_across(out, lse, group, mode=mode, heads=wanted)
        shape = Shape(heads, heads, dim, dtype=dtype)
        account = merge_cost(mode, wanted, rows, shape, group.size(), link_named("nvlink"), 4000.0)
        assert sent == [(each.name, each.sent) for each in account.collectives], (rows, heads, dim, dtype, mode, wanted)
        assert all(isinstance(each, Collective) for each in account.collectives)
        checked += 1
    assert checked == 16


def _counting(
    function: Any, collective: str, bytes_of: Callable[[int, int], int], place: int, sent: list[tuple[str, int]],
    running: list[str],
) -> Any:  # fmt: skip
    """Wraps a collective so that it notes what it sends, except inside of another one: newer names call older ones."""

    def counting(*tensors: Any, **options: Any) -> Any:
        if not running:
            tensor = tensors[place]
            sent.append((collective, bytes_of(tensor.numel() * tensor.element_size(), options["group"].size())))
        running.append(collective)
        try:
            return function(*tensors, **options)
        finally:
            running.pop()

    return counting


def _refused(name: str) -> Any:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError(f"{name} sends bytes that nobody counts")

    return refused
