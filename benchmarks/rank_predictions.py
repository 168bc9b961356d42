"""Predicts the time of a layer's attention on several ranks, as tables in Markdown. Needs no GPU.

    python benchmarks/rank_predictions.py [--heads all|own]

All figures are predictions of the cost model (treegen.cost.ranks) for H200s and bf16: a plan of `auto` for each rank, a
link in a model of a few numbers (treegen.cost.known_links), and the faster way to merge. Between two H200s over NVLink
the link's numbers were measured. Larger worlds and the links of 400 Gb/s are assumptions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import treegen
from treegen.cost.communication import Wanted
from treegen.cost.known_links import LINKS
from treegen.cost.ranks import Division, RanksCost, cost_of_ranks
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.strategies import auto
from treegen.target.problem import Problem
from treegen.target.targets import target_from

RANKS = (2, 8, 64)
TENSOR = 8
"""Ranks that divide heads, in the last column of the first tables; each holds an eighth of the tokens."""
HEADS_RANKS = (2, 4, 8)
ROWS = (8, 16, 32, 64, 128, 256)
SHAPE = Shape(32, 8, 128, dtype="bf16")
LLAMA_70B = Shape(64, 8, 128, dtype="bf16")


def shared(tokens: int, rows: int) -> Tree:
    """Makes a tree of one prefix that all rows share."""
    return Tree.from_parents([-1], [tokens], rows=[(0, tokens)] * rows)


FOREST, UNSHARED = "8 prompts of 4k, 32 samples of 512 each", "unshared, 64 rows of 16k"
CASES = {
    **{f"prefix of 8k, {rows} rows": shared(8 << 10, rows) for rows in ROWS},
    "prefix of 128k, 64 rows": shared(128 << 10, 64),
    "prefix of 1M, 64 rows": shared(1 << 20, 64),
    FOREST: Tree.from_levels([8, 256], [4 << 10, 512]),
    UNSHARED: Tree.from_levels([64], [16 << 10]),
}
HEADS_CASES = ("prefix of 8k, 64 rows", "prefix of 128k, 64 rows", FOREST, UNSHARED)


def cost(tree: Tree, shape: Shape, division: Division, *, scaled: bool = False) -> RanksCost:
    """Estimates a tree on several H200s."""
    return cost_of_ranks(Problem(tree, shape, target_from("h200")), division, auto(), scaled=scaled)


def context_rows(link: str, heads: Wanted) -> Iterator[list[str]]:
    """Yields a row for each case: one GPU, ranks that divide tokens, and ranks that divide both."""
    yield ["case", "one GPU", *(f"{ranks} ranks" for ranks in RANKS), f"64 ranks, heads by {TENSOR}"]
    divisions = [*(Division(ranks, LINKS[link]) for ranks in RANKS), Division(64, LINKS[link], TENSOR)]
    for name, tree in CASES.items():
        found = [cost(tree, SHAPE, division) for division in divisions]
        yield [name, f"{found[0].alone_us:.0f}", *(_cell(each, heads) for each in found)]


def length_rows() -> Iterator[list[str]]:
    """Yields a row for each number of rows: the tokens of a shared prefix from which on ranks pay."""
    yield ["rows", *(f"{ranks} ranks, {link}" for link in LINKS for ranks in RANKS)]
    for rows in ROWS:
        found = [
            cost(shared(8 << 10, rows), SHAPE, Division(ranks, link), scaled=True).pays_from
            for link in LINKS.values()
            for ranks in RANKS
        ]
        yield [str(rows), *("never" if tokens is None else f"{tokens:,}" for tokens in found)]


def heads_rows() -> Iterator[list[str]]:
    """Yields a row for each case of Llama-3-70B's heads: one GPU, and ranks that divide heads."""
    yield ["case", "one GPU", *(f"{ranks} ranks" for ranks in HEADS_RANKS)]
    for name in HEADS_CASES:
        found = [cost(CASES[name], LLAMA_70B, Division(ranks, LINKS["nvlink"], tensor=ranks)) for ranks in HEADS_RANKS]
        yield [name, f"{found[0].alone_us:.0f}", *(_cell(each, "all") for each in found)]


def _cell(found: RanksCost, heads: Wanted) -> str:
    if heads == "own" and found.merge("own") is None:
        return "-"
    return f"{found.total_us(heads):.0f} ({found.speedup(heads):.2f}x)"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table; the first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{' --- |' * len(rows[0])}", *lines[1:]])


def tables(heads: Wanted = "all") -> dict[str, str]:
    """Returns the tables by their titles."""
    made = {f"tokens divided, {link}": markdown(list(context_rows(link, heads))) for link in LINKS}
    made["tokens of a shared prefix from which on ranks pay"] = markdown(list(length_rows()))
    made["heads divided"] = markdown(list(heads_rows()))
    return made


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", choices=("all", "own"), default="all", help="what each rank gets of a merge")
    options = parser.parse_args()
    print(f"treegen {treegen.__version__}; microseconds of a layer, predicted")
    for title, table in tables(options.heads).items():
        print(f"\n{title}\n\n{table}")


if __name__ == "__main__":
    main()
