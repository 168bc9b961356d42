"""Every example runs and says what it promises."""

import re
import runpy
from pathlib import Path

import pytest

from treegen.strategies import registry

EXAMPLES = Path(__file__).parent.parent / "examples"
EXPECTED = {
    "decode_wrapper": "step 2: tree 64(5,17,18,9,3)",
    "demo": "against the float64 oracle: passed",
    "explain_tree": "moves the fewest bytes",
    "own_strategy": "us estimated on",
    "page_slots": "row 0 reads pages",
    "verify_drafts": "from masks: 8 rows, 63 unique tokens",
    "warm_cache": "and policies for 17 trees in",
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_example(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    assert EXPECTED[name] in capsys.readouterr().out


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


def test_the_readme_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    readme = EXAMPLES.parent / "README.md"
    text = readme.read_text("utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    namespace: dict[str, object] = {}
    for block in blocks:
        lines_above = text.count("\n", 0, block.start(1))  # a traceback names the README's lines
        exec(compile("\n" * lines_above + block[1], str(readme), "exec"), namespace)
    assert len(blocks) == text.count("```python")
    assert "passed: out error" in capsys.readouterr().out
