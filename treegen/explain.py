"""Explanations: a tree, the plans that strategies make of it, and their accounts, as data, text and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from treegen.estimate import Estimate, account
from treegen.ir.json_form import FORMAT
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import DEFAULT_SHAPE, Shape
from treegen.ir.tree import Tree
from treegen.ir.tree_text import draw
from treegen.ir.verify import verify
from treegen.lower import lower
from treegen.strategies import Strategy, auto, strategy_from
from treegen.targets import Target, target_from

DEFAULT_GROUPS = 12


@dataclass(frozen=True, slots=True)
class Entry:
    """One strategy's plan and account; `reason` says why the strategy is here."""

    name: str
    options: dict[str, object]
    reason: str
    plan: Plan
    schedule: Schedule
    estimate: Estimate

    @classmethod
    def from_plan(
        cls,
        strategy: Strategy,
        reason: str,
        plan: Plan,
        schedule: Schedule,
        tree: Tree,
        shape: Shape,
        target: Target,
    ) -> Entry:
        """The entry of a plan that is already made."""
        estimate = account(plan, schedule, tree, shape, target)
        return cls(strategy.name, strategy.options, reason, plan, schedule, estimate)

    @property
    def label(self) -> str:
        """Name and options."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name


@dataclass(frozen=True, slots=True)
class Explanation:
    """A tree on a target, and what strategies make of it. best: the strategy that `auto` takes."""

    tree: Tree
    shape: Shape
    shape_assumed: bool
    target: Target
    entries: tuple[Entry, ...]
    best: Strategy

    def text(self, most_groups: int = DEFAULT_GROUPS) -> str:
        """The explanation as plain, stable text; at most `most_groups` groups of every plan are listed."""
        tree = self.tree
        assumed = " (assumed: no shape was given)" if self.shape_assumed else ""
        lines = [
            str(tree),
            f"signature {tree.signature()}",
            f"shape {self.shape}{assumed}; target {self.target.name}",
            "",
            draw(tree),
        ]
        for entry in self.entries:
            lines += ["", *_describe(entry, most_groups)]
        if len(self.entries) > 1:
            lines += ["", *_compare(self.entries), f"auto takes {self.best}"]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def to_json(self) -> str:
        """The explanation as JSON, all groups included."""
        tree = self.tree
        return json.dumps(
            {
                "format": FORMAT,
                "tree": {
                    "text": tree.text,
                    "signature": tree.signature(),
                    "nodes": len(tree.nodes),
                    "rows": tree.num_rows,
                    "unique_tokens": tree.unique_tokens,
                    "path_tokens": tree.path_tokens,
                },
                "shape": asdict(self.shape),
                "target": self.target.name,
                "strategies": [_as_json(entry) for entry in self.entries],
                "best": self.best.name,
            },
            indent=1,
        )


def explain(
    tree: Tree,
    strategies: Sequence[str | Strategy] = ("auto",),
    shape: Shape | None = None,
    target: str | Target | None = None,
) -> Explanation:
    """Plans a tree with every strategy given; needs no torch and no GPU. Raises a TreegenError for unknown names."""
    resolved_target, resolved_shape = target_from(target), shape or DEFAULT_SHAPE
    best = auto().choose(tree, resolved_shape, resolved_target).strategy
    entries = []
    for wanted in strategies:
        choice = strategy_from(wanted).choose(tree, resolved_shape, resolved_target)
        plan = choice.strategy.plan(tree, resolved_shape, resolved_target)
        verify(plan, tree)
        schedule = lower(plan, tree, resolved_shape, resolved_target)
        entries.append(
            Entry.from_plan(choice.strategy, choice.reason, plan, schedule, tree, resolved_shape, resolved_target)
        )
    return Explanation(tree, resolved_shape, shape is None, resolved_target, tuple(entries), best)


def _as_json(entry: Entry) -> dict[str, object]:
    return {
        "name": entry.name,
        "options": entry.options,
        "groups": [
            {
                "rows": [list(interval) for interval in group.rows],
                "segments": [asdict(segment) for segment in group.segments],
                "mask": "interval" if group.masked else "none",
            }
            for group in entry.plan.groups
        ],
        "tile_classes": [asdict(tile) for tile in entry.schedule.classes],
        "estimate": asdict(entry.estimate),
        "reason": entry.reason,
    }


_ROWS: tuple[tuple[str, Callable[[Estimate], str]], ...] = (
    ("KV, each token once", lambda e: size(e.kv_unique_bytes)),
    ("KV the plan reads", lambda e: size(e.kv_hbm_bytes)),
    ("KV re-read by row tiles and groups", lambda e: size(e.kv_l2_bytes)),
    ("queries read", lambda e: size(e.q_bytes)),
    ("output written", lambda e: size(e.out_bytes)),
    ("partials written and read", lambda e: size(e.partial_bytes)),
    ("masks", lambda e: size(e.mask_bytes)),
    ("padding waste", lambda e: f"{100 * e.padding_waste:.1f} % of {count(e.padded_flops)}FLOP"),
    ("thread blocks", lambda e: f"{e.items} ({e.waves:.2f} waves)"),
    ("launches", lambda e: str(e.launches)),
)


def _describe(entry: Entry, most_groups: int) -> list[str]:
    plan = entry.plan.text(most_groups).splitlines()
    classes = [f"tile class {tile}" for tile in entry.schedule.classes]
    table = [f"  {name:36}{value(entry.estimate):>24}" for name, value in _ROWS]
    return [f"strategy {entry.label}: {entry.reason}", *plan, *classes, *table]


def _compare(entries: Sequence[Entry]) -> list[str]:
    width = max(len(entry.label) for entry in entries) + 2
    titles = ("KV read", 12), ("KV re-read", 12), ("partials", 12), ("padding", 9), ("blocks", 8), ("launches", 9)
    lines = [f"{'strategy':{width}}" + "".join(f"{title:>{room}}" for title, room in titles)]
    for entry in entries:
        e = entry.estimate
        lines.append(
            f"{entry.label:{width}}{size(e.kv_hbm_bytes):>12}{size(e.kv_l2_bytes):>12}{size(e.partial_bytes):>12}"
            f"{100 * e.padding_waste:>7.1f} %{e.items:>8}{e.launches:>9}"
        )
    return lines


def size(value: int) -> str:
    """Bytes with a binary unit and four digits at most: `1.5 MiB`."""
    amount, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def count(value: int) -> str:
    """A number with a decimal prefix: `3.2 G`."""
    amount, prefix = float(value), ""
    for prefix in ("", "K", "M", "G", "T"):
        if amount < 1000 or prefix == "T":
            break
        amount /= 1000
    return f"{amount:.1f} {prefix}" if prefix else f"{amount:.0f} "
