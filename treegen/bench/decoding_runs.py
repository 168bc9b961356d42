"""Whole decodings with a model: the same tree of sequences by each provider of attention, in the same engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from treegen.bench.clocked_controllers import OnProgress, clocked_controller, synchronize
from treegen.bench.decoding_cases import DecodingCase
from treegen.bench.decoding_kernels import flashinfer_kernel, no_kernel
from treegen.bench.decoding_sdpa import sdpa_kernel
from treegen.bench.kv_reads import KVReads, StepFigures
from treegen.bench.providers import UnavailableError
from treegen.distributed import Parallel
from treegen.engine.accounting import PARTS
from treegen.engine.attention_kernels import KernelMaker, tree_kernels
from treegen.engine.engine import CHUNK_ROWS, CHUNK_ROWS_APART, Engine
from treegen.engine.forward import Model
from treegen.report.decode_io import decimal_bytes

_MOST_STEPS = 100
"""The most decoding steps with figures of their own."""
_PROVIDERS: dict[str, KernelMaker] = {"flashinfer": flashinfer_kernel, "sdpa": sdpa_kernel, "none": no_kernel}
"""Providers beside treegen's strategies: FlashInfer's decode, PyTorch's attention function, and none at all."""


@dataclass(frozen=True, slots=True)
class DecodingSettings:
    """How decodings are run.

    Args:
        page_size: Tokens of a page.
        max_rows: The most tokens of a step; by default those of `Engine`.
        cuda_graphs: As in `Engine`.
        parallel: As in `Engine`.
    """

    page_size: int = 16
    max_rows: int | None = None
    cuda_graphs: bool | None = None
    parallel: Parallel | None = None

    @property
    def divides_tokens(self) -> bool:
        """Whether ranks divide tokens. Then what each reads is not counted."""
        return self.parallel is not None and self.parallel.shard.size > 1


