"""Every example runs and says what it promises."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
EXPECTED = {
    "demo": "against the float64 oracle: passed",
    "explain_tree": "moves the fewest bytes",
    "page_slots": "row 0 reads pages",
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    assert EXPECTED[name] in capsys.readouterr().out


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED)
