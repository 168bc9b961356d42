"""The command run: replays a tree of sequences with a model, and shows where the time and the memory go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treegen.cli.arguments import HtmlOption, print_table
from treegen.cli.progress_bars import progress_bar
from treegen.ir.errors import InputError
from treegen.text_files import save_text
from treegen.workloads.served_decodings import served_decoding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from treegen.integrations.hf import HFModel

WorkloadArgument = Annotated[
    str,
    typer.Argument(
        help="few-shot, few-shot-30, few-shot-50, grpo, beams, system-prompts, shot-sets, chains, documents, "
        "or reasoning, with options as in grpo:samples=8; recorded: reasoning-sorting, reasoning-docmerge or "
        "reasoning-keyword, with the number of a tree as in reasoning-keyword:3, and speculative-32, -64, -128 or "
        "-256; or a tree, as in `treegen explain`, whose roots are prompts.",
    ),
]
ModelOption = Annotated[
    str,
    typer.Option(
        metavar="NAME|PATH",
        help="A model of Transformers: a folder or a name; or, with random weights, tiny, llama-3-8b, qwen3-8b or "
        "llama-3-70b-eighth.",
    ),
]
CompareOption = Annotated[
    str,
    typer.Option(
        metavar="NAME,...",
        help="Strategies, with commas: who reads which KV together. query shares none. Besides flashinfer and "
        "sdpa, FlashInfer's kernels and PyTorch's attention function in the same engine, and none, which leaves "
        "attention out.",
    ),
]
PoolPageSizeOption = Annotated[int, typer.Option(min=1, help="Tokens per page of the KV pool, a power of two to 128.")]
MaxRowsOption = Annotated[
    int | None,
    typer.Option(min=1, help="The most tokens of a step.", show_default="2048, or 512 with --context-parallel"),
]
TokenSeedOption = Annotated[int, typer.Option(min=0, help="Seed of the tokens.")]
ScaleOption = Annotated[float, typer.Option(help="Multiplies all numbers of tokens: 0.1 for a tenth.")]
RecordingsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        envvar="TREEGEN_DATA",
        help="Folder of recorded decodings.",
        show_envvar=True,
        show_default="no recorded decodings",
    ),
]
EagerOption = Annotated[
    bool, typer.Option("--eager", help="Capture no CUDA graphs, and wait after each part, to see its time.")
]
TensorParallelOption = Annotated[
    bool, typer.Option("--tensor-parallel", help="Divide heads among the ranks that torchrun has started.")
]
ContextParallelOption = Annotated[
    bool, typer.Option("--context-parallel", help="Divide the tokens of KV among these ranks.")
]
CompileOption = Annotated[
    bool, typer.Option("--compile", help="Let torch.compile compile what lies between attention calls.")
]


def run(
    workload: WorkloadArgument = "few-shot",
    model: ModelOption = "tiny",
    compare: CompareOption = "auto,query",
    page_size: PoolPageSizeOption = 16,
    max_rows: MaxRowsOption = None,
    seed: TokenSeedOption = 0,
    scale: ScaleOption = 1.0,
    data: RecordingsOption = None,
    eager: EagerOption = False,
    tensor_parallel: TensorParallelOption = False,
    context_parallel: ContextParallelOption = False,
    compile: CompileOption = False,
    html: HtmlOption = None,
) -> None:  # fmt: skip
    """Decode a tree of sequences with a model, and show the time per token and the memory of KV.

    The tree says how long prompts are, where branches fork, and how long they grow; the tokens are random. So every run
    does the same work. Only beams follow the model's logits. The tree of other decodings is the one at their end. On a
    GPU, the time of captured attention is counted with the rest of the model, unless --eager is given.
    """
    from treegen.bench.decoding_cases import decoding_case
    from treegen.bench.decoding_runs import DecodingSettings, check_providers, decoding_table, run_decoding
    from treegen.bench.launched_ranks import launched_ranks

    providers = [each.strip() for each in compare.split(",")]
    check_providers(providers)
    decoding = served_decoding(workload, data).scaled(scale)
    with launched_ranks(tensor_parallel, context_parallel) as ranks:
        loaded = _loaded(model, decoding.most_tokens, ranks.mesh, {"dynamic": True} if compile else None)
        case = decoding_case(decoding, loaded.vocabulary, seed, page_size)
        settings = DecodingSettings(page_size, max_rows, False if eager else None, ranks.parallel)
        with progress_bar(len(providers) if ranks.first else 0) as on_done:
            outcomes = [run_decoding(loaded, case, provider, settings, on_done) for provider in providers]
    if not ranks.first:
        return
    prompts = f"{len(case.prompts)} prompts of up to " if len(case.prompts) > 1 else ""
    where = f"model {model}, {loaded.device}{ranks.words}"
    words = f"{decoding.name}: {prompts}{max(map(len, case.prompts))} prompt tokens, {where}"
    if html is not None:
        from treegen.bench.decoding_page import decoding_html

        save_text(html, decoding_html(outcomes, words))
    print(words)
    for found in outcomes:
        if found.detail:
            print(f"{found.provider}: {found.detail}")
    print_table(decoding_table(outcomes))


def _loaded(model: str, tokens: int, mesh: DeviceMesh | None, compile_options: dict[str, bool] | None) -> HFModel:
    """Loads a model for sequences of up to this many tokens. Raises InputError where there is none.

    Args:
        model: Its name or folder.
        tokens: The most tokens of a sequence.
        mesh: The ranks that divide its heads.
        compile_options: As of HFModel.
    """
    import torch

    try:
        import safetensors
        import transformers
    except ImportError as cause:
        raise InputError("model", model, "needs transformers", "pip install '.[hf]'") from cause
    from treegen.integrations.hf import HFModel
    from treegen.integrations.hf_parallel import divide_heads
    from treegen.integrations.random_models import RANDOM_MODELS, random_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if model in RANDOM_MODELS:
        made: Any = random_model(model, tokens, device)
    else:
        try:
            made = transformers.AutoModelForCausalLM.from_pretrained(model)
        except (OSError, ValueError, safetensors.SafetensorError) as cause:
            reason = f"cannot be loaded: {str(cause).splitlines()[0].rstrip('.')}"
            raise InputError("model", model, reason, "name a folder or a model of Transformers") from cause
    if mesh is not None:
        divide_heads(made, mesh)
    return HFModel(made.to(device), compile_options=compile_options)
