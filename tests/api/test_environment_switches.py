"""Switches in the environment: the values that they have, and errors for all others before any work."""

import pytest
import torch

import treegen
from support.rejections import rejected
from treegen import PageTable, Shape, Tree
from treegen.environment import SWITCHES, checks_inputs, shares, traces_phases
from treegen.ir.errors import InputError

PAGES = PageTable(torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32), num_pages=4)
READ = {"TREEGEN_CHECK": checks_inputs, "TREEGEN_SHARING": shares, "TREEGEN_TRACE": traces_phases}
WRONG = [
    *(("TREEGEN_SHARING", value) for value in ("0", "false", "no", "1")),
    *(("TREEGEN_CHECK", value) for value in ("yes", "on", " 1")),
    ("TREEGEN_TRACE", "true"),
]


@pytest.mark.parametrize("switch", SWITCHES)
def test_values(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    default, other = SWITCHES[switch]
    monkeypatch.delenv(switch, raising=False)
    unset = READ[switch]()
    for value, expected in ((default, unset), ("", unset), (other, not unset), (other.upper(), not unset)):
        monkeypatch.setenv(switch, value)
        assert READ[switch]() is expected


@pytest.mark.parametrize(("switch", "value"), WRONG)
def test_other_values_are_errors(switch: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch, value)
    words = (switch, value.strip(), "is neither", *SWITCHES[switch], "set it to", SWITCHES[switch][1])
    rejected(READ[switch], InputError, *words)
    rejected(lambda: treegen.compile(Tree.parse("10(5*2)")), InputError, *words)
    rejected(lambda: treegen.compile_batch(Shape(2, 1, 32, page_size=16), PAGES, max_tokens=32), InputError, *words)
