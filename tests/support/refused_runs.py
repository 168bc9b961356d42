"""Engines of a tiny model, and runs that they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from support.tiny_models import PROMPTS, generated, tiny
from treegen.engine import Engine, Sample
from treegen.engine.control import Controller
from treegen.integrations import HFModel
from treegen.ir.errors import TreegenError


def engine(controller: Controller, model: Any = None, **options: Any) -> Engine:
    model = HFModel(tiny()) if model is None else model
    return Engine(model, controller, **{"num_pages": 60, "page_size": 4, "max_branches": 9, **options})


def refused(made: Engine, text: str, prompts: Any = PROMPTS, error: type[BaseException] = TreegenError) -> None:
    """The run ends with this error, in one line; the engine then serves other prompts, with the right tokens."""
    with pytest.raises(error, match=text) as found:
        made.run(prompts)
    assert "\n" not in str(found.value)
    made.sequences.check()
    assert made.sequences.available == made.pool.num_pages
    made.controller = Sample(max_new_tokens=5)
    tokens = [[own.tokens for own in each] for each in made.run(PROMPTS)]
    assert tokens == [generated(tiny(), prompt, max_new_tokens=5) for prompt in PROMPTS]
    made.sequences.check()
    assert made.sequences.available == made.pool.num_pages
