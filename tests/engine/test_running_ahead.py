"""Running ahead: steps are launched before tokens and forks are read, and tokens are those of waiting for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from support.noted_steps import Noting, NotingTokens, note_launches
from support.replayed_steps import replaying
from support.tiny_models import PROMPTS, generated, tiny
from treegen.engine import Beam, Branch, Engine, Growth, Next, Sample, Sampling, Selection, tree_kernels
from treegen.engine.control import Frontier
from treegen.engine.row_forks import launch_forks
from treegen.integrations import HFModel
from treegen.ir.errors import BranchError


class Later:
    """Samples by a controller that decides after each step."""

    def __init__(self, **options: Any) -> None:
        self._sample = Sample(**options)
        self.width, self.together, self.max_new_tokens = 1, False, self._sample.max_new_tokens

    def decide(self, frontier: Frontier) -> Growth:
        return self._sample.decide(frontier)


class NotingSamples(NotingTokens, Sample):
    """Notes what happens in which order."""


def engine(model: Any, controller: Any, pages: int = 80, branches: int = 9) -> Engine:
    return Engine(HFModel(model), controller, num_pages=pages, page_size=4, max_rows=40, max_branches=branches)


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read() -> None:
    model, controller = tiny(), NotingSamples(max_new_tokens=8)
    noted = controller.noted
    made = engine(model, controller)
    note_launches(made, noted)
    assert [[own.tokens for own in each] for each in made.run([PROMPTS[0]])] == [
        generated(tiny(), PROMPTS[0], max_new_tokens=8)
    ]
    # The first token is read before anything follows; the last one ends the branch for certain.
    assert noted == ["decide", "launch", *["select", "launch", "commit"] * 6, "select", "commit"]


@pytest.mark.parametrize("branches", [1, 3, 9])
def test_samples_that_end_by_their_tokens_while_a_step_is_under_way(branches: int) -> None:
    """With prompts that wait for room, stop ids, and graphs; pages are free afterwards."""
    options = {"sampling": Sampling(1.0, 40, 0.95, seed=5), "max_new_tokens": 30, "stop_ids": tuple(range(0, 97, 9))}
    prompts = [*PROMPTS, *([9, number] for number in range(5))]
    expected = None
    for drawn_later in (True, False):
        made = engine(tiny(), Sample(**options), branches=branches)
        if drawn_later:
            made.controller = Later(**options)
        else:
            replaying(made)
        found = [[own.tokens for own in each] for each in made.run(prompts)]
        assert len({len(tokens) for own in found for tokens in own}) > 3
        expected = expected or found
        assert found == expected
        made.sequences.check()
        assert made.sequences.available == 80


def test_an_engine_that_is_stopped_while_a_step_is_under_way() -> None:
    """Pages of tokens that were never read are not found by later prompts."""
    controller = NotingSamples(trouble=5, max_new_tokens=12)
    model = tiny()
    expected = generated(model, PROMPTS[2], max_new_tokens=12)[0]
    made = engine(model, controller)
    with pytest.raises(KeyboardInterrupt):
        made.run(PROMPTS[2:])
    made.sequences.check()
    assert made.sequences.available == 80
    made.controller = Sample(max_new_tokens=4)
    longer = [[*PROMPTS[2], *expected[:8]]]
    assert [own.tokens for own in made.run(longer)[0]] == [expected[8:]]


class Stubborn(Sample):
    """Decides for another token than it has selected."""

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        return Growth({branch.number: [Next(1 + tokens[0] % 7, branch.label)] for branch in branches}, [])


def test_another_token_than_was_selected_is_refused() -> None:
    with pytest.raises(BranchError, match=r"commit\(\) = 0: has not the token that was selected"):
        engine(tiny(), Stubborn(max_new_tokens=9)).run(PROMPTS[:1])


class LaterBeams:
    """Beams by a controller that decides after each step."""

    together = True

    def __init__(self, *given: Any, **options: Any) -> None:
        self._beam = Beam(*given, **options)
        self.width, self.max_new_tokens = self._beam.width, self._beam.max_new_tokens

    def decide(self, frontier: Frontier) -> Growth:
        return self._beam.decide(frontier)


class NotingBeams(Noting, Beam):
    """Notes what happens in which order."""

    def select_forks(self, frontier: Frontier) -> Selection:
        self.noted.append("select")
        return super().select_forks(frontier)


def beams_of(made: Engine, prompts: list[list[int]]) -> list[list[tuple[list[int], Any]]]:
    """Tokens and scores. The last bits of scores follow from the other rows of steps."""
    return [[(each.tokens, pytest.approx(each.score, rel=1e-4)) for each in own] for own in made.run(prompts)]


@pytest.mark.parametrize(("page_size", "deterministic"), [
    (4, False), *(pytest.param(*case, marks=pytest.mark.full) for case in ((4, True), (1, False), (16, False))),
])  # fmt: skip
@pytest.mark.parametrize("options", [
    {"width": 1}, {"width": 3}, {"width": 4, "stop_ids": (3, 7, 11, 30), "length_penalty": -1.0},
    {"width": 6, "stop_ids": tuple(range(0, 97, 5)), "early_stopping": True},
])  # fmt: skip
def test_beams_that_fork_on_the_device(options: dict[str, Any], deterministic: bool, page_size: int) -> None:
    """With prompts of other lengths, prompts that wait for room, and searches that end while others go on."""
    prompts = [*PROMPTS, [9, 1], [9, 2]]
    sizes = {"num_pages": 12 * 80 // page_size, "page_size": page_size, "max_rows": 40, "max_branches": 13}
    found = []
    for beams in (LaterBeams(max_new_tokens=40, **options), NotingBeams(max_new_tokens=40, **options)):
        made = Engine(HFModel(tiny()), beams, deterministic=deterministic, **sizes)
        if page_size == 4:
            replaying(made)
        found.append([beams_of(made, prompts) for _ in range(2)])  # the second time by what the prefix cache has
        made.sequences.check()
        assert made.sequences.available == made.pool.num_pages
    assert beams.noted.count("select") > 30
    assert found[0] == found[1]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_plans_hold_whichever_forks_there_are(page_size: int) -> None:
    """Also a plan that was made for what beams shared before they ran ahead, and a search that decides in between."""
    beams = NotingBeams(5, max_new_tokens=150)
    made = Engine(HFModel(tiny()), beams, num_pages=2000 // page_size, page_size=page_size)
    made.run([[*range(50)]])
    (kernel,) = made.forward.decoding.kernels.values()
    assert kernel.counters()["planned"] >= 5 * 148
    selects = beams.selects
    beams.selects = lambda branches: len(branches[0].tokens) % 40 > 15 and selects(branches)  # type: ignore[method-assign]
    made.run([[*range(50)]])
    assert beams.noted.count("select") + beams.noted.count("decide") == 2 * 150
    assert kernel.counters()["refuted"] == 0


def test_a_step_is_launched_before_the_forks_of_the_one_before_are_read() -> None:
    beams = NotingBeams(3, max_new_tokens=6)
    made = Engine(HFModel(tiny()), beams, num_pages=80, page_size=4)
    note_launches(made, beams.noted)
    made.run([PROMPTS[0]])
    assert beams.noted == ["decide", "launch", *["select", "launch", "commit"] * 4, "decide"]


def test_kernels_that_read_tables_on_the_host_know_all_forks() -> None:
    """The stand-in reads the host's table at the beginning of each step, and finds the device's."""
    beams, checked = NotingBeams(3, max_new_tokens=12), 0

    def reading(step: Any, kind: Any, sinks: Any) -> Any:
        kernel = tree_kernels()(step, kind, sinks)
        kernel.device_tables = False
        return kernel

    made = Engine(HFModel(tiny()), beams, num_pages=80, page_size=4, make_kernel=reading)
    forward = made.forward.decoding.begin

    def begin(*given: Any) -> dict[int, int]:
        nonlocal checked
        last, step = forward(*given), made.forward.decoding
        for number in last:
            branch = made.sequences[number]
            row, pages = made.sequences.live.row[branch.seat], len(branch.pages)
            assert branch.pages == step.host_table[row, :pages].tolist() == step.pages.table[row, :pages].tolist()
            checked += 1
        return last

    made.forward.decoding.begin = begin  # type: ignore[method-assign]
    made.run([PROMPTS[0]])
    assert "select" not in beams.noted
    assert checked == 3 * 11


def test_beams_that_are_stopped_while_a_step_is_under_way() -> None:
    prompts = PROMPTS[1:]
    expected = beams_of(Engine(HFModel(tiny()), Beam(3, 20), num_pages=200, page_size=4), prompts)
    made = Engine(HFModel(tiny()), NotingBeams(3, 20), num_pages=200, page_size=4)
    for trouble in range(1, 19):
        made.controller.trouble, made.controller.noted = trouble, []
        with pytest.raises(KeyboardInterrupt):
            made.run(prompts)
        made.sequences.check()
        assert made.sequences.available == 200
        made.controller.trouble = 0
        assert beams_of(made, prompts) == expected


class Astray(Beam):
    """Selects or decides for something else, by `change`, which gets what was right."""

    def __init__(self, change: Any, commits: bool = False) -> None:
        super().__init__(3, max_new_tokens=9)
        self._change, self._commits = change, commits

    def select_forks(self, frontier: Frontier) -> Selection:
        selection = super().select_forks(frontier)
        return selection if self._commits else self._change(selection)

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        growth = super().commit(branches, tokens)
        return self._change(growth, branches) if self._commits else growth


@pytest.mark.parametrize(("change", "text"), [
    (lambda it: it._replace(parents=it.parents * 0 + 9), r"select_forks\(\) = 9: does not go on in its own place"),
    (lambda it: it._replace(parents=it.parents * 0 - 1), r"select_forks\(\) = -1: does not go on"),
    (lambda it: it._replace(parents=torch.tensor([1, 2, 2])), r"select_forks\(\) = 1: .*return another parent for 0"),
    (lambda it: it._replace(parents=it.parents[1:]), r"select_forks\(\) = int64 of shape \(2,\): is not int64"),
    (lambda it: it._replace(tokens=it.tokens.int()), r"select_forks\(\) = int32 of shape \(3,\): is not int64"),
    (lambda it: it._replace(tokens=it.tokens + 1), r"commit\(\) = 0: has not the token that was selected"),
    (lambda it: it._replace(parents=torch.tensor([0, 1, 2])), r"commit\(\) = \d: has not the token"),
])  # fmt: skip
def test_forks_that_cannot_be_are_refused(change: Any, text: str) -> None:
    made = Engine(HFModel(tiny()), Astray(change), num_pages=80, page_size=4)
    with pytest.raises(BranchError, match=text):
        made.run(PROMPTS[:1])
    made.sequences.check()
    assert made.sequences.available == 80
    made.controller = Beam(3, max_new_tokens=9)
    assert beams_of(made, PROMPTS[:1]) == beams_of(
        Engine(HFModel(tiny()), Beam(3, 9), num_pages=80, page_size=4), PROMPTS[:1]
    )


class Strided(Beam):
    """Selects columns of a wider tensor."""

    def select_forks(self, frontier: Frontier) -> Selection:
        return Selection(*torch.stack(super().select_forks(frontier), 1).T)


def test_what_is_selected_may_be_a_part_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read it, so on a GPU it has to lie together: here by the interpreted kernel."""
    monkeypatch.setattr("treegen.engine.step.fork_rows", launch_forks)
    found = [beams_of(Engine(HFModel(tiny()), beams, num_pages=80, page_size=4), PROMPTS[:1])
             for beams in (Beam(3, 12), Strided(3, 12))]  # fmt: skip
    assert found[0] == found[1]


def test_other_forks_than_were_selected_are_refused() -> None:
    def change(growth: Growth, branches: Sequence[Branch]) -> Growth:
        return growth._replace(grown={branch.number: [Next(5, branch.label)] for branch in branches})

    with pytest.raises(BranchError, match=r"commit\(\) = 0: has not the token that was selected"):
        Engine(HFModel(tiny()), Astray(change, True), num_pages=80, page_size=4).run(PROMPTS[:1])
