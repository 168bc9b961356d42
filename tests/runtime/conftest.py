"""Fixtures of tests of running batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from treegen.compiled import c_library


@pytest.fixture(scope="module", params=["C", "NumPy"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plans, and whom they serve, with the C code and without it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "NumPy":
            patch.setattr(c_library, "library", lambda: None)
        elif c_library.library() is None:
            pytest.skip("there is no C compiler")
        yield
