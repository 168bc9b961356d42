"""Strategies: named pipelines that turn a tree into a plan, and their registry."""

from treegen.strategies.named import auto, deft_flatten, deft_node, deft_node_chunk, fasttree, query
from treegen.strategies.registry import register_strategy, strategy_from, strategy_names
from treegen.strategies.strategy import Choice, Pipeline, Strategy, Traffic

__all__ = [
    "Choice",
    "Pipeline",
    "Strategy",
    "Traffic",
    "auto",
    "deft_flatten",
    "deft_node",
    "deft_node_chunk",
    "fasttree",
    "query",
    "register_strategy",
    "strategy_from",
    "strategy_names",
]
