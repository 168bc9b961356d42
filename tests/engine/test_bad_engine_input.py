"""What people and controllers may get wrong: one line says so, and the next run works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from support.refused_runs import engine, refused
from support.stops import interrupted_at
from support.tiny_models import PROMPTS, VOCABULARY, generated, tiny
from treegen.engine import (
    Beam,
    Branch,
    Continuation,
    DraftModel,
    DraftTree,
    Engine,
    Frontier,
    Growth,
    KVPool,
    Next,
    NGrams,
    Sample,
    Sampling,
    Search,
    SequenceTree,
    Speculate,
    Step,
)  # fmt: skip
from treegen.engine.control import Controller
from treegen.integrations import HFModel
from treegen.ir.errors import BranchError, InputError, PoolError, TreegenError
from treegen.ir.shape import Shape


@pytest.mark.parametrize(
    ("prompts", "text"),
    [([[1], []], r"prompts\[1\] = 0 tokens: is not within 1\.\."),
     ([[1, -1]], r"prompts\[0\]\[1\] = -1: is outside 0\.\.96"),
     ([[VOCABULARY]], r"prompts\[0\]\[0\] = 97: is outside 0\.\.96"),
     ([[1.5]], r"prompts\[0\]\[0\] = 1.5"),
     ([["a"]], r"prompts\[0\]"),
     (["text"], r"prompts\[0\] = text: "),
     ([1, 2, 3], r"prompts\[0\] = 1: has to be one-dimensional"),
     ([[[1, 2]]], r"prompts\[0\] = shape \(1, 2\): has to be one-dimensional"),
     ([None], r"prompts\[0\] = None"),
     (None, "prompts = NoneType: is not a list of prompts"),
     ("text", "prompts = str: is not a list of prompts"),
     ([[1] * 250], r"prompts\[0\] = 250 tokens: is not within 1..236 tokens: of the 240 tokens that the pages"),
     ([[2**40]], r"prompts\[0\]\[0\] = 1099511627776: is outside")],
    ids=str,
)  # fmt: skip
def test_prompts_that_are_no_tokens_are_refused_before_any_step(prompts: Any, text: str) -> None:
    made = engine(Sample(max_new_tokens=4))
    with pytest.raises(BranchError, match=text):
        made.run(prompts)
    assert made.accounting.steps == 0
    refused(made, text, prompts)


@pytest.mark.parametrize("convert", [tuple, np.array, torch.tensor, lambda tokens: np.array(tokens, np.uint8)])
def test_prompts_may_be_arrays_and_tensors(convert: Callable[[list[int]], Any]) -> None:
    made = engine(Sample(max_new_tokens=5))
    for _ in range(2):  # the prefix cache knows their tokens the second time
        found = made.run([convert(prompt) for prompt in PROMPTS])
        tokens = [[own.tokens for own in each] for each in found]
        assert tokens == [generated(tiny(), prompt, max_new_tokens=5) for prompt in PROMPTS]
    assert made.accounting.rows < 2 * sum(map(len, PROMPTS))
    assert made.run([]) == []


class Odd:
    """Decides as it is told, once branches have two new tokens."""

    together, width, max_new_tokens = False, 2, 8

    def __init__(self, decide: Callable[[Branch], Growth], ends: bool = False) -> None:
        self.told, self.ends = decide, ends

    def decide(self, frontier: Frontier) -> Growth:
        branch = frontier.branches[0]
        if len(branch.new_tokens) > 1:
            return self.told(branch)
        return Growth({each.number: [Next(3, each.label)] for each in frontier.branches}, [])


@pytest.mark.parametrize(
    ("decide", "text"),
    [(lambda branch: Growth({branch.number: [Next(-1, branch.label)]}, []), r"decide\(\) = -1: .* tokens 0\.\.96"),
     (lambda branch: Growth({branch.number: [Next(VOCABULARY, branch.label)]}, []), r"decide\(\) = 97: "),
     (lambda branch: Growth({branch.number: [Next("a", branch.label)]}, []), r"decide\(\) = a: "),
     (lambda branch: Growth({branch.number: [Next(1.0, branch.label)]}, []), r"decide\(\) = 1.0: "),
     (lambda branch: Growth({branch.number: [Next(1, (5,))]}, []), r"decide\(\) = \(5,\): .* begins with"),
     (lambda branch: Growth({branch.number: [Next(1, ())]}, []), r"decide\(\) = \(\): .* begins with"),
     (lambda branch: Growth({branch.number: [Next(1, branch.label)] * 10}, []), r"decide\(\) = 10 branches: .* 9"),
     (lambda branch: Growth({branch.number: []}, [Continuation((3,), [1])]), r"decide\(\) = \(3,\): .* result"),
     (lambda branch: Growth({branch.number: []}, [Continuation((-1,), [1])]), r"decide\(\) = \(-1,\): .* result"),
     (lambda branch: Growth({branch.number: []}, [Continuation((), [1])]), r"decide\(\) = \(\): .* result"),
     (lambda branch: Growth({branch.number + 1: []}, []), r"decide\(\) = \[0, 1\]: .* has no decision"),
     (lambda branch: None, r"decide\(\) = NoneType: is no Growth; return"),
     (lambda branch: {branch.number: []}, r"decide\(\) = dict: is no Growth"),
     (lambda branch: Growth({branch.number: [5]}, []), r"decide\(\) = \[5\]: is no list of next tokens"),
     (lambda branch: Growth({branch.number: [Next(1, 7)]}, []), r"decide\(\) = .* is no list of next tokens"),
     (lambda branch: Growth({branch.number: []}, [3]), r"decide\(\) = int: is no result"),
     (lambda branch: Growth({branch.number: []}, 3), r"decide\(\)\.results = int: is no Iterable as in Growth"),
     (lambda branch: Growth([[]], []), r"decide\(\)\.grown = list: is no Mapping"),
     (lambda branch: Growth({branch.number: []}, [], [1]), r"decide\(\)\.accepted = list: is no Mapping"),
     (lambda branch: Growth({branch.number: []}, [], {}, 1), r"decide\(\)\.resting = int: is no Collection"),
     (lambda branch: Growth({branch.number: [Next(1, branch.label)]} if len(branch.new_tokens) < 8 else {}, []),
      "max_new_tokens = 8; end it|has no decision")],
)  # fmt: skip
def test_decisions_that_cannot_be_followed(decide: Callable[[Branch], Growth], text: str) -> None:
    refused(engine(Odd(decide)), text, PROMPTS[:1])


@pytest.mark.parametrize("convert", [lambda found: found.values(), lambda found: iter(found.values())])
def test_results_may_be_any_iterable(convert: Callable[[dict[int, Continuation]], Any]) -> None:
    def ended(branch: Branch) -> Growth:
        return Growth({branch.number: []}, convert({5: Continuation(branch.label, branch.new_tokens)}))

    assert engine(Odd(ended)).run(PROMPTS[:1]) == [[Continuation((0,), [3, 3])]]


def test_branches_may_have_equal_labels() -> None:
    """Two branches of a prompt with one label, and one noise, are two results."""

    class Twins(Odd):
        def decide(self, frontier: Frontier) -> Growth:
            if not frontier.branches[0].new_tokens:
                return Growth({each.number: [Next(3, each.label)] * 2 for each in frontier.branches}, [])
            ended = [Continuation(each.label, each.new_tokens) for each in frontier.branches]
            return Growth({each.number: [] for each in frontier.branches}, ended)

    found = engine(Twins(lambda branch: Growth({}, []))).run(PROMPTS)
    assert found == [[Continuation((number,), [3])] * 2 for number in range(3)]


@pytest.mark.parametrize("limits", [5, (1, 2), "none", np.arange(2)], ids=str)
def test_controllers_of_users_may_have_attributes_of_such_names(limits: Any) -> None:
    """`limits` that are not those of Sample, and a `warm_up` that is no method."""

    class Named(Odd):
        warm_up = True

        def __init__(self) -> None:
            super().__init__(
                lambda branch: Growth({branch.number: []}, [Continuation(branch.label, branch.new_tokens)])
            )
            self.limits = limits

    made = engine(Named())
    made.warm_up()
    assert [[own.tokens for own in each] for each in made.run(PROMPTS[:1])] == [[[3, 3]]]


class Drafter(Odd):
    """Proposes what it is told."""

    max_draft, draft_trees = 2, False

    def __init__(self, drafts: list[Any]) -> None:
        super().__init__(lambda branch: Growth({branch.number: []}, []))
        self.drafts = drafts

    def draft(self, branches: Sequence[Branch]) -> list[DraftTree]:
        return [DraftTree.chain(self.drafts)] * len(branches)


@pytest.mark.parametrize(
    ("drafts", "text"),
    [([1, 2, 3], r"drafts = 3 tokens and 3 parents: .* at most 2"), ([-1], r"draft\(\) = -1: .* tokens 0\.\.96"),
     ([VOCABULARY], r"draft\(\) = 97: "), ([None], r"draft\(\) = None: ")],
)  # fmt: skip
def test_drafts_that_are_refused(drafts: list[Any], text: str) -> None:
    made = engine(Drafter(drafts), max_rows=90)
    refused(made, text)
    assert made.accounting.steps >= 1


class Selector(Sample):
    """Selects what it is told."""

    chosen: Any = None

    def select(self, frontier: Frontier) -> torch.Tensor:
        return (
            type(self).chosen(super().select(frontier)) if frontier.branches[0].new_tokens else super().select(frontier)
        )


@pytest.mark.parametrize(
    ("chosen", "text"),
    [(lambda tokens: tokens[:-1], r"select\(\) = int64 of shape \(2,\): is not int64 of shape \(3,\)"),
     (lambda tokens: tokens[:, None], r"select\(\) = int64 of shape \(3, 1\)"),
     (lambda tokens: tokens.float(), r"select\(\) = float32 of shape \(3,\)"),
     (lambda tokens: tokens.tolist(), r"select\(\) = list: "),
     (lambda tokens: torch.cat([tokens, tokens]), r"select\(\) = int64 of shape \(6,\)")],
)  # fmt: skip
def test_selections_that_do_not_fit_are_refused_before_the_step(chosen: Any, text: str) -> None:
    controller = type("Chosen", (Selector,), {"chosen": staticmethod(chosen)})(max_new_tokens=8)
    refused(engine(controller), text)


class Interrupted(HFModel):
    """Somebody presses Ctrl-C in a call of the model."""

    at, called, error = 0, 0, KeyboardInterrupt

    def __call__(self, step: Step, keep: torch.Tensor) -> torch.Tensor:
        self.called += 1
        attend = step.attend

        def stopped(layer: int, *given: Any) -> torch.Tensor:
            if layer == 2:
                raise self.error
            return attend(layer, *given)

        if self.called == self.at:
            step.attend = stopped  # type: ignore[method-assign]
        try:
            return super().__call__(step, keep)
        finally:
            step.attend = attend  # type: ignore[method-assign]


@pytest.mark.parametrize("at", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "controller",
    [Sample(2, Sampling(1.0), 8), Beam(2, 8),
     Search(lambda prompt, found: [0.0] * len(found), width=1, branching=2, thought_tokens=3, depth=3)],
    ids=["sample", "beam", "search"],
)  # fmt: skip
def test_a_model_that_is_stopped_within_a_layer(controller: Controller, at: int) -> None:
    model = Interrupted(tiny())
    model.at = at
    made = Engine(model, controller, num_pages=60, page_size=4, max_branches=9, max_rows=24)
    refused(made, "^$", error=KeyboardInterrupt)


@pytest.mark.parametrize("stop", ["draw", "select", "commit"])
def test_a_controller_that_is_stopped(stop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    owner: Any = Sampling if stop == "draw" else Sample
    plain = getattr(owner, stop)

    def interrupted(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == (1 if stop == "draw" else 3):
            raise KeyboardInterrupt
        return plain(*given)

    monkeypatch.setattr(owner, stop, interrupted)
    refused(engine(Sample(2, max_new_tokens=9)), "^$", error=KeyboardInterrupt)


ENGINE_FILES = ("treegen/engine/", "ir/live_batch", "ir/seat_")


def stopped_controllers() -> list[Controller]:
    small = DraftModel(HFModel(tiny(seed=1)), (2, 1), num_pages=40, page_size=4)
    return [
        Sample(2, Sampling(1.0, seed=3), 4, stop_ids=tuple(range(30))),
        Beam(2, 5),
        Search(lambda prompt, own: [sum(each) for each in own], width=1, branching=2, thought_tokens=3, depth=2),
        Speculate(NGrams(), 2, 2, max_new_tokens=6),
        Speculate(small, 3, max_new_tokens=6),
    ]


@pytest.mark.parametrize(("kinds", "stride"), [
    (slice(0, 5), 1709), *(pytest.param(slice(*each), stride, marks=pytest.mark.full)
                          for each, stride in (((0, 2), 3), ((2, 4), 11), ((4, 5), 47))),
], ids=str)  # fmt: skip
def test_an_engine_that_is_stopped_at_any_line(kinds: slice, stride: int) -> None:
    """Its pages are free or the cache's, and the next prompts have the tokens of an engine that was never stopped."""
    options = {"num_pages": 17, "page_size": 4, "max_branches": 6}
    prompts = [PROMPTS[0], [*PROMPTS[0], 3, 4], [1, 5]]
    model = HFModel(tiny())
    for controller in stopped_controllers()[kinds]:
        made = Engine(model, controller, **options)
        expected, line = [[own.tokens for own in each] for each in made.run(prompts)], 1
        while interrupted_at(line, lambda made=made: made.run(prompts), ENGINE_FILES, but=["clear"]):
            made.sequences.check()
            assert made.sequences.available == made.pool.num_pages
            assert [[own.tokens for own in each] for each in made.run(prompts)] == expected
            line += stride
        assert line > 300


