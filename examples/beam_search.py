"""Beam search: the most likely continuations of several prompts at once, in beams that share their prompt's KV.

The model is a tiny Llama with random weights. A beam's score is the sum of its tokens' log-probabilities, divided by a
power of their number: the length penalty.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from treegen.engine import Beam, Engine
from treegen.integrations import HFModel

PROMPTS = [[5, 17, 3, 3, 8, 42, 9, 1] * 6, [2, 7, 1, 8, 2, 8]]
END = 10
"""The token that ends a beam."""


def tiny_llama() -> LlamaForCausalLM:
    """Makes the model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data *= 8.0 if parameter.dim() > 1 else 1.0
    return model


def main() -> None:
    """Searches both prompts with four beams each; prints the beams, and how many pages they needed."""
    beams = Beam(4, max_new_tokens=16, length_penalty=1.0, stop_ids=(END,))
    engine = Engine(HFModel(tiny_llama()), beams, num_pages=100)
    for number, found in enumerate(engine.run(PROMPTS)):
        print(f"prompt {number}: {len(found)} beams, best score {found[0].score:.2f}")
        for beam in found:
            print(f"  {beam.score:.2f}  {beam.tokens}")
    known = engine.accounting
    print(f"pages: {known.most_pages} at most, and {known.most_unshared} without sharing")


if __name__ == "__main__":
    main()
