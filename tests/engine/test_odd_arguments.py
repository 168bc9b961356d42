"""Arguments that are out of range or of another type: one line says so, before anything is launched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from support.refused_runs import engine
from support.tiny_models import PROMPTS, tiny
from treegen.engine import (
    Beam,
    Branch,
    Continuation,
    DraftTree,
    Engine,
    Frontier,
    Growth,
    KVPool,
    Next,
    NGrams,
    Sample,
    Sampling,
    SequenceTree,
    Speculate,
)
from treegen.integrations import HFModel, generate
from treegen.ir.errors import InputError, TreegenError
from treegen.ir.shape import Shape


class Drafts:
    """A controller with the numbers that it is told."""

    together, draft_trees = False, False

    def __init__(self, width: Any = 1, max_new_tokens: Any = 8, max_draft: Any = 0) -> None:
        self.width, self.max_new_tokens, self.max_draft = width, max_new_tokens, max_draft

    def draft(self, branches: Sequence[Branch]) -> list[DraftTree]:
        return [DraftTree((), ())] * len(branches)

    def decide(self, frontier: Frontier) -> Growth:
        return Growth({branch.number: [] for branch in frontier.branches}, [])


@pytest.mark.parametrize("value", ["2", None, 2.0, -1, True])
@pytest.mark.parametrize("name", ["width", "max_new_tokens", "max_draft"])
def test_the_numbers_of_a_controller(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^controller\.{name} = {value}: is not an? (positive )?integer"):
        engine(Drafts(**{name: value}))


def test_a_controller_has_room_for_branches_and_tokens() -> None:
    for name in ("width", "max_new_tokens"):
        with pytest.raises(InputError, match=rf"^controller\.{name} = 0: is not a positive integer"):
            engine(Drafts(**{name: 0}))
    assert engine(Drafts(max_draft=0)).run([[1, 2]]) == [[]]


def test_a_model_that_attends_by_another_function() -> None:
    """After `set_attn_implementation` the model is not treegen's, until it is attached again."""
    model = HFModel(tiny())
    made = Engine(model, Sample(max_new_tokens=3), num_pages=60)
    expected = made.run(PROMPTS)
    model.model.set_attn_implementation("sdpa")
    text = r"^model = LlamaForCausalLM: attends by sdpa, not by treegen; call attach\(\) of its HFModel first$"
    with pytest.raises(InputError, match=text):
        made.run(PROMPTS)
    assert made.sequences.available == made.pool.num_pages
    model.attach()
    assert made.run(PROMPTS) == expected


@pytest.mark.parametrize(
    ("ids", "options", "text"),
    [([[]], {}, r"input_ids = \[1, 0\]: has no tokens; give"),
     ([[1, 2]], {"engine_options": [("page_size", 4)]}, r"engine_options = \[\('page_size', 4\)\]: is no dictionary"),
     ([[1, 2]], {"engine_options": 3}, "engine_options = 3: is no dictionary"),
     ([[1, 2]], {"engine_options": {3: 1, "pages": 2}}, r"engine_options = \[3, 'pages'\]: are no such options"),
     ([[1, 2]], {"num_beams": 0}, "num_beams = 0: is not a positive integer"),
     ([[1, 2]], {"num_beams": -1}, "num_beams = -1: is not a positive integer"),
     ([[1, 2]], {"num_return_sequences": -2}, "num_return_sequences = -2: is not a positive integer"),
     ([[1, 2], [3, 4]], {"attention_mask": torch.tensor([[0, 1], [0, 0]])}, "attention_mask = .*: has a row of zeros"),
     ([[1, 2]], {"attention_mask": torch.tensor([[1, 0]])}, "attention_mask = .*: has zeros after ones")],
    ids=str,
)  # fmt: skip
def test_calls_of_generate(ids: list[list[int]], options: dict[str, Any], text: str) -> None:
    given = {"custom_generate": generate, "max_new_tokens": 3, "pad_token_id": 0, **options}
    with pytest.raises(InputError, match=f"^{text}") as found:
        tiny().generate(torch.tensor(ids, dtype=torch.int64), **given)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("adopts", [False, True])
def test_branches_are_shared_and_fork_without_a_step(adopts: bool) -> None:
    """`store` is enough: the live batch need not be told of lengths, as steps do."""
    tree = SequenceTree(KVPool(Shape(2, 1, 16, page_size=4), 1, 12), 4)
    first, other = tree.add(range(9), (0,)), tree.add(range(9), (1,))
    tree.reserve({first.number: 9})
    tree.store({first.number: 9})
    if adopts:
        assert tree.adopt(other.number) == 8
        tree.reserve({other.number: 1})
        tree.store({other.number: 1})
    fork = tree.fork(first.number)
    tree.check()
    (again,) = tree.replace([first.number], [other.number if adopts else fork.number])
    tree.check()
    assert again.pages[:2] == fork.pages[:2]
    tree.clear()
    assert tree.pool.free == 12


