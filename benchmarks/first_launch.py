"""The time of a new process from filled caches to its first result, after imports and CUDA initialisation.

    python benchmarks/first_launch.py 1,512/256,32 --repeats 5

A first process, which is not timed, tunes the tree and compiles its kernels. Each timed process is new. It imports
treegen, torch and Triton, initialises CUDA and makes the inputs. Then the clock starts, and `treegen.compile` and the
first call run. Times are taken after planning, after the launch, and when the result is there. In half of the processes
a trivial Triton kernel runs before the clock starts, as in an engine that uses Triton; the other half includes Triton's
own first use.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import triton
import triton.language as tl

import treegen
from treegen.backends import triton_program  # noqa: F401 (imports of a first call come before the clock starts)

COLUMNS = ("plan", "launched", "done")


@triton.jit
def store_one(pointer: tl.tensor) -> None:
    """A kernel that does next to nothing."""
    tl.store(pointer, 1)


def one_process(tree_text: str, *, tuning: bool, warmed: bool) -> None:
    """Runs in a process of its own, and prints milliseconds until planned, launched and done."""
    tree, shape = treegen.Tree.parse(tree_text), treegen.Shape(32, 8, 128, dtype="fp16")
    place = torch.zeros(1, device="cuda", dtype=torch.int32)
    q = torch.randn(tree.num_rows, 32, 128, device="cuda", dtype=torch.float16)
    k, v = torch.randn(2, tree.kv.last_slot + 1, 8, 128, device="cuda", dtype=torch.float16)
    if warmed or tuning:
        store_one[(1,)](place)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    kernel = treegen.compile(tree, shape=shape, autotune=tuning)
    planned = time.perf_counter()
    kernel(q, k, v)
    launched = time.perf_counter()
    torch.cuda.synchronize()
    done = time.perf_counter()
    assert kernel.choice.reason.startswith("measured"), kernel.choice.reason
    print(*(1e3 * (moment - begin) for moment in (planned, launched, done)))


def main() -> None:
    """Prints medians over the timed processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tree", nargs="?", default="1,512/256,32", help="tree (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed processes of each kind (default: %(default)s)")
    parser.add_argument("--process", choices=("tune", "warmed", "cold"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        one_process(arguments.tree, tuning=arguments.process == "tune", warmed=arguments.process == "warmed")
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TREEGEN_CACHE_DIR": f"{folder}/treegen", "TRITON_CACHE_DIR": f"{folder}/triton"}

        def run(process: str) -> list[float]:
            command = [sys.executable, __file__, arguments.tree, "--process", process]
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            return [float(word) for word in done.stdout.split()]

        run("tune")
        run("cold")  # from here on the trivial kernel and ours are on disk
        for process, title in (("warmed", "after another Triton kernel"), ("cold", "with Triton's own first use")):
            columns = zip(*(run(process) for _ in range(arguments.repeats)), strict=True)
            medians = [statistics.median(column) for column in columns]
            shown = ", ".join(f"{name} {value:.1f} ms" for name, value in zip(COLUMNS, medians, strict=True))
            print(f"{arguments.tree}, {title}: {shown} (medians of {arguments.repeats})")


if __name__ == "__main__":
    main()
