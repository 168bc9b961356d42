"""Emitted modules on disk: written once, imported by path, named by digest."""

from __future__ import annotations

import importlib.util
import sys
from threading import Lock
from types import ModuleType

from treegen.autotune_cache.store import write_text
from treegen.counts import MODULE_PREFIX, count_loaded
from treegen.emit import Source

_loaded: dict[str, ModuleType] = {}
_lock = Lock()


def load_module(source: Source) -> ModuleType:
    """The module of an emitted source, imported from `<cache>/kernels/<digest>.py`; once per process.

    The file is imported only if its bytes equal the source, otherwise it is rewritten first, so a damaged or foreign
    file is never run.
    """
    with _lock:
        module = _loaded.get(source.digest)
        if module is None:
            path = write_text("kernels", f"{source.digest}.py", source.text)
            name = f"{MODULE_PREFIX}{source.digest}"
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            _loaded[source.digest] = module
            count_loaded()
        return module
