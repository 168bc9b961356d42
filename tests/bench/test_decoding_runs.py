"""Decoding runs: each workload does the work that its tree says, whoever computes attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.replayed_steps import replaying
from support.tiny_models import VOCABULARY, tiny
from treegen import Tree
from treegen.bench.decoding_cases import DecodingCase, decoding_case
from treegen.bench.decoding_runs import DecodingOutcome, DecodingSettings, decoding_table, run_decoding
from treegen.bench.decoding_sdpa import SdpaDecode, sdpa_kernel
from treegen.bench.kv_reads import KVReads
from treegen.bench.providers import UnavailableError
from treegen.engine import Engine, Forced, tree_kernels
from treegen.engine.control import Frontier, Growth
from treegen.integrations import HFModel
from treegen.workloads.served_decodings import DraftDecoding, ForcedDecoding, served_decoding

PAGE = 4
OF_TOKEN = 4 * 2 * 2 * 16 * 4
"""Bytes of a token of the tiny Llama: 4 layers, K and V, 2 heads of 16 elements, 4 bytes."""


def case_of(text: str, scale: float = 1, data: Path | None = None) -> tuple[DecodingCase, ForcedDecoding]:
    decoding = served_decoding(text, data).scaled(scale)
    assert isinstance(decoding, ForcedDecoding)
    return decoding_case(decoding, VOCABULARY, 0, PAGE), decoding


def ran(case: DecodingCase, provider: str, model: HFModel | None = None, max_rows: int = 512) -> DecodingOutcome:
    return run_decoding(model or HFModel(tiny()), case, provider, DecodingSettings(PAGE, max_rows))


class TreeAccount:
    """What a tree of one prompt says about the decoding of it: rows, pages and tokens in step 1, 2 and so on."""

    def __init__(self, tree: Tree) -> None:
        self.parent, self.count = tree.parent.tolist(), tree.tokens.tolist()
        self.begin = [0] * len(self.parent)
        for node in np.argsort(tree.topology.depth, kind="stable").tolist():
            if self.parent[node] >= 0:
                self.begin[node] = self.begin[self.parent[node]] + self.count[self.parent[node]]
        self.end = [begin + count for begin, count in zip(self.begin, self.count, strict=True)]
        self.leaves = [node for node in range(len(self.parent)) if node not in self.parent]
        self.steps = max(self.end) - self.count[0] - 1

    def alive(self, step: int) -> list[int]:
        length = self.count[0] + step
        return [
            node for node in range(1, len(self.parent))
            if self.begin[node] < length <= self.end[node] - (node in self.leaves)
        ]  # fmt: skip

    def path(self, node: int) -> list[int]:
        return [] if node < 0 else [*self.path(self.parent[node]), node]

    def pages(self, step: int) -> int:
        alive = self.alive(step)
        above = {each for node in alive for each in self.path(node)[:-1]}
        own = sum(-(-(self.count[0] + step) // PAGE) - self.begin[node] // PAGE for node in alive)
        return own + sum(self.end[node] // PAGE - self.begin[node] // PAGE for node in above)


def check_account(tree: Tree, outcome: DecodingOutcome) -> None:
    known = TreeAccount(tree)
    steps = range(1, known.steps + 1)
    lengths = [(known.count[0] + step, len(known.alive(step))) for step in steps]
    assert outcome.tokens == sum(known.end[leaf] - known.count[0] for leaf in known.leaves)
    assert outcome.decoding_steps == known.steps
    assert outcome.held_bytes == max(map(known.pages, steps)) * PAGE * OF_TOKEN
    assert outcome.unshared_bytes == max(-(-length // PAGE) * rows for length, rows in lengths) * PAGE * OF_TOKEN
    assert outcome.path_bytes == sum(length * rows for length, rows in lengths) * OF_TOKEN


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("few-shot", 0.015),
        ("few-shot-30:steps=200,prompt=2000", 0.02),
        ("reasoning:seed=1,depth=3,width=6,prompt=30,thought=7", 1),
        ("37(7(5*3),4,9(6*2))", 1),
    ],
)
def test_trees_of_one_prompt(text: str, scale: float) -> None:
    case, decoding = case_of(text, scale)
    outcome = ran(case, "auto")
    check_account(decoding.tree, outcome)
    assert outcome.read_bytes <= outcome.path_bytes


@pytest.mark.parametrize("text", ["reasoning-sorting:0", "reasoning-docmerge", "reasoning-keyword:3"])
def test_recorded_trees(text: str, data_dir: Path) -> None:
    case, decoding = case_of(text, 0.02, data_dir)
    check_account(decoding.tree, ran(case, "sdpa"))


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("grpo:prompts=3,samples=4", 0.02),
        ("system-prompts:rules=2,languages=2,requests=2", 0.02),
        ("shot-sets:sets=3,shots=600,questions=4", 0.02),
        ("chains:questions=4", 0.02),
        ("documents:first=2,second=2,questions=3", 0.02),
    ],
)
def test_trees_of_several_prompts(text: str, scale: float) -> None:
    case, decoding = case_of(text, scale)
    outcome, alone = ran(case, "cohort"), ran(case, "query")
    tree = decoding.tree
    leaves = tree.num_rows
    own = int(tree.tokens[-1])
    assert case.branches == leaves == case.controller.width * len(case.prompts)
    assert outcome.tokens == alone.tokens == leaves * own
    assert outcome.decoding_steps == alone.decoding_steps <= own - 1
    most = sum(-(-int(count) // PAGE) + 1 for count in tree.tokens) * PAGE * OF_TOKEN
    assert outcome.held_bytes == alone.held_bytes <= most < outcome.unshared_bytes
    assert outcome.read_bytes < outcome.path_bytes == alone.read_bytes == alone.path_bytes


def test_prompts_that_are_computed_in_one_step() -> None:
    """All prompts then decode side by side, so that the steps and the bytes follow from the tree."""
    case, _ = case_of("grpo:prompts=3,samples=4,prompt=20,tokens=9")
    outcome = ran(case, "auto")
    assert outcome.decoding_steps == 8
    assert outcome.held_bytes == (3 * 5 + 12 * 2) * PAGE * OF_TOKEN
    assert outcome.path_bytes == sum(12 * (20 + step) for step in range(1, 9)) * OF_TOKEN
    together = sum(3 * 20 + 12 * step for step in range(1, 9)) * OF_TOKEN
    assert together <= outcome.read_bytes <= outcome.path_bytes


def test_beams() -> None:
    decoding = served_decoding("beams:width=5,prompt=40,tokens=12")
    case = decoding_case(decoding, VOCABULARY, 0, PAGE)
    known = {provider: ran(case, provider) for provider in ("auto", "query", "sdpa", "none")}
    for outcome in known.values():
        assert (outcome.tokens, outcome.decoding_steps) == (5 * 12, 11)
        assert outcome.unshared_bytes == 5 * 13 * PAGE * OF_TOKEN
        assert outcome.held_bytes <= (10 + 5 * 3) * PAGE * OF_TOKEN
    assert known["query"].read_bytes == known["sdpa"].read_bytes == known["query"].path_bytes
    # steps run ahead where kernels read tables on the device: pages of beams that end are held for a step more
    assert known["auto"].held_bytes == known["query"].held_bytes
    assert 0 <= known["auto"].held_bytes - known["sdpa"].held_bytes <= 5 * PAGE * OF_TOKEN
    assert known["none"].read_bytes == 0


def test_recorded_drafts() -> None:
    """Two prompts of 40 tokens; the logits decide nothing, so providers do equal work."""
    accepted = (2, 1, 3, 2)
    case = decoding_case(DraftDecoding("drafts", 2, 40, (-1, -1, 0, 2), accepted), VOCABULARY, 0, PAGE)
    before = 40 + np.cumsum([0, *accepted[:-1]])  # the stored tokens of a branch
    ends = before[:, None] + np.arange(1, 6)  # what the rows of a step see of them and of the drafts
    for provider in ("auto", "query", "deft-node", "none"):
        told: list[float] = []
        outcome = run_decoding(HFModel(tiny()), case, provider, DecodingSettings(PAGE), told.append)
        assert (outcome.tokens, outcome.decoding_steps) == (2 * (1 + sum(accepted)), len(accepted))
        assert outcome.held_bytes == outcome.unshared_bytes == 2 * -(-(before[-1] + 5) // PAGE) * PAGE * OF_TOKEN
        assert sum(told) == pytest.approx(1)
        if provider == "none":
            assert outcome.read_bytes == 0
            continue
        assert outcome.path_bytes == 2 * int(ends.sum()) * OF_TOKEN
        once = 2 * int(ends[:, -1].sum()) * OF_TOKEN
        assert once <= outcome.read_bytes <= outcome.path_bytes
        if provider != "auto":
            assert outcome.read_bytes == (outcome.path_bytes if provider == "query" else once)
    assert ran(case, "sdpa").detail.endswith("without drafts")


def test_a_plan_reads_shared_tokens_once() -> None:
    """Prompts and nodes fill pages: 40 tokens for all, 8 for each of two, and what branches have of their own."""
    tree = Tree.parse("40(8(6*3)*2)")
    case = decoding_case(ForcedDecoding("tree", tree), VOCABULARY, 0, PAGE)
    outcome = ran(case, "deft-node")
    once = sum(40 + 2 * step for step in range(1, 9)) + sum(40 + 2 * 8 + 6 * step for step in range(1, 6))
    assert once * OF_TOKEN <= outcome.read_bytes < outcome.path_bytes
    check_account(tree, outcome)
    levels = decoding_case(ForcedDecoding("tree", tree, prompt_levels=2), VOCABULARY, 0, PAGE)
    planned = ran(levels, "deft-node")
    # The first prompt is a step ahead. When its branches have ended, those of the second one still read together.
    together = sum(40 + 2 * 8 + 3 * step + 3 * (step + 1) for step in range(1, 5))
    assert planned.read_bytes == (together + 40 + 8 + 3 * 5) * OF_TOKEN


def test_windows_limit_what_is_read() -> None:
    """Gemma 3 with a window of 7 tokens in two of four layers."""
    case, _ = case_of("40(6*3)")
    model = HFModel(tiny("Gemma3"))
    of_token = OF_TOKEN * model.shape.head_dim // 16
    lengths = np.arange(41, 46)
    paths = 3 * int((np.minimum(lengths, 7) + lengths).sum()) * of_token // 2
    for provider in ("query", "sdpa"):
        outcome = ran(case, provider, model)
        assert outcome.read_bytes == outcome.path_bytes == paths


class Recorded(Forced):
    """Keeps the logits of each decision, by label and position."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: dict[tuple[int, ...], torch.Tensor] = {}

    def decide(self, frontier: Frontier) -> Growth:
        for branch, row in zip(frontier.branches, frontier.logits, strict=True):
            self.seen[(*branch.label, len(branch.tokens))] = row.clone()
        return super().decide(frontier)


