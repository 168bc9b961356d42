"""What machine code takes: registers, stack, and what of the stack loops over KV touch, as Triton's own `cuobjdump`
prints them.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from treegen.ir.errors import BackendError

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.+?)\s*;", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA\b.*?\b0x([0-9a-f]+)")
_MATRIX_PRODUCT = re.compile(r"\b\w*MMA\b")
_STACK_ACCESS = re.compile(r"\b(LDL|STL)\b")


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread."""
    text = _printed("-res-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise _unread(text)
    return int(found.group(1)), int(found.group(2))


def stack_accesses_in_loops(cubin: bytes) -> int:
    """Instructions that read or write the stack within innermost loops that multiply matrices."""
    return accesses_in_loops(_printed("-sass", cubin))


def accesses_in_loops(sass: str) -> int:
    """The same of printed instructions."""
    code = [(int(place, 16), text) for place, text in _INSTRUCTION.findall(sass)]
    branches = [(_BRANCH.search(text), place) for place, text in code]
    loops = [(int(to.group(1), 16), place) for to, place in branches if to and int(to.group(1), 16) < place]
    accesses = 0
    for loop in loops:
        body = [text for place, text in code if loop[0] <= place <= loop[1]]
        innermost = not any(loop != other and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)
        if innermost and any(map(_MATRIX_PRODUCT.search, body)):
            accesses += sum(map(bool, map(_STACK_ACCESS.search, body)))
    return accesses


def _printed(option: str, cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    handle, name = tempfile.mkstemp(suffix=".cubin")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        done = subprocess.run([str(tool), option, name], capture_output=True, text=True, check=False)
    finally:
        Path(name).unlink()
    if done.returncode:
        raise _unread(done.stderr)
    return done.stdout


def _unread(said: str) -> BackendError:
    return BackendError("cubin", said.strip(), "is what cuobjdump says of it", "install a complete triton package")
