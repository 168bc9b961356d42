"""Strategies, which turn a tree into a plan, and their registry."""

from treegen.strategies.baselines import cascade, medusa, query, specinfer
from treegen.strategies.batch_invariant import batch_invariant
from treegen.strategies.cohort import cohort
from treegen.strategies.deft import deft_flatten, deft_node, deft_node_chunk
from treegen.strategies.fasttree import fasttree
from treegen.strategies.flashforge import flashforge
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
