"""HFModel: decoders of Hugging Face Transformers, unpatched, through their interface for attention functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch

from treegen.engine.attention_kernels import AttentionKind
from treegen.engine.step import Step
from treegen.integrations.hf_checks import check_decoder, most_tokens, whole_shape
from treegen.integrations.hf_parallel import divides_heads, local_shape
from treegen.ir.errors import InputError

NAME = "treegen"
"""The name of the attention function in Transformers."""


class HFModel:
    """A decoder of Transformers 5 as a model of the decoding system.

    Its attention function becomes `treegen`, which serves steps of an engine and nothing else;
    `model.set_attn_implementation` sets another one, and `attach` this one again. Full layers and layers with sliding
    windows are served, with or without a soft cap of the scores and sinks.

    Several ranks may compute the model together: those of `from_pretrained(..., tp_plan="auto")` or `divide_heads`.
    Each then attends with its part of the heads, and has all logits.

    Args:
        model: A causal language model of Transformers.
        weak: Whether to let the model be freed while this object is there.
        compile_options: Arguments of `torch.compile`, which then compiles what lies between attention calls, in place;
            `{"dynamic": True}` serves steps of any number of rows. None compiles nothing.

    Attributes:
        shape: The attention shape of all layers, with the heads of this rank.
        ranks: The number of ranks that compute the model together.
        layers: The number of attention layers.
        max_tokens: The most tokens of a sequence.
        vocabulary: The number of different tokens.

    Raises:
        InputError: The model has other layers than such attention layers, or a type that treegen does not serve.
        ShapeError: The ranks do not divide the heads.
    """

    def __init__(self, model: Any, *, weak: bool = False, compile_options: Mapping[str, Any] | None = None) -> None:
        config = check_decoder(model)
        self._model: Callable[[], Any] = ref(model) if weak else lambda: model
        self._config, self._way = config, NAME
        self.layers = int(config.num_hidden_layers)
        self.max_tokens, self.vocabulary = most_tokens(config), int(config.vocab_size)
        self.ranks = int(getattr(model, "tp_size", None) or 1)
        whole = whole_shape(model, config)
        self.shape = local_shape(whole, self.ranks) if self.ranks > 1 and divides_heads(model) else whole
        self._compiles = compile_options is not None
        self.attach()
        if compile_options is not None:
            model.base_model.compile(**compile_options)

    @property
    def model(self) -> Any:
        """The model of Transformers; None after it was freed."""
        return self._model()

    def attach(self) -> None:
        """Gives the model its attention function, and sets it to evaluation."""
        register(torch.compiler.disable(attend) if self._compiles else attend)  # type: ignore[no-untyped-call]
        self.model.set_attn_implementation(NAME)
        self._way = self._config._attn_implementation
        self.model.eval()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device = self.model.device
        assert isinstance(device, torch.device)
        return device

    @torch.no_grad()
    def __call__(self, step: Step, keep: torch.Tensor) -> torch.Tensor:
        """Computes a step; returns the logits of the rows `keep`. See treegen.engine.Model."""
        rows, way = step.rows, self._config._attn_implementation
        if way != self._way:
            fix = "call attach() of its HFModel first"
            raise InputError("model", type(self.model).__name__, f"attends by {way}, not by {NAME}", fix)
        try:
            made = self.model(
                input_ids=step.ids[None, :rows], position_ids=step.positions[None, :rows], use_cache=False,
                logits_to_keep=keep, treegen_step=step,
            )  # fmt: skip
        except _NoStepError as cause:
            reason = "does not hand on the engine's step to its attention layers"
            raise InputError("model", type(self.model).__name__, reason, "use another model") from cause
        logits = made.logits[0]
        assert isinstance(logits, torch.Tensor)
        return logits


def register(function: Callable[..., Any] | None = None) -> None:
    """Makes the attention function `treegen` known to Transformers.

    `HFModel` does so, too. Only `from_pretrained(..., attn_implementation="treegen")` before that needs it.

    Args:
        function: The attention function in place of `attend`, which serves steps of an engine.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend if function is None else function)


class _NoStepError(InputError):
    """The attention function was called without a step."""


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    treegen_step: Step | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention of a layer of Transformers in a step of the decoding system.

    Args:
        module: The attention layer; it knows its number.
        query: `[1, num_qo_heads, rows, head_dim]`.
        key: `[1, num_kv_heads, rows, head_dim]`; the keys of the new tokens, with their positions applied.
        value: The same of the values.
        attention_mask: Has to be None.
        scaling: The factor of the scores.
        treegen_step: The step.
        options: Further arguments of Transformers: sliding_window, softcap, and s_aux for sinks.

    Returns:
        `[1, rows, num_qo_heads, head_dim]`, and None in place of the weights.

    Raises:
        InputError: It is not called by an engine, or with an option that is not served.
    """
    if treegen_step is None:
        fix = "run the model by treegen.engine.Engine, or set another attention implementation"
        raise _NoStepError("attention", NAME, "serves steps of treegen's engine", fix)
    if attention_mask is not None or query.shape[0] != 1:
        reason = "has layers with a mask of their own, or divides a step into several rows"
        raise InputError("model", type(module).__name__, reason, "use a model with full and sliding attention")
    if False in (options.get("is_causal"), getattr(module, "is_causal", None)):
        raise InputError("model", type(module).__name__, "attends to later tokens", "use a decoder (is_decoder=True)")
    if options.get("dropout"):
        raise InputError("dropout", options["dropout"], "is not served", "call model.eval()")
    window, cap, sinks = (options.get(name) for name in ("sliding_window", "softcap", "s_aux"))
    if window is not None and window < 1:
        raise InputError("sliding_window", window, "leaves no token to attend to", "give at least 1, or None")
    kind = AttentionKind(
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        -1 if window is None else int(window) - 1,
        None if cap is None else float(cap),
        None if sinks is None else module.layer_idx,
    )
    q, k, v = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
    given = None if sinks is None else sinks.detach().float()
    return treegen_step.attend(module.layer_idx, kind, q, k, v, given)[None], None
