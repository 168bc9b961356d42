"""Expressions: sympy trees of functions of scores and positions, and the walk over them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import sympy
from sympy.core.logic import fuzzy_and
from sympy.logic.boolalg import BooleanAtom, BooleanFunction

SCORE = sympy.Symbol("score", real=True)
BATCH, HEAD, QUERY, TOKEN = (
    sympy.Symbol(name, integer=True, nonnegative=True) for name in ("b", "h", "q_idx", "kv_idx")
)
"""The row in the caller's order; the query head; the positions of query and token along the row's path, from 0."""


class Where(sympy.Function):  # type: ignore[misc]
    """Where(condition, a, b): a where the condition holds, otherwise b."""

    nargs = 3

    @classmethod
    def eval(cls, condition: sympy.Basic, a: sympy.Basic, b: sympy.Basic) -> sympy.Basic | None:
        """Simplifies constant conditions and equal branches."""
        if condition in (sympy.true, sympy.false):
            return a if condition == sympy.true else b
        return a if a == b else None

    def _eval_is_integer(self) -> Any:
        return fuzzy_and(each.is_integer for each in self.args[1:])

    def _eval_is_nonnegative(self) -> Any:
        return fuzzy_and(each.is_nonnegative for each in self.args[1:])


class FloorDivision(sympy.Function):  # type: ignore[misc]
    """Division rounded towards minus infinity, of integers or other numbers."""

    nargs = 2

    @classmethod
    def eval(cls, a: sympy.Basic, b: sympy.Basic) -> sympy.Basic | None:
        """Evaluates the quotient of constants."""
        return sympy.floor(a / b) if a.is_Number and b.is_Number else None

    def _eval_is_integer(self) -> Any:
        return fuzzy_and(each.is_integer for each in self.args)

    def _eval_is_nonnegative(self) -> Any:
        return True if self.args[0].is_nonnegative and self.args[1].is_positive else None


class FloorRemainder(sympy.Function):  # type: ignore[misc]
    """a - FloorDivision(a, b) * b, with the sign of b."""

    nargs = 2

    @classmethod
    def eval(cls, a: sympy.Basic, b: sympy.Basic) -> sympy.Basic | None:
        """Evaluates the remainder of constants."""
        return a - sympy.floor(a / b) * b if a.is_Number and b.is_Number else None

    def _eval_is_integer(self) -> Any:
        return fuzzy_and(each.is_integer for each in self.args)

    def _eval_is_nonnegative(self) -> Any:
        return True if self.args[1].is_positive else None


class BitAnd(sympy.Function):  # type: ignore[misc]
    """The bits that two integers have in common."""

    nargs = 2
    is_integer = True

    @classmethod
    def eval(cls, a: sympy.Basic, b: sympy.Basic) -> sympy.Basic | None:
        """Evaluates the function of constants."""
        return sympy.Integer(int(a) & int(b)) if a.is_Integer and b.is_Integer else None

    def _eval_is_nonnegative(self) -> Any:
        return True if any(each.is_nonnegative for each in self.args) else None


class RightShift(sympy.Function):  # type: ignore[misc]
    """An integer without its lowest bits, b of them, with its sign."""

    nargs = 2
    is_integer = True

    @classmethod
    def eval(cls, a: sympy.Basic, b: sympy.Basic) -> sympy.Basic | None:
        """Evaluates the function of constants."""
        return sympy.Integer(int(a) >> int(b)) if a.is_Integer and b.is_Integer else None

    def _eval_is_nonnegative(self) -> Any:
        return self.args[0].is_nonnegative


BITS: dict[str, Callable[..., sympy.Basic]] = {"and": BitAnd, "right_shift": RightShift}
"""Functions of the bits of integers."""


class Sigmoid(sympy.Function):  # type: ignore[misc]
    """1 / (1 + exp(-x))."""

    nargs = 1

    @classmethod
    def eval(cls, x: sympy.Basic) -> sympy.Basic | None:
        """Evaluates the function of a constant."""
        return 1 / (1 + sympy.exp(-x)) if x.is_Number else None


class Load(sympy.Function):  # type: ignore[misc]
    """Load(k, i, j, ...): the entry at i, j, ... of captured tensor k."""

    is_real = True


class WholeLoad(Load):
    """A Load from a tensor of integers."""

    is_integer = True


def is_truth(expression: sympy.Basic) -> bool:
    """Returns whether an expression is a truth value and not a number."""
    return isinstance(expression, BooleanFunction | BooleanAtom | sympy.core.relational.Relational)


T = TypeVar("T")


class Algebra(Protocol[T]):
    """The values that expressions are computed in: text, or tensors."""

    def symbol(self, name: str) -> T:
        """Returns a symbol's value."""

    def constant(self, value: float | bool) -> T:
        """Returns the value of a constant: int, float (also infinite) or bool."""

    def call(self, name: str, *arguments: T) -> T:
        """Applies a function to computed arguments.

        Names are add, sub, mul, div, power, floor_div and floor_mod (of integers), whole_div and whole_mod (of integers
        of at least 0), bit_and and right_shift (of integers), minimum, maximum, where, not, and, or, xor, lt, le, gt,
        ge, eq, ne, abs, floor, ceil, exp, log, sqrt, rsqrt, tanh, sigmoid, sin, cos, erf, float (of integers), and int
        (of integers in a floating-point type).
        """

    def load(self, number: int, indices: tuple[T, ...], wrapped: tuple[bool, ...]) -> T:
        """Returns an entry of a captured tensor. A `wrapped` index may be negative and then counts from the end."""

    def kept(self, expression: sympy.Basic, value: T) -> T:
        """Stores the value of a compound expression; returns the value to use for it from now on."""


