"""Engines that `generate` keeps: used again while the model is the same, and freed with it."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch

from support.replayed_steps import Replayed, replaying
from support.tiny_models import PROMPTS, padded, tiny
from treegen.integrations import generate, hf_engines
from treegen.integrations.hf_engines import model_state
from treegen.ir.errors import InputError, TreegenError

Made = list[tuple["weakref.ref[hf_engines.Engine]", Replayed]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """The engines, and what counts their captures."""
    listed: Made = []

    class Listed(hf_engines.Engine):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            listed.append((weakref.ref(self), replaying(self)))

    monkeypatch.setattr(hf_engines, "Engine", Listed)
    return listed


def served(model: Any, prompts: Any = PROMPTS[:2], **options: Any) -> Any:
    given = {"pad_token_id": 0, "max_new_tokens": 6, "do_sample": False, **options}
    return model.generate(**padded(prompts), custom_generate=generate, **given)


def expected(model: Any, prompts: Any = PROMPTS[:2], **options: Any) -> Any:
    return model.generate(**padded(prompts), **{"pad_token_id": 0, "max_new_tokens": 6, "do_sample": False, **options})


def test_a_second_call_captures_nothing_and_takes_no_pool(made: Made) -> None:
    model = tiny()
    first = served(model, max_new_tokens=9)
    assert torch.equal(first, expected(model, max_new_tokens=9))
    assert (len(made), made[0][1].captured) == (1, 2)
    for tokens in (9, 5):
        assert torch.equal(served(model, max_new_tokens=tokens), expected(model, max_new_tokens=tokens))
    assert (len(made), made[0][1].captured) == (1, 2)
    assert torch.equal(served(model, num_beams=2), expected(model, num_beams=2))
    assert len(made) == 2  # twice the rows, which then are enough for both
    assert made[0][0]() is None
    assert torch.equal(served(model, max_new_tokens=9), first)
    captured = made[1][1].captured
    assert torch.equal(served(model, max_new_tokens=9), first)
    assert torch.equal(served(model, num_beams=2), expected(model, num_beams=2))
    assert (len(made), made[1][1].captured) == (2, captured)


def test_engines_are_freed_with_their_models(made: Made) -> None:
    model = tiny()
    served(model, logits_processor=[lambda ids, scores, held=model: scores])
    engine = made[0][0]
    assert engine() is not None
    del model
    gc.collect()
    assert engine() is None


def test_what_a_call_asks_for_it_gets(made: Made) -> None:
    model = tiny()
    options: tuple[dict[str, Any], ...] = (
        {"num_pages": 40}, {"num_pages": 30}, {}, {"page_size": 4}, {"strategy": "query", "page_size": 4},
        {"strategy": "query", "page_size": 4, "keep": False}, {"strategy": "query", "page_size": 4},
    )  # fmt: skip
    for number, own in enumerate(options):
        assert torch.equal(served(model, engine_options=own), expected(model))
        assert len(made) == number + 1 - (number >= 2)
    kept = made[-1][0]()
    assert kept is not None
    assert [engine() for engine, _ in made[:-1]] == [None] * (len(made) - 1)
    with pytest.raises(TreegenError, match="add pages"):
        served(model, engine_options={"num_pages": 1})
    with pytest.raises(InputError, match=r"engine_options\['keep'\] = 1: is not a bool"):
        served(model, engine_options={"keep": 1})


@pytest.mark.parametrize("options", [{}, {"max_rows": 8}])
def test_every_way_after_every_other_one(options: dict[str, int]) -> None:
    """Short prompts, so that the rows of a step follow from beams and drafts."""
    model = tiny(num_hidden_layers=1)
    ways: tuple[dict[str, int], ...] = (
        {}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 7},
    )  # fmt: skip
    for before, own in itertools.product(ways, ways):
        for way in (before, own):
            plain = {name: value for name, value in way.items() if name == "num_beams"}
            found = served(model, PROMPTS[:1], engine_options=options, **way)
            assert torch.equal(found, expected(model, PROMPTS[:1], **plain))


def test_a_model_that_has_changed_gets_a_new_engine(made: Made) -> None:
    model = tiny()
    layer = model.model.layers[0]
    for change in (
        lambda: None,
        lambda: layer.mlp.down_proj.register_forward_hook(lambda module, given, out: -out),
        lambda: setattr(layer.mlp.down_proj, "weight", torch.nn.Parameter(layer.mlp.down_proj.weight.detach() * 2)),
        lambda: setattr(layer.input_layernorm, "variance_epsilon", 0.5),
        lambda: setattr(model.config, "note", "changed"),
        lambda: [setattr(weight, "data", weight.data.clone()) for weight in model.parameters()],
    ):
        before = model_state(model)
        change()
        assert len(made) == 0 or model_state(model) != before
        assert torch.equal(served(model), expected(model))
    assert len(made) == 6
    with torch.no_grad():
        layer.mlp.down_proj.weight += 1  # in place
    model.train()
    assert torch.equal(served(model), expected(model.eval()))
    assert len(made) == 6


def test_an_engine_is_not_kept_after_an_error(made: Made) -> None:
    model = tiny()

    def failing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no scores today")

    with pytest.raises(RuntimeError, match="no scores today"):
        served(model, logits_processor=[failing])
    assert torch.equal(served(model), expected(model))
    assert len(made) == 2
