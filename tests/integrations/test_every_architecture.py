"""Every causal language model of Transformers, made small: the tokens of `generate`, or a refusal of one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from treegen.integrations import generate
from treegen.ir.errors import InputError

# Sizes by all names that configurations have for them.
SIZES = {
    "vocab_size": 97, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "is_decoder": True,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 16, "kv_channels": 16, "rotary_dim": 8,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "num_experts_per_tok": 2, "encoder_layers": 2, "sliding_window": 7,
}  # fmt: skip
OPTIONAL = ("sliding_window", "q_lora_rank")  # stay None where they are None by default
MOST_PARAMETERS = 5_000_000
# Architectures with other layers, or with attention that does not call Transformers' functions.
REFUSED = {
    "bart", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "bloom", "codegen",
    "deepseek_v4", "diffllama", "doge", "falcon_h1", "falcon_mamba", "gpt_bigcode", "gpt_neox_japanese", "gptj",
    "hrm_text", "hy_v4", "jetmoe", "llama4_text", "mamba", "marian", "mbart", "megatron-bert", "mimo_v2_flash",
    "minimax", "moshi", "mpt", "mvp", "nemotron", "nemotron_h", "olmo_hybrid", "openai-gpt", "pegasus",
    "plbart", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rembert", "roformer",
    "rwkv", "stablelm", "trocr", "whisper", "xglm", "xlm",
}  # fmt: skip
PROMPTS = torch.tensor([[0] * 6 + [1, 5, 9, 33, 2, 7, 4, 4], [*range(3, 17)]])


def small(kind: str) -> Any:
    """A model of this architecture with random weights; skips where the sizes above do not make one."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    try:
        usual = CONFIG_MAPPING[kind]()
        named = {key: value for key, value in SIZES.items() if hasattr(usual, key)}
        sizes = {key: value for key, value in named.items() if key not in OPTIONAL or getattr(usual, key)}
        config = CONFIG_MAPPING[kind](**sizes)
        made = getattr(transformers, name if isinstance(name, str) else name[0])
        with torch.device("meta"):
            count = sum(each.numel() for each in made(config).parameters())
        if count > MOST_PARAMETERS:
            pytest.skip(f"{count} parameters")
        torch.manual_seed(0)
        model = made(config).eval()
    except Exception as cause:
        pytest.skip(f"cannot be made of these sizes: {cause}")
    for weight in model.parameters():
        if weight.is_floating_point():  # the same scale everywhere: experts and norms matter
            normal = torch.randn(weight.shape)
            weight.data = 0.15 * normal if weight.dim() > 1 else 1 + 0.5 * normal
    return model


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_tokens_are_those_of_generate(kind: str) -> None:
    model = small(kind)
    for options in ({}, {"num_beams": 3}):
        call = {
            "inputs": PROMPTS, "attention_mask": (PROMPTS > 0).long(), "max_new_tokens": 12, "do_sample": False,
            "pad_token_id": 0, **options,
        }  # fmt: skip
        try:
            expected = model.generate(**call)
        except Exception as cause:
            pytest.skip(f"fails with these sizes: {cause}")
        try:
            found = model.generate(**call, custom_generate=generate)
        except InputError as error:
            if kind not in REFUSED:
                raise
            pytest.skip(f"refused: {error}")
        assert torch.equal(found, expected), options
