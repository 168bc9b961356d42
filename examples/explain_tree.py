"""Compares all strategies on a few-shot batch, without torch and without a GPU."""

from treegen import Shape
from treegen.report.explain import explain
from treegen.strategies import deft_node_chunk, strategy_names
from treegen.workloads.generate import few_shot


def main() -> None:
    """Prints the bytes and the padding of each named strategy, and the strategy that `auto` chooses."""
    tree = few_shot(prompt=4000, width=20, step=200)
    strategies = (*strategy_names(), deft_node_chunk(chunk=512), "auto")
    explanation = explain(tree, strategies, Shape(32, 8, 128, dtype="fp16"), "a100")
    print(explanation.text(most_groups=3))
    moved = {
        str(entry.strategy): entry.estimate.kv_hbm_bytes + entry.estimate.partial_bytes for entry in explanation.entries
    }
    least = min(moved, key=lambda label: moved[label])
    print(f"{least} moves the fewest bytes of KV and partials: {moved[least] / 1e6:.1f} MB per layer")


if __name__ == "__main__":
    main()