_CALLS: dict[type, str] = {
    Where: "where", Sigmoid: "sigmoid", BitAnd: "bit_and", RightShift: "right_shift",
    sympy.Not: "not", sympy.And: "and", sympy.Or: "or", sympy.Xor: "xor",
    sympy.StrictLessThan: "lt", sympy.LessThan: "le", sympy.StrictGreaterThan: "gt", sympy.GreaterThan: "ge",
    sympy.Equality: "eq", sympy.Unequality: "ne",
    sympy.Min: "minimum", sympy.Max: "maximum", sympy.Abs: "abs", sympy.floor: "floor", sympy.ceiling: "ceil",
    sympy.exp: "exp", sympy.log: "log", sympy.tanh: "tanh", sympy.sin: "sin", sympy.cos: "cos", sympy.erf: "erf",
}  # fmt: skip
_JOINING = frozenset({"and", "or", "xor", "minimum", "maximum"})
_OF_FLOATS = frozenset({"floor", "ceil", "exp", "log", "tanh", "sigmoid", "sin", "cos", "erf"})
_ROOTS = {sympy.Rational(1, 2): "sqrt", -sympy.Rational(1, 2): "rsqrt"}
_MOST_MULTIPLIED = 8
"""The largest integer exponent of a power that is computed by products."""
_TINY = 1e-37
"""Stands for 0, which has no logarithm."""


def computed(expression: sympy.Basic, algebra: Algebra[T], known: dict[sympy.Basic, T]) -> T:
    """Computes an expression in an algebra. known: values of earlier expressions; new ones are added."""
    if expression in known:
        return known[expression]
    if isinstance(expression, sympy.Symbol):
        return algebra.symbol(expression.name)
    if expression in (sympy.true, sympy.false):
        return algebra.constant(bool(expression))
    if isinstance(expression, sympy.Integer):
        return algebra.constant(int(expression))
    if expression.is_number and not expression.has(Load):
        return algebra.constant(float(expression))
    known[expression] = value = algebra.kept(expression, _compound(expression, algebra, known))
    return value


def _compound(expression: sympy.Basic, algebra: Algebra[T], known: dict[sympy.Basic, T]) -> T:
    if isinstance(expression, Load):
        number, *indices = expression.args
        values = tuple(_index(index, algebra, known) for index in indices)
        return algebra.load(int(number), values, tuple(not index.is_nonnegative for index in indices))
    if isinstance(expression, sympy.Pow):
        return _power(expression.base, expression.exp, algebra, known)
    if isinstance(expression, FloorDivision | FloorRemainder):
        return _floored(expression, algebra, known)
    if isinstance(expression, sympy.Mul):
        return _product(expression, algebra, known)
    if isinstance(expression, sympy.Add):
        return _sum(expression, algebra, known)
    name, arguments = _CALLS[type(expression)], expression.args
    if name not in _JOINING:
        first, *others = [computed(argument, algebra, known) for argument in arguments]
        if name in _OF_FLOATS and arguments[0].is_integer:
            first = algebra.call("float", first)
        return algebra.call(name, first, *others)
    least, *further = sorted(arguments, key=sympy.default_sort_key)
    value = computed(least, algebra, known)
    for argument in further:
        value = algebra.call(name, value, computed(argument, algebra, known))
    return value