@dataclass(frozen=True, slots=True)
class DecodingOutcome:
    """A provider on a decoding.

    Args:
        provider: Its name.
        detail: Why it was not run; empty if it was.
        tokens: The tokens after the prompt that the branches have at the end, shared ones for each.
        seconds: Of the whole run.
        decoding_seconds: From the step on in which the last prompt was complete.
        decoding_steps: Steps of the model in that time.
        parts: Seconds by PARTS. On a GPU all but `model` are the host's; a captured step's attention is in `model`.
        held_bytes: The most bytes of KV that were held at a time.
        unshared_bytes: The same if each branch held its own.
        read_bytes: The bytes of KV that attention read in the decoding steps, those of a group of rows once.
        path_bytes: The same if each query row read its own.
        course: Figures of some decoding steps, spread evenly.
        token_bytes: Bytes of a token's keys and values in a layer.
        counts_reads: Whether the bytes that attention read were counted.
    """

    provider: str
    detail: str = ""
    tokens: int = 0
    seconds: float = 0.0
    decoding_seconds: float = 0.0
    decoding_steps: int = 0
    parts: tuple[float, ...] = ()
    held_bytes: int = 0
    unshared_bytes: int = 0
    read_bytes: int = 0
    path_bytes: int = 0
    course: tuple[StepFigures, ...] = ()
    token_bytes: int = 0
    counts_reads: bool = True

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step without chunks of the prompt."""
        return 1e3 * self.decoding_seconds / max(1, self.decoding_steps)

    @property
    def host_us(self) -> float:
        """Microseconds of a step for pages, plans and the controller."""
        return 1e6 * sum(self.parts[PARTS.index(part)] for part in ("pages", "control")) / max(1, self.decoding_steps)


def _engine(model: Model, case: DecodingCase, provider: str, settings: DecodingSettings, reads: KVReads) -> Engine:
    """Makes the engine of a provider; `reads` notes its steps, unless ranks divide tokens."""
    strategy = "auto" if provider in _PROVIDERS else provider
    wanted = settings.max_rows or (CHUNK_ROWS_APART if settings.divides_tokens else CHUNK_ROWS)
    noted = reads.noting(_PROVIDERS.get(provider) or tree_kernels(strategy))
    return Engine(
        model, case.controller, num_pages=case.pages, page_size=settings.page_size, max_branches=case.branches,
        max_rows=max(wanted, case.rows), strategy=strategy, prefix_cache=False,
        make_kernel=None if settings.divides_tokens else noted, cuda_graphs=settings.cuda_graphs,
        parallel=settings.parallel,
    )  # fmt: skip


def check_providers(providers: Sequence[str]) -> None:
    """Raises StrategyError for a provider that is none."""
    for provider in providers:
        if provider not in _PROVIDERS:
            tree_kernels(provider)


def run_decoding(
    model: Model,
    case: DecodingCase,
    provider: str,
    settings: DecodingSettings,
    on_progress: OnProgress | None = None,
) -> DecodingOutcome:
    """Runs a decoding with a provider, on a GPU after a run with fewer tokens that compiles and captures.

    Args:
        model: The model.
        case: The decoding.
        provider: `flashinfer`, `sdpa`, `none`, or a strategy of treegen.
        settings: How to run it.
        on_progress: Called with the part of the decoding that is done since its last call.

    Raises:
        TreegenError: The decoding, the provider or a setting does not fit.
    """
    if settings.divides_tokens and provider in _PROVIDERS:
        return DecodingOutcome(provider, "does not merge what ranks have attended to, each to its own tokens")
    reads = KVReads()
    engine = _engine(model, case, provider, settings, reads)
    if engine.forward.graphs is None and model.device.type == "cuda":
        engine.accounting.device = model.device
    try:
        if model.device.type == "cuda":
            engine.warm_up()
            engine.controller = case.warm
            engine.run(case.prompts)
        engine.controller = clocked = clocked_controller(case, engine, reads, on_progress)
        synchronize(engine)
        begin = time.perf_counter()
        results = engine.run(case.prompts)
        synchronize(engine)
    except UnavailableError as cause:
        return DecodingOutcome(provider, str(cause))
    end, known = time.perf_counter(), engine.accounting
    clocked.end()
    of_token = engine.pool.shape.kv_token_bytes
    of_page = engine.pool.page_size * of_token * engine.pool.layers
    read = reads.count()
    return DecodingOutcome(
        provider,
        tokens=sum(len(found.tokens) for own in results for found in own),
        seconds=end - begin,
        decoding_seconds=end - clocked.began,
        decoding_steps=known.steps - clocked.steps,
        parts=tuple(known.seconds[part] for part in PARTS),
        held_bytes=known.most_pages * of_page,
        unshared_bytes=known.most_unshared * of_page,
        read_bytes=read.read * of_token,
        path_bytes=read.paths * of_token,
        course=reads.course(_MOST_STEPS),
        token_bytes=of_token,
        counts_reads=not settings.divides_tokens,
    )


def decoding_table(outcomes: Sequence[DecodingOutcome]) -> list[list[str]]:
    """Returns lines for print_table: titles, and one for each outcome that ran."""
    bound = next((found for found in outcomes if found.provider == "none" and not found.detail), None)
    titles = ["provider", "ms a token", "ms a step", *_TITLES, "steps", *_BYTES]
    lines = [titles if bound is None else [*titles, "over none"]]
    for found in outcomes:
        if found.detail:
            continue
        total = sum(found.parts)
        shares = [f"{part / total:.0%}" for part in found.parts]
        line = [found.provider, f"{found.seconds / found.tokens * 1e3:.3f}", f"{found.step_ms:.3f}", *shares]
        amounts = found.held_bytes, found.unshared_bytes, found.read_bytes, found.path_bytes
        line += [str(found.decoding_steps), *map(decimal_bytes, amounts)]
        line[-2:] = line[-2:] if found.counts_reads else ["-", "-"]
        lines.append(line if bound is None else [*line, f"{found.seconds / bound.seconds:.2f}x"])
    return lines


_TITLES = ("attention", "rest of the model", "pages and plans", "control")
_BYTES = ("KV held", "unshared", "KV read", "unshared reads")
