"""Every error and warning of treegen, under one root.

A message is one line that names the argument, the value, the reason and the fix. Errors are raised before any GPU work.
"""

from __future__ import annotations

_LONGEST_VALUE = 60


class TreegenError(ValueError):
    """Root of all treegen errors: `argument = value: reason; fix`."""

    def __init__(self, argument: str, value: object, reason: str, fix: str) -> None:
        text = " ".join(str(value).split()) if isinstance(value, str) else " ".join(repr(value).split())
        if len(text) > _LONGEST_VALUE:
            text = text[: _LONGEST_VALUE - 3] + "..."
        super().__init__(f"{argument} = {text}: {reason}; {fix}")
        self.argument = argument
        self.value = value
        self.reason = reason
        self.fix = fix

    def __reduce__(self) -> tuple[type[TreegenError], tuple[str, object, str, str]]:
        return type(self), (self.argument, self.value, self.reason, self.fix)


class TreeError(TreegenError):
    """A tree's description is not a forest of token runs with rows inside them."""


class FormatError(TreegenError):
    """A text or JSON form cannot be read."""


class PlanError(TreegenError):
    """A plan or a schedule is malformed or breaks the coverage law."""


class StrategyError(TreegenError):
    """A strategy's name or option is unknown or out of range."""


class ShapeError(TreegenError):
    """An attention shape (heads, head dims, types, pages) is impossible or not supported."""


class InputError(TreegenError):
    """A tensor handed to a kernel does not fit the kernel's tree and shape."""


class BackendError(TreegenError):
    """A backend or target is unknown or cannot run here."""


class TreegenWarning(UserWarning):
    """Root of all treegen warnings."""


class PerformanceWarning(TreegenWarning):
    """The result is right but the way to it is slower than it needs to be."""


class CacheWarning(TreegenWarning):
    """A cache folder or entry could not be used; work goes on without it."""
