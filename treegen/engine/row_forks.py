"""Row forks: the device turns rows of a step into forks of other rows. The host learns later which ones.

             before                      row 1 is a fork of row 0
    row 0    [ 4 | 7 | 2: 5 tokens ]     [ 4 | 7 | 2: 5 tokens ]
    row 1    [ 4 | 3 | 9: 5 tokens ]     [ 4 | 7 | 9: 5 tokens ]    the tokens of page 2 are copied to page 9

A row keeps its last page, which nobody shares, so no page is taken or released on the device.
"""

from __future__ import annotations

import torch

from treegen.engine.pool import KVPool

_COPIED = 2048
"""Elements of a page that a thread block copies at a time."""


def fork_rows(
    pool: KVPool, table: torch.Tensor, seq_lens: torch.Tensor, table_rows: torch.Tensor, parents: torch.Tensor
) -> None:
    """Makes rows forks of others, with their pages and the tokens of their last page; does not wait for the device.

    Args:
        pool: Holds the KV.
        table: int32 `[batch, pages]`; the page table.
        seq_lens: int32 `[batch]`; tokens of each row of the table. KV of the last one is not stored yet.
        table_rows: int64 `[rows]`; the row of the table of each row of the step.
        parents: int64 `[rows]`; the parent of each row of the step: the row that it becomes a fork of, or itself if it
            stays as it is. A parent is its own parent. Rows with a parent out of range stay as they are.
    """
    keys, values = pool.keys, pool.values
    if table.device.type == "cpu":
        for row, parent in enumerate(parents.tolist()):
            if parent != row and 0 <= parent < len(parents):
                own, other = table[table_rows[row]], table[table_rows[parent]]
                full, partial = divmod(int(seq_lens[table_rows[row]]) - 1, pool.page_tokens)
                own[:full] = other[:full]
                if partial:
                    for cache in (keys, values):
                        cache[:, own[full]] = cache[:, other[full]]
        return
    launch_forks(pool, table, seq_lens, table_rows, parents)


def launch_forks(
    pool: KVPool, table: torch.Tensor, seq_lens: torch.Tensor, table_rows: torch.Tensor, parents: torch.Tensor
) -> None:
    """Makes rows forks of others in one launch, on a GPU or in Triton's interpreter."""
    from treegen.backends import write_kernels

    keys, values = pool.keys, pool.values
    of_key, of_value = keys[0, 0].numel(), values[0, 0].numel()
    grid = (len(parents), len(keys), -(-max(of_key, of_value) // _COPIED))
    write_kernels.fork_rows[grid](
        table_rows, parents, seq_lens, table, keys, values, len(parents), table.stride(0), keys.stride(0),
        values.stride(0), pool.page_tokens, of_key, of_value, _COPIED, num_warps=4,
    )  # fmt: skip
