"""The cost of several ranks as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from treegen.cost.communication import Wanted
from treegen.cost.figures import byte_text, time_text
from treegen.cost.ranks import Held, RanksCost

_MOST_RANKS = 8  # lines of ranks to list


def ranks_lines(cost: RanksCost) -> Iterator[str]:
    """Yields what each rank holds and how long it attends, the ways to merge, and the time against one GPU."""
    division, merge = cost.division, cost.merge()
    yield f"{division.ranks} ranks over {division.link.name}, predicted: {_division_text(cost)}"
    yield f"  {'rank':12}{'tokens':>14}{'KV':>12}{'attention':>13}  strategy"
    alike = [list(ranks) for _, ranks in groupby(cost.held, key=lambda held: held[1:])]
    yield from (_held_line(ranks, len(cost.held)) for ranks in alike[:_MOST_RANKS])
    if len(alike) > _MOST_RANKS:
        hidden = sum(len(ranks) for ranks in alike[_MOST_RANKS:])
        yield f"  {hidden} more; the slowest takes {time_text(_slowest_us(alike[_MOST_RANKS:]))}"
    if cost.merges:
        yield f"  {'merge: heads, mode':22}{'collective':16}{'messages':>10}{'sent':>12}{'time':>12}"
    for way in cost.merges:
        collectives = way.cost.collectives
        for place, each in enumerate(collectives):
            name = "" if place else f"{way.wanted}, {way.cost.mode}"
            time = time_text(way.cost.time_us) if place + 1 == len(collectives) else ""
            yield f"    {name:20}{each.name:16}{each.messages:>10}{byte_text(each.sent):>12}{time:>12}"
    slowest = f"slowest rank {time_text(cost.slowest.attention_us)}"
    parts = f" = {slowest} + {merge.mode} of all heads {time_text(merge.time_us)}" if merge else f" = {slowest}"
    yield f"  a layer: {time_text(cost.total_us())}{parts}"
    yield f"  one GPU: {time_text(cost.alone_us)}; {_verdict(cost)}"
    if cost.merge("own"):
        yield f"  where ranks go on with their own heads: {time_text(cost.total_us('own'))}, {_times(cost, 'own')}"
    if cost.pays_from is not None:
        length = f"from about {cost.pays_from:,} tokens of" if cost.pays_from > 1 else "whatever the length of"
        yield f"  {division.ranks} ranks pay {length} the longest node"


def ranks_object(cost: RanksCost) -> dict[str, Any]:
    """Returns the cost for JSON forms.

    - ranks, tensor, context, interleave, link: the division; shape: that of each rank;
    - held: the ranks that divide tokens, with tokens, bytes of KV, strategy and the time of attention;
    - merges: the ways to merge, with collectives, bytes that each rank sends, and times;
    - total_us, speedup: of a layer with the fastest merge, by the heads that ranks get (`own` may be missing);
    - alone_us: the time of one GPU; pays: whether the ranks are faster; pays_from: tokens of the longest node, or null.
    """
    division = cost.division
    wanted: tuple[Wanted, ...] = ("all", "own") if cost.merge("own") else ("all",)
    merges = [
        {
            "heads": way.wanted,
            "mode": way.cost.mode,
            "collectives": [each._asdict() for each in way.cost.collectives],
            "sent": way.cost.sent,
            "link_us": way.cost.link_us,
            "local_us": way.cost.local_us,
            "time_us": way.cost.time_us,
        }
        for way in cost.merges
    ]
    return {
        "ranks": division.ranks,
        "tensor": division.tensor,
        "context": division.context,
        "interleave": division.interleave,
        "link": asdict(division.link),
        "shape": asdict(cost.shape),
        "held": [held._asdict() for held in cost.held],
        "merges": merges,
        "total_us": {heads: cost.total_us(heads) for heads in wanted},
        "speedup": {heads: cost.speedup(heads) for heads in wanted},
        "alone_us": cost.alone_us,
        "pays": cost.pays,
        "pays_from": cost.pays_from,
    }


def _division_text(cost: RanksCost) -> str:
    division = cost.division
    texts = [f"heads divided by {division.tensor}"] if division.tensor > 1 else []
    if division.context > 1:
        texts.append(f"tokens divided by {division.context}, {division.interleave} at a time")
    return ", ".join(texts)


def _held_line(alike: Sequence[Held], ranks: int) -> str:
    """Returns a line for neighbouring ranks that hold and take the same."""
    first, last = alike[0], alike[-1]
    name = "each" if len(alike) == ranks else str(first.rank) if first is last else f"{first.rank} to {last.rank}"
    figures = f"{first.tokens:>14,}{byte_text(first.kv_bytes):>12}{time_text(first.attention_us):>13}"
    return f"  {name:12}{figures}  {first.strategy.partition('(')[0]}"


def _slowest_us(alike: Sequence[Sequence[Held]]) -> float:
    return max(ranks[0].attention_us for ranks in alike)


def _verdict(cost: RanksCost) -> str:
    return f"{cost.division.ranks} ranks {'pay' if cost.pays else 'do not pay'}, {_times(cost, 'all')}"


def _times(cost: RanksCost, heads: Wanted) -> str:
    return f"{cost.speedup(heads):.2f}x as fast"
