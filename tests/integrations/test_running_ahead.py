"""Running ahead: steps are launched before tokens are read, and tokens are those of waiting for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from support.replayed_steps import replaying
from support.tiny_models import PROMPTS, generated, tiny
from treegen.engine import Branch, Engine, Growth, Next, Sample, Sampling
from treegen.engine.control import Frontier
from treegen.integrations import HFModel
from treegen.ir.errors import BranchError


class Later:
    """Samples by a controller that decides after each step."""

    def __init__(self, **options: Any) -> None:
        self._sample = Sample(**options)
        self.width, self.together, self.max_new_tokens = 1, False, self._sample.max_new_tokens

    def decide(self, frontier: Frontier) -> Growth:
        return self._sample.decide(frontier)


class Noting(Later):
    """Selects tokens on the device, and notes what happens in which order. trouble: the commit that is interrupted."""

    def __init__(self, trouble: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.noted: list[str] = []
        self.trouble = trouble

    def selects(self, branches: Sequence[Branch]) -> bool:
        return self._sample.selects(branches)

    def select(self, frontier: Frontier) -> torch.Tensor:
        self.noted.append("select")
        return self._sample.select(frontier)

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> Growth:
        self.noted.append("commit")
        if self.noted.count("commit") == self.trouble:
            raise KeyboardInterrupt
        return self._sample.commit(branches, tokens)


def engine(model: Any, controller: Any, pages: int = 80, branches: int = 9) -> Engine:
    return Engine(HFModel(model), controller, num_pages=pages, page_size=4, max_rows=40, max_branches=branches)


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read() -> None:
    model, controller = tiny(), Noting(max_new_tokens=8)
    noted = controller.noted
    made = engine(model, controller)
    forward = made.forward.decoding.begin

    def begin(*given: Any) -> dict[int, int]:
        noted.append("launch")
        return forward(*given)

    made.forward.decoding.begin = begin  # type: ignore[method-assign]
    assert [[own.tokens for own in each] for each in made.run([PROMPTS[0]])] == [
        generated(tiny(), PROMPTS[0], max_new_tokens=8)
    ]
    # The first token is read before anything follows; the last one ends the branch for certain.
    assert noted == ["launch", *["select", "launch", "commit"] * 6, "select", "commit"]


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
    controller = Noting(trouble=5, max_new_tokens=12)
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
