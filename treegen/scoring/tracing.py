"""Tracing: makes an expression of a Python function of scores and positions that uses PyTorch's functions."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import sympy
import torch
from torch.overrides import TorchFunctionMode

from treegen.ir.errors import InputError
from treegen.scoring.expressions import BITS, FloorDivision, FloorRemainder, Load, Sigmoid, Where, WholeLoad, is_truth

_MOST_DIMS = 4
"""The most dimensions of a captured tensor."""
_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32,
)  # fmt: skip
_FIX = "write it with arithmetic, comparisons, torch.where and functions like torch.tanh"


class _UnsupportedError(Exception):
    """The traced function does something that tracing cannot follow."""


class Traced:
    """A symbolic value in a traced function."""

    __slots__ = ("expression",)

    def __init__(self, expression: sympy.Basic) -> None:
        self.expression = expression

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handles PyTorch's functions of traced values."""
        return _function(func, args, kwargs or {})

    def _refused(self, *_: object) -> NoReturn:
        raise _UnsupportedError("needs a value that is known only in the kernel (by if, and, or, not, int, ...)")

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __getitem__ = _refused
    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: _named(name, (self, *args), kwargs)


def _operator(name: str, *, swapped: bool = False) -> Callable[..., Any]:
    def operate(self: Traced, *others: object) -> Traced:
        return _named(name, (*others, self) if swapped else (self, *others), {})

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "rshift"):
    setattr(Traced, f"__{_name}__", _operator(_name))
    setattr(Traced, f"__r{_name}__", _operator(_name, swapped=True))
for _name in ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Traced, f"__{_name}__", _operator(_name))


class _Tracer(TorchFunctionMode):
    """Handles PyTorch's functions of traced values, also those that would otherwise convert them to numbers."""

    def __init__(self, captured: list[torch.Tensor]) -> None:
        super().__init__()
        self.captured = captured

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(value, Traced) for value in _leaves([args, kwargs])):
            return func(*args, **kwargs)
        if func is torch.Tensor.__getitem__:
            return self.loaded(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        return _function(func, args, kwargs)

    def loaded(self, tensor: torch.Tensor, indices: tuple[object, ...]) -> Traced:
        """Traces a load from a captured tensor."""
        if len(indices) != tensor.dim() or len(indices) > _MOST_DIMS:
            raise _UnsupportedError(f"indexes a tensor of shape {tuple(tensor.shape)} with {len(indices)} indices")
        if not tensor.numel():
            raise _UnsupportedError(f"indexes a tensor of shape {tuple(tensor.shape)}, which has no entries")
        if tensor.dtype not in _DTYPES:
            raise _UnsupportedError(f"reads a tensor of {tensor.dtype}; use one of {', '.join(map(str, _DTYPES))}")
        places = [_expression(index) for index in indices]
        if any(is_truth(place) or not place.is_integer for place in places):
            raise _UnsupportedError("indexes a tensor with a value that is not an integer")
        number = next((n for n, known in enumerate(self.captured) if known is tensor), len(self.captured))
        if number == len(self.captured):
            self.captured.append(tensor)
        whole = tensor.dtype == torch.bool or not tensor.dtype.is_floating_point
        load = (WholeLoad if whole else Load)(number, *places)
        return Traced(sympy.Ne(load, 0) if tensor.dtype == torch.bool else load)


_tracers: list[_Tracer] = []


def traced(
    argument: str, function: Callable[..., Any], symbols: tuple[sympy.Basic, ...], captured: list[torch.Tensor],
    given: Callable[..., Any] | None = None,
) -> sympy.Basic:  # fmt: skip
    """Calls a function with symbols, and returns the expression of its result.

    A scalar tensor on the CPU becomes a constant.

    Args:
        argument: The name of the caller's argument, for errors.
        function: The function.
        symbols: Its arguments.
        captured: The tensors that were read so far; new ones are added.
        given: The caller's function that `function` calls; by default `function` itself.

    Raises:
        InputError: The function cannot be traced. The message names the line of the caller's code.
    """
    tracer = _Tracer(captured)
    _tracers.append(tracer)
    try:
        with tracer:
            return _expression(function(*map(Traced, symbols)))
    except Exception as cause:
        reason = str(cause) if isinstance(cause, _UnsupportedError) else f"{type(cause).__name__}: {cause}"
        line = _line(cause)
        # A TypeError outside of the caller's code: the call itself failed.
        fix = f"give {argument}({', '.join(map(str, symbols))})" if isinstance(cause, TypeError) and not line else _FIX
        raise InputError(argument, line or _place(given or function), reason, fix) from cause
    finally:
        _tracers.pop()


def traced_truth(argument: str, function: Callable[..., Any], *others: Any) -> sympy.Basic:
    """Traces a function that returns a truth value. Arguments and errors are those of `traced`."""
    return _truth(Traced(traced(argument, function, *others)))


def _line(error: BaseException) -> str:
    """Returns the line of the caller's code where tracing failed; empty where it failed outside of it."""
    inside = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(inside)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} `{frames[-1].line}`" if frames else ""


