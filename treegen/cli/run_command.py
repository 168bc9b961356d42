"""The command run: replays a tree of sequences with a model, and shows where the time and the memory go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from treegen.cli.arguments import print_table
from treegen.cli.progress_bars import progress_bar
from treegen.ir.errors import InputError
from treegen.workloads.specs import trees_of

if TYPE_CHECKING:
    from treegen.engine.engine import Engine
    from treegen.engine.forced import Forced
    from treegen.integrations.hf import HFModel

TINY = "tiny"
_LAYERS = 2


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
            metavar="tiny|PATH", help="A model of Transformers: a folder, a name, or tiny, with random weights."
        ),
    ] = TINY,
    compare: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help="Strategies, with commas: who reads which KV together. query shares none."
        ),
    ] = "auto,query",
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per page of the KV pool, a power of two to 128.")] = 16,
    max_rows: Annotated[int, typer.Option(min=1, help="The most tokens of a step of the model.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the tokens.")] = 0,
) -> None:
    """Decode a tree of sequences with a model, and show the time per token and the memory of KV.

    The tree says how long the prompt is, where branches fork, and how long they grow; the tokens are random. So every
    run does the same work. The tree of a decoding is the one at its end.
    """
    from treegen.engine.engine import Engine
    from treegen.engine.forced import Forced

    *_, (name, tree) = trees_of(workload)
    loaded = _loaded(model, int(tree.tokens.sum()))
    forced = Forced(tree, loaded.vocabulary, seed)
    pages = sum(-(-int(count) // page_size) + 1 for count in tree.tokens.tolist()) + forced.width
    rows = [["strategy", "ms a token", *_PARTS.values(), "steps", "KV held", "unshared"]]
    strategies = [each.strip() for each in compare.split(",")]
    with progress_bar(len(strategies)) as on_done:
        for strategy in strategies:
            engine = Engine(
                loaded, forced, num_pages=pages, page_size=page_size, max_branches=max(2, forced.width),
                max_rows=max(max_rows, forced.width), strategy=strategy,
            )  # fmt: skip
            engine.accounting.device = loaded.device
            rows.append(_row(strategy, engine, forced))
            on_done()
    print(f"{name}: {forced.width} branches, {len(forced.prompt)} prompt tokens, model {model}, {loaded.device}")
    print_table(rows)


_PARTS = {"attention": "attention", "model": "rest of the model", "pages": "pages and plans", "control": "control"}


def _row(strategy: str, engine: Engine, forced: Forced) -> list[str]:
    """Runs an engine; returns a line of the table."""
    (results,) = engine.run([forced.prompt])
    known, tokens = engine.accounting, sum(len(found.tokens) for found in results)
    total = sum(known.seconds.values())
    shares = [f"{known.seconds[part] / total:.0%}" for part in _PARTS]
    of_page = engine.pool.page_size * engine.pool.shape.kv_token_bytes * engine.pool.layers
    held = [f"{pages * of_page / 1e6:.1f} MB" for pages in (known.most_pages, known.most_unshared)]
    return [strategy, f"{total / tokens * 1e3:.3f}", *shares, str(known.steps), *held]


def _loaded(model: str, tokens: int) -> HFModel:
    """Loads a model for sequences of up to this many tokens. Raises InputError where there is none."""
    import torch

    try:
        import transformers
    except ImportError as cause:
        raise InputError("model", model, "needs transformers", "pip install 'treegen[hf]'") from cause
    from treegen.integrations.hf import HFModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if model == TINY:
        return HFModel(_tiny(tokens).to(device))
    try:
        made: Any = transformers.AutoModelForCausalLM.from_pretrained(model)
    except (OSError, ValueError) as cause:
        raise InputError("model", model, "cannot be loaded", "name a folder or a model of Transformers") from cause
    return HFModel(made.to(device))


def _tiny(tokens: int) -> Any:
    """Makes a small Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    made: Any = LlamaForCausalLM
    return made(
        LlamaConfig(vocab_size=512, num_hidden_layers=_LAYERS, max_position_embeddings=max(tokens, 256), **sizes)
    )
