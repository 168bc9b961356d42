"""generate: Transformers' `model.generate` on treegen's engine, for a model that stays as it is.

model.generate ── processors, criteria, config ──▶ generate ── prompts ──▶ Engine ── tokens ──▶ sequences
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from treegen.backends.kept_tensors import for_kept_tensors
from treegen.engine import Engine, NGrams
from treegen.integrations.hf_beams import LockstepBeams
from treegen.integrations.hf_engines import engine_for
from treegen.integrations.hf_requests import GenerateRequest, check_request
from treegen.integrations.hf_rules import Criteria, Processors, TokenRules
from treegen.integrations.hf_samples import DraftedSample, LockstepSample
from treegen.ir.arrays import positive_int
from treegen.ir.errors import InputError, PoolError

OPTIONS = ("num_pages", "page_size", "max_rows", "strategy", "cuda_graphs", "keep")
"""Arguments of the engine that a caller may give, and whether to keep it."""

MOST_PROMPT_ROWS = 2048
"""Tokens of prompts in a step, where the caller does not say."""


@for_kept_tensors()
def generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Processors,
    stopping_criteria: Criteria,
    generation_config: Any,
    engine_options: Mapping[str, Any] | None = None,
    token_streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decodes with an engine in place of the loops of Transformers: give it to `model.generate` as `custom_generate`.

    Transformers prepares the call as always: the prompts, the generation config, and its logits processors and
    stopping criteria, with those of the caller. All rows get a token in each step, and prompts are padded for
    processors and criteria as in Transformers. So what these see, and the result, are the same as without
    `custom_generate`, up to rounding of the logits. This holds for greedy decoding and beams, with and without
    sampling; samples are the same for the same seed of torch. With `prompt_lookup_num_tokens` the tokens are those of
    a call without it, also for samples, whatever is drafted.

    Transformers does not hand on its arguments `streamer`, `assistant_model` and `tokenizer` to such a function: use
    `token_streamer`, and give stop strings as a `StopStringCriteria` among the `stopping_criteria`.

    The engine is kept for later calls of the model, with its pages and CUDA graphs, and freed with the model. A call
    that needs more, or asks for other options, gets a new one, as does a model whose modules, tensors, flags or config
    have changed. Values of weights may change in place.

    While it runs, the model attends through `treegen` and is in evaluation mode; afterwards, and after errors, both are
    as before. So no other thread may use it meanwhile.

    Args:
        model: A causal language model that `HFModel` serves.
        input_ids: `[rows, length]`; the prompts, padded at the left by the attention mask, each once for every beam or
            returned sequence.
        logits_processor: Changes the scores of next tokens.
        stopping_criteria: Says which rows end.
        generation_config: Everything else that the caller asks for.
        engine_options: Arguments of `Engine`: num_pages, page_size, max_rows, strategy or cuda_graphs. By default
            there are pages for all rows at their longest. With `keep` False no engine is kept or used again.
        token_streamer: A streamer of Transformers, for one row.
        model_kwargs: What Transformers hands to the model: the attention mask, positions and an empty cache.

    Returns:
        The sequences `[rows returned, length]`; with `return_dict_in_generate` Transformers' output, without a cache.

    Raises:
        InputError: Something is asked for that is not served; before any launch.
        PoolError: `num_pages` is too small.
    """
    request = check_request(model, input_ids, stopping_criteria, generation_config, model_kwargs)
    if token_streamer is not None and len(input_ids) > 1:
        raise InputError("token_streamer", f"{len(input_ids)} rows", "is for one row, without beams", "leave it out")
    options = _options(request, given := {} if engine_options is None else engine_options)
    controller = _controller(_rules(logits_processor, stopping_criteria, generation_config, token_streamer), request)
    controller.rules.stream(input_ids)
    with _restored(model), engine_for(model, controller, options, given, request.max_draft) as engine:
        _run(engine, request)
    if token_streamer is not None:
        token_streamer.end()
    return _output(controller, request)


def _run(engine: Engine, request: GenerateRequest) -> None:
    """Runs the prompts of a request. Raises PoolError, which says how many pages are enough."""
    try:
        engine.run(request.prompts)
    except PoolError as error:
        fix = f"leave it out, which gives {_pages(request, engine.pool.page_size)}: all rows advance together"
        raise PoolError("num_pages", error.value, error.reason, fix) from error


