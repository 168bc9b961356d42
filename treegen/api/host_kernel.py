"""Kernels of a wrapper whose batches are planned on the host."""

from __future__ import annotations

from treegen.api.compile import compile as compile_tree
from treegen.api.compile import in_isolation
from treegen.api.request_room import Settings
from treegen.api.wrapper_options import WrapperOptions
from treegen.backends.devices import resolve_target
from treegen.ir.tree import Tree
from treegen.runtime.call_options import CallOptions
from treegen.runtime.kernel import Kernel
from treegen.runtime.planner import Planner
from treegen.runtime.prepared import prepare
from treegen.runtime.prepared_calls import PreparedCalls
from treegen.scoring.options import Scoring
from treegen.strategies import strategy_from
from treegen.target.problem import Problem


def host_kernel(tree: Tree, settings: Settings, options: WrapperOptions) -> Kernel:
    """Makes the kernel for a wrapper's first batch; with CUDA graphs its capacity fits every batch in the buffers."""
    shape, sm_scale, scores = settings
    limits = options.limits_of(shape.page_size)
    if limits is None:
        return compile_tree(
            tree,
            strategy=options.strategy,
            shape=shape,
            sm_scale=sm_scale,
            logits_soft_cap=scores.logits_soft_cap,
            window_left=scores.window_left,
            isolated=options.isolated,
        )
    chosen, scoring = strategy_from(options.strategy), Scoring.of(scores)
    if options.isolated:
        chosen, scoring = in_isolation(chosen, scoring)
    planner, problem = Planner(chosen), Problem(tree, shape, resolve_target(None))
    prepared = prepare(problem, planner, scoring, limits)
    return Kernel(PreparedCalls(prepared, planner, CallOptions(sm_scale=sm_scale, scoring=scoring), limits))
