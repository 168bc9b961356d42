"""Published cost profiles, as fixtures of tests."""

from treegen.target.cost_grid import CostGrid

# Milliseconds of one thread block: a line per tokens, an entry per query head rows.
_TABLE_2 = {
    512: (0.036, 0.035, 0.036, 0.043, 0.048, 0.074, 0.112),
    1024: (0.043, 0.043, 0.044, 0.054, 0.062, 0.109, 0.122),
    2048: (0.060, 0.059, 0.059, 0.079, 0.094, 0.124, 0.145),
    4096: (0.092, 0.092, 0.093, 0.126, 0.147, 0.156, 0.183),
    8192: (0.156, 0.157, 0.156, 0.199, 0.189, 0.195, 0.266),
    16384: (0.283, 0.282, 0.283, 0.301, 0.303, 0.471, 0.746),
}

TABLE_2 = CostGrid(
    rows=(1, 2, 5, 10, 20, 50, 100),
    tokens=tuple(_TABLE_2),
    microseconds=tuple(tuple(round(1000 * time, 3) for time in line) for line in _TABLE_2.values()),
    source="FlashForge (Wang et al., 2025), Table 2: A100, head_dim 128",
)
