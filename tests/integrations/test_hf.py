"""The engine with models of Transformers: the tokens of their own `generate`, whatever the pool and the batch are."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from support.replayed_steps import Replayed, replaying
from support.tiny_models import NAMES, PROMPTS, VOCABULARY, generated, tiny
from treegen.engine import Beam, Continuation, Engine, Frontier, Growth, Next, Sample, Sampling
from treegen.engine.control import Controller
from treegen.engine.graphs import StepGraphs, prompt_buckets, row_buckets
from treegen.engine.step import Step
from treegen.integrations import HFModel
from treegen.ir.errors import BackendError, BranchError, InputError, PoolError, TreegenError

ENDS = {"none": [], "one": [11], "many": [11, 50, 3, 7]}


def engine(model: Any, controller: Controller, pages: int = 60, page_size: int = 4, rows: int = 40) -> Engine:
    return Engine(
        HFModel(model),
        controller,
        num_pages=pages,
        page_size=page_size,
        max_rows=rows,
        max_branches=max(9, controller.width),
    )


def served(made: Engine, prompts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """The tokens of the results of each prompt; afterwards all pages are free."""
    results = made.run(prompts)
    made.sequences.check()
    assert made.sequences.available == made.pool.num_pages
    return [[result.tokens for result in own] for own in results]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    model = tiny(name)
    expected = [generated(model, prompt, max_new_tokens=10) for prompt in PROMPTS]
    assert served(engine(model, Sample(max_new_tokens=10)), PROMPTS) == expected


@pytest.mark.full
@pytest.mark.parametrize(("name", "seed"), list(itertools.product(NAMES, range(1, 21))))
def test_greedy_and_beam_tokens_of_many_models(name: str, seed: int) -> None:
    model, source = tiny(name, seed), random.Random(seed)
    prompts = [[source.randrange(VOCABULARY) for _ in range(source.randint(1, 40))] for _ in range(4)]
    greedy = [generated(model, prompt, max_new_tokens=16) for prompt in prompts]
    beams = [generated(model, prompt, max_new_tokens=8, num_beams=3, num_return_sequences=3) for prompt in prompts]
    pages, page_size = source.choice([(30, 4), (100, 4), (20, 16), (160, 1)])
    assert served(engine(model, Sample(max_new_tokens=16), pages, page_size), prompts) == greedy
    assert served(engine(model, Beam(3, 8), pages, page_size), prompts) == beams


@pytest.mark.parametrize(("pages", "page_size", "rows"), [(40, 16, 512), (200, 1, 512), (60, 4, 9), (14, 4, 9)])
def test_pools_and_budgets_change_no_token(pages: int, page_size: int, rows: int) -> None:
    model = tiny()
    expected = [generated(model, prompt, max_new_tokens=10) for prompt in PROMPTS]
    made = engine(model, Sample(max_new_tokens=10), pages, page_size, rows)
    assert served(made, PROMPTS) == expected
    assert (made.accounting.preempted > 0) == (pages == 14)


def with_replays(model: Any, controller: Controller, pages: int = 60) -> tuple[Engine, Replayed]:
    made = engine(model, controller, pages)
    return made, replaying(made)


@pytest.mark.parametrize("pages", [60, 24])
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_stand_for_no_token_change_nothing(name: str, pages: int) -> None:
    """Steps are replayed as graphs are: with more rows than tokens, and logits that the next replay overwrites."""
    model = tiny(name)
    expected = [generated(model, prompt, max_new_tokens=10) for prompt in PROMPTS]
    beams = [generated(model, prompt, max_new_tokens=6, num_beams=3, num_return_sequences=3) for prompt in PROMPTS]
    for controller, wanted in ((Sample(max_new_tokens=10), expected), (Beam(3, 6), beams)):
        made, capture = with_replays(model, controller, pages)
        made.warm_up()
        forward = made.forward
        assert capture.captured == len(forward.graphs.buckets) + len(forward.prompt_graphs.buckets)
        captured = capture.captured
        assert served(made, PROMPTS) == wanted
        assert capture.captured == captured


def test_buckets_of_rows() -> None:
    assert row_buckets(1) == [1]
    assert row_buckets(9) == [1, 2, 4, 8, 16]
    assert row_buckets(80)[-4:] == [48, 56, 64, 80]
    assert prompt_buckets(16) == []
    assert prompt_buckets(200) == [32, 64, 128, 192]


def test_models_whose_prompts_cannot_be_captured() -> None:
    """They run without graphs; steps in which branches decode have theirs."""

    def failing(call: Any, pool: object) -> Any:
        raise BackendError("model", "a step", "cannot be captured", "pass cuda_graphs=False")

    made, capture = with_replays(tiny(), Sample(max_new_tokens=4), 60)
    forward = made.forward
    forward.prompt_graphs = StepGraphs(forward.step, made.model, [8, 40], 8, needed=False, capture=failing)
    made.warm_up()
    assert (forward.prompt_graphs.buckets, capture.captured) == ([], len(forward.graphs.buckets))
    assert served(made, PROMPTS) == [generated(tiny(), prompt, max_new_tokens=4) for prompt in PROMPTS]
    forward.graphs = StepGraphs(forward.decoding, made.model, [16], capture=failing)
    with pytest.raises(BackendError, match="pass cuda_graphs=False"):
        made.run(PROMPTS)


def test_prompts_of_few_rows_are_replayed() -> None:
    """Larger steps are not."""
    made, _ = with_replays(tiny(), Sample(max_new_tokens=2), 60)
    forward = made.forward
    forward.prompt_graphs.buckets = [8]
    expected = [generated(tiny(), prompt, max_new_tokens=2) for prompt in PROMPTS]
    assert served(made, PROMPTS) == expected
    assert len(forward.prompt_graphs) == 0
    for prompt, tokens in zip(PROMPTS, expected, strict=True):  # the cache has most of each
        assert served(made, [prompt]) == [tokens]
    assert len(forward.prompt_graphs) == 1


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_beams_are_those_of_generate(early_stopping: bool | str, ends: str) -> None:
    model, stop_ids = tiny(), ENDS[ends]
    for width, penalty, pages in ((2, 1.0, 60), (5, -0.5, 90), (3, 2.0, 22), (3, 0.0, 60)):
        options = {
            "num_beams": width, "num_return_sequences": width, "length_penalty": penalty, "max_new_tokens": 10,
            "early_stopping": early_stopping, "eos_token_id": stop_ids or None,
        }  # fmt: skip
        expected = [generated(model, prompt, **options) for prompt in PROMPTS]
        made = engine(copy.deepcopy(model), Beam(width, 10, penalty, early_stopping, tuple(stop_ids)), pages)
        assert served(made, PROMPTS) == expected, options


def test_samples_do_not_depend_on_the_batch() -> None:
    """Three samples of each prompt have the tokens that they have without the other prompts, and without sharing."""
    controller = Sample(3, Sampling(1.0, 20, 0.9, seed=7), max_new_tokens=12, stop_ids=(5, 9))
    together = served(engine(tiny(), controller), PROMPTS)
    assert len({tuple(tokens) for own in together for tokens in own}) > 6
    for number, prompt in enumerate(PROMPTS):
        prompts = [[1]] * number + [prompt]  # the number of a prompt is part of its labels
        assert served(engine(tiny(), controller, pages=90, page_size=16), prompts)[number] == together[number]
    assert served(engine(tiny(), controller, pages=20), PROMPTS) == together


def test_a_sample_ends_with_a_stop_id() -> None:
    model = tiny()
    tokens = generated(model, PROMPTS[0], max_new_tokens=10)[0]
    stop = tokens[3]
    first = tokens.index(stop)
    assert served(engine(model, Sample(max_new_tokens=10, stop_ids=(stop,))), PROMPTS[:1]) == [[tokens[: first + 1]]]


def test_a_shared_prompt_is_computed_once() -> None:
    """Ten prompts that begin with the same 24 tokens: their rows are computed for one of them."""
    prompts = [[*range(24), 30 + number] for number in range(8)]
    model = tiny()
    made = engine(model, Sample(max_new_tokens=2), page_size=4, rows=200)
    assert served(made, prompts) == [generated(tiny(), prompt, max_new_tokens=2) for prompt in prompts]
    assert made.accounting.rows == 25 + 7 * 1 + 8


def test_prompts_find_pages_of_branches_that_have_ended() -> None:
    """A second turn of the same conversation computes its new tokens only, and has the same tokens."""
    model = tiny()
    made = engine(model, Sample(max_new_tokens=6))
    (first,) = served(made, PROMPTS[2:])
    second = [[*PROMPTS[2], *first[0], 8, 9]]
    before = made.accounting.rows
    assert served(made, second) == [generated(tiny(), second[0], max_new_tokens=6)]
    stored = (len(PROMPTS[2]) + 5) // 4 * 4  # the last token's KV was never computed
    assert made.accounting.rows - before == len(second[0]) - stored + 5
    fresh = Engine(HFModel(model), Sample(max_new_tokens=6), num_pages=60, page_size=4, prefix_cache=False)
    assert served(fresh, second) == [generated(tiny(), second[0], max_new_tokens=6)]
    assert fresh.pool.free == 60


class Wander:
    """Forks, extends and drops branches at random, and keeps the logits that it was given."""

    together, width, max_new_tokens = False, 6, 40

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.running = 0  # branches, also those that wait
        self.seen: list[tuple[list[int], torch.Tensor]] = []

    def decide(self, frontier: Frontier) -> Growth:
        grown = {}
        for branch, logits in zip(frontier.branches, frontier.logits, strict=True):
            self.seen.append((list(branch.tokens), logits.clone()))
            self.running += not branch.new_tokens
            room = self.width - self.running
            count = 0 if len(branch.new_tokens) > 30 else self.random.choice([*[1] * 12, 0, 1 + min(2, max(0, room))])
            self.running += count - 1
            grown[branch.number] = [Next(self.random.randrange(VOCABULARY), branch.label) for _ in range(count)]
        return Growth(grown, [])


def compare_logits(seed: int, name: str, pages: int) -> int:
    """Compares the logits of each branch in each step to those of the model without cache, in float64 (experts: fp32).

    Errors are at most 1e-5 of the largest logit, or twice those of Transformers' own code in fp32: some random models
    enlarge what is rounded in their first layers.
    """
    model, controller = tiny(name, seed), Wander(seed)
    plain = copy.deepcopy(model)
    exact = plain if name in ("Qwen3Moe", "GptOss") else copy.deepcopy(model).double()
    engine(model, controller, pages).run([PROMPTS[0]])
    found, own, most = 0.0, 0.0, 1.0
    for tokens, logits in controller.seen:
        with torch.no_grad():
            rounded, expected = (each(torch.tensor([tokens])).logits[0, -1] for each in (plain, exact))
        found = max(found, float((logits - expected).abs().max()))
        own, most = max(own, float((rounded - expected).abs().max())), max(most, float(expected.abs().max()))
    assert found <= max(1e-5 * most, 2 * own)
    return len(controller.seen)


def test_logits_along_random_forks_and_drops() -> None:
    assert sum(compare_logits(0, name, pages) for name, pages in (("Llama", 80), ("Gemma3", 24))) > 15


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_logits_along_random_forks_and_drops_at_length(name: str) -> None:
    compared, seed = 0, 0
    while compared < 500:
        compared += compare_logits(seed, name, (80, 24, 18)[seed % 3])
        seed += 1


def test_bad_prompts_are_refused_before_any_step() -> None:
    made = engine(tiny(), Sample(max_new_tokens=10))
    for prompts, text in (([[]], r"prompts\[0\] = 0 tokens"), ([[1], [2] * 231], r"within 1..230 tokens")):
        with pytest.raises(BranchError, match=text):
            made.run(prompts)
        assert made.sequences.available == made.pool.num_pages
    assert served(made, [[1]]) == [generated(tiny(), [1], max_new_tokens=10)]


def test_too_few_pages_say_how_many_are_needed() -> None:
    made = engine(tiny(), Beam(6, 30), pages=14)
    text = r"num_pages = 14: is less than the \d+ that 6 branches that run together need; add pages; (\d+) hold this"
    with pytest.raises(PoolError, match=text) as raised:
        made.run(PROMPTS[:1])
    made.sequences.check()
    assert made.sequences.available == 14
    (enough,) = re.findall(r"(\d+) hold", str(raised.value))
    assert served(engine(tiny(), Beam(6, 30), pages=int(enough)), PROMPTS[:1]) == served(
        engine(tiny(), Beam(6, 30), pages=200), PROMPTS[:1]
    )


class Wrong:
    """Decides about a branch that there is not, or about none."""

    together, width, max_new_tokens = False, 1, 4

    def __init__(self, decision: Growth) -> None:
        self.decision = decision

    def decide(self, frontier: Frontier) -> Growth:
        return self.decision


@pytest.mark.parametrize("grown", [{}, {0: [], 7: []}, {7: [Next(1, (0,))]}], ids=str)
def test_decisions_about_other_branches_are_refused(grown: dict[int, list[Next]]) -> None:
    made = engine(tiny(), Wrong(Growth(grown, [])))
    with pytest.raises(BranchError, match=r"decide\(\) = .* has no decision"):
        made.run([[1, 2]])
    made.sequences.check()
    assert made.sequences.available == made.pool.num_pages


class Stopped(Wander):
    """Somebody presses Ctrl-C in the fourth step."""

    def decide(self, frontier: Frontier) -> Growth:
        if len(self.seen) > 3:
            raise KeyboardInterrupt
        return super().decide(frontier)


def test_an_engine_that_was_stopped_serves_the_next_prompts() -> None:
    made = engine(tiny(), Stopped(1))
    with pytest.raises(KeyboardInterrupt):
        made.run(PROMPTS)
    made.sequences.check()
    assert made.sequences.available == made.pool.num_pages
    made.controller = Sample(max_new_tokens=5)
    assert served(made, PROMPTS) == [generated(tiny(), prompt, max_new_tokens=5) for prompt in PROMPTS]


def test_models_and_engines_that_do_not_fit() -> None:
    model = tiny()
    with pytest.raises(InputError, match="serves steps of treegen's engine"):
        HFModel(model).model(torch.tensor([[1, 2]]))
    for options in ({"max_branches": 2}, {"max_rows": 8}, {"num_pages": 0}, {"page_size": 3}):
        with pytest.raises(TreegenError):
            Engine(HFModel(model), Sample(3), **{"num_pages": 10, **options})
    model.config.layer_types = ["chunked_attention"] * 4
    with pytest.raises(InputError, match="layer_types"):
        HFModel(model)
    with pytest.raises(InputError, match=r"model\.dtype"):
        HFModel(tiny().double())


@pytest.mark.parametrize(
    "make",
    [lambda: Sample(0), lambda: Sample(max_new_tokens=0), lambda: Beam(0), lambda: Beam(2, 0),
     lambda: Beam(2, 4, float("nan")), lambda: Beam(2, early_stopping="soon")],
)  # fmt: skip
def test_controllers_with_numbers_out_of_range(make: Any) -> None:
    with pytest.raises(InputError):
        make()


class Deaf(HFModel):
    """A model whose last layer does not call the step."""

    def __call__(self, step: Step, keep: torch.Tensor) -> torch.Tensor:
        attend, last = step.attend, self.layers - 1
        step.attend = lambda layer, *given: given[1] if layer == last else attend(layer, *given)  # type: ignore[method-assign]
        return super().__call__(step, keep)


def test_a_model_whose_layers_do_not_all_attend_is_refused() -> None:
    made = Engine(Deaf(tiny()), Sample(), num_pages=20)
    with pytest.raises(InputError, match="model = 3 of 4 layers: called attend in the step"):
        made.run(PROMPTS)
    made.sequences.check()
    assert made.sequences.available == made.pool.num_pages


def test_heads_that_are_not_the_pools_are_refused() -> None:
    model = HFModel(tiny())
    model.shape = dataclasses.replace(model.shape, num_kv_heads=1)
    with pytest.raises(
        InputError, match=r"keys = shape \(6, 2, 16\): has not the pool's heads and head dims \(1, 16\)"
    ):
        Engine(model, Sample(), num_pages=20).run(PROMPTS[:1])


def test_steps_refuse_what_does_not_fit() -> None:
    made = engine(tiny(), Sample())
    branch, step = made.sequences.add([1, 2, 3]), Step(made.sequences, 2, 2)
    for counts, text in (
        ({branch.number: 4}, "has 3 tokens to store"),
        ({branch.number: 3}, "max_tokens is 2"),
        ({}, "1..2"),
    ):
        with pytest.raises(BranchError, match=text):
            step.begin(counts)
    with pytest.raises(BranchError, match="max_rows"):
        Step(made.sequences, 2, 0)
    assert made.sequences.available == made.pool.num_pages


def test_results_are_ordered_by_labels() -> None:
    made = engine(tiny(), Sample(3, Sampling(1.0), max_new_tokens=3, stop_ids=tuple(range(40))))
    for number, own in enumerate(made.run(PROMPTS)):
        assert [result.label for result in own] == [(number, sample) for sample in range(3)]
        assert all(isinstance(result, Continuation) for result in own)


@pytest.mark.full
def test_compiled_models_give_the_same_tokens() -> None:
    model = tiny("Llama")
    controller = Sample(2, Sampling(1.0, seed=3), max_new_tokens=6)
    expected = served(engine(model, controller), PROMPTS[:2])
    options = {"backend": "eager", "dynamic": True}  # traced as ever, and run without a compiler
    made = Engine(HFModel(model, compile_options=options), controller, num_pages=60, page_size=4, max_rows=64)
    assert served(made, PROMPTS[:2]) == expected


def test_models_run_under_autocast() -> None:
    """K and V of such a model may have another type than the pool."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = served(engine(tiny(), Sample(max_new_tokens=6)), PROMPTS)
    assert [[len(tokens) for tokens in own] for own in found] == [[6]] * len(PROMPTS)
