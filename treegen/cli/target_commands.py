"""Commands for targets: targets, profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from treegen.cli.arguments import print_table
from treegen.cli.progress_bars import progress_bar
from treegen.target.targets import targets
from treegen.text_files import save_text


def list_targets() -> None:
    """List the GPUs that plans can be made for. `--target` also takes a file that `treegen profile` wrote."""
    titles = ("name", "capability", "SMs", "shared memory per block", "L2", "memory", "tensor fp16", "task costs")
    rows = [
        (
            t.name,
            f"sm_{t.capability}" if t.capability else "no GPU",
            str(t.sms),
            f"{t.shared_bytes / 1024:g} KiB",
            f"{t.l2_bytes / 2**20:g} MiB",
            f"{t.memory_gbps:g} GB/s",
            f"{t.tensor_tflops:g} TFLOP/s",
            "measured" if t.grid else "analytic",
        )
        for t in targets().values()
    ]
    print_table([titles, *rows])


def profile(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the target to this file.", show_default="print it"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each task.")] = 30,
) -> None:
    """Measure the time of tasks of many sizes on this machine's GPU, and write a target for `--target`."""
    from treegen.tuning.profile import ROWS, TOKENS, profiled_target, target_object

    with progress_bar(len(ROWS) * len(TOKENS)) as on_task:
        text = json.dumps(target_object(profiled_target(repeats, on_task)), indent=1)
    if output is None:
        print(text)
    else:
        save_text(output, text + "\n")
