"""Every example runs and says what it promises, and the README shows what `explain` prints."""

import re
import runpy

import pytest

from support.paths import ROOT
from treegen import cli
from treegen.strategies import registry

EXAMPLES = ROOT / "examples"
EXPECTED = {
    "beam_search": "prompt 1: 4 beams, best score -",
    "best_of_n": "of 8: [",
    "decode_wrapper": "step 2: tree 64(5,17,18,9,3)",
    "demo": "against the float64 oracle: passed",
    "explain_tree": "moves the fewest bytes",
    "own_strategy": "us estimated on",
    "page_slots": "row 0 reads pages",
    "server_loop": "in 100 steps: {'steps': 100, 'planned': ",
    "speculative": "with drafts: 80 tokens in ",
    "tree_of_thoughts": "best of 2: score -",
    "verify_drafts": "from masks: 8 rows, 63 unique tokens",
    "warm_cache": "and policies for 17 trees in",
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_example(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SPECS", dict(registry.SPECS))
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    assert EXPECTED[name] in capsys.readouterr().out


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


def test_the_readme_shows_what_explain_prints(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    command, excerpt = re.findall(r"^    \$ treegen (.*)\n((?:    .*\n)+)", readme, re.MULTILINE)[0]
    assert cli.main(command.split()) == 0
    printed = iter(capsys.readouterr().out.splitlines())
    shown = [line[4:] for line in excerpt.splitlines()]
    assert [line for line in shown if line != "..." and line not in printed] == []  # in this order
