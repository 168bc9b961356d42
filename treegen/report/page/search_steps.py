"""The search for a policy as data: what `auto` weighs by estimates, and what tuning has measured."""

from __future__ import annotations

from typing import Any

from treegen.autotune_cache.policy_cache import POLICY_CACHE
from treegen.ir.arrays import INT32_MAX
from treegen.search.policies import accepts, key_of
from treegen.search.split_estimates import BLOCKS_PER_SM, EVEN_SHARES
from treegen.search.weigh import candidates, weights_of
from treegen.search.weighed_policies import as_named
from treegen.target.problem import Problem

MOST_CANDIDATES = 40
"""The most policies to list, the ones with the least estimated times."""


def search_object(problem: Problem) -> dict[str, Any] | None:
    """Returns the search for a policy for JSON forms; None for a tree whose rows see nothing.

    - walks: the ways to divide rows into cohorts;
    - blocks_per_sm: `[splits]`; the thread blocks per SM that a split aims at, "even" for even shares, null for none;
    - split: `[splits, walks]`; tokens per work item, null where nothing is split;
    - time_us: `[splits, walks]`; estimated microseconds;
    - best: the place (split, walk) of the least time among plans that are not too large;
    - candidates: the policies with the least times, as {policy, estimated_us, measured_us, outcome}; measurements come
      from the policy cache and are null for policies that were not measured;
    - bucket: the trees that share measurements with this one;
    - measured: the measured policy of the bucket, as {policy, measured_us, source}, or null.
    """
    weights = weights_of(problem)
    if weights is None:
        return None
    key = key_of(problem)
    entry = POLICY_CACHE.lookup(key, accepts).entry
    listed = {
        str(policy): {"policy": str(policy), "estimated_us": time_us, "measured_us": None, "outcome": ""}
        for policy, time_us in candidates(problem, MOST_CANDIDATES)
    }
    for policy, measured_us, outcome in entry.candidates if entry else ():
        known = listed.setdefault(policy, {"policy": policy, "estimated_us": None})
        known.update(measured_us=measured_us, outcome=outcome)
    splits = [[None if split == INT32_MAX else int(split) for split in row] for row in weights.splits.tolist()]
    return {
        "walks": [str(as_named(walk, has_rows_inside=problem.tree.topology.has_rows_inside)) for walk in weights.walks],
        "blocks_per_sm": [None, EVEN_SHARES, *BLOCKS_PER_SM],
        "split": splits,
        "time_us": weights.times_us.tolist(),
        "best": list(weights.best_planned(problem)),
        "candidates": list(listed.values()),
        "bucket": key.bucket,
        "measured": entry and {
            "policy": dict(entry.policy),
            "measured_us": entry.measured_us,
            "source": entry.source,
        },
    }  # fmt: skip
