"""Commands that make trees: generate few-shot, reasoning, speculative."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treegen.ir.tree import Tree
from treegen.text_files import save_text
from treegen.workloads import generate

OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the tree here.", show_default="print it")
]
SeedOption = Annotated[int, typer.Option(help="Equal seeds give equal trees.")]

app = typer.Typer(no_args_is_help=True, help="Make a tree as decoding systems do, as treegen JSON.")


@app.command("few-shot")
def few_shot(
    prompt: Annotated[int, typer.Option(help="Tokens of the shared prompt.")] = 4000,
    width: Annotated[int, typer.Option(help="Branches.")] = 20,
    step: Annotated[int, typer.Option(help="Tokens of every branch.")] = 200,
    output: OutputOption = None,
) -> None:
    """A prompt shared by branches of one length."""
    _deliver(generate.few_shot(prompt, width, step), output)


@app.command()
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
    _deliver(generate.reasoning(seed, depth, width, prompt, thought, step), output)


@app.command()
def speculative(
    seed: SeedOption = 0,
    tokens: Annotated[int, typer.Option(help="Rows, the root token's included.")] = 32,
    prefix: Annotated[int, typer.Option(help="Tokens of the context.")] = 1000,
    output: OutputOption = None,
) -> None:
    """A draft token tree over a context."""
    _deliver(generate.speculative(seed, tokens, prefix), output)


def _deliver(tree: Tree, output: Path | None) -> None:
    if output is None:
        print(tree.to_json())
    else:
        save_text(output, tree.to_json() + "\n")
