"""Score options: the arguments of treegen.compile about scores, checked, traced, and in the forms of backends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from treegen.ir.arrays import INT32_MAX
from treegen.ir.errors import InputError
from treegen.ir.keys import ScoreCode
from treegen.ir.scalars import is_finite, plain_number
from treegen.ir.shape import Shape

if TYPE_CHECKING:
    import sympy

_SLOPES = (torch.float16, torch.bfloat16, torch.float32)
"""Types that ALiBi slopes may have. Kernels read them without a conversion."""


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """The arguments of `treegen.compile` about scores. It documents each of them. Raises InputError."""

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    window_left: int = -1
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        cap = self.logits_soft_cap
        if cap is not None and not (is_finite(cap) and cap >= 0):
            reason = "is not a finite number of at least 0"
            raise InputError("logits_soft_cap", cap, reason, "give such a number, or None for no cap")
        object.__setattr__(self, "logits_soft_cap", cap or None)
        object.__setattr__(self, "window_left", plain_number(self.window_left))
        if type(self.window_left) is not int or not -1 <= self.window_left <= INT32_MAX:
            fix = "give the number of tokens before its own that a row sees, or -1 for all"
            raise InputError("window_left", self.window_left, f"is not a whole number of -1..{INT32_MAX}", fix)
        for name, parameters in (("score_mod", "score, b, h, q_idx, kv_idx"), ("mask_mod", "b, h, q_idx, kv_idx")):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise InputError(name, value, "is not a function", f"give {name}({parameters})")
        for name in ("alibi_slopes", "sinks"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.Tensor) and value.is_floating_point()):
                fix = "give a tensor [num_qo_heads] of floats"
                raise InputError(name, type(value).__name__, "is not a tensor of floats", fix)
        if self.alibi_slopes is not None and self.alibi_slopes.dtype not in _SLOPES:
            reason = f"is none of {', '.join(map(str, _SLOPES))}"
            raise InputError("alibi_slopes", self.alibi_slopes.dtype, reason, "give alibi_slopes.float()")

    @property
    def any(self) -> bool:
        """Whether any option differs from its default."""
        return any(
            getattr(self, field.name) is not field.default and getattr(self, field.name) != field.default
            for field in fields(self)
        )

    @property
    def scores(self) -> bool:
        """Whether any option except sinks differs from its default."""
        return replace(self, sinks=None).any

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that the caller gave, by argument."""
        named = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        return {name: function for name, function in named.items() if function is not None}

    def text(self, tokens: int, seen: int) -> str:
        """Describes the options in a line. tokens: tokens of the tree. seen: those that some row's window reaches."""
        parts = [name for name in ("score_mod", "mask_mod", "sinks") if getattr(self, name) is not None]
        if self.alibi_slopes is not None:
            parts.insert(0, "ALiBi")
        if self.logits_soft_cap:
            parts.insert(0, f"soft-cap {self.logits_soft_cap:g}")
        if self.window_left >= 0:
            left = f"{tokens - seen} of {tokens} tokens are in no window"
            parts.append(f"window of {self.window_left} tokens before a row's own ({left})")
        return f"scores: {', '.join(parts)}"

    def score(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Returns the new score: applies the soft cap, then ALiBi, then score_mod."""
        if self.logits_soft_cap:
            score = self.logits_soft_cap * torch.tanh(score / self.logits_soft_cap)
        if self.alibi_slopes is not None:
            score = score + self.alibi_slopes[h] * (kv_idx - q_idx)
        return score if self.score_mod is None else self.score_mod(score, b, h, q_idx, kv_idx)

    def mask(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Returns whether a row sees a token of its path; None where rows see all tokens."""
        seen = None if self.mask_mod is None else self.mask_mod(b, h, q_idx, kv_idx)
        if self.window_left < 0:
            return seen
        inside = q_idx - kv_idx <= self.window_left
        return inside if seen is None else inside & seen

    def check(self, shape: Shape) -> None:
        """Raises InputError unless tensors are dense with an entry for every query head, and sinks contiguous."""
        for name in ("alibi_slopes", "sinks"):
            value = getattr(self, name)
            if value is None:
                continue
            if tuple(value.shape) != (shape.num_qo_heads,):
                reason = f"does not match {shape.num_qo_heads} query heads"
                raise InputError(name, f"shape {tuple(value.shape)}", reason, "give one number per query head")
            if value.is_meta or value.layout != torch.strided:
                kind = "a meta tensor" if value.is_meta else f"a tensor with layout {value.layout}"
                raise InputError(name, kind, "has no values that a kernel could read", "give a dense tensor")
        if self.sinks is not None and not self.sinks.is_contiguous():
            strides = f"strides {self.sinks.stride()}"
            raise InputError("sinks", strides, "is not contiguous", "give sinks.contiguous()")


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """Traced score options.

    Captured tensors may be overwritten: every call reads their values of that time.

    Args:
        options: The options.
        score: The expression of the new score; None where scores do not change.
        mask: The expression of the mask; None without a mask.
        captured: The tensors that both read.
        code: Triton code of both; None where both are None.
        prunes: Whether tokens that no row's window reaches are left out of the plan instead of masked.
        isolated: Whether infinities and NaN reach only rows that see their tokens.
    """

    options: ScoreOptions
    score: sympy.Basic | None
    mask: sympy.Basic | None
    captured: tuple[torch.Tensor, ...]
    code: ScoreCode | None
    prunes: bool = True
    isolated: bool = False

    @classmethod
    def of(cls, options: ScoreOptions) -> Scoring | None:
        """Traces the options; returns None for defaults. Raises InputError for a function that cannot be traced."""
        if not options.any:
            return None
        from treegen.scoring.expressions import BATCH, HEAD, QUERY, SCORE, TOKEN
        from treegen.scoring.tracing import traced, traced_truth
        from treegen.scoring.triton_code import score_code

        captured: list[torch.Tensor] = []
        places = (BATCH, HEAD, QUERY, TOKEN)
        score = traced("score_mod", options.score, (SCORE, *places), captured, options.score_mod)
        mask = None
        if options.mask_mod is not None or options.window_left >= 0:
            mask = traced_truth("mask_mod", options.mask, places, captured, options.mask_mod)
        changed = None if score == SCORE else score
        kinds = tuple((str(_readable(each).dtype).removeprefix("torch."), each.dim()) for each in captured)
        code = None if changed is None and mask is None else score_code(changed, mask, kinds)
        return cls(options, changed, mask, tuple(captured), code)

    @property
    def positions(self) -> bool:
        """Whether kernels need the positions of rows and tokens."""
        return self.code is not None and self.code.positions

    @property
    def causal(self) -> bool:
        """Whether the mask hides all tokens after a row's own: it has the part `& (kv_idx <= q_idx)`."""
        if self.mask is None:
            return False
        from treegen.scoring.triton_code import is_causal

        return is_causal(self.mask)

    @property
    def guarded(self) -> bool:
        """Whether kernels have to protect rows from values: in isolated mode, where scores may hide tokens."""
        return self.isolated and (self.mask is not None or self.options.score_mod is not None)

    @property
    def sinks(self) -> torch.Tensor | None:
        """A score for each query head in every row's softmax, without a value: `[num_qo_heads]`."""
        return self.options.sinks

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Sinks and captured tensors, by their names in messages."""
        names = {id(self.options.alibi_slopes): "alibi_slopes"}
        tensors = {
            names.get(id(tensor), f"tensor {number} that score_mod or mask_mod reads"): tensor
            for number, tensor in enumerate(self.captured)
        }
        return tensors if self.sinks is None else {"sinks": self.sinks, **tensors}

    def __reduce__(self) -> tuple[Callable[..., Scoring], tuple[ScoreOptions, bool, bool]]:
        return _traced_again, (self.options, self.prunes, self.isolated)

    @property
    def readable(self) -> tuple[torch.Tensor, ...]:
        """The captured tensors, in types that kernels read."""
        return tuple(map(_readable, self.captured))

    def check(self, shape: Shape, device: torch.device) -> None:
        """Raises InputError unless tensors fit the shape and are on the device."""
        self.options.check(shape)
        for name, tensor in self.tensors.items():
            if tensor.device != device:
                raise InputError(name, tensor.device, f"is not on q's device {device}", "move it there")

    def scores(
        self,
        scores: torch.Tensor,
        b: torch.Tensor,
        h: torch.Tensor,
        q_idx: torch.Tensor,
        kv_idx: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the new scores, with -inf for hidden tokens. All arguments broadcast to the shape of `scores`."""
        from treegen.scoring.torch_values import Values

        values = Values({"score": scores, "b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx}, self.captured)
        wanted = [each for each in (self.score, self.mask) if each is not None]
        found = values.of(*wanted)
        result = scores if self.score is None else found[0].expand_as(scores).to(scores.dtype)
        return result if self.mask is None else result.masked_fill(~found[-1].expand_as(scores), -math.inf)


def _traced_again(options: ScoreOptions, prunes: bool, isolated: bool) -> Scoring:
    scoring = Scoring.of(options)
    assert scoring is not None
    return replace(scoring, prunes=prunes, isolated=isolated)


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory in a type that kernels read."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
