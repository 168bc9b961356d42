"""A target for golden files: it stands for no device, so no new measurement of one changes a golden file."""

from __future__ import annotations

from typing import Any

from treegen.target.targets import BatchConstants, Constants, Target

TOY = Target(
    name="toy",
    capability=90,
    sms=16,
    shared_bytes=200_000,
    shared_bytes_per_sm=200_000,
    l2_bytes=4_000_000,
    memory_gbps=500,
    tensor_tflops=100,
    constants=Constants(
        launch_us=5.0,
        next_launch_us=1.0,
        lone_block_us=0.5,
        full_block_us=0.02,
        full_row_us=0.03,
        lone_tile_us=0.5,
        lone_flop_fraction=1.0,
        full_tile_us=0.2,
        full_flop_fraction=1.0,
        full_bytes_per_us=200_000.0,
        lone_packed_us=0.1,
        full_packed_us=0.05,
        memory_fraction=1.0,
        merge_fraction=0.5,
        merge_step_us=0.1,
        sharpness=2.0,
    ),
    batch_constants=BatchConstants(blocks_factor=0.8, item_tiles=2.0, merge_factor=1.5, idle_merge_us=1.0),
    constants_of="toy",
)


def rounded(value: Any) -> Any:
    """A JSON value with numbers of three digits."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value