@pytest.mark.parametrize(
    ("name", "page_size", "replays"),
    [("Llama", 4, False), ("Llama", 1, False), ("Llama", 16, True), ("Gemma3", 4, False), ("Qwen3", 4, True)],
)
def test_sdpa_gives_the_logits_of_auto(name: str, page_size: int, replays: bool) -> None:
    """With graphs all rows are padded to the most tokens of a branch, and some rows stand for no token."""
    model, seen = HFModel(tiny(name)), []
    for make in (tree_kernels("auto"), sdpa_kernel):
        forced = Recorded(Tree.parse("30(7(5*3),4)+21(6)"), VOCABULARY)
        engine = Engine(model, forced, num_pages=200, page_size=page_size, max_branches=8, make_kernel=make)
        if replays:
            replaying(engine)
        engine.run(forced.prompts)
        seen.append(forced.seen)
        if replays and make is sdpa_kernel:
            (kernel,) = engine.forward.decoding.kernels.values()
            assert isinstance(kernel, SdpaDecode)
            kernel.pads = True
            again = engine.controller = Recorded(Tree.parse("30(7(5*3),4)+21(6)"), VOCABULARY)
            engine.run(again.prompts)
            seen.append(again.seen)
    assert all(each.keys() == seen[0].keys() for each in seen)
    for each in seen[1:]:
        for place, logits in seen[0].items():
            torch.testing.assert_close(each[place], logits, atol=1e-5 * float(logits.abs().max()), rtol=0)


