"""`generate` on the engine returns what it returns without, and leaves the model as it was."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation import StopStringCriteria

from support.tiny_models import NAMES, PROMPTS, VOCABULARY, padded, tiny
from treegen.engine import Step
from treegen.engine.host_copy import HostCopy
from treegen.integrations import generate, hf_engines
from treegen.ir.errors import InputError, PoolError, TreegenError

ENDS = [11, 50, 3, 7]
SHARED = [[*range(20, 60), 30 + number] for number in range(3)] + [[5, 6]]
"""Some of these prompts begin alike, so they do not all get their first logits in the same step."""


def both(model: Any, prompts: Sequence[Sequence[int]], seed: int = 0, own: Any = None, **options: Any) -> list[Any]:
    """What `generate` returns without and with the engine, for the same seed."""
    made = []
    for custom in ({}, {"custom_generate": generate, **(own or {})}):
        torch.manual_seed(seed)
        made.append(model.generate(**padded(prompts), **{"pad_token_id": 0, "max_new_tokens": 10, **options, **custom}))
    return made


def check_equal(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> torch.Tensor:
    plain, served = both(model, prompts, **options)
    assert plain.tolist() == served.tolist()
    assert model.config._attn_implementation == "eager"
    return served


@pytest.mark.parametrize("name", NAMES)
def test_batches_of_all_models(name: str) -> None:
    model = tiny(name)
    check_equal(model, PROMPTS, do_sample=False)
    check_equal(model, PROMPTS, do_sample=False, num_beams=3, num_return_sequences=2, eos_token_id=ENDS)
    check_equal(model, PROMPTS, do_sample=True, num_return_sequences=2, top_k=20, eos_token_id=ENDS)


class EndsBySum(StoppingCriteria):
    """Ends rows whose tokens add up to a multiple of seven."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.sum(1) % 7 == 0