def _index(index: sympy.Basic, algebra: Algebra[T], known: dict[sympy.Basic, T]) -> T:
    value = computed(index, algebra, known)
    # Rounded values are integers in a floating-point type.
    return algebra.call("int", value) if index.has(sympy.floor, sympy.ceiling) else value


def _sum(expression: sympy.Add, algebra: Algebra[T], known: dict[sympy.Basic, T]) -> T:
    terms = sorted(expression.args, key=lambda term: (term.could_extract_minus_sign(), sympy.default_sort_key(term)))
    value = computed(terms[0], algebra, known)
    for term in terms[1:]:
        if term.could_extract_minus_sign():
            value = algebra.call("sub", value, computed(-term, algebra, known))
        else:
            value = algebra.call("add", value, computed(term, algebra, known))
    return value


def _product(expression: sympy.Mul, algebra: Algebra[T], known: dict[sympy.Basic, T]) -> T:
    factors = expression.as_ordered_factors()
    below = [factor for factor in factors if isinstance(factor, sympy.Pow) and factor.exp == -1]
    first, *others = [factor for factor in factors if factor not in below] or [sympy.Integer(1)]
    value = computed(first, algebra, known)
    for factor in others:
        value = algebra.call("mul", value, computed(factor, algebra, known))
    for factor in below:
        value = algebra.call("div", value, computed(factor.base, algebra, known))
    return value


def _power(base: sympy.Basic, exponent: sympy.Basic, algebra: Algebra[T], known: dict[sympy.Basic, T]) -> T:
    value = computed(base, algebra, known)
    if exponent == -1:
        return algebra.call("div", algebra.constant(1.0), value)
    if exponent.is_Integer and 2 <= abs(exponent) <= _MOST_MULTIPLIED:
        product = value
        for _ in range(abs(int(exponent)) - 1):
            product = algebra.call("mul", product, value)
        return product if exponent > 0 else algebra.call("div", algebra.constant(1.0), product)
    if base.is_number and base.is_positive:
        factor, times = algebra.constant(math.log(float(base))), computed(exponent, algebra, known)
        power = algebra.call("exp", algebra.call("mul", times, factor))
        if base.is_integer and exponent.is_integer:  # whole numbers are exact, since masks may compare them
            whole = algebra.call("floor", algebra.call("add", power, algebra.constant(0.5)))
            return algebra.call("where", algebra.call("lt", times, algebra.constant(0)), power, whole)
        return power
    if base.is_integer:
        value = algebra.constant(float(base)) if base.is_number else algebra.call("float", value)
    if exponent in _ROOTS:
        return algebra.call(_ROOTS[exponent], value)
    times = computed(exponent, algebra, known)
    if base.is_positive or not exponent.is_integer or exponent.has(sympy.floor, sympy.ceiling):
        return algebra.call("power", value, times)
    one, odd = (
        algebra.constant(1.0),
        algebra.call("eq", algebra.call("bit_and", times, algebra.constant(1)), algebra.constant(1)),
    )
    negative = algebra.call("and", algebra.call("lt", value, algebra.constant(0.0)), odd)
    size = algebra.call("maximum", algebra.call("abs", value), algebra.constant(_TINY))
    sign = algebra.call("where", negative, algebra.constant(-1.0), one)
    power = algebra.call("mul", sign, algebra.call("power", size, times))
    return algebra.call("where", algebra.call("eq", times, algebra.constant(0)), one, power)


def _floored(expression: sympy.Basic, algebra: Algebra[T], known: dict[sympy.Basic, T]) -> T:
    divides, (a, b) = isinstance(expression, FloorDivision), expression.args
    values = computed(a, algebra, known), computed(b, algebra, known)
    if a.is_integer and b.is_integer:
        if a.is_nonnegative and b.is_positive:
            return algebra.call("whole_div" if divides else "whole_mod", *values)
        return algebra.call("floor_div" if divides else "floor_mod", *values)
    quotient = algebra.call("floor", algebra.call("div", *values))
    if divides:
        return quotient
    return algebra.call("sub", values[0], algebra.call("mul", quotient, values[1]))
