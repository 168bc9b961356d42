"""The C code of this folder, compiled with the machine's C compiler, which Triton needs as well.

    tree_by_request.c   LiveBatch ──▶ tree by request     treegen.ir.tree.live_trees has the same results
    less_sharing.c      tree ──▶ LiveBatch, less shared   treegen.ir.tree.less_sharing
    windowed_tree.c     tree ──▶ tree within windows      treegen.ir.positions
    cohort_plan.c       tree ──▶ plan                     treegen.strategies.cohort
    context_cuts.c      where plans cut paths             treegen.strategies.context_cuts
    batch_walks.c       tree ──▶ cohorts                  treegen.search.cohort_counts
    batch_weights.c     cohorts ──▶ estimated times       treegen.search.weigh
    item_tables.c       plan ──▶ tables of a schedule     treegen.schedule.by_request, query_runs
    item_entries.c      the entries of its items          treegen.schedule.by_request, query_runs
    batch_tables.c      cohort_plan and item_tables in one call
    table_words.c       tables ──▶ words for the device   treegen.ir.request_tables
    planned_seats.c     whom a plan serves                treegen.runtime.planned_requests
    late_requests.c     what a late plan costs            treegen.runtime.lateness
    shared_prefixes.c   page table ──▶ shared prefixes    treegen.ir.tree.shared_prefixes

A serving engine plans beside a GPU that takes less than a millisecond for a step. NumPy takes 1 to 5 us for each of the
hundreds of operations of a plan, however few requests there are. Both ways have the same results, which tests compare.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy.typing as npt

from treegen.autotune_cache.folders import cache_folder, make_folder, private_folder, refusal

_FOLDER = Path(__file__).parent
_SOURCES = (
    "tree_by_request.c",
    "less_sharing.c",
    "windowed_tree.c",
    "cohort_plan.c",
    "context_cuts.c",
    "batch_walks.c",
    "batch_weights.c",
    "item_tables.c",
    "item_entries.c",
    "batch_tables.c",
    "table_words.c",
    "planned_seats.c",
    "late_requests.c",
    "shared_prefixes.c",
)
_OPTIONS = ("-O2", "-fPIC", "-shared", "-ffp-contract=off")
_LONGEST_S = 60  # seconds that compiling may take

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p
_ARGUMENTS = {
    "tree_by_request": (_POINTER, *(_INT,) * 5, *(_POINTER,) * 3),
    "share_less": (_POINTER, _INT, _POINTER, _INT),
    "windowed_tree": (_POINTER, _INT, _INT, *(_POINTER,) * 3),
    "batch_tables": (_POINTER, _POINTER, _POINTER, _POINTER, _INT, _POINTER),
    "write_tables": (_POINTER, _POINTER, _POINTER, _POINTER),
    "begin_requests": (_POINTER, _POINTER),
    "widen_state": (_POINTER, _POINTER, _INT),
    "serve_requests": (_POINTER, _POINTER, _INT, _POINTER),
    "planned_requests": (_POINTER, _POINTER, _POINTER),
    "late_facts": (_POINTER, _POINTER, _POINTER),
    "growth": (_POINTER, _POINTER, _INT, _INT, _POINTER),
    "weigh_policies": (_POINTER, _POINTER, _POINTER, _POINTER),
    "size_of_weighed": (),
    "policy_items": (_POINTER, _INT, _INT),
    "policy_time": (_POINTER, _POINTER, _INT, _INT, _POINTER),
    "best_policy": (_POINTER, _POINTER, _INT, _POINTER),
    "shared_prefixes": (*(_POINTER,) * 3, *(_INT,) * 3, _POINTER, _POINTER),
}


def c_compiler() -> str | None:
    """Returns the path of the C compiler: $CC, by default gcc or clang; None if there is none."""
    chosen = os.environ.get("CC")
    return shutil.which(chosen) if chosen else shutil.which("gcc") or shutil.which("clang")


@cache
def library() -> ctypes.PyDLL | None:
    """Returns the compiled functions; None where there is no C compiler, or it fails. Calls hold the GIL.

    The file lies in the cache folder. Its name has a digest of the sources, options and machine, and one of its own
    content, so that a damaged file is not loaded.
    """
    compiler = c_compiler()
    if compiler is None:
        return None
    digest = _digest(compiler)
    try:
        try:
            folder = _own_folder()
            return _found(folder, digest) or _compiled(compiler, folder, digest)
        except OSError:  # of the folder
            return _compiled(compiler, private_folder(), digest)
    except (OSError, AttributeError, subprocess.SubprocessError):
        return None


def address_of(array: npt.NDArray[Any]) -> int:
    """Returns the address of a contiguous array, whose owner keeps it. In an eighth of the time of its `ctypes.data`
    where it may be written to.
    """
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]  # before Python 3.12
    except (TypeError, ValueError):  # it is read-only, or empty
        address: int = array.ctypes.data
        return address


def _digest(compiler: str) -> str:
    """Returns a digest of all that the compiled file depends on."""
    parts = [compiler, *_OPTIONS, platform.machine(), platform.system()]
    text = "\0".join(parts + [path.read_text("utf-8") for path in sorted(_FOLDER.glob("*.[ch]"))])
    return _sha256(text.encode())


def _own_folder() -> Path:
    """Returns the folder of compiled files, which is made if it is missing and in which nobody else can put any."""
    folder = cache_folder("compiled")
    make_folder(folder)
    return private_folder() if refusal(folder) else folder


def _found(folder: Path, digest: str) -> ctypes.PyDLL | None:
    """Loads the file that an earlier process compiled; None where there is none, or it is damaged."""
    for path in folder.glob(f"{digest}.*.so"):
        if path.name.split(".")[1] == _sha256(path.read_bytes()):
            return _loaded(path)
    return None


def _compiled(compiler: str, folder: Path, digest: str) -> ctypes.PyDLL:
    """Compiles the sources into a file of this folder, and loads it. Raises OSError or SubprocessError."""
    with tempfile.TemporaryDirectory(prefix=".", dir=folder) as place:
        made = Path(place) / "made.so"
        sources = [str(_FOLDER / source) for source in _SOURCES]
        command = [compiler, *_OPTIONS, "-o", str(made), *sources, "-lm"]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_LONGEST_S)
        made.chmod(stat.S_IRWXU)
        path = folder / f"{digest}.{_sha256(made.read_bytes())}.so"
        made.replace(path)
    return _loaded(path)


def _loaded(path: Path) -> ctypes.PyDLL:
    """Loads a compiled file. Raises OSError or AttributeError where it does not fit this machine."""
    made = ctypes.PyDLL(str(path.absolute()))
    for function, arguments in _ARGUMENTS.items():
        getattr(made, function).argtypes, getattr(made, function).restype = arguments, _INT
    return made


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
