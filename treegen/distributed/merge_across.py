"""merge_across(): merges the attention states that the ranks of a group have of the same rows.

Each rank has attended to its own tokens. The states of disjoint sets of tokens merge exactly (FlashInfer, "Cascade
Inference", 2024), so out and lse over all tokens follow from those of the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from treegen.backends.check_inputs import TORCH_DTYPES, lse_scale
from treegen.cost.communication import MODES, Link, Mode, Wanted, best_merge, merge_modes
from treegen.distributed.collectives import all_gather, reduce_scatter
from treegen.distributed.measured_links import link_of
from treegen.distributed.packed_states import StateForm, combine, pack, rescale
from treegen.distributed.parallel import check_group
from treegen.distributed.peer_memory import buffers_for, reach_each_other
from treegen.ir.errors import InputError
from treegen.ir.scalars import is_one_of
from treegen.ir.shape import Shape, dtype_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from treegen.distributed.direct_states import Buffers

_COPY_GIGABYTES = 4000.0
"""What memory copies in a second, in units of 1e9 bytes, for the choice of a way: a detail beside the link's time."""


def merge_across(
    out: torch.Tensor,
    lse: torch.Tensor,
    group: ProcessGroup,
    *,
    mode: Mode | Literal["auto"] = "auto",
    heads: Wanted = "all",
    lse_base: str = "ln",
    link: Link | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the attention states of all ranks of a group.

    A rank that saw no token of a row (its lse is -inf) counts for nothing. Where no rank saw one, the result is 0 and
    -inf. States are merged in fp32, and equal inputs give equal bits in every run: "direct" and "exchange" merge in the
    order of the ranks, "gather" in the order of the library's reduction. With NCCL it can be captured in CUDA graphs,
    after a call with tensors of these sizes outside of them. Merges of a group have to follow one another on the
    device: on one stream, or ordered by events.

    Args:
        out: `[rows, heads, head_dim]` in fp16, bf16 or fp32: the rank's attention over its own tokens.
        lse: `[rows, heads]` in float32: its log-sum-exp.
        group: The ranks. All of them call this, with tensors of the same sizes and the same arguments.
        mode: "direct" writes states into the memory of the other ranks and combines them in one launch, where up to 8
            GPUs of a host reach each other's memory. "exchange" sends packed states, by one collective, and each rank
            combines them. "gather" sends lse first, and sums rescaled results by a second collective. "auto" takes the
            way that is fastest by the link's model.
        heads: "all" gives each rank all heads; "own" gives rank r of n the r-th n-th part of the heads.
        lse_base: The base of lse: "ln" or "log2".
        link: What connects the ranks, for "auto"; by default what `measure_link` found, or an NVLink of Hopper GPUs.
            All ranks have to give the same.

    Returns:
        out `[rows, heads, head_dim]` and lse `[rows, heads]`, or those of the rank's own heads.

    Raises:
        InputError: The tensors are no states, the group's size does not divide heads, or the mode is "direct" and ranks
            do not reach each other's memory; before any state is sent.
    """
    scale = lse_scale(lse_base)
    check_group("group", group)
    _check(out, lse)
    check_how(mode, heads)
    ranks, rank = group.size(), group.rank()
    if heads == "own" and out.shape[1] % ranks:
        fix = 'give a multiple of the ranks, or heads="all"'
        raise InputError("heads", f"{out.shape[1]} heads", f"cannot be divided among {ranks} ranks", fix)
    if ranks == 1 or not out.numel():
        return (out, lse) if heads == "all" else (out[:, : out.shape[1] // ranks], lse[:, : lse.shape[1] // ranks])
    out, lse = out.contiguous(), lse.contiguous()
    buffers = _buffers(out, group, mode, heads, link)
    if buffers is not None:
        return buffers.merge(out, lse, heads == "own", scale)
    if mode == "auto":
        mode = _fastest(out, group, heads, link, without="direct")
    merged = _exchanged if mode == "exchange" else _gathered
    return merged(out, lse, group, rank, heads == "own", scale)


def check_how(mode: object, heads: object) -> None:
    """Raises InputError unless these are arguments of `merge_across` of these names."""
    for name, value, known in (("mode", mode, ("auto", *MODES)), ("heads", heads, ("all", "own"))):
        if not is_one_of(value, known):
            raise InputError(name, value, "is unknown", f"use one of {', '.join(known)}")


def _buffers(
    out: torch.Tensor, group: ProcessGroup, mode: Mode | Literal["auto"], heads: Wanted, link: Link | None
) -> Buffers | None:
    """Returns the buffers of a direct merge; None if states are to be merged by collectives. Raises InputError."""
    if (_fastest(out, group, heads, link) if mode == "auto" else mode) != "direct":
        return None
    buffers = None
    if reach_each_other(group, out.device):
        states = len(out) * out.shape[1] // (group.size() if heads == "own" else 1)
        buffers = buffers_for(group, states, out.shape[2], out.dtype, out.device)
    if buffers is None and mode == "direct":
        why = (
            "needs 2 to 8 ranks of one host whose GPUs reach each other's memory and have room for buffers, and for a "
            "CUDA graph a call before it is captured"
        )
        raise InputError("mode", mode, why, 'give "auto"')
    return buffers


def _fastest(
    out: torch.Tensor, group: ProcessGroup, heads: Wanted, link: Link | None, *, without: Mode | None = None
) -> Mode:
    link, dim = link or link_of(group), max(8, out.shape[2] // 8 * 8)
    shape = Shape(out.shape[1], out.shape[1], dim, dtype=dtype_name("out", out.dtype))
    modes = [mode for mode in merge_modes(heads, len(out), shape, group.size(), link) if mode != without]
    return best_merge(heads, len(out), shape, group.size(), link, _COPY_GIGABYTES, modes).mode


def _exchanged(
    out: torch.Tensor, lse: torch.Tensor, group: ProcessGroup, rank: int, own: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch.distributed as dist

    parts = group.size() if own else 1
    packed = pack(out, lse, parts)
    received = packed.new_empty(group.size(), packed.shape[1])
    if own:
        dist.all_to_all_single(received, packed, group=group)
    else:
        all_gather(received, packed, group)
    return combine(received, StateForm(len(out), out.shape[1] // parts, out.shape[2], out.dtype), scale)


def _gathered(
    out: torch.Tensor, lse: torch.Tensor, group: ProcessGroup, rank: int, own: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch.distributed as dist

    ranks, rows, heads = group.size(), *lse.shape
    lses = lse.new_empty(ranks, rows, heads)
    all_gather(lses.view(-1, heads), lse, group)
    scaled, merged_lse = rescale(out, lses, rank, ranks if own else 1, scale)
    if not own:
        dist.all_reduce(scaled, group=group)
        return scaled[0].to(out.dtype), merged_lse
    merged = scaled.new_empty(scaled.shape[1:])
    reduce_scatter(merged, scaled.flatten(0, 1), group)
    mine = slice(rank * heads // ranks, (rank + 1) * heads // ranks)
    return merged.to(out.dtype), merged_lse[:, mine]


def _check(out: torch.Tensor, lse: torch.Tensor) -> None:
    for name, tensor in (("out", out), ("lse", lse)):
        if not isinstance(tensor, torch.Tensor):
            raise InputError(name, type(tensor).__name__, "is not a tensor", "give a torch.Tensor")
    if out.dim() != 3 or out.dtype not in TORCH_DTYPES.values():
        found = f"shape {tuple(out.shape)}, {out.dtype}"
        fix = "give [rows, heads, head_dim] in fp16, bf16 or fp32"
        raise InputError("out", found, "is no result of attention", fix)
    if lse.shape != out.shape[:2] or lse.dtype != torch.float32 or lse.device != out.device:
        found = f"shape {tuple(lse.shape)}, {lse.dtype} on {lse.device}"
        fix = f"give float32 {tuple(out.shape[:2])} on {out.device}"
        raise InputError("lse", found, "does not go with out", fix)
