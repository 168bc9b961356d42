"""Tree of thoughts: a model of Transformers draws thoughts level by level, and a scorer keeps the best branches.

The model is a tiny Llama with random weights. The scorer is the mean log-probability by a copy of it.
"""

import copy

import torch
from transformers import LlamaForCausalLM

from treegen.engine import Engine, Sampling, Search
from treegen.integrations import HFModel
from treegen.integrations.random_models import random_model

PROMPTS = [[5, 17, 3, 3, 8, 42, 9, 1] * 6, [2, 7, 1, 8, 2, 8]]
NEWLINE = 10


@torch.no_grad()
def mean_log_probability(model: LlamaForCausalLM, prompt: list[int], tokens: list[int]) -> float:
    """Scores a candidate by one pass of the model, without treegen."""
    log_probs = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return float(log_probs.gather(1, torch.tensor(tokens)[:, None]).mean())


def main() -> None:
    """Searches both prompts at once. Each of three levels draws 4 thoughts from a branch, and keeps the best two."""
    model = random_model("tiny", 256, "cpu")
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
