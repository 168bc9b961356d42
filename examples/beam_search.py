"""Beam search: the most likely continuations of several prompts at once, in beams that share their prompt's KV.

The model is a tiny Llama with random weights. A beam's score is the sum of its tokens' log-probabilities, divided by a
power of their number: the length penalty.
"""

from treegen.engine import Beam, Engine
from treegen.integrations import HFModel
from treegen.integrations.random_models import random_model

PROMPTS = [[5, 17, 3, 3, 8, 42, 9, 1] * 6, [2, 7, 1, 8, 2, 8]]
END = 10
"""The token that ends a beam."""


def main() -> None:
    """Searches both prompts with four beams each; prints the beams, and how many pages they needed."""
    beams = Beam(4, max_new_tokens=16, length_penalty=1.0, stop_ids=(END,))
    engine = Engine(HFModel(random_model("tiny", 256, "cpu")), beams, num_pages=100)
    for number, found in enumerate(engine.run(PROMPTS)):
        print(f"prompt {number}: {len(found)} beams, best score {found[0].score:.2f}")
        for beam in found:
            print(f"  {beam.score:.2f}  {beam.tokens}")
    known = engine.accounting
    print(f"pages: {known.most_pages} at most, and {known.most_unshared} without sharing")


if __name__ == "__main__":
    main()
