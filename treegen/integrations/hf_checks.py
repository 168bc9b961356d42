"""Checks of models of Transformers, before a step runs: an error of one line names what cannot be served."""

from __future__ import annotations

from typing import Any

from treegen.backends.check_inputs import TORCH_DTYPES
from treegen.ir.errors import InputError
from treegen.ir.shape import Shape

_KINDS = {"full_attention", "sliding_attention"}
_NUMBERS = ("num_hidden_layers", "num_attention_heads", "max_position_embeddings", "vocab_size")


def check_decoder(model: Any) -> Any:
    """Returns the configuration of a causal language model. Raises InputError for other models.

    Its attention layers have to call Transformers' attention functions, be full or sliding ones, and have equal heads.
    """
    from transformers import PreTrainedModel

    name, fix = type(model).__name__, "give one that AutoModelForCausalLM.from_pretrained has loaded"
    if not isinstance(model, PreTrainedModel):
        if callable(getattr(model, "get_base_model", None)):  # a model of peft
            fix = "give model.get_base_model(), or merge its adapters first"
        raise InputError("model", name, "is no model of Transformers", fix)
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise InputError("model", name, "has an encoder", "use a model that is a decoder alone")
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        raise InputError("model", name, "gives no logits", fix)
    if kinds := set(getattr(config, "layer_types", None) or ()) - _KINDS:
        fix = "use models with full and sliding attention"
        raise InputError("layer_types", sorted(kinds), "are not served", fix)
    if not getattr(model, "_supports_attention_backend", False):
        raise InputError("model", name, "has attention layers of its own", "use a model with the AttentionInterface")
    if model.dtype not in TORCH_DTYPES.values():
        raise InputError("model.dtype", model.dtype, "is not served", f"use one of {', '.join(TORCH_DTYPES)}")
    if missing := [each for each in _NUMBERS if not isinstance(getattr(config, each, None), int)]:
        raise InputError("model.config", name, f"has no {missing[0]}", "use another model, or set it")
    return config


def whole_shape(model: Any, config: Any) -> Shape:
    """Returns the attention shape of all layers of a model. Raises InputError where these have different ones."""
    types = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    try:
        heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        if getattr(config, "kv_lora_rank", None):  # latent attention: K and V are as for heads of their own
            kv_heads, head_dim = heads, config.qk_head_dim
            return Shape(heads, kv_heads, head_dim, config.v_head_dim, dtype=types[model.dtype])
    except AttributeError as cause:
        reason = f"has layers with different heads, or none: {str(cause).splitlines()[0]}"
        raise InputError("model.config", type(config).__name__, reason, "use models whose layers are alike") from cause
    return Shape(heads, kv_heads or heads, head_dim, dtype=types[model.dtype])


def most_tokens(config: Any) -> int:
    """Returns the most tokens of a sequence.

    LongRoPE (as of Phi-3) turns keys of all sequences of a step by the length of the longest. Up to the length that the
    model was first trained with it does not, so sequences end there.
    """
    most, rope = int(config.max_position_embeddings), getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return most
    first = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return min(most, int(first or most))
