"""Which decoders of Transformers HFModel serves, and what it says of others before any step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM

from support.tiny_models import PROMPTS, generated, tiny
from treegen.engine import Engine, Sample
from treegen.integrations import HFModel, generate, register
from treegen.ir.errors import InputError, TreegenError

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97,
    "intermediate_size": 64, "max_position_embeddings": 256,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "moe_intermediate_size": 32, "head_dim": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip


def made(name: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**SIZES | sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return AutoModelForCausalLM.from_config(config).float().eval()


class Adapted:
    """As peft wraps a model."""

    def get_base_model(self) -> Any:
        return tiny()


def engine(model: Any) -> Engine:
    return Engine(HFModel(model), Sample(max_new_tokens=6), num_pages=60, page_size=4)


@pytest.mark.parametrize("name", ["phi", "deepseek_v3"])
def test_tokens_are_those_of_generate(name: str) -> None:
    """Also with keys and values of different head dims."""
    model = made(name, **(LATENT if name == "deepseek_v3" else {}))
    expected = [generated(model, prompt, max_new_tokens=6) for prompt in PROMPTS]
    assert [[each.tokens for each in own] for own in engine(model).run(PROMPTS)] == expected


@pytest.mark.parametrize(("make", "text"), [
    (lambda: None, "model = NoneType: is no model of Transformers; give one that AutoModelForCausalLM"),
    (lambda: "gpt2", "model = str: is no model of Transformers"),
    (lambda: HFModel(tiny()), "model = HFModel: is no model of Transformers"),
    (lambda: AutoModel.from_config(CONFIG_MAPPING["llama"](**SIZES)), "model = LlamaModel: gives no logits"),
    (lambda: made("stablelm"), "model = StableLmForCausalLM: has attention layers of its own"),
    (lambda: made("qwen3_next"), r"layer_types = \['linear_attention'\]: are not served; use models with full and"),
    (lambda: made("jamba"), r"layer_types = \['linear_attention'\]: are not served"),
    (lambda: made("bamba"), r"layer_types = \['linear_attention'\]: are not served"),
    (Adapted, r"model = Adapted: is no model of Transformers; give model\.get_base_model\(\), or merge its adapters"),
    (lambda: made("bloom"), "model = BloomForCausalLM: has attention layers of its own"),
    (lambda: tiny().double(), "model.dtype = torch.float64: is not served"),
])  # fmt: skip
def test_models_that_cannot_be_served(make: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        HFModel(make())


@pytest.mark.parametrize(("name", "text"), [
    ("diffllama", "layer = 0: attends a second time in a step"),
    ("doge", "model = DogeAttention: has layers with a mask of their own"),
    ("nemotron", "model = NemotronForCausalLM: does not hand on the engine's step"),
    ("bert", r"model = BertSelfAttention: attends to later tokens; use a decoder \(is_decoder=True\)"),
    ("gemma3_text", "model = Gemma3Attention: attends to later tokens"),
    ("mistral", "sliding_window = 0: leaves no token to attend to; give at least 1, or None"),
])  # fmt: skip
def test_models_whose_first_step_shows_it(name: str, text: str) -> None:
    more = {"gemma3_text": {"use_bidirectional_attention": True}, "mistral": {"sliding_window": 0}}
    served = engine(made(name, **more.get(name, {})))
    with pytest.raises(InputError, match=text):
        served.run(PROMPTS)
    assert served.sequences.available == served.pool.num_pages


def test_generate_says_so_too() -> None:
    """Also of a model without a number of positions, and of one with parts that have no attention function yet."""
    ids, moshi = torch.tensor([[1, 2]]), made("moshi", head_dim=16, num_hidden_layers=1)
    with pytest.raises(InputError, match="attention layers of its own"):
        made("bloom").generate(ids, custom_generate=generate, max_new_tokens=5)
    with pytest.raises(InputError, match="does not hand on the engine's step"):
        moshi.generate(ids, custom_generate=generate, max_new_tokens=5)
    assert moshi.config._attn_implementation != "treegen"


def test_models_may_be_loaded_with_the_attention_function() -> None:
    register()
    model = AutoModelForCausalLM.from_config(tiny().config, attn_implementation="treegen")
    assert model.config._attn_implementation == "treegen"


def test_sequences_of_longrope_end_where_it_begins_to_depend_on_the_longest() -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = made("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    short, long = [*range(5, 15)], [*range(40, 60)]
    expected = [generated(model, prompt, max_new_tokens=6) for prompt in (short, long)]
    served = engine(model)
    assert [[each.tokens for each in own] for own in served.run([short, long])] == expected
    with pytest.raises(TreegenError, match=r"is not within 1\.\.26 tokens: of the 32 tokens that the model can hold"):
        served.run([short, [*range(30)]])
    with pytest.raises(InputError, match="is over the model's 32"):
        model.generate(torch.tensor([[*range(30)]]), custom_generate=generate, max_new_tokens=6, pad_token_id=0)
