"""The command line: explain a tree, print its kernels, account for decodings, list what there is, generate trees."""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
import traceback as tracebacks
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from treegen import emit as emission
from treegen import generate as generator
from treegen.decode_io import DEFAULT_LAYERS, DEFAULT_STRIDE, decode_io
from treegen.difference import Difference, difference
from treegen.emit import Source
from treegen.explain import DEFAULT_GROUPS, Explanation
from treegen.explain import explain as explained
from treegen.files import save_text, tree_from_argument
from treegen.ir.errors import FormatError, ShapeError, StrategyError, TreegenError
from treegen.ir.shape import DEFAULT_SHAPE, Shape
from treegen.ir.tree import Tree
from treegen.strategies import named, strategy_from, strategy_names
from treegen.targets import DEFAULT_TARGET, targets
from treegen.workloads import workload_from

# The root of unknown options, missing arguments and values of a wrong type: typer raises it but does not export it.
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
generate = typer.Typer(no_args_is_help=True, help="Make a tree as decoding systems do, as treegen JSON.")
app.add_typer(generate, name="generate")


@app.callback()
def program(
    context: typer.Context,
    traceback: Annotated[bool, typer.Option("--traceback", help="Print where an error comes from as well.")] = False,
) -> None:
    """A kernel compiler for tree attention."""
    if isinstance(context.obj, dict):
        context.obj["traceback"] = traceback


TreeArgument = Annotated[
    str,
    typer.Argument(
        metavar="TREE",
        help="Levels 1,16/1000,50; nodes 1000(50*16); or a .json or .txt file, of templates FILE#INDEX@STEP.",
        show_default=False,
    ),
]
StrategyOption = Annotated[str, typer.Option(metavar="NAME|all", help="A strategy; see `treegen strategies`.")]
HeadsOption = Annotated[
    str | None,
    typer.Option(metavar="QUERY:KV", help="Numbers of query heads and KV heads, as 32:8 or 32/8.", show_default="32:8"),
]
HeadDimOption = Annotated[int | None, typer.Option(help="Head dimension.", show_default="128")]
DtypeOption = Annotated[str | None, typer.Option(help="Element type: fp16, bf16 or fp32.", show_default="bf16")]
PageSizeOption = Annotated[int | None, typer.Option(help="Tokens of a page of the KV cache.", show_default="1")]
TargetOption = Annotated[str, typer.Option(metavar="NAME", help="What to plan for; see `treegen targets`.")]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the tree here.", show_default="print it")
]
SeedOption = Annotated[int, typer.Option(help="Equal seeds give equal trees.")]