def test_a_controller_cannot_run_its_own_engine() -> None:
    made = engine(Odd(lambda branch: made.run([[1]])))  # type: ignore[arg-type, return-value]
    refused(made, r"branches = 1: are running; wait", PROMPTS[:1])


class Short(HFModel):
    """A model that forgets a row."""

    def __call__(self, step: Step, keep: torch.Tensor) -> torch.Tensor:
        return super().__call__(step, keep)[1:]


def test_a_model_with_too_few_logits() -> None:
    made = Engine(Short(tiny()), Sample(), num_pages=60)
    with pytest.raises(InputError, match=r"model = logits of shape \(2, 97\): has not a row for each of 3"):
        made.run(PROMPTS)
    made.sequences.check()
    assert made.sequences.available == made.pool.num_pages


class Nan(HFModel):
    """A model whose logits are no numbers in one call."""

    at, called, value = 1, 0, float("nan")

    def __call__(self, step: Step, keep: torch.Tensor) -> torch.Tensor:
        self.called += 1
        logits = super().__call__(step, keep)
        return logits.fill_(self.value) if self.called == self.at else logits


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize(
    ("at", "text"),
    [(1, r"logits\[0\] = NaN or -inf: gives tokens no probabilities"), (3, r"select\(\) = 97: is not one of the tok")],
)  # fmt: skip
def test_logits_that_are_no_numbers(at: int, text: str, value: float) -> None:
    model = Nan(tiny())
    model.at, model.value = at, value
    refused(Engine(model, Sample(2, Sampling(1.0, 20, 0.9), 8), num_pages=60, max_branches=9), text)


