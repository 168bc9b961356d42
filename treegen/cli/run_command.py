"""The command run: replays a tree of sequences with a model, and shows where the time and the memory go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from treegen.cli.arguments import print_table
from treegen.cli.progress_bars import progress_bar
from treegen.ir.errors import InputError
from treegen.workloads.specs import trees_of

if TYPE_CHECKING:
    from treegen.integrations.hf import HFModel


def run(
    workload: Annotated[
        str,
        typer.Argument(
            help="few-shot, speculative or reasoning, as in `treegen io`; or a tree with one root, as in "
            "`treegen explain`.",
        ),
    ] = "few-shot",
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|PATH",
            help="A model of Transformers: a folder or a name; or, with random weights, tiny, llama-3-8b, qwen3-8b or "
            "llama-3-70b-eighth.",
        ),
    ] = "tiny",
    compare: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Strategies, with commas: who reads which KV together. query shares none. Besides flashinfer, its "
            "decode in the same engine, and none, which leaves attention out.",
        ),
    ] = "auto,query",
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per page of the KV pool, a power of two to 128.")] = 16,
    max_rows: Annotated[int, typer.Option(min=1, help="The most tokens of a step of the model.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the tokens.")] = 0,
    eager: Annotated[
        bool, typer.Option("--eager", help="Capture no CUDA graphs, and wait after each part, to see its time.")
    ] = False,
) -> None:
    """Decode a tree of sequences with a model, and show the time per token and the memory of KV.

    The tree says how long the prompt is, where branches fork, and how long they grow; the tokens are random. So every
    run does the same work. The tree of a decoding is the one at its end. On a GPU, the time of captured attention is
    counted with the rest of the model, unless --eager is given.
    """
    from treegen.bench.decoding_runs import DecodingSettings, decoding_table, run_decoding

    *_, (name, tree) = trees_of(workload)
    loaded = _loaded(model, int(tree.tokens.sum()))
    settings = DecodingSettings(page_size, max_rows, seed, False if eager else None)
    providers = [each.strip() for each in compare.split(",")]
    outcomes = []
    with progress_bar(len(providers)) as on_done:
        for provider in providers:
            outcomes.append(run_decoding(loaded, tree, loaded.vocabulary, provider, settings))
            on_done()
    root = int(tree.parent.argmin())
    print(f"{name}: {int(tree.tokens[root])} prompt tokens, model {model}, {loaded.device}")
    for found in outcomes:
        if found.detail:
            print(f"{found.provider}: {found.detail}")
    print_table(decoding_table(outcomes))


def _loaded(model: str, tokens: int) -> HFModel:
    """Loads a model for sequences of up to this many tokens. Raises InputError where there is none."""
    import torch

    try:
        import transformers
    except ImportError as cause:
        raise InputError("model", model, "needs transformers", "pip install 'treegen[hf]'") from cause
    from treegen.integrations.hf import HFModel
    from treegen.integrations.random_models import RANDOM_MODELS, random_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if model in RANDOM_MODELS:
        return HFModel(random_model(model, tokens, device))
    try:
        made: Any = transformers.AutoModelForCausalLM.from_pretrained(model)
    except (OSError, ValueError) as cause:
        raise InputError("model", model, "cannot be loaded", "name a folder or a model of Transformers") from cause
    return HFModel(made.to(device))
