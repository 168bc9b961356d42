"""Line breaks: long lines of emitted code become shorter ones that mean the same."""

from __future__ import annotations

import ast

import pytest

from treegen.codegen.line_breaks import MOST_COLUMNS, broken

NAMES = [f"name_of_a_value_{number}" for number in range(9)]
LONG = {
    "call": f"        value = tl.load({', '.join(NAMES)})",
    "call that fits in one further line": f"    x = f({', '.join(NAMES[:4])}, one_further_name)",
    "sum": f"    value = {' + '.join(NAMES)}",
    "precedence": f"    value = {' * '.join(NAMES[:4])} + {' * '.join(NAMES[4:])}",
    "comparison": f"    value = {' & '.join(f'({name} < 3)' for name in NAMES)}",
    "target of several names": f"    a, b = f({', '.join(NAMES)})",
    "annotated": f"    VALUE: tl.constexpr = {' and '.join(NAMES)}",
    "statement": f"    tl.store({' + '.join(NAMES)}, {NAMES[0]}[:, None], mask={' & '.join(NAMES)})",
    "nested": f"  x = f((g({', '.join(NAMES)}) | ((a % 5) == 0)), [{', '.join(NAMES)}])",
    "method": f"    value = ({' // '.join(NAMES)}).to(tl.int64)",
    "subscript": f"    value = table[{', '.join(NAMES)}]",
    "trailing comma": f"    value = f({', '.join(NAMES)},)",
}


def tree_of(line: str) -> str:
    return ast.dump(ast.parse(line.strip()))


@pytest.mark.parametrize("line", LONG.values(), ids=list(LONG))
def test_long_lines_are_broken_and_mean_the_same(line: str) -> None:
    assert len(line) > MOST_COLUMNS
    lines = broken(line).split("\n")
    assert max(map(len, lines)) <= MOST_COLUMNS
    assert tree_of("\n".join(lines)) == tree_of(line)
    indent = len(line) - len(line.lstrip())
    assert [len(each) - len(each.lstrip()) for each in (lines[0], lines[-1])] == [indent, indent]


def test_lines_are_broken_as_formatters_break_them() -> None:
    loaded = broken(f"    value = tl.load(places + {' + '.join(NAMES[:5])}, mask=live[:, None], other=0.0)")
    assert loaded.split("\n") == [
        "    value = tl.load(",
        "        places",
        *(f"        + {name}" for name in NAMES[:4]),
        f"        + {NAMES[4]},",
        "        mask=live[:, None],",
        "        other=0.0,",
        "    )",
    ]
    called = broken(f"    x = f({', '.join(NAMES[:4])}, one_further_name)")
    assert called.split("\n") == ["    x = f(", f"        {', '.join(NAMES[:4])}, one_further_name", "    )"]


@pytest.mark.parametrize(
    "line", ["    x = f(1, 2)", f"    # {' '.join(NAMES)} (a, b)", f'    """{NAMES} (a, b)', "x" * 120]
)
def test_other_lines_stay(line: str) -> None:
    assert broken(f"a = 1\n{line}\n") == f"a = 1\n{line}\n"
