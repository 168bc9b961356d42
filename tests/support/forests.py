"""Random forests for property tests, and plain-loop oracles of what their rows see.

The oracles read only what a caller gives (parents, tokens, rows, KV runs), never `treegen.ir.tree.topology`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from treegen.ir.groups import Group, Segment
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.tree import Tree
from treegen.ir.tree.kv import KVRuns

Rows = list[tuple[int, int]]
Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]

ROW_STYLES = ("leaves", "ends", "inside", "copies", "every", "mixed", "nothing", "nobody")
"""leaves: default rows. ends: whole nodes, any of them. inside: anywhere in any node. copies: several rows that see the
same. every: one row per token. nothing: rows that see nothing, among others. nobody: no rows at all."""
KV_STYLES = ("default", "slots", "pages", "runs")
"""default: nodes one after another. slots: every token anywhere. pages: shuffled pages. runs: pieces of any length."""


def forest(
    *,
    nodes: int,
    most_tokens: int,
    seed: int,
    roots: float = 0.1,
    chain: float = 0.3,
    rows: str = "mixed",
    shuffled: bool = False,
    kv: str = "default",
    page_size: int = 1,
) -> Tree:
    """A forest that depends on its arguments alone; fewer `nodes` leave the remaining ones as they are.

    roots: how often a node is a root; chain: how often a node extends the one before it. shuffled: children may have
    lower numbers than their parents, and rows come in any order.
    """
    source = random.Random(seed)
    parents, tokens = [], []
    attached: Rows = []
    for node in range(nodes):
        starts, extends, place = source.random(), source.random(), source.random()
        parents.append(-1 if node == 0 or starts < roots else node - 1 if extends < chain else int(place * node))
        tokens.append(_length(source, most_tokens))
        attached += [(node, sees) for sees in _sees(source, tokens[-1], rows)]
    other = random.Random(seed + 1)
    if shuffled:
        number = list(range(nodes))
        other.shuffle(number)
        order = sorted(range(nodes), key=number.__getitem__)
        parents = [-1 if parents[old] < 0 else number[parents[old]] for old in order]
        tokens = [tokens[old] for old in order]
        attached = [(number[node], sees) for node, sees in attached]
        other.shuffle(attached)
    return Tree.from_parents(
        parents, tokens, None if rows == "leaves" else attached, _placement(other, tokens, kv, page_size)
    )


def _length(source: random.Random, most: int) -> int:
    kind, size = source.random(), source.random()
    if kind < 0.15:
        return 0
    if kind < 0.3:
        return min(1, most)
    return most if kind > 0.95 else round(most * size * size)


def _sees(source: random.Random, tokens: int, style: str) -> list[int]:
    if style == "mixed":
        style = source.choice(("ends", "inside", "copies", "every", "nothing", "nobody"))
    if style == "ends":
        return [tokens] * (source.random() < 0.5)
    if style == "inside":
        return [source.randint(0, tokens) for _ in range(source.randrange(4))]
    if style == "copies":
        return [source.randint(0, tokens)] * source.randrange(5)
    if style == "every":
        return list(range(1, min(tokens, 5) + 1))
    if style == "nothing":
        return [0] * source.randrange(3) + [tokens] * source.randrange(2)
    return []


def _placement(source: random.Random, tokens: list[int], style: str, page_size: int) -> KVRuns | list[list[int]] | None:
    total = sum(tokens)
    if style == "slots":
        free = iter(source.sample(range(total + 7), total))
        return [[next(free) for _ in range(count)] for count in tokens]
    if style == "pages":
        counts = [-(-count // page_size) for count in tokens]
        free = iter(source.sample(range(sum(counts) + 3), sum(counts)))
        pages = [[next(free) for _ in range(count)] for count in counts]
        return KVRuns.from_pages(np.array(tokens), pages, page_size)
    if style == "runs":
        return KVRuns.from_runs(np.array(tokens), _scattered_runs(source, tokens))
    return None


def _scattered_runs(source: random.Random, tokens: list[int]) -> list[list[tuple[int, int]]]:
    pieces = []
    for node, count in enumerate(tokens):
        while count:
            length = min(count, source.choice((1, 2, 7, 16, 33, 80)))
            pieces.append((node, len(pieces), length))
            count -= length
    slot, starts = 0, [0] * len(pieces)
    for _, piece, length in source.sample(pieces, len(pieces)):
        starts[piece] = slot
        slot += length + source.randrange(2)
    runs: list[list[tuple[int, int]]] = [[] for _ in tokens]
    for node, piece, length in pieces:
        runs[node].append((starts[piece], length))
    return runs


def forests(
    max_nodes: int = 60,
    max_tokens: int = 100,
    *,
    rows: tuple[str, ...] = ROW_STYLES,
    kv: tuple[str, ...] = KV_STYLES,
    salt: int = 0,
) -> st.SearchStrategy[Tree]:
    """Random forests; `salt` tells apart tests that would otherwise draw the same ones.

    All draws but one are from distinct `sampled_from`: hypothesis then finds no two draws to make equal, and nearly all
    examples are fresh ones. (Its mutations would repeat a few small forests, hundreds of times.)
    """
    return st.builds(
        forest,
        nodes=st.sampled_from(
            [1 + round((max_nodes - 1) * (step / 63) ** 2.5) for step in range(64)]
        ),  # more small ones
        most_tokens=st.sampled_from(range(max_tokens + 1)),
        seed=st.integers(salt << 24, (salt + 1 << 24) - 1),
        roots=st.sampled_from((0.1, 0.0, 0.5, 1.0)),
        chain=st.sampled_from((0.3, 0.0, 0.9, 1.0)),
        rows=st.sampled_from(rows),
        shuffled=st.sampled_from((False, True)),
        kv=st.sampled_from(kv),
        page_size=st.sampled_from(range(1, 17)),
    )


def token_slots(tree: Tree) -> list[list[int]]:
    """The slots of every node's tokens."""
    indptr, start, length = tree.kv.indptr.tolist(), tree.kv.start.tolist(), tree.kv.length.tolist()
    return [
        [slot for run in range(indptr[v], indptr[v + 1]) for slot in range(start[run], start[run] + length[run])]
        for v in range(len(tree.tokens))
    ]


