"""Speculative decoding: a model's tokens come in fewer steps where an n-gram drafter guesses them.

    pip install '.[hf]'
    python examples/speculative.py

The model here has random weights and no meaning; any causal language model of Transformers goes in its place.
"""

import torch

from treegen.engine import Engine, NGrams, Sample, Speculate
from treegen.engine.control import Controller
from treegen.integrations import HFModel
from treegen.integrations.random_models import random_model

PROMPT = [10, 20, 30] * 20
"""Text that repeats itself is what n-grams can guess."""
NEW_TOKENS = 80


def main() -> None:
    """Decodes one prompt token by token, and with drafts; prints the steps of both."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = HFModel(random_model("tiny", 256, device))
    controllers: dict[str, Controller] = {
        "one by one": Sample(max_new_tokens=NEW_TOKENS),
        "with drafts": Speculate(NGrams(), max_draft=4, max_new_tokens=NEW_TOKENS),
    }
    tokens = {}
    for name, controller in controllers.items():
        engine = Engine(model, controller, num_pages=32)
        ((result,),) = engine.run([PROMPT])
        tokens[name] = result.tokens
        print(f"{name}: {len(result.tokens)} tokens in {engine.accounting.steps} steps")
    assert tokens["one by one"] == tokens["with drafts"]


if __name__ == "__main__":
    main()
