"""The C code of this folder, compiled at the first use with the machine's C compiler, which Triton needs as well.

    tree_by_request.c   batch ──▶ tree       treegen.ir.tree.requests does the same
    cohort_plan.c       tree ──▶ plan        treegen.strategies.cohort
    item_tables.c       plan ──▶ schedule    treegen.schedule.by_request
    planned_seats.c     whom a plan serves   treegen.runtime.planned_requests

A serving engine plans beside a GPU that takes less than a millisecond for a step. NumPy takes 1 to 5 us for each of the
hundreds of operations of a plan, however few requests there are. Both ways have the same results, which tests compare.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

from treegen.autotune_cache.folders import cache_folder, make_folder, private_folder

_FOLDER = Path(__file__).parent
_SOURCES = ("tree_by_request.c", "cohort_plan.c", "item_tables.c", "planned_seats.c")
_OPTIONS = ("-O2", "-fPIC", "-shared", "-ffp-contract=off")
_LONGEST_S = 60  # seconds that compiling may take

_INT, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_ARGUMENTS = {
    "tree_by_request": (_POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER),
    "cohort_plan": (
        *(_POINTER, _POINTER, _INT, _INT, _INT),
        *(_INT, _INT, _FLOAT, _POINTER, _INT),
        *(_POINTER, _INT, _POINTER),
    ),
    "item_tables": (_POINTER, _POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER),
    "begin_requests": (_POINTER, _POINTER),
    "widen_state": (_POINTER, _POINTER, _INT),
    "serve_requests": (_POINTER, _POINTER, _INT, _POINTER, _POINTER),
    "running_requests": (_POINTER, _POINTER, _POINTER),
    "late_tokens": (_POINTER, _POINTER, _POINTER, _INT, _POINTER),
}


def c_compiler() -> str | None:
    """Returns the path of the C compiler: $CC, by default gcc or clang; None if there is none."""
    chosen = os.environ.get("CC")
    return shutil.which(chosen) if chosen else shutil.which("gcc") or shutil.which("clang")


@cache
def library() -> ctypes.PyDLL | None:
    """Returns the compiled functions; None where there is no C compiler, or it fails.

    The file lies in the cache folder, under a name of its sources, options and machine. Calls hold the GIL.
    """
    compiler = c_compiler()
    if compiler is None:
        return None
    name = f"{_digest(compiler)}.so"
    folder = cache_folder("compiled")
    return _loaded(folder / name) or _compiled(compiler, folder, name) or _compiled(compiler, private_folder(), name)


def _digest(compiler: str) -> str:
    """Returns the name of the compiled file: a digest of all that it depends on."""
    parts = [compiler, *_OPTIONS, platform.machine(), platform.system()]
    text = "\0".join(parts + [path.read_text("utf-8") for path in sorted(_FOLDER.glob("*.[ch]"))])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _compiled(compiler: str, folder: Path, name: str) -> ctypes.PyDLL | None:
    """Compiles the sources into a file of this folder, and loads it; None if either fails."""
    made = folder / f".{name}.{os.getpid()}"
    try:
        make_folder(folder)
        sources = [str(_FOLDER / source) for source in _SOURCES]
        command = [compiler, *_OPTIONS, "-o", str(made), *sources, "-lm"]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_LONGEST_S)
        made.replace(folder / name)
    except (OSError, subprocess.SubprocessError):
        with suppress(OSError):
            made.unlink()
        return None
    return _loaded(folder / name)


def _loaded(path: Path) -> ctypes.PyDLL | None:
    """Loads a compiled file; None where there is none, or it does not fit this machine."""
    try:
        made = ctypes.PyDLL(str(path.absolute())) if path.exists() else None
        for function, arguments in _ARGUMENTS.items() if made is not None else ():
            getattr(made, function).argtypes, getattr(made, function).restype = arguments, _INT
    except (OSError, AttributeError):
        return None
    return made
