"""What ranks refuse in tests of `treegen.distributed`, and how they end when one of them is gone."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from support.ranks import TIMEOUT
from treegen import strategies
from treegen.backends.page_table import PageTable
from treegen.distributed import Merge, Parallel, compile, compile_batch, merge_across
from treegen.ir.errors import RankError, TreegenError
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree


def bad_input() -> None:
    """Refuses what ranks cannot serve, before anything is sent; in check mode all ranks name what differs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tree = Tree.from_levels([1, 4], [8, 3])
    shape = Shape(2 * ranks, ranks, 16, dtype="fp32")
    heads, tokens = Parallel.over(mesh, tensor="ranks"), Parallel.over(mesh, context="ranks")
    few = Shape(2 * ranks, 1, 16, dtype="fp32")
    table = torch.zeros(2, 4, dtype=torch.int32)
    rows = PageTable(table, torch.zeros(2, dtype=torch.int32), 8, qo_indptr=torch.zeros(3, dtype=torch.int32))
    plain, invariant = replace(rows, qo_indptr=None), strategies.batch_invariant()

    def merge(of_out: int, of_lse: int, **how: Any) -> object:
        return merge_across(torch.zeros(2, of_out, 8), torch.zeros(2, of_lse), tokens.groups[0], **how)

    refused: tuple[tuple[str, Callable[[], object]], ...] = (
        ("tensor = tp", lambda: Parallel.over(mesh, tensor="tp")),
        ("context = ranks", lambda: Parallel.over(mesh, tensor="ranks", context="ranks")),
        ("interleave = 0", lambda: Parallel.over(mesh, context="ranks", interleave=0)),
        ("num_kv_heads = 1", lambda: compile(tree, heads, shape=few)),
        ("num_qo_heads = 1", lambda: compile(tree, heads, shape=Shape(1, 1, 16))),
        ("batch_invariant = True", lambda: compile(tree, tokens, shape=shape, batch_invariant=True)),
        ("batch_invariant = True", lambda: compile(tree, tokens, shape=shape, strategy=invariant)),
        ("qo_indptr", lambda: compile_batch(shape, rows, tokens, max_tokens=8)),
        ("mode = fast", lambda: merge(2, 2, mode="fast")),
        ("mode = direct: needs 2 to 8 ranks of one host", lambda: merge(2, 2, mode="direct")),
        ("mode = fast", lambda: Merge(mode="fast")),  # type: ignore[arg-type]
        ("heads = some", lambda: Merge(heads="some")),  # type: ignore[arg-type]
        ("heads = 1 heads", lambda: merge(1, 1, heads="own")),
        ("lse", lambda: merge(2, 3)),
        ("rank = 9", lambda: tree.shard(9, 2)),
        ("positions = None", lambda: compile_batch(shape, plain, tokens, max_tokens=8, window_left=3)),
    )  # fmt: skip
    for beginning, call in refused:
        with pytest.raises(TreegenError, match=f"^{re.escape(beginning)}"):
            call()
    assert compile(tree, Parallel.over(mesh, tensor="ranks", replicate_kv=True), shape=few).local is not None
    os.environ["TREEGEN_CHECK"] = "1"
    compile(tree, tokens, shape=shape)
    other = Tree.from_levels([1, 4], [8, 3 + (rank == 1)])
    others = Merge("gather") if rank == 1 else None
    named = (
        ("tree.tokens[1] = 4: 4 on rank 1 is 3 on rank 0", lambda: compile(other, tokens, shape=shape)),
        ("shape", lambda: compile(tree, heads, shape=replace(shape, head_dim=16 + 8 * (rank == 1)))),
        ("strategy = deft-node", lambda: compile(tree, heads, shape=shape, strategy=("query", "deft-node")[rank == 1])),
        ("merge = ", lambda: compile(tree, tokens, shape=shape, merge=Merge(("gather", "exchange")[rank == 1]))),
        ("merge = ", lambda: compile_batch(shape, plain, tokens, max_tokens=8, merge=others)),
    )
    for beginning, call in named:
        with pytest.raises(RankError, match=f"^{re.escape(beginning)}"):
            call()
    merge(2, 2)  # no rank is left behind


def failing() -> None:
    """Rank 1 fails before a merge: the others end with an error within the timeout of the group."""
    group = dist.group.WORLD
    assert group is not None
    began = time.monotonic()
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        merge_across(torch.zeros(2, 2, 8), torch.zeros(2, 2), group, mode="exchange")
    assert time.monotonic() - began < TIMEOUT + 5
    print(f"rank {group.rank()} ended with an error")
