"""Strategies: named pipelines that turn a tree into a plan, and their registry."""

from treegen.strategies.named import (
    batch_invariant,
    cascade,
    cohort,
    deft_flatten,
    deft_node,
    deft_node_chunk,
    fasttree,
    flashforge,
    medusa,
    query,
    specinfer,
)
from treegen.strategies.registry import auto, register_strategy, strategy_from, strategy_names
from treegen.strategies.strategy import Choice, Pipeline, Strategy, Traffic

__all__ = [
    "Choice",
    "Pipeline",
    "Strategy",
    "Traffic",
    "auto",
    "batch_invariant",
    "cascade",
    "cohort",
    "deft_flatten",
    "deft_node",
    "deft_node_chunk",
    "fasttree",
    "flashforge",
    "medusa",
    "query",
    "register_strategy",
    "specinfer",
    "strategy_from",
    "strategy_names",
]
