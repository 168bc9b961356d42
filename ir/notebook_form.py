"""Values that draw themselves in notebooks. Layers above set the functions that draw them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_DRAWINGS: dict[str, Callable[[Any], str]] = {}


class Drawn:
    """A value that notebooks show as a drawing."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """Returns the drawing as HTML; None, so that notebooks show the text, where nothing draws such values."""
        draw = _DRAWINGS.get(type(self).__name__)
        return draw(self) if draw else None


def use_drawings(**drawings: Callable[[Any], str]) -> None:
    """Sets the functions that draw values, by the names of their classes."""
    _DRAWINGS.update(drawings)
