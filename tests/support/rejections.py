"""Errors as all of treegen raises them: one line, `argument = value: reason; fix`."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from treegen import TreegenError

Make = Callable[[], object]


def rejected(make: Make, error: type[TreegenError], *words: str) -> None:
    """`make` raises exactly this error, in one line of the agreed form that has all `words` in order."""
    with pytest.raises(error) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    assert message == f"{caught.value.argument} = {message.split(' = ', 1)[1]}"
    assert caught.value.argument
    assert message.endswith(f": {caught.value.reason}; {caught.value.fix}")
    assert re.search(".*".join(map(re.escape, words)), message), message