def _place(function: Callable[..., Any]) -> str:
    """Returns where a function is defined, or its name."""
    try:
        return f"{Path(inspect.getsourcefile(function) or '').name}:{inspect.getsourcelines(function)[1]}"
    except (OSError, TypeError):
        return getattr(function, "__name__", str(function))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for entry in value:
            yield from _leaves(entry)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _expression(value: object) -> sympy.Basic:
    if isinstance(value, Traced):
        return value.expression
    if isinstance(value, torch.Tensor):
        if value.dim():
            raise _UnsupportedError(f"takes a tensor of shape {tuple(value.shape)} as a whole")
        if value.device.type == "cpu":
            return _expression(value.item())
        return _tracers[-1].loaded(value, ()).expression
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if isinstance(value, int | float):
        return sympy.sympify(value)
    raise _UnsupportedError(f"uses {type(value).__name__} {value!r}")


def _number(value: object) -> sympy.Basic:
    """Converts a value to a number; true is 1."""
    expression = _expression(value)
    if is_truth(expression):
        return _where(expression, sympy.Integer(1), sympy.Integer(0))
    return expression


def _truth(value: object) -> sympy.Basic:
    expression = _expression(value)
    if is_truth(expression):
        return expression
    return sympy.Ne(expression, 0)


def _where(condition: sympy.Basic, a: sympy.Basic, b: sympy.Basic) -> sympy.Basic:
    if condition in (sympy.true, sympy.false):
        return a if condition == sympy.true else b
    return a if a == b else Where(condition, a, b)


def _chosen(condition: object, a: object, b: object) -> sympy.Basic:
    """Traces torch.where. Of two truth values it is a truth value."""
    wanted, both = _truth(condition), (_expression(a), _expression(b))
    if all(is_truth(each) for each in both):
        return sympy.Or(sympy.And(wanted, both[0]), sympy.And(sympy.Not(wanted), both[1]))
    return _where(wanted, _number(a), _number(b))


def _clamped(value: object, low: object = None, high: object = None) -> sympy.Basic:
    result = _number(value)
    result = result if low is None else sympy.Max(result, _number(low), evaluate=False)
    return result if high is None else sympy.Min(result, _number(high), evaluate=False)


def _bitwise(name: str, of_truths: Callable[..., sympy.Basic] | None = None) -> Callable[..., sympy.Basic]:
    def operate(*values: object) -> sympy.Basic:
        expressions, numbers = [_expression(value) for value in values], [_number(value) for value in values]
        if of_truths is not None and all(is_truth(each) for each in expressions):
            return of_truths(*expressions)
        if name not in BITS or not all(each.is_integer for each in numbers):
            raise _UnsupportedError(f"takes bitwise {name} of numbers" + " that are not integers" * (name in BITS))
        return BITS[name](*numbers)

    return operate


def _of_number(function: Callable[..., sympy.Basic]) -> Callable[..., sympy.Basic]:
    return lambda *values: function(*map(_number, values))


def _whole(value: object) -> sympy.Basic:
    """Rounds a value towards zero."""
    number = _number(value)
    return number if number.is_integer else _where(number < 0, sympy.ceiling(number), sympy.floor(number))