@pytest.mark.parametrize(("name", "what"), [("Gemma2", "soft caps"), ("GptOss", "sinks")])
def test_layers_that_sdpa_does_not_compute(name: str, what: str) -> None:
    case, _ = case_of("20(6*3)")
    outcome = ran(case, "sdpa", HFModel(tiny(name)))
    assert outcome.detail == f"PyTorch's scaled_dot_product_attention is compared in layers without {what}"
    forced = Forced(Tree.parse("20(6*3)"), VOCABULARY)
    engine = Engine(HFModel(tiny(name)), forced, num_pages=60, make_kernel=sdpa_kernel)
    with pytest.raises(UnavailableError):
        engine.run(forced.prompts)


def test_progress_adds_up_to_one() -> None:
    told: list[float] = []
    run_decoding(HFModel(tiny()), case_of("10(40)")[0], "query", DecodingSettings(PAGE), told.append)
    assert len(told) > 2
    assert sum(told) == pytest.approx(1)


def test_a_table_has_a_line_for_each_provider_that_ran() -> None:
    known = [DecodingOutcome("auto", "", 10, 2.0, 1.0, 5, (0.1, 0.2, 0.3, 0.4), 4000, 8000, 10**9, 3 * 10**9)]
    titles, line = decoding_table([*known, DecodingOutcome("sdpa", "cannot")])
    assert titles[-4:] == ["KV held", "unshared", "KV read", "unshared reads"]
    assert line[-5:] == ["5", "4.00 kB", "8.00 kB", "1.00 GB", "3.00 GB"]


def test_reads_of_no_steps() -> None:
    assert KVReads().count() == (0, 0)
