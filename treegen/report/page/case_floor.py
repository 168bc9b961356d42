"""The floor of a case: the least time that a device needs for it, whatever the plan."""

from __future__ import annotations

from typing import Any

from treegen.target.problem import Problem


def floor_object(problem: Problem) -> dict[str, Any]:
    """Returns the floor of a problem for JSON forms.

    - bytes: unique KV, queries and results, each once;
    - flops: operations on visible (row, head, token) triples;
    - memory_us, arithmetic_us: microseconds that these take at the full rates of the target's data sheet;
    - time_us: the longer one;
    - bound: "memory" or "arithmetic", the longer one's name.
    """
    tree, shape, target = problem
    moved = tree.unique_tokens * shape.kv_token_bytes
    moved += tree.num_rows * shape.num_qo_heads * (shape.head_dim + shape.head_dim_v) * shape.dtype_bytes
    flops = tree.path_tokens * shape.num_qo_heads * 2 * (shape.head_dim + shape.head_dim_v)
    memory_us, arithmetic_us = moved / target.memory_bytes_per_us, flops / (target.tensor_tflops * 1e6)
    return {
        "bytes": moved,
        "flops": flops,
        "memory_us": memory_us,
        "arithmetic_us": arithmetic_us,
        "time_us": max(memory_us, arithmetic_us),
        "bound": "memory" if memory_us >= arithmetic_us else "arithmetic",
    }


def device_object(problem: Problem) -> dict[str, Any]:
    """Returns the facts about the target that floors and drawings need, for JSON forms."""
    target = problem.target
    return {
        "name": target.name,
        "sms": target.sms,
        "memory_gbps": target.memory_gbps,
        "tensor_tflops": target.tensor_tflops,
        "l2_bytes": target.l2_bytes,
    }
