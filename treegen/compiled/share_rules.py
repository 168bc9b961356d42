"""How tokens are cut in even shares, as C is told: values of treegen.strategies.context_cuts."""

from __future__ import annotations

import ctypes

from treegen.strategies.context_cuts import LATE, LATE_TOKENS, MOST_PARTS, SHARE_ROOM, SPLIT_STEP


class ShareRules(ctypes.Structure):
    """The structure of that name in context_cuts.h."""

    _fields_ = (
        ("room", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("step", "most_parts", "late_tokens")),
        ("late", ctypes.c_double),
    )


SHARE_RULES = ShareRules(SHARE_ROOM, SPLIT_STEP, MOST_PARTS, LATE_TOKENS, LATE)