_TRUTHS = {"and": sympy.And, "or": sympy.Or, "xor": sympy.Xor, "not": sympy.Not}
_FUNCTIONS: dict[str, Callable[..., sympy.Basic]] = {
    "add": _of_number(lambda a, b: a + b), "sub": _of_number(lambda a, b: a - b),
    "mul": _of_number(lambda a, b: a * b), "div": _of_number(lambda a, b: a / b),
    "floor_divide": _of_number(FloorDivision), "remainder": _of_number(FloorRemainder),
    "pow": _of_number(lambda a, b: a**b), "square": _of_number(lambda a: a**2),
    "neg": _of_number(lambda a: -a), "positive": _of_number(lambda a: a),
    "abs": _of_number(lambda a: sympy.Abs(a)), "relu": _of_number(lambda a: sympy.Max(a, 0, evaluate=False)),
    "reciprocal": _of_number(lambda a: 1 / a), "sqrt": _of_number(sympy.sqrt),
    "rsqrt": _of_number(lambda a: 1 / sympy.sqrt(a)),
    "exp": _of_number(sympy.exp), "exp2": _of_number(lambda a: sympy.exp(a * sympy.log(2))),
    "log": _of_number(sympy.log), "log2": _of_number(lambda a: sympy.log(a) / sympy.log(2)),
    "tanh": _of_number(sympy.tanh), "sigmoid": _of_number(Sigmoid), "erf": _of_number(sympy.erf),
    "sin": _of_number(sympy.sin), "cos": _of_number(sympy.cos),
    "floor": _of_number(sympy.floor), "ceil": _of_number(sympy.ceiling),
    "minimum": _of_number(lambda a, b: sympy.Min(a, b, evaluate=False)),
    "maximum": _of_number(lambda a, b: sympy.Max(a, b, evaluate=False)),
    "clamp": _clamped, "where": _chosen,
    "lt": _of_number(sympy.Lt), "le": _of_number(sympy.Le), "gt": _of_number(sympy.Gt), "ge": _of_number(sympy.Ge),
    "eq": _of_number(sympy.Eq), "ne": _of_number(sympy.Ne),
    "float": _number, "int": _whole, "long": _whole, "bool": _truth,
    **{f"logical_{name}": lambda *values, of=of: of(*map(_truth, values)) for name, of in _TRUTHS.items()},
    **{f"bitwise_{name}": _bitwise(name, of) for name, of in _TRUTHS.items()},
    "bitwise_right_shift": _bitwise("right_shift"),
}  # fmt: skip
_SAME = {
    "truediv": "div", "true_divide": "div", "divide": "div", "rtruediv": "div", "multiply": "mul", "subtract": "sub",
    "floordiv": "floor_divide", "mod": "remainder", "absolute": "abs", "negative": "neg", "pos": "positive",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not", "clip": "clamp",
    "rshift": "bitwise_right_shift",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne",
}  # fmt: skip
_SWAPPED = ("radd", "rsub", "rmul", "rtruediv", "rdiv", "rfloordiv", "rmod", "rpow", "rand", "ror", "rxor", "rrshift")


def _function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    name = getattr(func, "__name__", str(func)).strip("_")
    if name in _SWAPPED:
        return _named(name[1:], args[::-1], kwargs)
    return _named(name, args, kwargs)


def _named(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    function = _FUNCTIONS.get(_SAME.get(name, name))
    if function is None:
        raise _UnsupportedError(f"calls {name}, which kernels do not support")
    if name in ("clamp", "clip"):
        kwargs = {{"min": "low", "max": "high"}.get(key, key): value for key, value in kwargs.items()}
    elif "other" in kwargs:
        args, kwargs = (*args, kwargs["other"]), {key: kwargs[key] for key in kwargs if key != "other"}
    if kwargs and function is not _clamped:
        raise _UnsupportedError(f"calls {name} with {', '.join(kwargs)}")
    try:
        return Traced(function(*args, **kwargs))
    except TypeError as cause:
        raise _UnsupportedError(f"calls {name} with wrong arguments") from cause