@pytest.mark.parametrize(
    "make",
    [lambda ids: Sample(stop_ids=ids), lambda ids: Beam(2, stop_ids=ids),
     lambda ids: Search(len, width=1, branching=1, thought_tokens=1, depth=1, stop_ids=ids)],
    ids=["sample", "beam", "search"],
)  # fmt: skip
@pytest.mark.parametrize("stop_ids", [5, None, (1, -2), (1.0,), "ab", (True,)], ids=str)
def test_stop_ids_that_are_no_tokens(make: Callable[[Any], Controller], stop_ids: Any) -> None:
    with pytest.raises(InputError, match=r"stop_ids = .*: is not a sequence of tokens; give"):
        make(stop_ids)
    assert make([1, 2]).max_new_tokens


@pytest.mark.parametrize("make", [lambda: Sample(2, 0.8), lambda: Search(len, width=1, branching=1, thought_tokens=1,
                                                                       depth=1, sampling=0.8)])  # fmt: skip
def test_a_temperature_in_place_of_sampling(make: Callable[[], Controller]) -> None:
    with pytest.raises(InputError, match=r"sampling = 0\.8: is not a Sampling; give"):
        make()


@pytest.mark.parametrize(
    "options", [{"max_branches": 0}, {"max_branches": 1.5}, {"max_branches": "9"}, {"max_rows": "40"},
                {"max_rows": 90.0}, {"num_pages": 1.5}, {"num_pages": "9"}, {"page_size": "4"}, {"page_size": 0}],
    ids=str,
)  # fmt: skip
def test_engines_with_numbers_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(TreegenError, match=f"{next(iter(options))} = "):
        engine(Sample(), **options)


