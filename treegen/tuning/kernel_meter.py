"""The meter of real kernels: inputs on the device, a check of some rows against the oracle, and a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from treegen.backends import oracle
from treegen.backends.check_inputs import KV_TORCH_DTYPES, TORCH_DTYPES
from treegen.backends.devices import default_device
from treegen.backends.triton_program import TritonProgram
from treegen.codegen.compile_counter import expected_compiles
from treegen.ir.arrays import Ints, frozen
from treegen.ir.errors import InputError
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.ir.verify import verify
from treegen.schedule.pipeline import planned_device_schedule
from treegen.strategies import Strategy
from treegen.target.problem import Problem
from treegen.tuning.timing import median_us
from treegen.tuning.worker import DeviceLostError

Timer: TypeAlias = Callable[[Callable[[], object], int], float]

CHECKED_ROWS = 64
"""The most rows compared with the oracle, which computes row by row in float64."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Tensors for a tree and a shape, and the results of attention on some of the rows.

    Attributes:
        tree: The tree.
        shape: The attention shape.
        q: `[rows, num_qo_heads, head_dim]`.
        k_cache: In the shape's layout.
        v_cache: In the shape's layout.
        out: `[rows, num_qo_heads, head_dim_v]`, which programs fill.
        lse: `[rows, num_qo_heads]`, which programs fill.
        rows: The rows that are checked.
        expected_out: `out` of these rows, by the oracle.
        expected_lse: `lse` of these rows, by the oracle.
    """

    tree: Tree
    shape: Shape
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    rows: Ints
    expected_out: torch.Tensor
    expected_lse: torch.Tensor

    @classmethod
    def of(cls, tree: Tree, shape: Shape, device: torch.device, most_rows: int | None = None) -> Case:
        """Makes standard-normal q, k and v, always the same ones, and the expected results of some rows.

        Args:
            tree: The tree; caches have the slots up to its last one.
            shape: The attention shape.
            device: The device.
            most_rows: The most rows with expected results; by default CHECKED_ROWS.

        Raises:
            InputError: The tensors would take more than half of the device's free memory.
        """
        dtype, pages = TORCH_DTYPES[shape.dtype], -(-max(1, tree.kv.last_slot + 1) // shape.page_size)
        of_rows, of_caches = (tree.num_rows, shape.num_qo_heads), shape.cache_sizes(pages)
        of_both = math.prod(of_rows) * (shape.head_dim + shape.head_dim_v)
        _check_memory(sum(map(math.prod, of_caches)) + of_both, shape, device)
        generator = torch.Generator(device).manual_seed(0)
        sizes = (*of_rows, shape.head_dim), *of_caches
        q, k_cache, v_cache = (torch.randn(size, generator=generator, device=device, dtype=dtype) for size in sizes)
        k_cache, v_cache = (cache.to(KV_TORCH_DTYPES[shape.kv_dtype]) for cache in (k_cache, v_cache))
        if shape.shared_kv:
            v_cache = k_cache[..., : shape.head_dim_v]
        out = torch.empty(*of_rows, shape.head_dim_v, dtype=dtype, device=device)
        lse = torch.empty(of_rows, dtype=torch.float32, device=device)
        rows = checked_rows(tree, most_rows)
        expected = oracle.reference(tree, q, k_cache, v_cache, oracle.OracleOptions(kv_layout=shape.kv_layout), rows)
        return cls(tree, shape, q, k_cache, v_cache, out, lse, rows, *expected)

    def run(self, program: TritonProgram) -> None:
        """Runs a program, which fills out and lse."""
        scale = self.shape.head_dim**-0.5
        program(self.q, self.k_cache, self.v_cache, self.out, self.lse, scale, 1.0)

    def check(self, program: TritonProgram) -> float:
        """Returns the larger error of out and lse on the checked rows; infinite when any row is left unwritten."""
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)
        self.run(program)
        if bool(self.lse.isnan().any()):
            return math.inf
        return max(self.error_of(self.out), oracle.error(self.lse[self._checked], self.expected_lse))

    def error_of(self, out: torch.Tensor) -> float:
        """Returns the error of an out on the checked rows; infinite when any row at all holds NaN."""
        if bool(out.isnan().any()):
            return math.inf
        return oracle.error(out[self._checked], self.expected_out)

    @property
    def _checked(self) -> torch.Tensor:
        return torch.from_numpy(self.rows.astype(np.int64)).to(self.out.device)


def checked_rows(tree: Tree, most: int | None = None) -> Ints:
    """Returns `most` of the caller's rows (default: CHECKED_ROWS), or all, spread over the ranks from first to last."""
    count = min(tree.num_rows, CHECKED_ROWS if most is None else most)
    ranks = np.linspace(0, tree.num_rows - 1, count).round().astype(np.int64)
    return frozen(np.sort(tree.topology.row_of_rank[ranks]))


def prepare(problem: Problem, strategy: Strategy, device: torch.device) -> TritonProgram:
    """Plans a tree and returns a program that is ready to run. Plans of strategies that are not proven are verified."""
    chosen = strategy.choose(problem).strategy
    plan = chosen.plan(problem)
    if not chosen.proven:
        verify(plan, problem.tree)
    return TritonProgram(planned_device_schedule(plan, problem), problem.shape, device)


class KernelMeter:
    """Measures strategies by their kernels on the current device; inputs are made once for all candidates of a tree."""

    def __init__(self, repeats: int, timer: Timer = median_us) -> None:
        self._repeats = repeats
        self._timer = timer
        self._case: Case | None = None

    def __call__(self, problem: Problem, strategy: Strategy) -> tuple[float | None, float]:
        """Returns microseconds on a cold L2, and the larger error of out and lse; a wrong output is not timed.

        Raises DeviceLostError when the device fails from now on; errors of planning, compiling and launching pass
        through.
        """
        tree, shape, device = problem.tree, problem.shape, default_device()
        try:
            if self._case is None or self._case.tree is not tree or self._case.shape != shape:
                self._case = None  # frees its memory for the next one
                self._case = Case.of(tree, shape, device)
            case, program = self._case, prepare(problem, strategy, device)
            with expected_compiles():
                error = case.check(program)
            if not error <= oracle.TOLERANCE[shape.dtype]:
                return None, error
            return self._timer(lambda: case.run(program), self._repeats), error
        except Exception as cause:
            if _is_lost(device):
                raise DeviceLostError(str(cause)) from cause
            raise


def free_bytes(device: torch.device) -> int | None:
    """Returns the free memory of a CUDA device; None for any other device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _check_memory(elements: int, shape: Shape, device: torch.device) -> None:
    """Raises InputError if tensors of this many elements take more than half of the device's free memory."""
    free, needed = free_bytes(device), elements * shape.dtype_bytes
    if free is not None and 2 * needed > free:
        reason = f"are more than half of the {free / 1e9:.3g} GB that are free on {device}"
        raise InputError("q, k_cache, v_cache, out", f"{needed / 1e9:.3g} GB", reason, "free memory or lower the slots")


def _is_lost(device: torch.device) -> bool:
    """Tells whether CUDA fails for good in this process, as it does after an illegal memory access."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
