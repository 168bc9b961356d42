"""Commands that generate trees: few-shot, reasoning, speculative."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treegen.ir.tree import Tree
from treegen.text_files import save_text
from treegen.workloads import generate

OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write the tree to this file.", show_default="print it"),
]
TreeSeedOption = Annotated[int, typer.Option(min=0, help="Seed; equal seeds give equal trees.")]

app = typer.Typer(no_args_is_help=True, help="Generate a tree as decoding systems make it, as treegen JSON.")


@app.command("few-shot")
def few_shot(
    prompt: Annotated[int, typer.Option(help="Tokens of the shared prompt.")] = 4000,
    width: Annotated[int, typer.Option(help="Number of branches.")] = 20,
    step: Annotated[int, typer.Option(help="Tokens of each branch.")] = 200,
    output: OutputOption = None,
) -> None:
    """Generate a prompt that branches of equal length share."""
    _deliver(generate.few_shot(prompt, width, step), output)


@app.command()
def reasoning(
    seed: TreeSeedOption = 0,
    depth: Annotated[int, typer.Option(help="Number of rounds of thoughts.")] = 5,
    width: Annotated[int, typer.Option(help="New thoughts of a round.")] = 10,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 1000,
    thought: Annotated[int, typer.Option(help="Usual tokens of a thought.")] = 300,
    step: Annotated[int | None, typer.Option(help="Decoding step, from 1.", show_default="the middle step")] = None,
    output: OutputOption = None,
) -> None:
    """Generate a tree-of-thoughts search during decoding: branches of uneven length, some of them pruned."""
    _deliver(generate.reasoning(seed, depth, width, prompt, thought, step), output)


@app.command()
def speculative(
    seed: TreeSeedOption = 0,
    tokens: Annotated[int, typer.Option(help="Draft tokens, the root token included; a row each.")] = 32,
    prefix: Annotated[int, typer.Option(help="Tokens of the context.")] = 1000,
    output: OutputOption = None,
) -> None:
    """Generate a draft token tree over a context."""
    _deliver(generate.speculative(seed, tokens, prefix), output)


def _deliver(tree: Tree, output: Path | None) -> None:
    if output is None:
        print(tree.to_json())
    else:
        save_text(output, tree.to_json() + "\n")