@app.command()
def explain(
    tree: TreeArgument,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="NAME|all", help="A strategy; see `treegen strategies`.", show_default="auto"),
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Tell what two strategies do differently.", show_default=False),
    ] = None,
    heads: HeadsOption = None,
    head_dim: HeadDimOption = None,
    dtype: DtypeOption = None,
    page_size: PageSizeOption = None,
    target: TargetOption = DEFAULT_TARGET,
    groups: Annotated[
        int, typer.Option(min=0, help="Groups of a plan, and lines of --diff on nodes, that are listed at most.")
    ] = DEFAULT_GROUPS,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Draw a tree, list who reads what together, and account for bytes, padding and launches."""
    shape = _shape(heads, head_dim, dtype, page_size)
    told: Explanation | Difference
    if diff is None:
        told = _explanation(tree, strategy or "auto", shape, target)
    elif strategy is None:
        told = difference(tree_from_argument(tree), *diff, shape, target)
    else:
        fix = "leave out --strategy or --diff"
        raise StrategyError("strategy", strategy, "cannot go with --diff, which names the two it compares", fix)
    print(told.to_json() if json else told.text(groups))


@app.command()
def emit(
    tree: TreeArgument,
    strategy: StrategyOption = "auto",
    heads: HeadsOption = None,
    head_dim: HeadDimOption = None,
    dtype: DtypeOption = None,
    page_size: PageSizeOption = None,
    target: TargetOption = DEFAULT_TARGET,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Write <digest>.py files here.", show_default="print"),
    ] = None,
) -> None:
    """Print the Triton modules that a tree's kernel launches.

    A page size other than 1 gives the modules for pages that lie apart; a cache without gaps is addressed by slot.
    """
    explanation = _explanation(tree, strategy, _shape(heads, head_dim, dtype, page_size), target)
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            reason = f"cannot be made ({cause.strerror})"
            raise FormatError("output", str(output), reason, "name another folder") from cause
    for source in _sources(explanation):
        if output is None:
            print(f"# {source.digest}.py\n{source.text}")
        else:
            save_text(output / f"{source.digest}.py", source.text)
            print(output / f"{source.digest}.py")


@app.command("io")
def account_workload(
    workload: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD",
            help="few-shot, reasoning or speculative, as few-shot:width=30,steps=100; or a .json file of reasoning "
            "templates, FILE or FILE#INDEX, or of a speculative decoding, FILE or FILE:prompt=500.",
            show_default=False,
        ),
    ],
    strategy: StrategyOption = "all",
    heads: HeadsOption = None,
    head_dim: HeadDimOption = None,
    dtype: DtypeOption = None,
    layers: Annotated[int, typer.Option(help="Attention layers of the model.")] = DEFAULT_LAYERS,
    stride: Annotated[int, typer.Option(help="Steps between plans, where only plans tell.")] = DEFAULT_STRIDE,
    target: TargetOption = DEFAULT_TARGET,
    json: Annotated[bool, typer.Option("--json", help="Print exact numbers as JSON.")] = False,
) -> None:
    """Account for the bytes that strategies move over whole decodings."""
    named_workload = workload_from(workload)
    names = (*strategy_names(), "auto") if strategy == "all" else (strategy,)
    shape = _shape(heads, head_dim, dtype, None) or DEFAULT_SHAPE
    progress: AbstractContextManager[Any] = nullcontext()
    if sys.stderr.isatty():
        progress = typer.progressbar(length=len(named_workload.decodes), file=sys.stderr)
    with progress as bar:
        on_decode = (lambda: bar.update(1)) if bar else None
        found = decode_io(named_workload, names, shape, target, layers=layers, stride=stride, on_decode=on_decode)
    print(found.to_json() if json else found.text())


@app.command()
def strategies() -> None:
    """List the strategies with their default options."""
    names = [*strategy_names(), "auto"]
    summaries = [
        (inspect.getdoc(getattr(named, name.replace("-", "_"), None)) or "").split("\n\n")[0] for name in names
    ]
    _print_table(
        [(str(strategy_from(name)), " ".join(text.split())) for name, text in zip(names, summaries, strict=True)]
    )


@app.command("targets")
def list_targets() -> None:
    """List the devices that plans can be made for."""
    titles = ("name", "capability", "SMs", "shared memory per block")
    rows = [
        (t.name, f"sm_{t.capability}" if t.capability else "no GPU", str(t.sms), f"{t.shared_bytes / 1024:g} KiB")
        for t in targets().values()
    ]
    _print_table([titles, *rows])


@generate.command("few-shot")
def few_shot(
    prompt: Annotated[int, typer.Option(help="Tokens of the shared prompt.")] = 4000,
    width: Annotated[int, typer.Option(help="Branches.")] = 20,
    step: Annotated[int, typer.Option(help="Tokens of every branch.")] = 200,
    output: OutputOption = None,
) -> None:
    """A prompt shared by branches of one length."""
    _deliver(generator.few_shot(prompt, width, step), output)


@generate.command()
def reasoning(
    seed: SeedOption = 0,
    depth: Annotated[int, typer.Option(help="Rounds of thoughts.")] = 5,
    width: Annotated[int, typer.Option(help="Thoughts of a round.")] = 10,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 1000,
    thought: Annotated[int, typer.Option(help="Tokens of a thought, about.")] = 300,
    step: Annotated[int | None, typer.Option(help="Decoding step.", show_default="the middle one")] = None,
    output: OutputOption = None,
) -> None:
    """A tree-of-thoughts search during decoding: branches of uneven lengths, losers pruned."""
    _deliver(generator.reasoning(seed, depth, width, prompt, thought, step), output)


@generate.command()
def speculative(
    seed: SeedOption = 0,
    tokens: Annotated[int, typer.Option(help="Rows, the root token's included.")] = 32,
    prefix: Annotated[int, typer.Option(help="Tokens of the context.")] = 1000,
    output: OutputOption = None,
) -> None:
    """A draft token tree over a context."""
    _deliver(generator.speculative(seed, tokens, prefix), output)


def _deliver(tree: Tree, output: Path | None) -> None:
    if output is None:
        print(tree.to_json())
    else:
        save_text(output, tree.to_json() + "\n")


def _explanation(tree: str, strategy: str, shape: Shape | None, target: str) -> Explanation:
    names = (*strategy_names(), "auto") if strategy == "all" else (strategy,)
    return explained(tree_from_argument(tree), names, shape, target)


def _shape(heads: str | None, head_dim: int | None, dtype: str | None, page_size: int | None) -> Shape | None:
    """The shape that the options describe, DEFAULT_SHAPE's parts where they are silent; None when all are."""
    if heads is None and head_dim is None and dtype is None and page_size is None:
        return None
    default = DEFAULT_SHAPE
    query, kv = (default.num_qo_heads, default.num_kv_heads) if heads is None else _heads(heads)
    return Shape(
        query,
        kv,
        default.head_dim if head_dim is None else head_dim,
        dtype=default.dtype if dtype is None else dtype,
        page_size=default.page_size if page_size is None else page_size,
    )


def _heads(text: str) -> tuple[int, int]:
    pair = re.fullmatch(r"(\d{1,6})[:/](\d{1,6})", text)
    if pair is None:
        raise ShapeError("heads", text, "is not a pair of head counts", "give query and KV heads as 32:8")
    return int(pair[1]), int(pair[2])


def _sources(explanation: Explanation) -> Iterable[Source]:
    """The modules behind all plans of an explanation, each once."""
    found: dict[str, Source] = {}
    for entry in explanation.entries:
        emitted = emission.emit(entry.schedule, explanation.shape, explanation.shape.page_size)
        found.update((source.digest, source) for source in emitted)
    return found.values()


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code: 2, and one line on stderr, when something is wrong with the
    arguments or with what they name.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a drawing, where the encoding has no lines
    settings: dict[str, Any] = {}
    try:
        code = app(args=arguments, prog_name="treegen", standalone_mode=False, obj=settings)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except TreegenError as error:
        if settings.get("traceback"):
            tracebacks.print_exc()
        message = str(error)
    except _UsageError as error:
        # Without a command the message is the help: all of it, or nothing when it is printed already.
        message = error.format_message()
        if not message or "\n" in message:
            print(message, end="", file=sys.stderr)
            return 2
    except (BrokenPipeError, SystemExit):
        # The reader of our output has gone (`| head`), which typer may have noticed first. What is still buffered goes
        # nowhere, so that the interpreter does not fail on it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        message = f"output cannot be written: {error.strerror}"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(f"treegen: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
