"""Kernel: an attention kernel for a tree, and for the trees that follow."""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy.typing as npt
import torch

from treegen.backends import check_inputs, oracle
from treegen.cost.account import Account
from treegen.ir.arrays import IntsLike
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.report.explain import Explanation
from treegen.runtime import torch_op
from treegen.runtime.copies import Copyable
from treegen.runtime.explained_kernel import ExplainedKernel
from treegen.runtime.kernel_text import describe, explanation_of, kernel_source
from treegen.runtime.limits import GraphLimits
from treegen.runtime.prepared_calls import PreparedCalls
from treegen.strategies import Choice
from treegen.target.targets import Target


class Kernel(Copyable, ExplainedKernel):
    """An attention kernel for one tree at a time. `treegen.compile` makes it.

    Threads: any number of threads may call one kernel, or several, at the same time. One thread at a time may change a
    kernel's tree (`update`, `append`, `step`, `branch`, `prune`). A call that runs meanwhile serves the old or the new
    tree. A kernel of fixed capacity must not be called meanwhile.

    Streams: calls run on the current stream of q's device. Calls on several streams may overlap, because each allocates
    its scratch memory on its stream. Before you change the tree, let the work of other streams finish, or make the
    current stream wait for it: the old tree's tables are freed or overwritten. Calls of a kernel of fixed capacity, and
    replays of graphs captured from them, share one workspace: never run two of them at the same time.

    torch.compile: a call is one operator, `treegen::attention`, without a graph break. The operator looks the kernel up
    at run time, so an `update` does not compile anew.

    Gradients: there is no backward pass. A call raises InputError when gradients are enabled and one of its tensors, or
    a tensor that the kernel was compiled with, requires them.

    CUDA graphs: call once before capturing, with q and out of `max_rows` rows, because the first call allocates memory
    and compiles kernels. Keep the kernel for as long as its graphs are replayed. A graph of a kernel without a capacity
    replays the plan of its capture, whose tables the kernel keeps. A replay reads the caches of its capture: trees with
    slots beyond the smallest of them are refused where the tables of replays would change.

    Copies: `copy`, `deepcopy` and `pickle` make a kernel with the same arguments, choice, capacity and tree, which
    plans anew and has its own tables. To be pickled, functions and strategies have to be defined at the top level of a
    module.
    """

    def __init__(self, calls: PreparedCalls) -> None:
        self._calls = calls

    def _state(self) -> dict[str, Any]:
        return self._calls.state()

    def _restore(self, state: dict[str, Any]) -> None:
        self._calls = PreparedCalls.again(state)

    def _given(self) -> dict[str, object]:
        return self._calls.given()

    def __repr__(self) -> str:
        return f"<treegen.Kernel {describe(self._calls)}>"

    @overload
    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
        out: torch.Tensor | None = None, return_lse: Literal[False] = False, lse_base: str = "ln",
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
        out: torch.Tensor | None = None, return_lse: Literal[True], lse_base: str = "ln",
    ) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
        out: torch.Tensor | None = None, return_lse: bool = False, lse_base: str = "ln",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Computes attention of every row over the tokens that it sees.

        Under a fixed capacity q may have more rows than the tree, up to `max_rows`; out and lse keep what they held in
        the further rows.

        Args:
            q: `[rows, num_qo_heads, head_dim]`, in the tree's row order.
            k_cache: `[slots, num_kv_heads, head_dim]`, or `[pages, page_size, num_kv_heads, head_dim]`; pages also in
                the layout of the shape's kv_layout.
            v_cache: The same with head_dim_v.
            out: Where the result goes; by default a new tensor.
            return_lse: Whether to return the log-sum-exp as well.
            lse_base: "ln" for the natural logarithm, "log2" for base 2.

        Returns:
            out `[rows, num_qo_heads, head_dim_v]` of q's type; with return_lse also the log-sum-exp `[rows,
            num_qo_heads]` in float32. A row that sees nothing gives 0 and -inf.

        Raises:
            InputError: A tensor does not fit; before any launch.
        """
        calls = self._calls
        if torch.compiler.is_compiling():
            gradients = check_inputs.needing_gradients(calls.options.named(q, k_cache, v_cache, out))
            result, sums = torch_op.call(calls.handle, (q, k_cache, v_cache, out), return_lse, lse_base, gradients)
        else:
            result, sums = calls.attend(q, k_cache, v_cache, out, return_lse, lse_base)
        return result if sums is None else (result, sums)

    def update(self, tree: Tree) -> None:
        """Plans for another tree.

        Loaded kernels serve the new tree as well. A new kernel is loaded only if the tree needs another kernel config:
        masked or not, few or many rows, short or long runs. `auto` keeps its choice for trees of the same bucket
        (`treegen cache why`) and chooses again for others.

        A kernel of fixed capacity keeps choice and kernel configs for all trees. Its tables are overwritten on the
        current stream, after the calls and replays before, and without waiting for them.

        Args:
            tree: The tree that the next call serves.

        Raises:
            InputError: The tree exceeds the capacity (the message names the limit), or has slots beyond the smallest
                cache that a CUDA graph was captured with. The kernel then keeps its tree.
        """
        self._calls.replace_tree(tree)

    def append(self, rows: IntsLike | None = None, tokens: int = 1, slots: npt.ArrayLike | None = None) -> None:
        """Makes rows see more tokens: the kernel's tree becomes `tree.appended(rows, tokens, slots)`.

        Plans anew, as `update`; threads, streams and errors are the same. In a kernel of fixed capacity graphs then see
        the new tokens. Requests that grow step after step are better served by `treegen.compile_batch`, which needs no
        host work while they grow.

        Args:
            rows: The rows that grow; by default all.
            tokens: New tokens of each row.
            slots: KV slots of the new tokens, `[rows, tokens]`, or flat for one token a row; by default the slots after
                the last one that each row sees.

        Raises:
            TreeError: As of Tree.appended.
        """
        with self._calls.lock:
            self.update(self.tree.appended(rows, tokens, slots))

    def step(self, slots: npt.ArrayLike | None = None) -> None:
        """Makes every row see one more token, as `append` does.

        Args:
            slots: A KV slot for each row; by default the slot after the last one that it sees.
        """
        self.append(None, 1, slots)

    def branch(self, row: int, copies: int) -> None:
        """Makes a row `copies` rows, which share its tokens so far; the new ones follow all other rows.

        The kernel's tree becomes `tree.branched(row, copies)`. Plans anew, as `update`.

        Args:
            row: The row to copy.
            copies: Rows afterwards, the row itself included.

        Raises:
            TreeError: As of Tree.branched.
        """
        with self._calls.lock:
            self.update(self.tree.branched(row, copies))

    def prune(self, rows: IntsLike) -> None:
        """Ends rows, and renumbers the rest in order: the kernel's tree becomes `tree.pruned(rows)`.

        Plans anew, as `update`.

        Args:
            rows: The rows to end.

        Raises:
            TreeError: As of Tree.pruned.
        """
        with self._calls.lock:
            self.update(self.tree.pruned(rows))

    def workspace_size(self) -> int:
        """Counts the bytes of device memory that the kernel takes besides its inputs and outputs.

        These are tables, partial results, and the lse of calls that do not return it. A kernel of fixed capacity keeps
        them; any other keeps tables until the next update, and the rest during a call. Nothing is allocated for the
        answer, and no device is needed.

        Returns:
            The bytes for the given or assumed shape on the triton backend, without the scores of strategies that run
            unfused.
        """
        return self._calls.prepared.workspace_size()

    def check_inputs(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Checks tensors as a call does, and that no value that the kernel reads is NaN.

        Waits for the device. With `TREEGEN_CHECK=1` in the environment every call does this.

        Args:
            q, k_cache, v_cache: As of a call.

        Raises:
            InputError: A tensor does not fit, or has a NaN.
        """
        self._calls.checked(q, k_cache, v_cache)
        check_inputs.check_values(self.tree, q, k_cache, v_cache, self.shape.kv_layout)

    def verify(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> oracle.Verification:
        """Runs the kernel and compares out and lse with a float64 oracle.

        Args:
            q, k_cache, v_cache: As of a call.

        Returns:
            The largest errors and the tolerance; it is true if the result is right.

        Raises:
            InputError: A tensor does not fit.
        """
        found = self(q, k_cache, v_cache, return_lse=True)
        options = self._calls.options.of_oracle(self.shape.kv_layout)
        expected = oracle.reference(self.tree, q[: self.tree.num_rows], k_cache, v_cache, options)
        return oracle.Verification.of(found, expected, self.shape.dtype)

    @property
    def calls(self) -> PreparedCalls:
        """The state of calls, to look at in tests and debuggers: programs, bound calls, options. Do not change it."""
        return self._calls

    @property
    def tree(self) -> Tree:
        """The tree that the next call serves."""
        return self._calls.prepared.tree

    @property
    def shape(self) -> Shape:
        """The attention shape. Without a given shape it is assumed until the first call."""
        return self._calls.prepared.problem.shape

    @property
    def target(self) -> Target:
        """The device that the plan is made for."""
        return self._calls.prepared.problem.target

    @property
    def plan(self) -> Plan:
        """The plan: which rows read which KV together."""
        return self._calls.prepared.plan

    @property
    def schedule(self) -> Schedule:
        """The schedule: work items, tiles and merge lists as they are launched."""
        with self._calls.lock:
            return self._calls.prepared.schedule

    @property
    def capacity(self) -> GraphLimits | None:
        """The limits of a kernel of fixed capacity; None for any other kernel."""
        return self._calls.prepared.limits

    @property
    def choice(self) -> Choice:
        """The strategy that made the plan, and the reason for it."""
        return self._calls.prepared.choice

    @property
    def backend(self) -> str:
        """The backend that runs the schedule: "triton" or "torch"."""
        return self._calls.backend

    @property
    def source(self) -> str:
        """The text of the emitted Triton modules, for a cache addressed by slot."""
        return kernel_source(self._calls)

    @property
    def estimate(self) -> Account:
        """The account of the plan: bytes, operations, launches and the estimated time."""
        return self._calls.prepared.estimate

    def _explanation(self) -> tuple[str, Explanation]:
        return explanation_of(self._calls)
