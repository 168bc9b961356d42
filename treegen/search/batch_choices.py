"""Choices for running batches: a measured policy, or else the policy with the least estimated time.

A policy for batches names a walk of treegen.search.weigh and how finely it is split, so that it fits a batch of any
length:

    {"strategy": "cohort", "head_rows": 64, "cut": "highest", "blocks_per_sm": "2"}

head_rows: query head rows of a cohort. cut: whether paths are cut at the lowest or at the highest threshold on rows.
blocks_per_sm: thread blocks per SM that the split makes, or "even" for even shares; without it nothing is split.
Policies measured by earlier versions may call it waves, and have more of them than are weighed now.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from treegen.autotune_cache.entry import Entry, Policy, PolicyValue
from treegen.autotune_cache.key import PolicyKey, key_for
from treegen.autotune_cache.policy_cache import POLICY_CACHE
from treegen.compiled.batch_tree import BatchTree
from treegen.ir.kernel_config import KernelConfig
from treegen.ir.shape import Shape
from treegen.search.bucket import Figures, batch_bucket
from treegen.search.compiled_weights import BatchWalks
from treegen.search.split_estimates import BATCH_BLOCKS_PER_SM, EVEN_SHARES
from treegen.search.weigh import NOTHING, weights_of
from treegen.search.weighed_policies import WeighedPolicies, as_named
from treegen.strategies.baselines import query
from treegen.strategies.cohort import Cohort
from treegen.strategies.context_cuts import SPLIT_STEP
from treegen.strategies.strategy import Choice, Strategy
from treegen.target.problem import Problem
from treegen.target.targets import Target

_DRIFT = 1.15
"""The factor by which the tokens of a batch may grow or shrink before its policies are weighed anew."""
_NEAR = 1.15
"""A measured policy is taken where its estimate is at most this many times the least one.

Batches of a bucket differ: work items that just fill the GPU for one of them leave half of it idle for another one. The
estimates of shipped policies are at most 1.05 times the least, for the batches that they were measured with. On an H200
none of 926 policies with estimates of more than 1.15 times the least was faster than the choice.
"""
_CUTS = ("lowest", "highest")
_BLOCKS = (EVEN_SHARES, *(f"{blocks:g}" for blocks in BATCH_BLOCKS_PER_SM))
_EARLIER_BLOCKS = ("4", "8")


def batch_key(problem: Problem) -> PolicyKey:
    """Returns the cache key of a batch's bucket. Page sizes share policies, as do bf16 and fp16."""
    return _key_of(batch_bucket(problem.tree), problem.shape, problem.target)


def _key_of(bucket: str, shape: Shape, target: Target) -> PolicyKey:
    return key_for(f"batch of {bucket}", _measured_shape(shape), target)


@lru_cache(16)
def _measured_shape(shape: Shape) -> Shape:
    """Returns the shape whose policies a shape takes."""
    shape = replace(shape, page_size=16)
    return replace(shape, dtype="bf16", kv_dtype="bf16") if shape.dtype == shape.kv_dtype == "fp16" else shape


def accepts_for_batches(policy: Mapping[str, object]) -> bool:
    """Tells whether a policy from outside is one for batches."""
    rows, cut, blocks = policy.get("head_rows"), policy.get("cut", _CUTS[0]), _blocks_of(policy)
    known = set(policy) <= {"strategy", "head_rows", "cut", "blocks_per_sm", "waves"}
    known = known and policy.get("strategy") == "cohort"
    return (
        known
        and type(rows) is int
        and rows > 0
        and cut in _CUTS
        and (blocks is None or blocks in _BLOCKS + _EARLIER_BLOCKS)
    )


def _blocks_of(policy: Mapping[str, object]) -> object:
    """Returns the thread blocks per SM of a policy, None where nothing is split."""
    return policy.get("blocks_per_sm", policy.get("waves"))


def policy_at(weights: WeighedPolicies, place: tuple[int, int]) -> Policy:
    """Returns the policy at a place of weighed ones, for batches of the same bucket."""
    split, walk = place
    policy: dict[str, PolicyValue] = {"strategy": "cohort", "head_rows": weights.walks[walk].head_rows}
    if weights.walks[walk].split_shared_rows is not None:
        policy["cut"] = _CUTS[walk == len(weights.walks) - 1]
    if split:
        policy["blocks_per_sm"] = _BLOCKS[split - 1]
    return policy


