"""Marks of tests that need a C compiler."""

from __future__ import annotations

import pytest

from treegen.compiled import c_library

needs_compiler = pytest.mark.skipif(c_library.c_compiler() is None, reason="there is no C compiler")
