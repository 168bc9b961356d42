"""Expressions as lines of Triton, in the terms of templates/partial_attention/.

Its symbols are `raw` [M, N], the score before changes; `b`, `h` and `q_idx` [M, 1]; `kv_idx` [1, N]. Lines that depend
on neither score nor token go before the loops.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

import sympy

from treegen.ir.keys import ScoreCode
from treegen.scoring.expressions import QUERY, SCORE, TOKEN, computed

LESS = (sympy.StrictLessThan, sympy.StrictGreaterThan, sympy.LessThan, sympy.GreaterThan)
_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "whole_div": "//", "whole_mod": "%",
    "bit_and": "&", "right_shift": ">>",
    "and": "&", "or": "|", "xor": "^", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
_CALLS = {
    "where": "tl.where", "minimum": "tl.minimum", "maximum": "tl.maximum", "abs": "tl.abs", "floor": "tl.floor",
    "ceil": "tl.ceil", "exp": "tl.exp", "log": "tl.log", "sqrt": "tl.sqrt", "rsqrt": "tl.rsqrt", "sin": "tl.sin",
    "cos": "tl.cos", "erf": "tl.erf",
}  # fmt: skip
_FORMS = {
    "not": "({0} == 0)",
    "power": "tl.exp2({1} * tl.log2({0}))",
    "sigmoid": "(1.0 / (1.0 + tl.exp(-({0}))))",
    "tanh": "(2.0 / (1.0 + tl.exp(-2.0 * ({0}))) - 1.0)",
    "float": "{0}.to(tl.float32)",
    "int": "{0}.to(tl.int32)",
    "floor_mod": "((({0} % {1}) + {1}) % {1})",
    "floor_div": "(({0} - ((({0} % {1}) + {1}) % {1})) // {1})",
}


class _Lines:
    """An algebra of Triton code. Values are text, with compound values in brackets."""

    def __init__(self, before: frozenset[sympy.Basic], named: frozenset[sympy.Basic]) -> None:
        self._before, self._named = before, named
        self.before: list[str] = []
        self.inside: list[str] = []

    def symbol(self, name: str) -> str:
        """Returns the template's name of a symbol."""
        return "raw" if name == SCORE.name else name

    def constant(self, value: float | bool) -> str:
        """Returns a literal."""
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        return f"({value!r})" if value < 0 else repr(value)

    def call(self, name: str, *arguments: str) -> str:
        """Returns a call or an operator in Triton."""
        if name in _OPERATORS:
            return f"({arguments[0]} {_OPERATORS[name]} {arguments[1]})"
        if name in _CALLS:
            return f"{_CALLS[name]}({', '.join(arguments)})"
        return _FORMS[name].format(*arguments)

    def load(self, number: int, indices: tuple[str, ...], wrapped: tuple[bool, ...]) -> str:
        """Returns a load with indices clamped to the tensor."""
        places = []
        for axis, (index, wraps) in enumerate(zip(indices, wrapped, strict=True)):
            size = f"captured_{number}_size_{axis}"
            inside = f"tl.where({index} < 0, {index} + {size}, {index})" if wraps else index
            places.append(f"tl.minimum(tl.maximum({inside}, 0), {size} - 1) * captured_{number}_stride_{axis}")
        return f"entry_{number}({' + '.join([f'captured_{number}', *places])}, INTERPRETED)"

    def kept(self, expression: sympy.Basic, value: str) -> str:
        """Names a value that is used more than once or can be computed before the loops."""
        if expression not in self._named and expression not in self._before:
            return value
        ahead = expression in self._before or not expression.free_symbols & {SCORE, TOKEN}
        name = f"ahead_{len(self.before)}" if ahead else f"part_{len(self.inside)}"
        (self.before if ahead else self.inside).append(f"{name} = {value}")
        return name


def score_code(score: sympy.Basic | None, mask: sympy.Basic | None, captured: tuple[tuple[str, int], ...]) -> ScoreCode:
    """Returns the code of a new score and of a mask. captured: as in ScoreCode."""
    both = [each for each in (score, mask) if each is not None]
    uses = Counter(node for each in both for node in sympy.preorder_traversal(each))
    named = frozenset(node for node, times in uses.items() if times > 1 and not node.is_Atom)
    lines = _Lines(frozenset(_ahead(both)), named)
    known: dict[sympy.Basic, str] = {}
    texts = ["" if each is None else computed(each, lines, known) for each in (score, mask)]
    if score is not None and not score.has(SCORE, TOKEN):
        texts[0] = f"(raw * 0.0 + {texts[0]})"
    positions = any(each.has(QUERY, TOKEN) for each in both)
    bound = _seen_below(mask) if score is None else None
    below = "" if bound is None else computed(bound, lines, known)
    return ScoreCode(tuple(lines.before), tuple(lines.inside), texts[0], texts[1], captured, positions, below)


def _seen_below(mask: sympy.Basic | None) -> sympy.Basic | None:
    """Returns the position below which a mask is true for a row; None where none is known.

    `(kv_idx < prefix[b]) | ...` is true below `prefix[b]`, and `... & (kv_idx <= q_idx)` at most below `q_idx + 1`.
    """
    bounds = []
    for part in mask.args if isinstance(mask, sympy.And) else (mask,):
        of_part = (_bound(each) for each in (part.args if isinstance(part, sympy.Or) else (part,)))
        bound = next((each for each in of_part if each is not None), None)
        if bound is None:
            return None
        bounds.append(bound)
    return sympy.Min(*bounds)


def _bound(relation: sympy.Basic | None) -> sympy.Basic | None:
    """Returns x for a relation `kv_idx < x`, in any of its forms; None for others."""
    if not isinstance(relation, LESS):
        return None
    rest = relation.lts - relation.gts - TOKEN  # it says: kv_idx + rest < 0, or <= 0
    if rest.has(SCORE, TOKEN):
        return None
    if isinstance(relation, sympy.StrictLessThan | sympy.StrictGreaterThan):
        return -rest
    return 1 - rest if rest.is_integer else None


def _ahead(expressions: list[sympy.Basic]) -> Iterator[sympy.Basic]:
    """Yields the largest compound parts that depend on neither score nor token."""
    for expression in expressions:
        if expression.is_Atom or expression.is_number:
            continue
        if not expression.has(SCORE, TOKEN):
            yield expression
        else:
            yield from _ahead(list(expression.args))


@lru_cache(64)
def is_causal(mask: sympy.Basic) -> bool:
    """Says whether a mask has the part `& (kv_idx <= q_idx)`, so that no row sees tokens after its own."""
    parts = mask.args if isinstance(mask, sympy.And) else (mask,)
    return any(
        isinstance(part, sympy.LessThan | sympy.GreaterThan) and part.lts - part.gts == TOKEN - QUERY for part in parts
    )