def place_of(weights: WeighedPolicies, policy: Policy) -> tuple[int, int] | None:
    """Returns the place of a policy among those weighed for a batch; None where it is not among them."""
    cut = policy.get("cut")
    walks = [walk for walk, each in enumerate(weights.walks) if (each.split_shared_rows is None) == (cut is None)]
    if cut is not None:
        walks = walks[-1:] if cut == _CUTS[1] else walks[:1]
    blocks = _blocks_of(policy)
    if blocks in _EARLIER_BLOCKS:
        return None
    split = 0 if blocks is None else 1 + _BLOCKS.index(str(blocks))
    return next(((split, walk) for walk in walks if weights.walks[walk].head_rows == policy["head_rows"]), None)


def scaled(strategy: Strategy, factor: float) -> Strategy:
    """Returns a weighed strategy whose split is multiplied by a factor, and rounded up as those of policies are."""
    split = strategy.options.get("split")
    if not isinstance(split, int):
        return strategy
    return _split_every(strategy, math.ceil(split * factor / SPLIT_STEP) * SPLIT_STEP)


@lru_cache(256)
def _split_every(strategy: Strategy, tokens: int) -> Strategy:
    """Returns a weighed strategy with another split."""
    return replace(strategy, split=tokens) if isinstance(strategy, Cohort) else query(tokens)


class BatchChoices:
    """Chooses for the batches of one shape and target, and remembers the choice for each bucket; a server has few.

    Files are read once for each bucket of the policy cache.

    Args:
        shape: The attention shape.
        target: The GPU.
        config: The kernel config of all launches.
        most_items: The most work items of a plan.
    """

    def __init__(self, shape: Shape, target: Target, config: KernelConfig, most_items: int) -> None:
        self._shape, self._target = shape, target
        self.config, self.most_items = config, most_items
        self._walks: dict[int, BatchWalks] = {}  # by the rows of a tree, at most those of a tile
        self._choices: dict[str, tuple[Choice, int]] = {}  # by bucket, with the tokens of the batch
        self._entries: dict[str, Entry | None] = {}

    def choose(self, tree: BatchTree) -> Choice:
        """Returns the choice of an earlier batch of the same bucket with about equal tokens, or else a new one.

        The split of an earlier choice grows and shrinks with the tokens, so the number of work items stays the same.

        Raises ShapeError: No kernel config fits the shape.
        """
        figures = Figures.of_counts(*tree.counts)
        choice = self._known(figures)
        if choice is None:
            weights = self._weights(tree)
            choice = Choice(as_named(Cohort(1), has_rows_inside=tree.has_rows_inside), NOTHING)
            if weights is not None:
                measured = self._measured(tree, figures.batch_bucket, weights)
                choice = measured or _chosen(tree, weights, weights.best(self.most_items))
            self._choices[figures.policy_bucket] = choice, figures.tokens
        return choice

    def _weights(self, tree: BatchTree) -> WeighedPolicies | None:
        """Weighs all policies, in C where that is possible; None where no row sees anything."""
        if not tree.counts.unique_tokens:
            return None
        rows = min(tree.counts.rows, self.config.rows)
        walks = self._walks.get(rows)
        if walks is None:
            walks = self._walks[rows] = BatchWalks(self._shape, self._target, self.config, rows)
        return walks.weights(tree) or weights_of(Problem(tree.tree, self._shape, self._target), self.config)

    def _known(self, figures: Figures) -> Choice | None:
        """Returns the choice of an earlier batch of the same bucket with about equal tokens, if there was one."""
        tokens = figures.tokens
        choice, known = self._choices.get(figures.policy_bucket, (None, 0))
        if choice is not None and known <= _DRIFT * tokens <= _DRIFT * _DRIFT * known:
            return choice if known == tokens else Choice(scaled(choice.strategy, tokens / known), choice.reason)
        return None

    def _measured(self, tree: BatchTree, bucket: str, weights: WeighedPolicies) -> Choice | None:
        """Returns the measured choice for a bucket of batches, if the policy cache has one that fits this batch."""
        if bucket not in self._entries:
            key = _key_of(bucket, self._shape, self._target)
            self._entries[bucket] = POLICY_CACHE.lookup(key, accepts_for_batches).entry
        entry = self._entries[bucket]
        place = None if entry is None else place_of(weights, entry.policy)
        if entry is None or place is None or weights.items(place) > self.most_items:
            return None
        if weights.time_us(place) > _NEAR * weights.time_us(weights.best()):
            return None
        reason = f"measured as the fastest for such batches: {entry.source}"
        return Choice(as_named(weights.policy(place), has_rows_inside=tree.has_rows_inside), reason)


def _chosen(tree: BatchTree, weights: WeighedPolicies, place: tuple[int, int]) -> Choice:
    strategy = as_named(weights.policy(place), has_rows_inside=tree.has_rows_inside)
    return Choice(strategy, weights.reason(strategy, weights.time_us(place)))
