"""Best of n: a model of Transformers draws samples that share their prompt's KV, and a scorer takes the best one.

The model is a tiny Llama with random weights. Its own log-probabilities are the scorer.
"""

import torch
from transformers import LlamaForCausalLM

from treegen.engine import Continuation, Engine, Sample, Sampling
from treegen.integrations import HFModel
from treegen.integrations.random_models import random_model

PROMPTS = [[5, 17, 3, 3, 8, 42, 9, 1] * 6, [2, 7, 1, 8, 2, 8]]
SAMPLES = 8


@torch.no_grad()
def mean_log_probability(model: LlamaForCausalLM, prompt: list[int], found: Continuation) -> float:
    """Scores a continuation by one pass of the model, without treegen."""
    ids = torch.tensor([[*prompt, *found.tokens]])
    log_probs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return float(log_probs.gather(1, torch.tensor(found.tokens)[:, None]).mean())


def main() -> None:
    """Draws samples of all prompts at once, and prints the best of each."""
    model = random_model("tiny", 256, "cpu")
    sampler = Sample(SAMPLES, Sampling(temperature=0.7, seed=1), max_new_tokens=24)
    results = Engine(HFModel(model), sampler, num_pages=200).run(PROMPTS)
    model.set_attn_implementation("sdpa")  # the scorer's passes are Transformers' own
    for prompt, samples in zip(PROMPTS, results, strict=True):
        best = max(samples, key=lambda found: mean_log_probability(model, prompt, found))
        print(f"sample {best.label[1]} of {len(samples)}: {best.tokens}")


if __name__ == "__main__":
    main()
