"""Kept calls: bound calls by the form of their tensors."""

from __future__ import annotations

from typing import TypeVar

MOST_FORMS = 64
"""The most forms of tensors for which calls are kept."""

Kept = TypeVar("Kept")


class KeptCalls(dict[tuple[object, str], Kept]):
    """Bound calls by the form of their tensors (check_inputs.form_of) and the base of their lse."""

    def keep(self, form: tuple[object, ...], lse_base: str, call: Kept) -> None:
        """Keeps a call, and drops the oldest one of more than MOST_FORMS."""
        self[form, lse_base] = call
        if len(self) > MOST_FORMS:
            del self[next(iter(self))]
