"""Random models: decoders of Transformers with random weights, in the shapes of published models."""

from __future__ import annotations

from typing import Any

import torch

from treegen.ir.errors import InputError

TINY = "tiny"
_PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    TINY: ("Llama", {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }),
    "llama-3-8b": ("Llama", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    }),
    "qwen3-8b": ("Qwen3", {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    }),
    # What one of eight GPUs has of Llama-3-70B: an eighth of the heads, of the inner width and of the vocabulary.
    "llama-3-70b-eighth": ("Llama", {
        "vocab_size": 16032, "hidden_size": 8192, "intermediate_size": 3584, "num_hidden_layers": 80,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128,
    }),
}  # fmt: skip
RANDOM_MODELS = tuple(_PUBLISHED)
"""Names of the models."""


def random_model(name: str, max_tokens: int, device: torch.device | str, seed: int = 0) -> Any:
    """Makes a decoder with random weights on a device: `tiny` in fp32, others in bf16.

    Args:
        name: One of RANDOM_MODELS.
        max_tokens: The most tokens of a sequence.
        device: Where the weights are made.
        seed: Decides the weights.

    Raises:
        InputError: There is no model of this name.
    """
    import transformers

    if name not in _PUBLISHED:
        raise InputError("model", name, "is unknown", f"use one of {', '.join(RANDOM_MODELS)}")
    family, sizes = _PUBLISHED[name]
    config = getattr(transformers, f"{family}Config")(**sizes, max_position_embeddings=max(256, max_tokens))
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float32 if name == TINY else torch.bfloat16)
    try:
        with torch.device(device):
            return getattr(transformers, f"{family}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(before)
