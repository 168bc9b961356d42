"""Cost grids: Table 2 of FlashForge, interpolation between its knots, the rule outside, and faulty grids."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.profiles import TABLE_2
from treegen.ir.errors import BackendError
from treegen.target.cost_grid import CostGrid

SIZES = st.floats(0.5, 1e6)


def test_knots_are_exact() -> None:
    rows, tokens = np.meshgrid(TABLE_2.rows, TABLE_2.tokens)
    assert TABLE_2.cost(rows, tokens) == pytest.approx(np.array(TABLE_2.microseconds), rel=1e-12)
    assert float(TABLE_2.cost(20, 4096)) == pytest.approx(147, rel=1e-12)


@pytest.mark.parametrize(
    ("rows", "tokens", "expected"),
    [
        # Halfway in the logarithm of one axis or of both: means of the two or four knots around.
        (math.sqrt(10 * 20), 8192, (199 + 189) / 2),
        (5, math.sqrt(512 * 1024), (36 + 44) / 2),
        (math.sqrt(50 * 100), math.sqrt(8192 * 16384), (195 + 266 + 471 + 746) / 4),
        # A quarter of the way from 1,024 to 2,048 tokens.
        (1, 1024 * 2**0.25, 43 + (60 - 43) / 4),
        # Below the first knot constant, in each axis and in both.
        (0.5, 4096, 92),
        (20, 16, 48),
        (0.1, 1, 36),
        # Beyond the last knot in proportion, in each axis and in both.
        (100, 3 * 16384, 3 * 746),
        (150, 512, 1.5 * 112),
        (200, 2 * 16384, 4 * 746),
        (200, 16, 2 * 112),
    ],
)
def test_between_and_outside_knots(rows: float, tokens: float, expected: float) -> None:
    assert float(TABLE_2.cost(rows, tokens)) == pytest.approx(expected, rel=1e-12)


@given(rows=st.lists(SIZES, min_size=1, max_size=6), tokens=st.lists(SIZES, min_size=1, max_size=6))
def test_arrays_broadcast(rows: list[float], tokens: list[float]) -> None:
    table = TABLE_2.cost(np.array(rows), np.array(tokens)[:, None])
    assert table.shape == (len(tokens), len(rows))
    assert table.dtype == np.float64
    single = [[float(TABLE_2.cost(r, t)) for r in rows] for t in tokens]
    assert table == pytest.approx(np.array(single), rel=1e-12)


@given(rows=SIZES, tokens=SIZES)
def test_costs_stay_between_the_knots_around(rows: float, tokens: float) -> None:
    """No interpolated time leaves the range of its cell, and the extrapolation joins without a jump."""
    grid = CostGrid((4, 16), (100, 1000), ((7.0, 9.0), (20.0, 50.0)), "made up")
    factor = max(rows / 16, 1) * max(tokens / 1000, 1)
    assert 7 * (1 - 1e-12) <= float(grid.cost(rows, tokens)) / factor <= 50 * (1 + 1e-12)
    assert float(grid.cost(16 + 1e-9, 1000 + 1e-7)) == pytest.approx(50)


def test_a_grid_of_one_knot() -> None:
    grid = CostGrid((16,), (256,), ((5.0,),), "made up")
    assert grid.cost([1, 16, 32, 32], [1, 256, 256, 1024]) == pytest.approx([5, 5, 10, 40])
    line = CostGrid((16,), (256, 1024), ((5.0,), (9.0,)), "made up")
    assert line.cost(8, [256, 512, 1024]) == pytest.approx([5, 7, 9])
    assert CostGrid((1, 4), (8,), ((1.0, 3.0),), "made up").cost([1, 2, 4], 8) == pytest.approx([1, 2, 3])


def test_objects_survive_json() -> None:
    again = CostGrid.from_object(json.loads(json.dumps(TABLE_2.to_object())))
    assert again == TABLE_2
    assert hash(again) == hash(TABLE_2)
    assert set(TABLE_2.to_object()) == {"rows", "tokens", "microseconds", "source"}
    assert again.cost(7, 777) == TABLE_2.cost(7, 777)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ()}, "rows of a cost grid"),
        ({"rows": (1, 2, 5, 10, 20, 50)}, "do not match"),
        ({"rows": (1, 2, 5, 20, 10, 50, 100)}, "do not ascend"),
        ({"rows": (0, 2, 5, 10, 20, 50, 100)}, "not positive integers"),
        ({"rows": (1, 2, 5, 10, 20, 50, 100.0)}, "not positive integers"),
        ({"tokens": (512, 512, 2048, 4096, 8192, 16384)}, "tokens of a cost grid"),
        ({"microseconds": TABLE_2.microseconds[:-1]}, "do not match"),
        ({"microseconds": (*TABLE_2.microseconds[:-1], (1.0, 2.0))}, "do not match"),
        ({"microseconds": (*TABLE_2.microseconds[:-1], (1.0, 2.0, 0.0, 1.0, 1.0, 1.0, 1.0))}, "5 rows, 16384 tokens"),
        ({"microseconds": (*TABLE_2.microseconds[:-1], (1.0, math.nan, *(1.0,) * 5))}, "2 rows, 16384 tokens"),
        ({"microseconds": (*TABLE_2.microseconds[:-1], (math.inf, *(1.0,) * 6))}, "1 rows, 16384 tokens"),
        ({"source": ""}, "source of a cost grid"),
    ],
)
def test_faulty_grids(change: dict[str, object], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        replace(TABLE_2, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1],
        {"rows": [1]},
        {**TABLE_2.to_object(), "unit": "ms"},
        {**TABLE_2.to_object(), "rows": 7},
        {**TABLE_2.to_object(), "microseconds": [1, 2, 3, 4, 5, 6]},
        {**TABLE_2.to_object(), "microseconds": [["a"] * 7] * 6},
        {**TABLE_2.to_object(), "source": None},
    ],
)
def test_faulty_objects(value: object) -> None:
    with pytest.raises(BackendError):
        CostGrid.from_object(value)