class Halved:
    """A processor that depends on the row: it halves the scores of even rows."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores / (2 - torch.arange(len(scores)) % 2)[:, None]


def allowed(row: int, ids: torch.Tensor) -> list[int]:
    return [(row * 7 + len(ids) * 3 + k) % VOCABULARY for k in range(1, 9)]


PROCESSED: dict[str, dict[str, Any]] = {
    "none": {},
    "one end": {"eos_token_id": 11},
    "ends": {"eos_token_id": ENDS},
    "another pad": {"eos_token_id": ENDS, "pad_token_id": 5},
    "repetition penalty": {"repetition_penalty": 1.5},
    "bad words": {"bad_words_ids": [[5], [7, 8], [9]]},
    "least length": {"min_new_tokens": 4, "eos_token_id": ENDS},
    "n-grams": {"no_repeat_ngram_size": 2},
    "max length": {"max_new_tokens": None, "max_length": 33},
    "allowed": {"prefix_allowed_tokens_fn": allowed},
    "own criterion": {"stopping_criteria": [EndsBySum()]},
    "own criterion and end": {"stopping_criteria": [EndsBySum()], "eos_token_id": 11},
    "own processor": {"logits_processor": [Halved()], "eos_token_id": ENDS},
    "no time": {"max_time": 1e-9},
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "samples": {"do_sample": True, "num_return_sequences": 3, "temperature": 0.8, "top_p": 0.9},
    "beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 3},
    "sampled beams": {"do_sample": True, "num_beams": 3, "num_return_sequences": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("processed", PROCESSED)
def test_processors_and_criteria(processed: str, way: str) -> None:
    check_equal(tiny(), PROMPTS, **{"pad_token_id": 0, **WAYS[way], **PROCESSED[processed]})


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize(("width", "penalty"), [(2, 1.0), (5, -0.5), (3, 2.0), (3, 0.0)])
def test_beams_of_a_batch(width: int, penalty: float, early_stopping: bool | str) -> None:
    for ends in (None, 11, ENDS, list(range(1, 60))):
        check_equal(
            tiny(), PROMPTS, do_sample=False, num_beams=width, num_return_sequences=width, length_penalty=penalty,
            early_stopping=early_stopping, eos_token_id=ends,
        )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_launched_before_the_host_has_read(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    for owner, name, event in ((HostCopy, "__init__", "c"), (HostCopy, "read", "r"), (Step, "begin", "l")):
        monkeypatch.setattr(owner, name, noting(getattr(owner, name), noted, event))
    check_equal(tiny(), PROMPTS, max_new_tokens=9, eos_token_id=ENDS, **WAYS[way])
    assert re.search(r"(c+lr+){5}", "".join(noted))


def noting(call: Callable[..., Any], noted: list[str], event: str) -> Callable[..., Any]:
    """Returns a call that notes an event when it is made."""

    def made(*given: Any) -> Any:
        noted.append(event)
        return call(*given)

    return made


@pytest.mark.parametrize("way", WAYS)
def test_prompts_that_begin_alike_wait_for_one_another(way: str) -> None:
    for own in ({}, {"engine_options": {"page_size": 4, "max_rows": 17, "strategy": "query"}}):
        check_equal(tiny(), SHARED, own=own, eos_token_id=ENDS, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kept", [(True, True), (True, False), (False, True), (False, False)])
def test_outputs_with_scores(way: str, kept: tuple[bool, bool]) -> None:
    scores, logits = kept
    plain, served = both(
        tiny(), PROMPTS, eos_token_id=ENDS, return_dict_in_generate=True, output_scores=scores, output_logits=logits,
        **WAYS[way],
    )  # fmt: skip
    assert type(plain) is type(served)
    assert served.past_key_values is None
    assert plain.sequences.tolist() == served.sequences.tolist()
    for name in ("scores", "logits", "sequences_scores", "beam_indices"):
        torch.testing.assert_close(getattr(plain, name, None), getattr(served, name, None), rtol=1e-4, atol=1e-4)


class Seen(StoppingCriteria):
    """A processor and a criterion that keeps the ids that it is called with."""

    def __init__(self) -> None:
        self.ids: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        self.ids.append(input_ids.tolist())
        return scores if isinstance(scores, torch.Tensor) else torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("way", WAYS)
def test_processors_and_criteria_are_called_as_in_transformers(way: str) -> None:
    """In the same steps, with the same rows, also for rows that have ended."""
    calls = []
    for custom in ({}, {"custom_generate": generate}):
        torch.manual_seed(0)
        processor, criterion = Seen(), Seen()
        options = {**WAYS[way], **custom, "logits_processor": [processor], "stopping_criteria": [criterion]}
        tiny().generate(**padded(SHARED), pad_token_id=0, eos_token_id=ENDS, max_new_tokens=10, **options)
        calls.append((processor.ids, criterion.ids))
    assert calls[0] == calls[1]


@pytest.mark.parametrize("processed", ["none", "ends", "repetition penalty", "own criterion"])
def test_drafts_by_prompt_lookup_change_no_token(processed: str) -> None:
    options = {"max_new_tokens": 24, **PROCESSED[processed]}
    for seed in range(2):
        for way in ({"do_sample": False}, {"do_sample": True, "temperature": 0.3}):
            plain, _ = both(tiny(), PROMPTS[:1], seed, **way, **options)
            _, drafted = both(tiny(), PROMPTS[:1], seed, prompt_lookup_num_tokens=4, **way, **options)
            assert drafted.tolist() == plain.tolist()


def test_drafts_by_prompt_lookup_save_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Any] = []
    monkeypatch.setattr(hf_engines, "Engine", counting(engines))
    options = {"max_new_tokens": 40, "do_sample": False, "max_matching_ngram_size": 3}
    check_equal(tiny(), PROMPTS[2:], **options)
    check_equal(tiny(), PROMPTS[2:], prompt_lookup_num_tokens=6, **options)
    usual, drafted = (engine.accounting.steps for engine in engines)
    assert drafted < usual == 40


def counting(engines: list[Any]) -> Callable[..., Any]:
    """An engine class that lists its engines."""

    class Listed(hf_engines.Engine):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            engines.append(self)

    return Listed


def test_all_pages_are_used_at_the_longest_and_a_prompt_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Any] = []
    monkeypatch.setattr(hf_engines, "Engine", counting(engines))
    check_equal(tiny(), PROMPTS, own={"engine_options": {"page_size": 4}}, **WAYS["samples"])
    (engine,) = engines
    assert engine.accounting.rows == sum(map(len, PROMPTS)) + 9 * len(PROMPTS) * 3
    assert engine.accounting.most_pages <= engine.pool.num_pages
    engine.sequences.check()
    assert engine.sequences.available == engine.pool.num_pages


def test_stop_strings_as_a_criterion() -> None:
    vocabulary = {chr(33 + token): token for token in range(VOCABULARY)}
    letters = Tokenizer(models.BPE(vocabulary, []))
    letters.decoder = decoders.Fuse()
    tokens = check_equal(tiny(), PROMPTS[:1], do_sample=False)[0, len(PROMPTS[0]) :].tolist()
    text = "".join(chr(33 + token) for token in tokens[3:5])
    stop = StopStringCriteria(PreTrainedTokenizerFast(tokenizer_object=letters), [text])
    stopped = check_equal(tiny(), PROMPTS[:1], do_sample=False, stopping_criteria=[stop])
    assert stopped.shape[1] == len(PROMPTS[0]) + 5


class Streamed:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.ends = 0

    def put(self, tokens: torch.Tensor) -> None:
        self.got += tokens.flatten().tolist()

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("lookup", [None, 4])
def test_a_streamer_gets_each_token(lookup: int | None) -> None:
    streamer = Streamed()
    options = {"do_sample": False, "prompt_lookup_num_tokens": lookup, "own": {"token_streamer": streamer}}
    served = check_equal(tiny(), PROMPTS[2:], **options)
    assert streamer.got == served[0].tolist()
    assert streamer.ends == 1


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "contrastive": ({"penalty_alpha": 0.5, "top_k": 4, "do_sample": False}, "generation mode = contrastive_search"),
    "groups": ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, "generation mode = group_beam_search"),
    "constraints": ({"num_beams": 2, "force_words_ids": [[5]]}, "generation mode = constrained_beam_search"),
    "layers": ({"dola_layers": "low", "do_sample": False}, "generation mode = dola_generation"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions = True"),
    "states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states = True"),
    "no cache": ({"use_cache": False}, "use_cache = False"),
    "a cache": ({"past_key_values": DynamicCache()}, "past_key_values = DynamicCache"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation = static"),
    "guidance": ({"guidance_scale": 2.0}, r"guidance_scale = 2\.0"),
    "early exit": ({"assistant_early_exit": 2, "do_sample": False}, "assistant_early_exit = 2"),
    "rows with drafts": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens = 3: is for one row"),
    "too long": ({"max_new_tokens": 300}, "max_length = 330: with prompts of 30 tokens"),
    "positions": ({"position_ids": torch.arange(30)[None].repeat(3, 1)}, "position_ids"),
    "right padding": ({"attention_mask": torch.tensor([[1] * 29 + [0]] * 3)}, "has zeros after ones"),
    "another mask": ({"attention_mask": torch.ones(3, 29)}, r"attention_mask = \[3, 29\]: has not the shape"),
    "all padding": ({"attention_mask": torch.zeros(3, 30)}, "attention_mask = "),
    "engine options": ({"engine_options": {"pages": 3}}, r"engine_options = \['pages'\]"),
    "page size": ({"engine_options": {"page_size": 0}}, "page_size = 0"),
    "streamer": ({"token_streamer": Streamed()}, "token_streamer = 3 rows"),
    "embeddings": ({"inputs_embeds": torch.zeros(3, 30, 64)}, "inputs_embeds = Tensor: is not handed"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_before_any_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (options, text) = tiny(), BAD[name]
    monkeypatch.setattr(hf_engines, "HFModel", None)
    with pytest.raises(InputError, match=text) as caught:
        model.generate(
            **{**padded(PROMPTS), "pad_token_id": 0, "max_new_tokens": 5, "custom_generate": generate, **options}
        )
    assert "\n" not in str(caught.value)
    assert model.config._attn_implementation == "eager"


def test_models_that_are_refused() -> None:
    sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    with pytest.raises(InputError, match="model = T5ForConditionalGeneration: has an encoder"):
        model.generate(torch.tensor([[1, 2]]), custom_generate=generate, max_new_tokens=3)
    model = tiny().double()
    with pytest.raises(InputError, match=r"model\.dtype"):
        model.generate(torch.tensor([[1, 2]]), custom_generate=generate, max_new_tokens=3)


def failing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no scores today")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_model_works_as_before(implementation: str) -> None:
    """Its attention and its modes are restored, after results and after errors."""
    model = tiny("Gemma3")
    model.set_attn_implementation(implementation)
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    prompt = padded(PROMPTS[:1])
    calls: list[tuple[dict[str, Any], Any, str]] = [
        ({}, None, ""),
        ({"logits_processor": [failing]}, RuntimeError, "no scores today"),
        ({"engine_options": {"num_pages": 1}}, TreegenError, "prompts"),
        ({"num_beams": 4, "engine_options": {"num_pages": 12, "page_size": 2}}, PoolError, "num_pages = 12"),
    ]
    for options, error, text in calls:
        call = functools.partial(model.generate, **prompt, custom_generate=generate, max_new_tokens=12, **options)
        if error is None:
            call()
        else:
            with pytest.raises(error, match=text):
                call()
        assert model.config._attn_implementation == implementation
        assert [module.training for module in model.modules()] == modes
        assert model(**prompt).logits.shape == (1, len(PROMPTS[0]), VOCABULARY)


def test_the_parts_of_a_model_keep_their_attention() -> None:
    """A model with a decoder and an encoder of images, asked without images."""
    decoder = tiny("Gemma3").config.to_dict()
    images = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=decoder, vision_config={**images, "image_size": 28, "patch_size": 14})
    model = Gemma3ForConditionalGeneration(config).eval()
    parts = {"": "sdpa", "text_config": "eager", "vision_config": "sdpa"}
    model.set_attn_implementation(parts)
    prompt = padded(PROMPTS[:1])
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**prompt, **options)
    assert torch.equal(model.generate(**prompt, **options, custom_generate=generate), expected)
    own = (model.config, model.config.text_config, model.config.vision_config)
    assert [each._attn_implementation for each in own] == list(parts.values())


@pytest.mark.parametrize("way", WAYS)
def test_few_pages_change_no_token_and_too_few_are_an_error(way: str) -> None:
    """Rows wait for others, also for those that were preempted. The error says how many pages all of them need."""
    served = 0
    for pages in range(16, 50, 8):
        own = {"engine_options": {"num_pages": pages, "page_size": 4}}
        try:
            check_equal(tiny(), PROMPTS, own=own, **WAYS[way])
            served += 1
        except PoolError as error:
            found = re.search(r"num_pages = (\d+): is less than the (\d+) that .* needs?;", str(error))
            assert found is not None
            assert int(found[1]) == pages < int(found[2])
            assert not served
    assert served


@pytest.mark.parametrize("pages", [4, 5, 6, 8, 12, 13])
def test_rows_that_wait_for_one_another_do_not_take_turns_for_ever(pages: int) -> None:
    """Of three prompts with four rows each, that of 17 tokens lacks pages that rows of the last one have, and are too
    few for it.
    """
    prompts = [[1], [*range(17)], [5, 6, 7]]
    call = {"max_new_tokens": 6, "num_return_sequences": 4, "do_sample": True, "pad_token_id": 0}
    own = {"engine_options": {"num_pages": pages}}
    if pages >= 13:
        check_equal(tiny(), prompts, own=own, **call)
        return
    with pytest.raises(
        PoolError, match=rf"num_pages = {pages}: is less than .*; leave it out, which gives 13: all rows"
    ):
        tiny().generate(**padded(prompts), **call, **own, custom_generate=generate)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_random_calls(seed: int) -> None:
    source = random.Random(seed)
    model = tiny(source.choice(NAMES), seed)
    common = [source.randrange(1, VOCABULARY) for _ in range(source.choice([0, 0, 40]))]
    prompts = [
        common + [source.randrange(1, VOCABULARY) for _ in range(source.randint(1, 30))]
        for _ in range(source.randint(1, 4))
    ]
    for way, processed in ((way, processed) for way in WAYS for processed in source.sample(sorted(PROCESSED), 3)):
        options = {**WAYS[way], **PROCESSED[processed]}
        if "max_length" in options:
            options["max_length"] = 90
        if "num_beams" in options:
            options["length_penalty"] = source.choice([1.0, -0.5, 0.0, 2.0])
            options["early_stopping"] = source.choice([True, False, "never"])
        own = {"engine_options": {"page_size": source.choice([1, 4, 16]), "max_rows": source.randint(20, 200)}}
        check_equal(model, prompts, seed=seed, own=own, **options)
