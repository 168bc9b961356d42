"""Every strategy, and results of its schedules in the interpreter, against attention over all slots at once."""

from __future__ import annotations

import math

import torch

from support.forests import visible_slot_counts
from treegen import Shape, Tree, strategies
from treegen.backends import oracle
from treegen.backends.torch_program import TorchProgram
from treegen.ir.schedule import Schedule
from treegen.strategies import Strategy, strategy_from, strategy_names

SMALL = Shape(4, 2, 16, dtype="fp32")
TOLERANCE = 1e-5

_generator = torch.Generator().manual_seed(0)
_KEYS, _VALUES = (torch.randn(24_576, 2, 16, generator=_generator) for _ in range(2))
_QUERIES = torch.randn(1_024, 4, 16, generator=_generator)


def optioned(option: int | None) -> list[Strategy]:
    """Every registered strategy; those that take a length to split at get this one, if any."""
    split: dict[str, Strategy] = {}
    if option is not None:
        split["cohort"] = strategies.cohort(
            head_rows=option, split=16 * option if option < 10 else None, shares=3.5 if option == 24 else None
        )
        split["query"] = strategies.query(split=option)
        split["deft-node-chunk"] = strategies.deft_node_chunk(chunk=option)
        split["deft-flatten"] = strategies.deft_flatten(block=option, mask="bits" if option == 24 else "interval")
    return [split.get(name) or strategy_from(name) for name in (*strategy_names(), "auto")]


def tensors(tree: Tree, page_size: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and caches of SMALL for a tree, from one pool of normal numbers."""
    pages = -(-(tree.kv.last_slot + 1) // page_size)
    assert pages * page_size <= len(_KEYS)
    assert tree.num_rows <= len(_QUERIES)
    keys, values = (pool[: pages * page_size] for pool in (_KEYS, _VALUES))
    if page_size > 1:
        keys, values = (cache.view(pages, page_size, 2, 16) for cache in (keys, values))
    return _QUERIES[: tree.num_rows], keys, values


def masked_softmax(
    tree: Tree, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all slots at once in float64, under the brute-force mask of who sees which slot: (out, lse)."""
    keys, values = (cache.reshape(-1, 2, 16).double().repeat_interleave(2, 1) for cache in (keys, values))
    unseen = torch.from_numpy(visible_slot_counts(tree, len(keys)) == 0)
    scores = torch.einsum("rhd,thd->rht", q.double(), keys) / 4
    scores = scores.masked_fill(unseen[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.nan_to_num(lse, neginf=0.0)[..., None])
    return torch.einsum("rht,thd->rhd", weights, values), lse


def run(schedule: Schedule, tree: Tree) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a schedule in the interpreter."""
    q, keys, values = tensors(tree)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan)
    TorchProgram(schedule, SMALL, q.device)(q, keys, values, out, lse, SMALL.head_dim**-0.5, 1.0)
    return out, lse


def assert_computes_attention(schedule: Schedule, tree: Tree) -> None:
    expected = masked_softmax(tree, *tensors(tree))
    for found, correct in zip(run(schedule, tree), expected, strict=True):
        assert oracle.error(found, correct) <= TOLERANCE


# Worked examples


def tree_of_two_roots() -> Tree:
    """100 over (10, 20 over (5, 5)), and 7: nodes 0 to 5 in this order, a row per leaf."""
    return Tree.parse("100(10,20(5*2))+7")
