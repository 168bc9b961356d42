"""treegen: a kernel compiler for tree attention.

`Tree` describes which query rows share which runs of KV; `compile` makes the attention kernel for it.
"""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING

if ((_root := _Path(__file__).resolve().parent.parent) / "pyproject.toml").is_file():
    # A checkout, uninstalled or editable: the subpackages ir/, templates/ and autotune_cache/ lie beside treegen/.
    __path__[:] = [str(_root / "treegen"), str(_root)]

from treegen import strategies
from treegen.codegen.compile_counter import KernelCounts, kernel_counts
from treegen.ir.errors import TreegenError, TreegenWarning
from treegen.ir.live_batch import LiveBatch
from treegen.ir.notebook_form import use_drawings as _use_drawings
from treegen.ir.plan import Plan as _Plan
from treegen.ir.shape import Shape
from treegen.ir.tree import Tree
from treegen.ir.tree.build import token_tree_parents
from treegen.ir.tree.kv import KVRuns
from treegen.ir.tree.tree import use_files as _use_files
from treegen.strategies import register_strategy
from treegen.text_files import save_text as _save_text
from treegen.version import VERSION
from treegen.workloads.tree_files import load_tree as _load_tree

if _TYPE_CHECKING:
    from treegen.api.compile import compile
    from treegen.api.compile_batch import compile_batch
    from treegen.api.wrapper import TreeAttentionWrapper
    from treegen.backends.merge_state import merge_state, merge_states
    from treegen.backends.page_table import PageTable
    from treegen.compiled.found_prefixes import shared_prefixes
    from treegen.runtime.batch_kernel import BatchKernel
    from treegen.runtime.kernel import Kernel
    from treegen.scoring.masked_tree import masked_tree

__version__ = VERSION


def _auto() -> strategies.Strategy:
    """Takes a measured policy for trees like this one; without one, the policy with the least estimated time."""
    from treegen.search.auto import Auto

    return Auto()


def _drawn_tree(tree: Tree) -> str:
    from treegen.report.page.notebook import tree_html

    return tree_html(tree)


def _drawn_plan(plan: _Plan) -> str:
    from treegen.report.page.notebook import plan_html

    return plan_html(plan)


register_strategy("auto", _auto)  # here, because strategies must not import the search, which compares them
_use_files(_load_tree, _save_text)  # for Tree.load and Tree.save, because ir does no input or output
_use_drawings(Tree=_drawn_tree, Plan=_drawn_plan)  # for notebooks

__all__ = [
    "BatchKernel",
    "KVRuns",
    "Kernel",
    "KernelCounts",
    "LiveBatch",
    "PageTable",
    "Shape",
    "Tree",
    "TreeAttentionWrapper",
    "TreegenError",
    "TreegenWarning",
    "__version__",
    "compile",
    "compile_batch",
    "kernel_counts",
    "masked_tree",
    "merge_state",
    "merge_states",
    "register_strategy",
    "shared_prefixes",
    "strategies",
    "token_tree_parents",
]


_LAZY = {
    "compile": "treegen.api.compile",
    "compile_batch": "treegen.api.compile_batch",
    "BatchKernel": "treegen.runtime.batch_kernel",
    "PageTable": "treegen.backends.page_table",
    "Kernel": "treegen.runtime.kernel",
    "masked_tree": "treegen.scoring.masked_tree",
    "merge_state": "treegen.backends.merge_state",
    "merge_states": "treegen.backends.merge_state",
    "shared_prefixes": "treegen.compiled.found_prefixes",
    "TreeAttentionWrapper": "treegen.api.wrapper",
}
_PARTS = ("distributed", "engine", "integrations")


def __getattr__(name: str) -> object:
    # torch is imported when the first kernel is built, so that planning and explaining stay light.
    if name in _LAZY:
        return getattr(_import_module(_LAZY[name]), name)
    if name in _PARTS:
        return _import_module(f"treegen.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
