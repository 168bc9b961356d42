"""Tiny decoders of Transformers with random weights, and prompts for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

PROMPTS = ([1, 5, 9, 33, 2, 7], [3] * 20, [4, 8, 15, 16, 23, 42] * 5)
VOCABULARY = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_OPTIONS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 32},
    "Mistral": {"sliding_window": 9},
    "Gemma2": {"head_dim": 32, "sliding_window": 7, "query_pre_attn_scalar": 20},
    "Gemma3": {"head_dim": 32, "sliding_window": 7, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 20},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "GptOss": {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "layer_types": _ALTERNATING, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
NAMES = tuple(_OPTIONS)


def tiny(name: str = "Llama", seed: int = 0, **changes: Any) -> Any:
    """A decoder in fp32 that attends by Transformers' own `eager` code. changes: fields of its config."""
    torch.manual_seed(seed)
    config_of = "Gemma3Text" if name == "Gemma3" else name
    config = getattr(transformers, f"{config_of}Config")(**_COMMON | _OPTIONS[name] | changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # logits that differ clearly, and no weights that were never set
        spread = torch.randn(parameter.shape) * (0.15 if parameter.dim() > 1 else 0.5)
        parameter.data = spread + (1.0 if parameter.dim() == 1 and name != "GptOss" else 0.0)
    model.set_attn_implementation("eager")
    return model


def generated(model: Any, prompt: list[int], **options: Any) -> list[list[int]]:
    """The tokens that Transformers' own `generate` adds to a prompt, a list for each result."""
    ids = torch.tensor([prompt])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **options)
    ends = options.get("eos_token_id") or []
    return [_until(sequence[len(prompt) :].tolist(), ends) for sequence in made]


def _until(tokens: list[int], ends: list[int]) -> list[int]:
    place = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: place + 1]


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """A batch of prompts for `generate`, padded at the left with token 0."""
    length = max(map(len, prompts))
    ids = [[0] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
