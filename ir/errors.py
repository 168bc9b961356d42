"""All errors and warnings of treegen, under one root each.

A message is one line that names the argument, the value, the reason and the fix. Errors are raised before any GPU work.
"""

from __future__ import annotations

import reprlib
import sys
import warnings

_LONGEST_VALUE = 60
_LONGEST_PART = 160
_LONGEST_READ = 4 * _LONGEST_PART
# Only the beginning of a value is written out: a list may have millions of entries, and be too deep for `repr`.
_SHOWN = reprlib.Repr()
_SHOWN.maxlevel = 6
_SHOWN.maxlist = _SHOWN.maxtuple = _SHOWN.maxdict = _SHOWN.maxset = _SHOWN.maxfrozenset = _SHOWN.maxdeque = 40
_SHOWN.maxstring = _SHOWN.maxlong = _SHOWN.maxother = _LONGEST_READ
_PACKAGE = "treegen"


class TreegenError(ValueError):
    """The root of all errors. Its message is `argument = value: reason; fix`.

    Args:
        argument: The name of the argument that is wrong.
        value: Its value; the message shows the first 60 characters.
        reason: What is wrong with it.
        fix: What to give instead.
    """

    def __init__(self, argument: str, value: object, reason: str, fix: str) -> None:
        self.argument = _short(argument, _LONGEST_PART)
        self.value = value
        self.reason = _short(reason, _LONGEST_PART)
        self.fix = _short(fix, _LONGEST_PART)
        shown = _short(value if isinstance(value, str) else _text_of(value), _LONGEST_VALUE)
        super().__init__(f"{self.argument} = {shown}: {self.reason}; {self.fix}")

    def __reduce__(self) -> tuple[type[TreegenError], tuple[str, object, str, str]]:
        return type(self), (self.argument, self.value, self.reason, self.fix)


def _text_of(value: object) -> str:
    """Returns the beginning of `repr(value)`, or the type of a value that has none, such as an int of 5,000 digits."""
    try:
        return _SHOWN.repr(value)
    except Exception:  # whatever a value's own `__repr__` raises
        return f"a value of type {type(value).__name__}"


def _short(text: str, longest: int) -> str:
    """Returns `text` on one line, cut after `longest` characters."""
    line = " ".join(text[:_LONGEST_READ].split())
    return line if len(line) <= longest and len(text) <= _LONGEST_READ else line[: longest - 3] + "..."


class TreeError(TreegenError):
    """A description of a tree is not a forest of token runs with rows inside them."""


class CrossingError(TreeError):
    """A mask has the shape of no tree."""


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


class PoolError(TreegenError):
    """Pages of a KV pool are missing, or held and free at once."""


class BranchError(TreegenError):
    """A branch of a sequence tree, or what is asked of it, is impossible."""


class RankError(TreegenError):
    """Ranks that have to do the same were given something else."""


class BackendError(TreegenError):
    """A backend or target is unknown or cannot run here."""


class TreegenWarning(UserWarning):
    """Root of all treegen warnings."""


class PerformanceWarning(TreegenWarning):
    """The result is right but took a slower way than needed."""


class CacheWarning(TreegenWarning):
    """A cache folder or entry could not be used; work goes on without it."""


def warn(category: type[TreegenWarning], message: str) -> None:
    """Warns at the line of the caller's code: the innermost frame outside of treegen."""
    frame = sys._getframe()
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def _is_ours(module: str) -> bool:
    return module == _PACKAGE or module.startswith(f"{_PACKAGE}.")