def path(tree: Tree, row: int) -> Iterator[tuple[int, int]]:
    """(node, tokens of it that the row sees), from the row's own node up to the root."""
    node, sees = tree.row_node.item(row), tree.row_sees.item(row)
    while node >= 0:
        yield node, sees
        node = tree.parent.item(node)
        sees = tree.tokens.item(node)


def visible_slots(tree: Tree, row: int) -> list[int]:
    """The slots that a row sees, root first."""
    slots = token_slots(tree)
    pieces = [slots[node][:sees] for node, sees in path(tree, row)]
    return [slot for piece in reversed(pieces) for slot in piece]


def first_tokens(tree: Tree) -> list[int]:
    """Where every node's tokens begin when all nodes' tokens are numbered one after another."""
    result = [0]
    for count in tree.tokens.tolist():
        result.append(result[-1] + count)
    return result


def visible(tree: Tree) -> Bools:
    """Whether row i sees token j, nodes' tokens numbered one after another."""
    first = first_tokens(tree)
    result = np.zeros((tree.num_rows, first[-1]), bool)
    for row in range(tree.num_rows):
        for node, sees in path(tree, row):
            result[row, first[node] : first[node] + sees] = True
    return result


def preorder(tree: Tree) -> list[int]:
    """Nodes in depth-first order, siblings by index."""
    children: list[list[int]] = [[] for _ in range(len(tree.parent) + 1)]
    for node, parent in enumerate(tree.parent.tolist()):
        children[parent].append(node)
    pending, result = children[-1][::-1], []
    while pending:
        result.append(pending.pop())
        pending += children[result[-1]][::-1]
    return result


def ranked_rows(tree: Tree) -> list[int]:
    """The rows in rank order: by node in depth-first order, within a node by what they see, then as the caller's."""
    place = {node: index for index, node in enumerate(preorder(tree))}
    rows = zip(tree.row_node.tolist(), tree.row_sees.tolist(), strict=True)
    return [row for *_, row in sorted((place[node], sees, row) for row, (node, sees) in enumerate(rows))]


