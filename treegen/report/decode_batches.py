"""Batches of trees: trees at chosen steps of a decoding as one forest, which is planned and counted at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from treegen.ir.arrays import Floats, Longs
from treegen.ir.tree import Tree
from treegen.strategies.forest import Forest
from treegen.workloads.traces import CourseSegment

LARGEST_BATCH = 512  # trees of a batch
MOST_TOKENS = 2**30  # tokens of a batch, because token coordinates are int32


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The forest of trees at chosen steps of a decoding.

    Args:
        forest: The trees.
        weight: `[trees]`: the number of steps that each tree stands for.
        segment: `[trees]`: the number of each tree's segment.
        tokens: `[trees]`: tokens that some row sees, each once.
        paths: `[trees]`: tokens that rows see, once per row.
    """

    forest: Forest
    weight: Floats
    segment: Longs
    tokens: Longs
    paths: Longs

    @classmethod
    def of(cls, trees: list[Tree], weight: Floats, segment: Longs) -> Batch:
        """Makes the batch of at least one tree."""
        forest = Forest.of(trees)
        spans = forest.joined.topology.spans
        owner = np.searchsorted(forest.first_node, spans.node, side="right") - 1
        tokens = np.bincount(owner, spans.lengths, len(trees)).astype(np.int64)
        seen = spans.lengths * (spans.hi.astype(np.int64) - spans.lo)
        paths = np.bincount(owner, seen, len(trees)).astype(np.int64)
        return cls(forest, weight, segment, tokens, paths)

    def take(self, chosen: Longs) -> Batch:
        """Makes the batch of these trees."""
        if len(chosen) == len(self.trees):
            return self
        return Batch.of([self.trees[index] for index in chosen], self.weight[chosen], self.segment[chosen])

    @property
    def trees(self) -> list[Tree]:
        """The trees, one by one."""
        return self.forest.trees

    @property
    def rows(self) -> Longs:
        """Rows of every tree, `[trees]`."""
        return np.diff(self.forest.first_row)


def batches(segments: Iterable[CourseSegment], stride: int) -> Iterator[Batch]:
    """Yields the trees of a decoding that are counted, with the number of steps that they stand for.

    stride: steps between two trees of a segment.
    """
    trees: list[Tree] = []
    weights: list[Floats] = []
    numbers: list[int] = []
    tokens = 0
    for number, segment in enumerate(segments):
        places, weight = _sampled(segment.grown, stride)
        for place, stands_for in zip(places.tolist(), weight.tolist(), strict=True):
            tree = segment.at(segment.first + place)
            size = int(tree.tokens.sum(dtype=np.int64))
            if trees and (len(trees) == LARGEST_BATCH or tokens + size > MOST_TOKENS):
                yield Batch.of(trees, np.array(weights), np.array(numbers))
                trees, weights, numbers, tokens = [], [], [], 0
            trees.append(tree)
            weights.append(stands_for)
            numbers.append(number)
            tokens += size
    if trees:
        yield Batch.of(trees, np.array(weights), np.array(numbers))


def _sampled(grown: Longs, stride: int) -> tuple[Longs, Floats]:
    """Returns chosen steps of a segment, and their weights.

    The weighted sum over the chosen steps equals the sum over all steps for every function that is linear in `grown`
    between chosen steps.
    """
    last = len(grown) - 1
    places: Longs = np.unique(np.append(np.arange(0, last + 1, stride), last))
    if last == 0:
        return places, np.ones(1)
    step = np.arange(last + 1)
    left = np.minimum(np.searchsorted(places, step, side="right") - 1, len(places) - 2)
    begin, end = grown[places[left]], grown[places[left + 1]]
    right_share = (grown - begin) / np.maximum(end - begin, 1)
    weight = np.bincount(left, 1 - right_share, len(places)) + np.bincount(left + 1, right_share, len(places))
    return places, weight.astype(np.float64)