def _rules(processors: Processors, criteria: Criteria, config: Any, streamer: Any) -> TokenRules:
    """Returns the rules of a call, which keep what is to be returned."""
    records = bool(config.return_dict_in_generate)
    scores: list[torch.Tensor] | None = [] if records and config.output_scores else None
    logits: list[torch.Tensor] | None = [] if records and config.output_logits else None
    return TokenRules(processors, criteria, bool(config.do_sample), scores, logits, streamer)


def _controller(rules: TokenRules, request: GenerateRequest) -> LockstepSample | LockstepBeams | DraftedSample:
    """Returns the controller of a request."""
    if request.mode.startswith("beam"):
        return LockstepBeams(rules, request)
    if request.max_draft:
        longest = request.config.max_matching_ngram_size or 2
        return DraftedSample(rules, request, NGrams(longest), request.max_draft)
    return LockstepSample(rules, request)


def _options(request: GenerateRequest, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of the engine, by default with room for all rows of a request at their longest."""
    if not isinstance(given, Mapping):
        raise InputError("engine_options", given, "is no dictionary", 'give {"num_pages": 500}, for instance')
    if unknown := sorted(given.keys() - set(OPTIONS), key=str):
        raise InputError("engine_options", unknown, "are no such options", f"give some of {', '.join(OPTIONS)}")
    if not isinstance(given.get("keep", True), bool):
        raise InputError("engine_options['keep']", given["keep"], "is not a bool", "give True or False")
    rows, page_size = len(request.ids), given.get("page_size", 16)
    step = rows * (1 + request.max_draft)
    prefill = min(MOST_PROMPT_ROWS, sum(map(len, request.prompts)))
    made = {"page_size": page_size, "max_rows": max(step, prefill), "max_branches": rows}
    if "num_pages" not in given:
        positive_int("page_size", page_size, InputError)
        made["num_pages"] = _pages(request, page_size)
    return {**made, **{name: value for name, value in given.items() if name != "keep"}}


def _pages(request: GenerateRequest, page_size: int) -> int:
    """Returns the pages that all rows need at their longest: of each prompt its full ones, and for each row its own."""
    pages, more = 0, request.new_tokens + request.max_draft
    for prompt in map(len, request.prompts):
        full = prompt // page_size
        pages += full + request.width * (-(-(prompt + more) // page_size) - full)
    return pages


def _output(controller: LockstepSample | LockstepBeams | DraftedSample, request: GenerateRequest) -> Any:
    """Returns the sequences, or the output of Transformers that has them."""
    import transformers.generation as outputs

    config, rules = request.config, controller.rules
    fields: dict[str, Any] = {}
    if isinstance(controller, LockstepBeams):
        best = (each[:, : config.num_return_sequences].flatten(0, 1) for each in controller.results)
        ids, paths, scores, _ = best
        made = int((paths >= 0).sum(1).max())
        ids = ids[:, : request.ids.shape[1] + made]
        fields = {"beam_indices": paths[:, :made], "sequences_scores": scores if config.output_scores else None}
    else:
        ids = controller.ids
    if not config.return_dict_in_generate:
        return ids
    for name, steps in (("scores", rules.scores), ("logits", rules.logits)):
        fields[name] = None if steps is None else tuple(steps)
    kind = "GenerateBeamDecoderOnlyOutput" if isinstance(controller, LockstepBeams) else "GenerateDecoderOnlyOutput"
    return getattr(outputs, kind)(sequences=ids, **fields)


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Gives a model, at the end, the attention functions and the modes that it has at the beginning."""
    config = model.config
    configs = {"": config, **{name: getattr(config, name, None) for name in config.sub_configs}}
    configs = {name: part for name, part in configs.items() if part is not None}
    before = {name: part._attn_implementation for name, part in configs.items()}
    training = [module for module in model.modules() if module.training]
    try:
        yield
    finally:
        model.set_attn_implementation({name: way for name, way in before.items() if way is not None})
        for name, part in configs.items():  # None is for those that have none yet, which the call above refuses
            part._attn_implementation = before[name]
        for module in training:
            module.training = True
