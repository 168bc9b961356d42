"""Emitted modules: the text that was emitted is what runs; the file in the cache is for people."""

from __future__ import annotations

import linecache
import sys
from threading import Lock
from types import ModuleType

from treegen.autotune_cache.store import write_text
from treegen.codegen.compile_counter import MODULE_PREFIX, count_loaded
from treegen.codegen.emit import Source

loaded: dict[str, ModuleType] = {}
_lock = Lock()


def load_module(source: Source) -> ModuleType:
    """The module of an emitted source, under the name `<cache>/kernels/<digest>.py`; once per process.

    The file is written for people and debuggers. Nothing is read from it: whatever lies there or in a `__pycache__`
    beside it is never run.
    """
    with _lock:
        module = loaded.get(source.digest)
        if module is None:
            path = str(write_text("kernels", f"{source.digest}.py", source.text).absolute())
            module = ModuleType(f"{MODULE_PREFIX}{source.digest}")
            module.__file__ = path
            # Triton, its interpreter and tracebacks read lines of kernels from here. An entry without a time is never
            # compared with the file, which may have changed.
            linecache.cache[path] = (len(source.text), None, source.text.splitlines(keepends=True), path)
            sys.modules[module.__name__] = module
            exec(compile(source.text, path, "exec", dont_inherit=True), vars(module))
            loaded[source.digest] = module
            count_loaded()
        return module