def test_trees_and_pools_refuse_what_is_not_theirs() -> None:
    tree = SequenceTree(KVPool(Shape(2, 1, 16, page_size=4), 1, 6), 4)
    branch = tree.add([1, 2, 3, 4, 5])
    tree.reserve({branch.number: 5})
    tree.store({branch.number: 5})
    held = list(branch.pages)
    with pytest.raises(BranchError, match=r"branch = 0: has pages; preempt it first"):
        tree.adopt(branch.number)
    refusals: Sequence[tuple[Callable[[], Any], type[TreegenError], str]] = [
        (lambda: tree.reserve({7: 1}), BranchError, "is not running"),
        (lambda: tree.store({0: 1, 7: 1}), BranchError, "is not running"),
        (lambda: tree.pages_missing({7: 1}), BranchError, "is not running"),
        (lambda: tree.pool.retain([-1]), PoolError, "page = -1: is not one of 6"),
        (lambda: tree.pool.retain([6]), PoolError, "page = 6: is not one of 6"),
        (lambda: tree.pool.release([held[0], 6]), PoolError, "page = 6: is not one of 6"),
        (lambda: tree.pool.release([held[0], held[0]]), PoolError, "lists a page twice"),
    ]
    for act, error, text in refusals:
        with pytest.raises(error, match=text):
            act()
        tree.check()
        assert (branch.stored, branch.pages) == (5, held)


