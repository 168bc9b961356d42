"""Sizes: files, functions and lists of parameters stay short; what may be longer is listed here with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

MOST_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS = 300, 60, 7
PACKAGE = ("treegen", "ir", "templates", "autotune_cache")
PUBLIC = "public face: an argument for each option, and a docstring that explains all of them"
DEVICE = "device code: a parameter for each table, size and switch"
COMMAND = "a command: a parameter for each option, with its help"
OPERATOR = "an operator of PyTorch: a parameter for each argument of its schema"
LONG_FILES = {
    "ir/tree/tree.py": PUBLIC,
}
LONG_FUNCTIONS = {
    "treegen/api/compile.py:compile": PUBLIC,
    "treegen/api/compile_batch.py:compile_batch": PUBLIC,
    "treegen/api/wrapper.py:TreeAttentionWrapper.plan": PUBLIC,
    "treegen/backends/chunk_kernels.py:settle_chunks": DEVICE,
    "treegen/backends/claim_checks.py:state_of_request": DEVICE,
    "treegen/backends/page_expansion.py:expand": DEVICE,
    "treegen/backends/step_kernels.py:read_requests": DEVICE,
    "treegen/backends/step_kernels.py:settle_requests": DEVICE,
    "treegen/cli/bench_command.py:bench": COMMAND,
}
MANY_PARAMETERS = {
    "templates/kernel_functions.py:guarded_softmax_step": DEVICE,
    "templates/kernel_functions.py:softmax_step": DEVICE,
    "templates/kernel_functions.py:softmax_step_in_planes": DEVICE,
    "treegen/api/compile.py:compile": PUBLIC,
    "treegen/api/compile_batch.py:compile_batch": PUBLIC,
    "treegen/engine/engine.py:Engine.__init__": PUBLIC,
    "treegen/engine/thoughts.py:Search.__init__": PUBLIC,
    "treegen/strategies/cohort.py:cohort": "public face: two of its options have earlier names as well",
    "treegen/api/wrapper.py:TreeAttentionWrapper.__init__": PUBLIC,
    "treegen/api/wrapper.py:TreeAttentionWrapper.plan": PUBLIC,
    "treegen/api/wrapper.py:TreeAttentionWrapper.run": PUBLIC,
    "treegen/backends/chunk_kernels.py:chunks_of": DEVICE,
    "treegen/backends/chunk_kernels.py:list_merges": DEVICE,
    "treegen/backends/chunk_kernels.py:settle_chunks": DEVICE,
    "treegen/backends/claim_checks.py:state_of_request": DEVICE,
    "treegen/backends/claim_checks.py:settle_seat": DEVICE,
    "treegen/backends/page_expansion.py:entries_of": DEVICE,
    "treegen/backends/page_expansion.py:expand": DEVICE,
    "treegen/backends/page_expansion.py:row_lengths": DEVICE,
    "treegen/backends/page_expansion.py:write_lone_item": DEVICE,
    "treegen/backends/sampling_kernels.py:_least_kept": DEVICE,
    "treegen/backends/sampling_kernels.py:_weight_above": DEVICE,
    "treegen/backends/sampling_kernels.py:draw_tokens": DEVICE,
    "treegen/backends/sharing_kernels.py:find_shared": DEVICE,
    "treegen/backends/sharing_kernels.py:hash_pages": DEVICE,
    "treegen/backends/direct_kernels.py:merge_directly": DEVICE,
    "treegen/backends/state_kernels.py:combine_block": DEVICE,
    "treegen/backends/state_kernels.py:combine_states": DEVICE,
    "treegen/backends/state_kernels.py:pack_states": DEVICE,
    "treegen/backends/state_kernels.py:rescale_states": DEVICE,
    "treegen/backends/step_kernels.py:read_entries": DEVICE,
    "treegen/backends/step_kernels.py:read_requests": DEVICE,
    "treegen/backends/step_kernels.py:settle_requests": DEVICE,
    "treegen/backends/table_kernels.py:take_table": DEVICE,
    "treegen/backends/write_kernels.py:copy_kv": DEVICE,
    "treegen/backends/write_kernels.py:fork_rows": DEVICE,
    "treegen/backends/write_kernels.py:write_kv": DEVICE,
    "treegen/cli/bench_command.py:bench": COMMAND,
    "treegen/cli/plan_commands.py:account_workload": COMMAND,
    "treegen/cli/plan_commands.py:emit": COMMAND,
    "treegen/cli/plan_commands.py:explain": COMMAND,
    "treegen/cli/run_command.py:run": COMMAND,
    "treegen/cli/tune_command.py:tune": COMMAND,
    "treegen/cli/warm_command.py:warm": COMMAND,
    "treegen/runtime/torch_op.py:_": OPERATOR,
    "treegen/runtime/torch_op.py:attention_out": OPERATOR,
}


def modules() -> Iterator[tuple[str, ast.Module, int]]:
    """Every module of the package: its path, its tree and its lines."""
    for folder in PACKAGE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            yield path.relative_to(ROOT).as_posix(), ast.parse(text), len(text.splitlines())


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function of the package, as `path:function` or `path:Class.function`."""

    def below(prefix: str, node: ast.AST) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", "")
            if isinstance(child, ast.FunctionDef):
                yield prefix + name, child
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                yield from below(f"{prefix}{name}.", child)

    for path, module, _ in modules():
        yield from below(f"{path}:", module)


def parameters(function: ast.FunctionDef) -> int:
    """The parameters that callers see."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_files_are_short() -> None:
    long = {path for path, _, lines in modules() if lines > MOST_LINES}
    assert long == LONG_FILES.keys()


def test_functions_are_short() -> None:
    long = {name for name, node in functions() if (node.end_lineno or 0) - node.lineno >= MOST_FUNCTION_LINES}
    assert long == LONG_FUNCTIONS.keys()


def test_lists_of_parameters_are_short() -> None:
    wide = {name for name, node in functions() if parameters(node) > MOST_PARAMETERS}
    assert wide == MANY_PARAMETERS.keys()


def test_exemptions_have_reasons() -> None:
    for reasons in (LONG_FILES, LONG_FUNCTIONS, MANY_PARAMETERS):
        assert all(len(reason.split()) >= 4 for reason in reasons.values())
    assert all((ROOT / name.partition(":")[0]).is_file() for name in (*LONG_FILES, *LONG_FUNCTIONS, *MANY_PARAMETERS))


def test_one_path_is_one_file() -> None:
    assert len({Path(path) for path, *_ in modules()}) > 150