@pytest.mark.parametrize("penalty", [300.0, -300.0, 300, -(10**300), 1e308])
def test_length_penalties_whose_scores_no_float_holds(penalty: float) -> None:
    with pytest.raises(
        InputError, match=r"length_penalty = .*: makes scores of 20 tokens too large or too small for a f"
    ):
        Beam(2, 20, penalty)
    assert Beam(2, 1, penalty).length_penalty == penalty


@pytest.mark.parametrize("penalty", [200.0, -200.0])
def test_large_length_penalties(penalty: float) -> None:
    """Scores are sums below 0: the longest results are the best, or the shortest."""
    (found,) = engine(Beam(2, 20, penalty, stop_ids=tuple(range(1, 97, 3)))).run(PROMPTS[:1])
    lengths = [len(each.tokens) for each in found]
    assert lengths == sorted(lengths, reverse=penalty > 0)
    assert all(-math.inf < each.score < 0 for each in found)


def test_numbers_may_be_numpys() -> None:
    """Those of controllers, engines and decisions, as tokens of prompts are; they become Python's own."""
    three, ids = np.int64(3), np.array([40, 41])
    sample = Sample(three, Sampling(np.float32(0.5), np.int32(9), np.float32(1), np.int64(7)), np.int64(5), ids)
    plain = Sample(3, Sampling(0.5, 9, 1.0, 7), 5, (40, 41))
    assert sample == plain
    assert {type(getattr(sample, name)) for name in ("n", "max_new_tokens")} == {int}
    sizes = {"num_pages": np.int64(60), "page_size": np.int32(4), "max_branches": np.int8(9), "max_rows": np.int16(90)}
    made = Engine(HFModel(tiny()), sample, **sizes)
    assert made.run(PROMPTS) == engine(plain).run(PROMPTS)
    assert type(made.pool.num_pages) is type(made.pool.page_size) is int
    beams, same = Beam(np.int64(2), three, np.float32(1), stop_ids=ids), Beam(2, 3, 1.0, stop_ids=[40, 41])
    assert vars(beams) == vars(same)
    assert Speculate(NGrams(three), three, stop_ids=ids) == Speculate(NGrams(3), 3, stop_ids=(40, 41))
    assert Shape(np.int64(2), 1, 16) == Shape(2, 1, 16)


def test_tokens_of_decisions_may_be_numpys() -> None:
    class Threes(Drafts):
        def decide(self, frontier: Frontier) -> Growth:
            ends = len(frontier.branches[0].new_tokens) > 2
            grown = {each.number: [] if ends else [Next(np.int64(3), each.label)] for each in frontier.branches}
            assert all(type(token) is int for each in frontier.branches for token in each.tokens)
            return Growth(grown, [Continuation(each.label, each.new_tokens) for each in frontier.branches if ends])

    assert [each.tokens for each in engine(Threes()).run([[1, 2]])[0]] == [[3, 3, 3]]


@pytest.mark.parametrize("stop_ids", [{3: 1}, "", b"ab", np.array(3), np.array([[3]]), np.array([0.5]), [np.bool_(1)]])
def test_stop_ids_that_are_no_tokens(stop_ids: Any) -> None:
    for make in (Sample, lambda stop_ids: Beam(2, stop_ids=stop_ids), lambda stop_ids: Speculate(stop_ids=stop_ids)):
        with pytest.raises(InputError, match=r"stop_ids = .*: is not a sequence of tokens; give"):
            make(stop_ids=stop_ids)


@pytest.mark.parametrize("value", [np.bool_(1), np.float64(2), True, np.int64(0), np.array(2)])
def test_numbers_that_are_none(value: Any) -> None:
    for make in (Sample, Beam, lambda n: engine(Sample(), num_pages=n), lambda n: engine(Sample(), max_branches=n)):
        with pytest.raises(TreegenError, match="is not a positive integer; give"):
            make(value)


@pytest.mark.parametrize("temperature", [1e-6, 1e-19, 1e-20])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
def test_low_temperatures_take_the_most_likely_token(temperature: float, options: dict[str, Any]) -> None:
    logits = torch.tensor([[5.0, 7.0, -3.0], [-9.0, -1e4, -8.0], [1.0, 1.0, 1.0]])
    drawn = Sampling(temperature, **options).draw(logits, [(0,)] * 3, [1, 2, 3])
    assert drawn == [1, 2, Sampling(1.0).draw(logits[2:], [(0,)], [3])[0]]
    with pytest.raises(InputError, match=r"logits\[0\] = NaN or -inf"):
        Sampling(temperature).draw(torch.full((1, 3), float("-inf")), [(0,)], [1])


@pytest.mark.parametrize("temperature", [9e-21, 1e-38, 5e-324])
def test_temperatures_that_make_logits_infinite(temperature: float) -> None:
    with pytest.raises(InputError, match=r"temperature = .*: is so low that logits over it are infinite; give 0"):
        Sampling(temperature)
