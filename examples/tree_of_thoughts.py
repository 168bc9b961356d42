"""Tree of thoughts: a model of Transformers draws thoughts level by level, and a scorer keeps the best branches.

The model is a tiny Llama with random weights. The scorer is the mean log-probability by a copy of it.
"""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from treegen.engine import Engine, Sampling, Search
from treegen.integrations import HFModel

PROMPTS = [[5, 17, 3, 3, 8, 42, 9, 1] * 6, [2, 7, 1, 8, 2, 8]]
NEWLINE = 10


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


@torch.no_grad()
def mean_log_probability(model: LlamaForCausalLM, prompt: list[int], tokens: list[int]) -> float:
    """Scores a candidate by one pass of the model, without treegen."""
    log_probs = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return float(log_probs.gather(1, torch.tensor(tokens)[:, None]).mean())


def main() -> None:
    """Searches both prompts at once: 3 levels, of which each draws 4 thoughts per branch and keeps 2 branches."""
    model = tiny_llama()
    judge = copy.deepcopy(model)

    def score(prompt: list[int], candidates: list[list[int]]) -> list[float]:
        return [mean_log_probability(judge, prompt, tokens) for tokens in candidates]

    search = Search(
        score, width=2, branching=4, thought_tokens=8, depth=3, sampling=Sampling(0.9, seed=1), stop_ids=(NEWLINE,)
    )
    for found in Engine(HFModel(model), search, num_pages=200).run(PROMPTS):
        print(f"best of {len(found)}: score {found[0].score:.2f}, tokens {found[0].tokens}")


if __name__ == "__main__":
    main()
