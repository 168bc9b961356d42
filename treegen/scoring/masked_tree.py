"""Masks of any shape: as a tree where that is possible, otherwise as a tree and a mask_mod that reads the mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treegen.ir.arrays import INT32_MAX, IntsLike, offsets
from treegen.ir.errors import CrossingError, TreeError
from treegen.ir.tree import Tree, custom_masks


def masked_tree(
    custom_mask: npt.ArrayLike,
    qo_indptr: IntsLike,
    kv_indptr: IntsLike,
    kv_indices: IntsLike | None = None,
    kv_last_page_len: IntsLike | None = None,
    page_size: int = 1,
    *,
    device: torch.device | str | None = None,
) -> tuple[Tree, Callable[..., Any] | None]:
    """Makes a tree and a mask_mod for `treegen.compile` from a batch of requests with FlashInfer's masks.

    Where the masks have the shape of a tree, no mask_mod is needed. Otherwise each query is a row that sees all tokens
    of its request, and the mask_mod hides tokens from it. It reads a tensor with a byte for each query and token, from
    the first token on that some query of the request does not see. Positions, which windows, ALiBi and score functions
    read, then count all tokens of the request; without a mask_mod they are those of `Tree.from_custom_mask`.

    Args:
        custom_mask, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, page_size: As in Tree.from_custom_mask.
        device: The device of the mask_mod's tensor; by default the current CUDA device, without one the CPU.

    Returns:
        The tree, and the mask_mod or None.

    Raises:
        TreeError: An argument is wrong.
    """
    arguments = (custom_mask, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, page_size)
    try:
        return Tree.from_custom_mask(*arguments), None
    except CrossingError:
        requests = custom_masks.requests_of(*arguments)
    tree = Tree.of_parts(custom_masks.under_masks(requests))
    first = [int(np.argmin(np.append(mask.all(0), False))) for mask in requests.masks]
    rests = [mask[:, begin:] for mask, begin in zip(requests.masks, first, strict=True)]
    rows = requests.queries[1:] - requests.queries[:-1]
    begins = offsets(np.array([rest.shape[1] for rest in rests], np.int64).repeat(rows))
    if begins[-1] > INT32_MAX:
        raise TreeError("custom_mask", f"{begins[-1]} entries", "exceeds 2^31 - 1", "split the batch")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    seen, begin, before = (
        torch.from_numpy(array).to(device)
        for array in (
            np.concatenate([rest.reshape(-1) for rest in rests]),
            begins[:-1].astype(np.int32),
            np.array(first, np.int32).repeat(rows),
        )
    )
    return tree, partial(_sees, seen, begin, before)


def _sees(
    seen: torch.Tensor, begin: torch.Tensor, before: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any
) -> Any:
    """The mask_mod: row b sees its first `before[b]` tokens; entries of further tokens begin at `seen[begin[b]]`."""
    place = kv_idx - before[b]
    return (place < 0) | seen[begin[b] + torch.clamp(place, min=0)]
