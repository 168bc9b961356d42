"""Whether Triton has tiles of results in registers as instructions of emitted kernels take them: two neighbours of a
row at a time. It does so far, but promises nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from treegen.ir.errors import BackendError

_PAIRS = "v2.f32"
_INSTRUCTION = re.compile(rf"elementwise_inline_asm[^\n]*{re.escape(_PAIRS)}[^\n]*-> tensor<[^#>]*(#\w*)>")
_NEIGHBOURS = (
    re.compile(r"#ttg\.nvidia_mma<"),
    re.compile(r"#ttg\.linear<\{register = \[\[0, 1\]"),
    re.compile(r"#ttg\.blocked<\{sizePerThread = \[\d+, \d*[02468]\][^\n]*order = \[1, 0\]"),
)
"""Layouts in which every two registers from the first on have neighbours of a row: of matrix instructions before
Blackwell, of tensor memory, and of blocks.
"""


@lru_cache(1024)
def check_pairs(compiled: Any) -> None:
    """Raises BackendError where a compiled kernel takes registers for neighbours that are not; asked once for each."""
    text = compiled.asm["ttgir"]
    for layout in set(_INSTRUCTION.findall(text)):
        (definition,) = re.findall(rf"^{layout} = (.*)$", text, re.MULTILINE)
        if not any(known.match(definition) for known in _NEIGHBOURS):
            import triton

            reason = f"has tiles of results in registers in an order that is not known here, {definition}"
            raise BackendError("triton", triton.__version__, reason, "install triton 3.7, or choose backend='torch'")
