"""Compares one launch with two launches for plans whose last items merge.

    python benchmarks/one_launch.py

fp16, head dim 128, on the current CUDA device. A time is the median of three medians of CUDA graphs on a cold L2 cache
(treegen.tuning.timing), in turn for both ways. Every output is checked against the float64 oracle before it is timed.
All plans are measured in one launch, also those with more partials or longer first items than
treegen.schedule.passes.fuse_merge would allow; their lines end with "left as two".
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from unittest.mock import patch

import treegen
from treegen.backends import oracle
from treegen.backends.devices import current_target, default_device
from treegen.codegen.compile_counter import expected_compiles
from treegen.ir.schedule import Schedule
from treegen.schedule import pipeline
from treegen.schedule.lower import lower
from treegen.schedule.passes import fuse_merge
from treegen.strategies import Strategy, cohort
from treegen.target.problem import Problem
from treegen.tuning.kernel_meter import Case, prepare
from treegen.tuning.timing import graph_of, median_us

REPEATS, ROUNDS = 15, 3
SMALL, WIDE = "1,4,8,256/8,256,256,32", "1,4,16,512/1024,256,128,32"


def split(head_rows: int, *tokens: int) -> list[Strategy]:
    """Returns a strategy for each number of tokens: whole paths in parts of at most this number."""
    return [cohort(head_rows=head_rows, split=most, merge="final") for most in tokens]


def apart(head_rows: int, *rows: int) -> list[Strategy]:
    """Returns a strategy for each number of rows: nodes seen by at least this number get items of their own."""
    return [cohort(head_rows=head_rows, split_shared_rows=least, merge="final") for least in rows]


CASES: tuple[tuple[int, int, str, list[Strategy]], ...] = (
    (16, 1, SMALL, [*apart(64, 64, 256), *split(64, 576, 256, 192)]),
    (16, 1, "1,2,64/8,256,32", [*split(32, 192, 128), *split(64, 256, 192, 112)]),
    (16, 1, "1,4,256/8,256,32", [*apart(64, 256), *split(64, 320, 192, 112)]),
    (16, 1, "1,256/256,32", split(64, 256, 128)),
    (16, 1, "1,16,64/1024,256,32", split(64, 512, 384)),
    (16, 1, WIDE, [*apart(64, 128), *split(64, 1152, 512)]),
    (32, 8, SMALL, [*apart(64, 64), *split(64, 832, 448)]),
    (32, 8, "1,2,64/8,256,32", [*split(64, 320, 256), *split(32, 320, 256)]),
    (32, 8, "1,4,256/8,256,32", split(64, 640, 320)),
    (32, 8, "1,256/256,32", split(64, 576, 256)),
    (32, 8, "1,16,64/1024,256,32", split(64, 1024, 704)),
    (28, 4, "1,16,64,256/2048,1024,1024,1024", split(56, 9984, 5120)),
)


def measured(case: Case, strategy: Strategy, way: Callable[[Schedule], Schedule]) -> Callable[[], float]:
    """Returns a function that measures the median time of a plan launched in this way, in microseconds.

    Raises AssertionError when the output is wrong.
    """
    target, device = current_target(), default_device()
    with patch.object(pipeline, "with_fused_merge", way), expected_compiles():
        program = prepare(Problem(case.tree, case.shape, target), strategy, device)
        error = case.check(program)
    assert error <= oracle.TOLERANCE[case.shape.dtype], (str(case.tree), str(strategy), error)
    replay, _ = graph_of(lambda: case.run(program))

    def median() -> float:
        assert program.table.is_cuda  # keeps the program alive, whose tables the graph reads
        return median_us(replay, REPEATS)

    return median


def any_in_one_launch(schedule: Schedule) -> Schedule:
    """Makes one launch wherever there is a kernel for it."""
    with patch.multiple(fuse_merge, MOST_PARTS=3, MOST_LONGER=99.0):
        return fuse_merge.with_fused_merge(schedule)


def compare(heads: tuple[int, int], text: str, strategies: list[Strategy]) -> None:
    """Prints a line for every strategy's plan."""
    tree, shape, target = treegen.Tree.parse(text), treegen.Shape(*heads, 128, dtype="fp16"), current_target()
    case = Case.of(tree, shape, default_device(), 16)
    for strategy in strategies:
        schedule = lower(strategy.plan(Problem(tree, shape, target)), Problem(tree, shape, target))
        made = any_in_one_launch(schedule)
        assert made.has_fused_merge, (text, str(strategy))
        ways = [measured(case, strategy, way) for way in (lambda two: two, any_in_one_launch)]
        rounds = [[way() for way in ways] for _ in range(ROUNDS)]
        two, one = (statistics.median(times) for times in zip(*rounds, strict=True))
        tiles, border = schedule.column("tiles") + schedule.column("packed_tiles"), schedule.config_indptr[1]
        left = "" if fuse_merge.with_fused_merge(schedule).has_fused_merge else ", left as two"
        print(
            f"{heads[0]}/{heads[1]} {text:32} {strategy!s:46} {fuse_merge.parts_of(made)} partials, tiles "
            f"{tiles[:border].max():3} and {tiles[border:].max():3}: two {two:6.1f} us, one {one:6.1f} us, ratio "
            f"{one / two:.2f}{left}",
            flush=True,
        )


def main() -> None:
    """Prints a line for every plan of every tree."""
    for heads, kv_heads, text, strategies in CASES:
        compare((heads, kv_heads), text, strategies)


if __name__ == "__main__":
    main()
