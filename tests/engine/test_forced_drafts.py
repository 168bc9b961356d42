"""ForcedDrafts: the recorded tokens of each step, whatever the logits are."""

from __future__ import annotations

import pytest

from support.tiny_models import VOCABULARY, tiny
from treegen.engine import Engine, ForcedDrafts
from treegen.integrations import HFModel
from treegen.ir.errors import InputError

PARENTS = [-1, -1, 0, 0, 3]


def test_each_step_accepts_what_was_recorded() -> None:
    """Prompts of 9 and 5 tokens; each takes a step for its first token, and one for each recorded step."""
    accepted = [1, 4, 3, 2, 1]
    engine = Engine(HFModel(tiny()), ForcedDrafts(PARENTS, accepted, VOCABULARY), num_pages=40, page_size=4)
    results = engine.run([list(range(9)), list(range(50, 55))])
    engine.sequences.check()
    assert [len(own.tokens) for (own,) in results] == [1 + sum(accepted)] * 2
    assert (engine.accounting.steps, engine.accounting.rows) == (1 + 5, 9 + 5 + 2 * 5 * 6)
    again = Engine(HFModel(tiny()), ForcedDrafts(PARENTS, accepted, VOCABULARY), num_pages=40, page_size=16)
    assert again.run([list(range(9)), list(range(50, 55))]) == results


@pytest.mark.parametrize(
    ("accepted", "text"), [([], "has no steps"), ([1, 0], r"accepted\[1\] = 0"), ([5], r"accepted\[0\] = 5: is more")]
)
def test_records_that_do_not_fit(accepted: list[int], text: str) -> None:
    with pytest.raises(InputError, match=text):
        ForcedDrafts(PARENTS, accepted, VOCABULARY)