@pytest.mark.parametrize(
    ("make", "text"),
    [(lambda: engine(None), "controller = NoneType: has no width"),
     (lambda: engine(Sample), "controller = Sample: is a class, and not an object of it"),
     (lambda: Engine(tiny(), Sample(), num_pages=9), "model = LlamaForCausalLM: has no shape; give treegen.integr"),
     (lambda: Engine(None, Sample(), num_pages=9), "model = NoneType: has no shape"),
     (lambda: engine(Sample(), cuda_graphs=True), "cuda_graphs = True: needs a GPU, and the model is on cpu"),
     (lambda: engine(Sample(), prefix_cache="no"), "prefix_cache = no: is not a bool"),
     (lambda: engine(Sample(), make_kernel=3), "make_kernel = int: is not a function"),
     (lambda: engine(Sample(), strategy="foo"), "strategy = foo: is not registered"),
     (lambda: engine(Sample(), strategy="medusa"), "strategy = medusa: needs launches of its own"),
     (lambda: Speculate(None), "drafter = NoneType: has no trees; give"),
     (lambda: Speculate("ngram"), "drafter = str: has no trees"),
     (lambda: Speculate(lambda texts, most: []), "drafter = function: has no trees"),
     (lambda: Speculate(NGrams), "drafter = NGrams: is a class"),
     (lambda: DraftModel(tiny(), num_pages=9), "model = LlamaForCausalLM: has no shape"),
     (lambda: DraftModel(HFModel(tiny()), 4, num_pages=9), "widths = 4: is no list of numbers"),
     (lambda: DraftModel(HFModel(tiny()), (1, 98), num_pages=9), r"widths\[1\] = 98: is more than the 97 tokens"),
     (lambda: engine(Speculate(DraftModel(HFModel(tiny(vocab_size=99)), (98,), num_pages=9))).run(PROMPTS),
      "widths = 98: is more than the 97 tokens of the large model")],
)  # fmt: skip
def test_engines_are_made_of_models_controllers_and_drafters(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(TreegenError, match=text):
        make()


@pytest.mark.parametrize(("most", "text"), [
    (300, "max_new_tokens = 300: leaves no room for a prompt in the 256 tokens that the model can hold; lower it$"),
    (250, r"prompts\[0\] = 9 tokens: is not within 1..6 tokens: of the 256 tokens that the model can hold, 250"),
])  # fmt: skip
def test_prompts_that_leave_no_room_for_new_tokens(most: int, text: str) -> None:
    made = engine(Sample(max_new_tokens=most), num_pages=200)
    with pytest.raises(BranchError, match=text):
        made.run([[*range(9)]])
    assert made.run([]) == []
    assert made.accounting.steps == 0


@pytest.mark.parametrize(("found", "text"), [
    (lambda texts: [], "drafts = 0 of them: are not for 1 texts"),
    (lambda texts: None, "drafts = NoneType: is not a list"),
    (lambda texts: [None], "drafts = NoneType: is not a DraftTree"),
    (lambda texts: [[5, 6]], "drafts = list: is not a DraftTree"),
    (lambda texts: [DraftTree([5], ["x"])], r"parents\[0\] = x: is no earlier draft"),
    (lambda texts: [DraftTree(5, 6)], "drafts = DraftTree: is not a DraftTree of two lists"),
    (lambda texts: {0: DraftTree([5], [-1])}, "drafts = dict: is not a list"),
    (lambda texts: [DraftTree(np.array([1.5]), [-1])], r"draft\(\) = 1.5: is not one of the tokens"),
])  # fmt: skip
def test_drafters_that_give_something_else(found: Callable[[Any], Any], text: str) -> None:
    class Own:
        trees = False

        def __call__(self, texts: Sequence[Sequence[int]], most: int) -> Any:
            return found(texts)

    refused(engine(Speculate(Own(), max_draft=2, max_new_tokens=6)), text, PROMPTS[:1])


@pytest.mark.parametrize("convert", [
    lambda drafts: (each for each in drafts),
    lambda drafts: [DraftTree(np.array(each.tokens), np.array(each.parents)) for each in drafts],
    lambda drafts: [DraftTree(torch.tensor(each.tokens), torch.tensor(each.parents)) for each in drafts],
    lambda drafts: tuple(DraftTree(tuple(np.array(each.tokens)), [*np.int32(each.parents)]) for each in drafts),
], ids=["generator", "arrays", "tensors", "numpy integers"])  # fmt: skip
@pytest.mark.parametrize("by_itself", [False, True])
def test_drafts_may_be_arrays(convert: Callable[[Sequence[DraftTree]], Any], by_itself: bool) -> None:
    """Those of a drafter, and those of a controller."""

    class Own(NGrams):
        def __call__(self, texts: Sequence[Sequence[int]], most: int) -> Any:
            found = super().__call__(texts, most)
            return found if by_itself else convert(found)

        def fixed_parents(self, most: int) -> list[int]:
            return []

    class Proposing(Speculate):
        def draft(self, branches: Sequence[Branch]) -> Any:
            found = super().draft(branches)
            return convert(found) if by_itself else found

    found = engine(Proposing(Own(), 3, max_new_tokens=9), max_rows=90).run(PROMPTS)
    assert found == engine(Sample(max_new_tokens=9)).run(PROMPTS)
