"""Drafts that are accepted and proposed on the device: tokens and steps are those of a controller that decides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from support.noted_steps import NotingTokens, note_launches
from support.replayed_steps import replaying
from support.tiny_models import PROMPTS, VOCABULARY, tiny
from treegen.engine import (
    Branch,
    DraftModel,
    DraftTree,
    Engine,
    Growth,
    NGrams,
    Sample,
    Sampling,
    Speculate,
    tree_kernels,
)
from treegen.engine.control import Frontier, Next
from treegen.engine.draft_rows import DraftPaths, DraftTexts, draw_back, move_drafts
from treegen.engine.draft_trees import DraftMask, longest_path
from treegen.engine.pool import KVPool
from treegen.integrations import HFModel
from treegen.ir.errors import BranchError
from treegen.ir.shape import Shape


class Later:
    """Drafts and decides after each step."""

    together = False

    def __init__(self, *given: Any, **options: Any) -> None:
        own = Speculate(*given, **options)
        self.width, self.max_new_tokens, self.max_draft, self.draft_trees = (
            own.width, own.max_new_tokens, own.max_draft, own.draft_trees
        )  # fmt: skip
        self.draft, self.decide = own.draft, own.decide


class NotingDrafts(NotingTokens, Speculate):
    """Notes what happens in which order. `change` changes what is selected, proposed or decided, by its name."""

    change: dict[str, Any]

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        object.__setattr__(self, "change", {})

    def selects(self, branches: Sequence[Branch]) -> bool:
        return super().selects(branches) and self.change.get("selects", lambda branches: True)(branches)

    def select(self, frontier: Frontier) -> torch.Tensor:
        return self.change.get("select", lambda it: it)(super().select(frontier))

    def drafts_after(self, *given: Any) -> torch.Tensor:
        return self.change.get("drafts_after", lambda it: it)(super().drafts_after(*given))

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        return self.change.get("commit", lambda it, _: it)(super().commit(branches, tokens), branches)


def engine(controller: Any, name: str = "Llama", page_size: int = 4, tokens: int = 900, **options: Any) -> Engine:
    return Engine(
        HFModel(tiny(name)), controller, num_pages=tokens // page_size, page_size=page_size, max_rows=200,
        max_branches=12, **options,
    )  # fmt: skip


def tokens_of(made: Engine, prompts: list[list[int]]) -> list[list[list[int]]]:
    found = [[each.tokens for each in own] for own in made.run(prompts)]
    made.sequences.check()
    assert made.sequences.available == made.pool.num_pages
    return found


LOOPS = [[*range(9)] * 3, [5, 6, 7] * 6, *PROMPTS[:2]]
"""Prompts whose n-grams recur, so that drafts are accepted now and then."""
DRAWN = {"sampling": Sampling(0.7, seed=5), "stop_ids": (3, 50, 61)}


@pytest.mark.parametrize(("name", "page_size", "max_draft", "n", "occurrences", "options"), [
    ("Llama", 4, 1, 1, 1, {}), ("Llama", 1, 4, 2, 1, DRAWN), ("Mistral", 4, 3, 1, 1, {}),
    ("Gemma3", 16, 6, 3, 1, DRAWN), ("Llama", 4, 7, 2, 3, DRAWN), ("Mistral", 1, 5, 1, 2, {}),
    pytest.param("Llama", 4, 3, 12, 1, DRAWN, marks=pytest.mark.full),
])  # fmt: skip
def test_tokens_and_steps_are_those_of_deciding_after_each_step(
    name: str, page_size: int, max_draft: int, n: int, occurrences: int, options: dict[str, Any]
) -> None:
    """With prompts that wait for room, samples that end, and a second run by what the prefix cache has."""
    found = []
    for kind in (Later, NotingDrafts):
        controller = kind(NGrams(occurrences=occurrences), max_draft, n, max_new_tokens=40, **options)
        made = engine(controller, name, page_size, tokens=3000)
        if page_size == 4 and kind is NotingDrafts:
            replaying(made)
        found.append(([tokens_of(made, LOOPS) for _ in range(2)], made.accounting.steps))
    assert controller.noted.count("select") > 20
    assert found[0][0] == found[1][0]
    # Nobody ends a branch while its step is under way that would not have had it; a dead one has a row in one more.
    assert found[0][1] <= found[1][1] <= 1.3 * found[0][1]


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read() -> None:
    controller = NotingDrafts(NGrams(), 2, max_new_tokens=9)
    made = engine(controller)
    note_launches(made, controller.noted)
    tokens_of(made, [PROMPTS[0]])
    noted = controller.noted
    assert noted[:2] == ["decide", "launch"]
    ahead = (len(noted) - 4) // 3
    assert ahead >= 2
    assert noted[2:] == [*["select", "launch", "commit"] * ahead, "select", "commit"]


def slots_of(table: torch.Tensor, rows: Sequence[int], places: Sequence[int]) -> list[int]:
    return [int(table[row, place // 4]) * 4 + place % 4 for row, place in zip(rows, places, strict=True)]


def test_rows_are_drawn_back() -> None:
    """Three branches of four new tokens, in rows 2, 0 and 3 of the table. Drafts of one lie side by side."""
    pool = KVPool(Shape(4, 2, 16, page_size=4), 1, 40, torch.device("cpu"))
    table = torch.randperm(40).to(torch.int32).view(5, 8)
    rows, lengths, behind = torch.tensor([2, 0, 3]), torch.tensor([13, 4, 31]), torch.tensor([3, 0, 1])
    seq_lens = torch.full((5,), 9, dtype=torch.int32)
    seq_lens[rows] = lengths.to(torch.int32)
    positions, slots = (lengths[:, None] - 4 + torch.arange(4)).view(-1), torch.zeros(12, dtype=torch.int64)
    positions[11] = positions[10]
    draw_back(pool, table, seq_lens, rows, behind, (positions, slots))
    assert seq_lens.tolist() == [4, 9, 10, 30, 9]
    assert positions.tolist() == [6, 7, 8, 9, 0, 1, 2, 3, 26, 27, 28, 28]
    places = [6, 7, 8, 9, 0, 1, 2, 3, 26, 27, 28, 29]
    assert slots.tolist() == slots_of(table, [2] * 4 + [0] * 4 + [3] * 4, places)
    mask = DraftMask(16, 3, torch.device("cpu"))
    mask.first[:12] = torch.tensor([99, 10, 10, 10, 99, 1, 1, 1, 99, 28, 28, 28])
    mask.draw_back(behind, 4)
    assert mask.first[:12].tolist() == [96, 7, 7, 7, 99, 1, 1, 1, 98, 27, 27, 27]


def test_the_longest_path_is_accepted() -> None:
    """Of trees and chains, on the device as on the host; its KV moves, and no other."""
    source, pool = random.Random(8), KVPool(Shape(4, 2, 16, page_size=4), 2, 40, torch.device("cpu"))
    deepest = 0
    for _ in range(200):
        count, words = source.randint(1, 9), source.choice([1, 2, 3])
        parents = [source.randint(-1, draft - 1) for draft in range(count)]
        drafts = torch.randint(words, (3, count))
        drawn = torch.randint(words, (3, 1 + count))
        paths = DraftPaths(parents, torch.device("cpu"))
        accepted = paths.accept(drawn, drafts)
        own = [longest_path(*each, parents) for each in zip(drawn.tolist(), drafts.tolist(), strict=True)]
        assert accepted.counts.tolist() == [len(path) for path in own]
        assert [row[: len(path)] for row, path in zip(accepted.paths.tolist(), own, strict=True)] == own
        for row, tokens, path in zip(drawn.tolist(), accepted.tokens.tolist(), own, strict=True):
            assert tokens[: len(path) + 1] == [row[draft + 1] for draft in [-1, *path]]
        deepest = max(deepest, *map(len, own))
        table = torch.randperm(40).to(torch.int32).view(5, 8)
        rows, given = torch.tensor([4, 1, 2]), torch.tensor([5, 7, 12])
        pool.keys.normal_()
        expected = pool.keys.clone().flatten(1, 2)
        for row, begin, path in zip(rows.tolist(), given.tolist(), own, strict=True):
            here = slots_of(table, [row] * len(path), [begin + draft for draft in path])
            there = slots_of(table, [row] * len(path), [*range(begin, begin + len(path))])
            expected[:, there] = expected[:, here]
        move_drafts(pool, table, rows, given, accepted.paths)
        assert torch.equal(pool.keys.flatten(1, 2)[:, :160], expected[:, :160])
    assert deepest > 4


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2)])
def test_models_with_windows(name: str, widths: tuple[int, ...]) -> None:
    options = {"sampling": Sampling(0.6, top_k=4, seed=5), "max_new_tokens": 20}
    expected = tokens_of(engine(Sample(2, **options), name, tokens=3000), LOOPS)
    drafter = DraftModel(HFModel(tiny(name)), widths, num_pages=900, page_size=4)
    controller = NotingDrafts(drafter, drafter.drafts, 2, **options)
    made = engine(controller, name, tokens=3000)
    assert tokens_of(made, LOOPS) == expected
    assert controller.noted.count("select") > 5


@pytest.mark.parametrize("trouble", [1, 2, 5, 9])
def test_an_engine_that_is_stopped_while_a_step_is_under_way(trouble: int) -> None:
    """What was assumed of drafts that were never read is not found by later prompts."""
    expected = tokens_of(engine(Later(NGrams(), 3, max_new_tokens=40)), LOOPS)
    made = engine(NotingDrafts(NGrams(), 3, max_new_tokens=40, trouble=trouble))
    with pytest.raises(KeyboardInterrupt):
        made.run(LOOPS)
    made.sequences.check()
    assert made.sequences.available == made.pool.num_pages
    object.__setattr__(made.controller, "trouble", 0)
    assert tokens_of(made, LOOPS) == expected


def test_a_controller_that_decides_now_and_then_knows_all_drafts() -> None:
    expected = tokens_of(engine(Later(NGrams(), 3, max_new_tokens=60)), LOOPS)
    controller = NotingDrafts(NGrams(), 3, max_new_tokens=60)
    controller.change["selects"] = lambda branches: len(controller.noted) % 7 != 3
    assert tokens_of(engine(controller), LOOPS) == expected
    assert controller.noted.count("decide") > 5


def test_few_pages() -> None:
    """Branches wait for pages, are preempted, and go on without drafts."""
    for tokens in (84, 160):
        made = engine(NotingDrafts(NGrams(), 3, n=2, max_new_tokens=40, **DRAWN), tokens=tokens)
        expected = tokens_of(engine(Later(NGrams(), 3, n=2, max_new_tokens=40, **DRAWN)), LOOPS)
        assert tokens_of(made, LOOPS) == expected


def test_kernels_that_read_lengths_on_the_host_wait_for_decisions() -> None:
    controller = NotingDrafts(NGrams(), 3, max_new_tokens=12)

    def reading(step: Any, kind: Any, sinks: Any) -> Any:
        kernel = tree_kernels()(step, kind, sinks)
        kernel.device_lengths = False
        return kernel

    tokens_of(engine(controller, make_kernel=reading), LOOPS)
    tokens_of(engine(controller, deterministic=True), LOOPS)
    assert "select" not in controller.noted


def test_a_controller_that_drafts_on_the_host_alone_never_runs_ahead() -> None:
    """Also where it could select tokens, and a step has no drafts."""

    class Without(Later):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            own, self.asked = Speculate(*given, **options), 0
            self.selects, self.select, self.commit = own.selects, own.select, own.commit

        def draft(self, branches: Sequence[Branch]) -> list[DraftTree]:  # type: ignore[no-redef]
            self.asked += len(branches)
            return [DraftTree((), ()) for _ in branches]

    controller = Without(NGrams(), 3, max_new_tokens=20)
    del controller.__dict__["draft"]
    tokens_of(engine(controller), PROMPTS[:1])
    assert controller.asked == 19


@pytest.mark.parametrize(("name", "change", "text"), [
    ("select", lambda it: it[1:], r"select\(\) = int64 of shape \(3,\): is not int64 of shape \(4,\)"),
    ("select", lambda it: it * 0 + VOCABULARY, r"select\(\) = 97: is not one of the tokens"),
    ("drafts_after", lambda it: it.int(), r"drafts_after\(\) = int32 of shape \(1, 3\): is not int64 of shape"),
    ("drafts_after", lambda it: it - 200, r"drafts_after\(\) = -\d+: is not one of the tokens"),
    ("commit", lambda it, branches: it._replace(accepted={0: [0, 1, 2]}), r"commit\(\) = 0: has not the token"),
    ("commit", lambda it, branches: it._replace(grown={0: [Next(1, (0, 0))]}), r"commit\(\) = 0: has not the token"),
])  # fmt: skip
def test_selections_that_cannot_be_are_refused(name: str, change: Any, text: str) -> None:
    controller = NotingDrafts(NGrams(), 3, max_new_tokens=30)
    controller.change[name] = change
    made = engine(controller)
    with pytest.raises(BranchError, match=text):
        made.run(PROMPTS[1:2])
    made.sequences.check()
    assert made.sequences.available == made.pool.num_pages
    made.controller = Speculate(NGrams(), 3, max_new_tokens=30)
    assert tokens_of(made, LOOPS) == tokens_of(engine(Later(NGrams(), 3, max_new_tokens=30)), LOOPS)


def test_n_grams_are_the_same_on_the_device() -> None:
    source = random.Random(3)
    for _ in range(500):
        words, most, longest = source.choice([1, 2, 3, 5, 50]), source.randint(1, 9), source.randint(1, 5)
        texts = [[source.randrange(words) for _ in range(source.randint(1, 30))] for _ in range(5)]
        drafter = NGrams(longest, occurrences=source.choice([1, 1, 2, 3, 12]))
        expected = drafter(texts, most)
        assert all(own.parents == drafter.fixed_parents(most) for own in expected)
        held = torch.randint(words, (5, max(map(len, texts)) + source.randint(0, 4)), dtype=torch.int32)
        for row, text in zip(held, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        found = drafter.drafts_after((), held, torch.tensor([len(text) for text in texts]), most)
        assert found.tolist() == [list(own.tokens) for own in expected]


def test_texts_are_written_once() -> None:
    texts = DraftTexts(4, torch.device("cpu"))
    branches = [Branch(number, (0,), 3, [*range(number, number + 40)], seat=seat) for number, seat in ((0, 2), (1, 0))]
    texts.write(branches, np.array([10, 12]), 5)
    texts.tokens[2, :10] = 77  # what is known is not written again
    texts.write(branches, np.array([20, 20]), 50)
    assert texts.tokens[2, :20].tolist() == [77] * 10 + [*range(10, 20)]
    assert texts.tokens[0, :20].tolist() == [*range(1, 21)]
    other = Branch(5, (1,), 3, [90] * 30, seat=2)  # takes the seat
    texts.write([other], np.array([25]), 0)
    assert texts.tokens[2, :25].tolist() == [90] * 25
