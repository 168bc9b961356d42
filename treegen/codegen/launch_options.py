"""What Triton takes of a launch besides arguments: warps, stages, registers, and whether it may begin early."""

from __future__ import annotations

from typing import Any

from treegen.ir.keys import KernelKey, MergeKey
from treegen.target.targets import starts_launches_early

_HOPPER, _BLACKWELL = 90, 100
_MOST_REGISTERS = 255
"""Of a thread. On Ampere and Blackwell kernels are told that they may take them: by itself the assembler rather spills
some. Those that need most, which merge, work off lists or have tiles of over _FEW_TOKENS, spill less by themselves.
"""
_FEW_TOKENS = 64


def launch_options(key: KernelKey | MergeKey, capability: int) -> dict[str, Any]:
    """What Triton takes of a launch besides arguments. capability: as of switch_values."""
    dependent, on_hopper = starts_launches_early(capability), _HOPPER <= capability < _BLACKWELL
    if isinstance(key, MergeKey):
        return {"num_warps": key.num_warps, **({"launch_pdl": True} if dependent else {})}
    needs_most = key.epilogue_merge or key.work_list or key.tile_tokens > _FEW_TOKENS
    may_take_all = capability > 0 and not on_hopper and not needs_most
    return {
        "num_warps": key.num_warps,
        "num_stages": key.num_stages,
        **({"launch_pdl": True} if dependent and key.epilogue_merge else {}),
        **({"maxnreg": _MOST_REGISTERS} if may_take_all else {}),
    }
