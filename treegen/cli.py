"""The command line: explain a tree, print its kernels, list strategies and targets, generate trees."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from treegen import generate as generator
from treegen.emit import Source, emit_merge, emit_partial, kernel_key, merge_key
from treegen.explain import DEFAULT_GROUPS, Explanation
from treegen.explain import explain as explained
from treegen.files import save_text, tree_from_argument
from treegen.ir.errors import ShapeError, TreegenError
from treegen.ir.shape import DEFAULT_SHAPE, Shape
from treegen.strategies import strategy_from, strategy_names
from treegen.targets import DEFAULT_TARGET, targets

app = typer.Typer(
    help="A kernel compiler for tree attention.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

TreeArgument = Annotated[
    str, typer.Argument(metavar="TREE", help="Levels 1,16/1000,50, nested 1000(50*16), or a .json or .txt file.")
]
StrategyOption = Annotated[str, typer.Option(help="A strategy's name, auto, or all.")]
HeadsOption = Annotated[str, typer.Option(help="Query heads and KV heads, as 32:8 or 32/8.")]
HeadDimOption = Annotated[int, typer.Option(help="Head dimension.")]
DtypeOption = Annotated[str, typer.Option(help="Element type: fp16, bf16 or fp32.")]
TargetOption = Annotated[str, typer.Option(help="Device to plan for; see `treegen targets`.")]
DEFAULT_HEADS = f"{DEFAULT_SHAPE.num_qo_heads}:{DEFAULT_SHAPE.num_kv_heads}"


@app.callback()
def options(
    context: typer.Context, traceback: Annotated[bool, typer.Option(help="Show where an error comes from.")] = False
) -> None:
    """A kernel compiler for tree attention."""
    context.obj = traceback


@app.command()
def explain(
    tree: TreeArgument,
    strategy: StrategyOption = "auto",
    heads: HeadsOption = DEFAULT_HEADS,
    head_dim: HeadDimOption = DEFAULT_SHAPE.head_dim,
    dtype: DtypeOption = DEFAULT_SHAPE.dtype,
    target: TargetOption = DEFAULT_TARGET,
    groups: Annotated[int, typer.Option(min=0, help="Groups of a plan to list at most.")] = DEFAULT_GROUPS,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Draw a tree, list what each work group reads, and account for bytes, padding and launches."""
    explanation = _explain(tree, strategy, heads, head_dim, dtype, target)
    print(explanation.to_json() if json else explanation.text(groups))


@app.command()
def emit(
    tree: TreeArgument,
    strategy: StrategyOption = "auto",
    heads: HeadsOption = DEFAULT_HEADS,
    head_dim: HeadDimOption = DEFAULT_SHAPE.head_dim,
    dtype: DtypeOption = DEFAULT_SHAPE.dtype,
    target: TargetOption = DEFAULT_TARGET,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write DIGEST.py files here.")] = None,
) -> None:
    """Print the Triton modules that a tree's kernel launches."""
    explanation = _explain(tree, strategy, heads, head_dim, dtype, target)
    sources: dict[str, Source] = {}
    for entry in explanation.entries:
        keys = [kernel_key(tile, explanation.shape) for tile in entry.schedule.classes]
        emitted = [emit_partial(key) for key in keys]
        if len(entry.schedule.merge_rows):
            emitted.append(emit_merge(merge_key(explanation.shape)))
        sources |= {source.digest: source for source in emitted}
    for digest, source in sources.items():
        if output is None:
            print(source.text)
        else:
            output.mkdir(parents=True, exist_ok=True)
            save_text(output / f"{digest}.py", source.text)
            print(output / f"{digest}.py")


@app.command()
def strategies() -> None:
    """List the registered strategies with their default options."""
    for name in (*strategy_names(), "auto"):
        print(strategy_from(name))


@app.command(name="targets")
def list_targets() -> None:
    """List the devices that plans can be made for."""
    for target in targets().values():
        capability = f"sm_{target.capability}" if target.capability else "no GPU"
        print(f"{target.name:8} {capability:7} {target.sms:4} SMs, {target.shared_bytes // 1024} KiB shared memory per block")


class Workload(str, Enum):
    """What `generate` makes."""

    few_shot = "few-shot"
    reasoning = "reasoning"
    speculative = "speculative"


@app.command()
def generate(
    workload: Workload,
    seed: Annotated[int, typer.Option(help="Seed of reasoning and speculative trees.")] = 0,
    width: Annotated[int, typer.Option(help="Branches of a few-shot tree, thoughts per round of a reasoning tree.")] = 10,
    tokens: Annotated[int, typer.Option(help="Rows of a speculative tree.")] = 32,
    prompt: Annotated[int, typer.Option(help="Prompt of a few-shot or prefix of a speculative tree, in tokens.")] = 1000,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the tree's JSON here.")] = None,
) -> None:
    """Make a tree as a decoding system would, as JSON."""
    if workload is Workload.few_shot:
        tree = generator.few_shot(prompt=prompt, width=width)
    elif workload is Workload.reasoning:
        tree = generator.reasoning(seed, width=width)
    else:
        tree = generator.speculative(seed, tokens=tokens, prefix=prompt)
    if output is None:
        print(tree.to_json())
    else:
        save_text(output, tree.to_json())


def _explain(tree: str, strategy: str, heads: str, head_dim: int, dtype: str, target: str) -> Explanation:
    names = strategy_names() if strategy == "all" else (strategy,)
    shape = Shape(*_heads(heads), head_dim, dtype=dtype)
    return explained(tree_from_argument(tree), names, shape, target)


def _heads(text: str) -> tuple[int, int]:
    query, separator, kv = text.replace("/", ":").partition(":")
    if not (separator and query.isdigit() and kv.isdigit()):
        raise ShapeError("heads", text, "is not a pair of head counts", "give query and KV heads as 32:8")
    return int(query), int(kv)


def main() -> None:
    """Runs the command line; a TreegenError becomes one line on stderr and exit code 2."""
    try:
        app()
    except TreegenError as error:
        if "--traceback" in sys.argv:
            raise
        print(f"treegen: error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output is gone: nothing is left to say, not even at interpreter exit.
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