def plan_counts(plan: Plan, tree: Tree) -> Counts | None:
    """In how many groups row i sees token j; None when the plan names a node, token or rank that does not exist."""
    first, ranked = first_tokens(tree), ranked_rows(tree)
    result = np.zeros((tree.num_rows, first[-1]), np.int64)
    for group in plan.groups:
        rows: list[int] = []
        for lo, hi in group.rows:
            if lo < 0 or hi > len(ranked):
                return None
            rows += ranked[lo:hi]
        for segment in group.segments:
            if not 0 <= segment.node < len(tree.tokens):
                return None
            if not 0 <= segment.start < segment.stop <= tree.tokens[segment.node]:
                return None
            begin = first[segment.node]
            for row in rows[segment.seen[0] : segment.seen[1]]:
                result[row, begin + segment.start : begin + segment.stop] += 1
    return result


def obeys_law(plan: Plan, tree: Tree) -> bool:
    """The coverage law by brute force: every visible pair is seen once, every other pair never."""
    counts = plan_counts(plan, tree)
    return counts is not None and bool((counts == visible(tree)).all())


def schedule_counts(schedule: Schedule, num_rows: int, num_partials: int) -> Counts:
    """How many items let row i attend to slot j, straight from the tables that kernels read."""
    result = np.zeros((num_rows, num_partials), np.int64)
    for index, config in enumerate(schedule.configs):
        for number in range(schedule.config_indptr[index], schedule.config_indptr[index + 1]):
            item = schedule.work_items[number]
            rows = schedule.rows[item.row0 : item.row0 + item.rows].tolist()
            full = schedule.tiles[item.tile0 : item.tile0 + item.tiles].tolist()
            packed = item.packed_tiles * config.runs_per_tile
            for slot, length, lo, hi in full + schedule.packed_runs[item.run0 : item.run0 + packed].tolist():
                word = (hi % 2**32 << 32) + lo % 2**32
                seeing = (
                    [row for bit, row in enumerate(rows) if word >> bit & 1] if config.mask == "bits" else rows[lo:hi]
                )
                for row in seeing:
                    result[row, slot : slot + length] += 1
    return result


def visible_slot_counts(tree: Tree, num_partials: int) -> Counts:
    """What `schedule_counts` has to be: 1 where a row sees the token in a slot."""
    result = np.zeros((tree.num_rows, num_partials), np.int64)
    slots = [np.array(node_slots, np.int64) for node_slots in token_slots(tree)]
    for row in range(tree.num_rows):
        for node, sees in path(tree, row):
            result[row, slots[node][:sees]] += 1
    return result


def plan_by_row_classes(tree: Tree, seed: int, configs: int, *, unseen: bool) -> Plan:
    """A lawful plan whose groups have several rank intervals: every rank joins one of `configs` groups at random.

    Every group reads all visible tokens in random pieces; with `unseen` also pieces that none of its rows sees.
    """
    source = random.Random(seed)
    ranked = ranked_rows(tree)
    sees_token = visible(tree)[ranked]
    first = first_tokens(tree)
    owner = [source.randrange(configs) for _ in ranked]
    groups = []
    for number in range(configs):
        ranks = [rank for rank in range(len(ranked)) if owner[rank] == number]
        segments = []
        for node in preorder(tree):
            start = 0
            while start < tree.tokens[node]:
                column = sees_token[ranks, first[node] + start]
                stop = start + 1
                limit = min(int(tree.tokens[node]), start + source.choice((1, 3, 40)))
                while stop < limit and (sees_token[ranks, first[node] + stop] == column).all():
                    stop += 1
                seeing = np.flatnonzero(column).tolist()
                if seeing:
                    segments.append(Segment(node, start, stop, (seeing[0], seeing[-1] + 1)))
                elif unseen and source.random() < 0.5:
                    segments.append(Segment(node, start, stop, (0, 0)))
                start = stop
        if ranks and segments:
            source.shuffle(segments)
            groups.append(Group(_intervals(ranks), tuple(segments)))
    return Plan.from_groups("row-configs", groups)


def _intervals(ranks: list[int]) -> tuple[tuple[int, int], ...]:
    begins = [rank for index, rank in enumerate(ranks) if index == 0 or ranks[index - 1] != rank - 1]
    ends = [rank + 1 for index, rank in enumerate(ranks) if index == len(ranks) - 1 or ranks[index + 1] != rank + 1]
    return tuple(zip(begins, ends, strict=True))


def examples(count: int) -> settings:
    """Hypothesis settings of property tests: how many examples, and no limit on the time of one."""
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])
