"""What ranks do in tests of engines on several ranks: each function runs in all ranks, and fails by an assertion."""

from __future__ import annotations

import io
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from support.paths import ROOT
from support.ranks import TIMEOUT
from support.replayed_steps import replaying
from support.tiny_models import PROMPTS, tiny
from treegen import cli
from treegen.distributed import Parallel
from treegen.distributed.agreement import check_agreement
from treegen.engine import Beam, DraftModel, Engine, NGrams, Sample, Sampling, Search, Speculate, tree_kernels
from treegen.engine.context_kernels import ContextSteps
from treegen.engine.control import Controller
from treegen.engine.step import Step
from treegen.integrations import HFModel, divide_heads
from treegen.ir.errors import RankError, TreegenError

VOCABULARY = 96
"""A number of tokens that ranks divide."""
SAMPLING = Sampling(0.9, seed=3)
CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "greedy": lambda: Sample(max_new_tokens=8),
    "samples": lambda: Sample(3, SAMPLING, max_new_tokens=8),
    "beams": lambda: Beam(3, max_new_tokens=6),
    "drafts": lambda: Speculate(NGrams(), max_draft=3, n=2, sampling=SAMPLING, max_new_tokens=10),
}
SIZES: dict[str, Any] = {"num_pages": 60, "page_size": 4, "max_rows": 40, "max_branches": 9}
Tokens = list[list[list[int]]]


def tokens_of(model: Any, controller: Controller, *, replays: bool = False, **options: Any) -> Tokens:
    """The tokens of the results of each prompt. Prompts are decoded twice, the second time from the prefix cache."""
    engine = Engine(model, controller, **SIZES | options)
    if replays:
        replaying(engine)
    found = [[[each.tokens for each in own] for own in engine.run(PROMPTS)] for _ in range(2)]
    assert_free(engine)
    assert found[0] == found[1]
    assert (engine.accounting.preempted > 0) == (engine.pool.num_pages < 10)
    return found[0]


def assert_free(engine: Engine) -> None:
    """All pages are free, or the cache's."""
    engine.sequences.check()
    assert not len(engine.sequences)
    assert engine.sequences.available == engine.pool.num_pages


def mesh_of(*names: str) -> DeviceMesh:
    """A mesh of all ranks: a line, or with two names a square."""
    ranks = dist.get_world_size()
    return init_device_mesh("cpu", (ranks,) if len(names) == 1 else (2, ranks // 2), mesh_dim_names=names)


def divided(name: str, mesh: DeviceMesh) -> tuple[HFModel, HFModel]:
    """A tiny model, and the same model whose heads are divided among the ranks of a mesh."""
    whole, own = tiny(name, vocab_size=VOCABULARY), tiny(name, vocab_size=VOCABULARY)
    divide_heads(own, mesh)
    return HFModel(whole), HFModel(own)


def heads() -> None:
    """Divides heads among two ranks."""
    mesh = mesh_of("tp")
    parallel = Parallel.over(mesh, tensor="tp")
    for name in ("Llama", "Mistral"):
        whole, model = divided(name, mesh)
        assert (model.shape.num_qo_heads, model.shape.num_kv_heads, model.ranks) == (2, 1, 2)
        for controller in CONTROLLERS.values() if name == "Llama" else [CONTROLLERS["samples"]]:
            assert tokens_of(model, controller(), parallel=parallel) == tokens_of(whole, controller())
    _run_ahead(model, whole, parallel)
    trees = {"parallel": parallel, "deterministic": True}
    controller = Speculate(NGrams(2, 3), max_draft=3, n=2, sampling=SAMPLING, max_new_tokens=6)
    assert tokens_of(model, controller, **trees) == tokens_of(whole, controller)
    _follow_rank_0(model, parallel)
    with pytest.raises(TreegenError, match="is divided among 2; give Parallel"):
        Engine(model, controller, **SIZES)
    with pytest.raises(TreegenError, match="num_kv_heads = 1: are no multiple of the 2 ranks"):
        divide_heads(tiny("Llama", num_key_value_heads=1), mesh)
    _run_command()


@contextmanager
def _waits() -> Iterator[list[int]]:
    """Notes inside the block how often a rank waits for an object of rank 0."""
    waits: list[int] = []
    broadcast = dist.broadcast_object_list

    def noted(*args: Any, **kwargs: Any) -> None:
        waits.append(1)
        broadcast(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast_object_list", noted)
        yield waits


def _run_ahead(model: HFModel, whole: HFModel, parallel: Parallel) -> None:
    """Beams, chains and trees of drafts: ranks wait for objects of rank 0 in few steps."""
    options: dict[str, Any] = {"max_draft": 3, "n": 2, "sampling": SAMPLING, "max_new_tokens": 16}

    def draft_model() -> DraftModel:
        return DraftModel(HFModel(tiny(seed=1, vocab_size=VOCABULARY)), (2, 1), num_pages=100)

    makers: tuple[Callable[[], Controller], ...] = (
        lambda: Beam(3, max_new_tokens=16, stop_ids=(3, 7)),
        lambda: Speculate(NGrams(), **options),
        lambda: Speculate(NGrams(2, 2), **options),
        lambda: Speculate(draft_model(), **options | {"max_draft": 4}),
    )
    for make in makers:
        engine = Engine(model, make(), **SIZES | {"num_pages": 100, "max_rows": 45}, parallel=parallel)
        first = engine.run(PROMPTS)
        with _waits() as waits:
            found = engine.run(PROMPTS)
        check_agreement(dist.group.WORLD, {"results": found})  # type: ignore[arg-type]
        assert len(waits) <= 6 < engine.accounting.steps // 2, (len(waits), engine.accounting.steps)
        alone = Engine(whole, make(), **SIZES | {"num_pages": 100, "max_rows": 45}).run(PROMPTS)
        tokens = [[[each.tokens for each in own] for own in results] for results in (first, found, alone)]
        assert tokens[0] == tokens[1] == tokens[2]


def context() -> None:
    """Divides tokens among two ranks."""
    mesh = mesh_of("cp")
    for name in ("Llama", "Mistral", "GptOss"):
        model = HFModel(tiny(name))
        for place, controller in enumerate(CONTROLLERS.values() if name == "Llama" else [CONTROLLERS["drafts"]]):
            parallel = Parallel.over(mesh, context="cp", interleave=(2, 1)[place % 2])
            assert tokens_of(model, controller(), parallel=parallel) == tokens_of(model, controller()), name
    model, parallel = HFModel(tiny("Mistral")), Parallel.over(mesh, context="cp")
    _serve_samples(model, parallel, {"num_pages": 7, "max_rows": 12})
    _read_shared_tokens_once(parallel)
    _follow_rank_0(model, parallel)
    _refuse(model, mesh)


def pools() -> None:
    """Divides tokens among two ranks, in pages of other sizes, without a prefix cache, and as for graphs."""
    model, parallel = HFModel(tiny("Mistral")), Parallel.over(mesh_of("cp"), context="cp")
    _serve_samples(
        model, parallel, {"page_size": 1, "num_pages": 120}, {"replays": True},
        {"page_size": 16, "strategy": "cohort", "prefix_cache": False},
    )  # fmt: skip


def _serve_samples(model: HFModel, parallel: Parallel, *variants: dict[str, Any]) -> None:
    """Samples are the same with all options of an engine."""
    expected = tokens_of(model, CONTROLLERS["samples"]())
    for options in variants:
        assert tokens_of(model, CONTROLLERS["samples"](), parallel=parallel, **options) == expected, options


def _read_shared_tokens_once(parallel: Parallel) -> None:
    """Plans of a rank serve all its rows: chunks of prompts, and branches that share them."""
    sampler = Sample(4, SAMPLING, max_new_tokens=8)
    engine = Engine(
        HFModel(tiny()), sampler, parallel=parallel, **SIZES | {"prefix_cache": False, "strategy": "cohort"}
    )
    engine.run([[*range(1, 91)], [*range(1, 71), 5, 5]])
    for step in (engine.forward.step, engine.forward.decoding):
        for kernel in step.kernels.values():
            assert isinstance(kernel, ContextSteps)
            counted = kernel.kernel.local.counters()
            assert counted["saved_bytes"] > 0
            assert counted["planned"] > 0 == counted["new"] + counted["refuted"] + counted["outgrown"]
    model = HFModel(tiny(max_position_embeddings=1024, num_hidden_layers=1))
    sizes = {"num_pages": 64, "page_size": 8, "max_rows": 300, "max_branches": 4}
    engine = Engine(model, Sample(max_new_tokens=1), parallel=parallel, **sizes)
    engine.run([[1, 2, 3] * 300])
    (steps,) = engine.forward.step.kernels.values()
    assert isinstance(steps, ContextSteps)
    of_rows = sum(range(601, 901)) // 2 * engine.pool.shape.kv_token_bytes
    assert steps.kernel.local.counters()["saved_bytes"] > 0.8 * of_rows


def both() -> None:
    """Divides heads and tokens among four ranks."""
    mesh = mesh_of("tp", "cp")
    parallel = Parallel.over(mesh, tensor="tp", context="cp")
    whole, model = divided("Mistral", mesh["tp"])
    for name in ("samples", "beams", "drafts"):
        controller = CONTROLLERS[name]
        assert tokens_of(model, controller(), parallel=parallel) == tokens_of(whole, controller())
    _follow_rank_0(model, parallel)
    _run_example()


def _run_example() -> None:
    """Runs the example of the page, whose process group is there already."""
    page = (ROOT / "docs" / "engine.md").read_text("utf-8")
    (example,) = re.findall(r"```python torchrun\n(.*?)```", page, re.DOTALL)
    with redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        for name in ("init_process_group", "destroy_process_group"):
            patch.setattr(dist, name, lambda: None)
        exec(example, {})
    assert printed.getvalue().count("[") == (0 if dist.get_rank() else 5)


def _run_command() -> None:
    """Runs the command on two ranks; rank 0 prints."""
    for option, divided in (("--tensor-parallel", "heads"), ("--context-parallel", "tokens")):
        with redirect_stdout(io.StringIO()) as printed:
            assert cli.main(["run", "40(6*3)", option, "--compare", "auto,query,sdpa", "--page-size", "4"]) == 0
        lines = printed.getvalue().splitlines()
        if dist.get_rank():
            assert not lines
            continue
        assert lines[0] == f"40(6*3): 40 prompt tokens, model tiny, cpu, {divided} divided among 2 ranks"
        rows = [re.split("  +", line) for line in lines[-2:]]
        if divided == "heads":
            assert [row[0] for row in rows] == ["query", "sdpa"]
            assert rows[0][-4:] == rows[1][-4:]
        else:
            assert lines[1].startswith("sdpa: does not merge")
            assert [(row[0], *row[-2:]) for row in rows] == [("auto", "-", "-"), ("query", "-", "-")]
    with redirect_stdout(io.StringIO()), _waits() as waits:
        beams = ["run", "beams:width=3,prompt=20,tokens=24", "--compare", "auto", "--page-size", "4"]
        assert cli.main([*beams, "--tensor-parallel"]) == 0
    assert not waits


def _follow_rank_0(model: HFModel, parallel: Parallel) -> None:
    """Ranks whose controllers would decide otherwise do what that of rank 0 decides."""
    rank = dist.get_rank()

    def score(prompt: list[int], continuations: list[list[int]]) -> list[float]:
        return [(-1) ** rank * sum(tokens) for tokens in continuations]

    for controller, of_rank_0 in (
        (Sample(2, Sampling(1.0, seed=rank), 8), Sample(2, Sampling(1.0, seed=0), 8)),
        (Search(score, width=2, branching=2, thought_tokens=3, depth=2), None),
    ):
        results = Engine(model, controller, parallel=parallel, **SIZES).run(PROMPTS)
        check_agreement(dist.group.WORLD, {"results": results})  # type: ignore[arg-type]
        if of_rank_0 is not None:
            assert results == Engine(model, of_rank_0, parallel=parallel, **SIZES).run(PROMPTS)


def _refuse(model: HFModel, mesh: DeviceMesh) -> None:
    """What engines cannot do where ranks divide tokens, and what differs between ranks, is an error of one line."""
    sample, odd = CONTROLLERS["greedy"](), dist.get_rank() % 2
    for controller, options, text in (
        (Speculate(NGrams(2, 3), max_draft=2), {}, "draft_trees = True: are not served where ranks divide tokens"),
        (sample, {"deterministic": True}, "deterministic = True: would merge partial results in another order"),
        (sample, {"make_kernel": tree_kernels()}, "make_kernel = function: makes kernels that would see"),
        (sample, {"interleave": 8}, "interleave = 8: does not divide page_size = 4"),
        (sample, {"num_pages": 60 + odd}, "num_pages = 61: 61 on rank 1 is 60 on rank 0"),
        (sample if odd else Beam(1), {}, "controller = Sample: Sample on rank 1 is Beam on rank 0"),
        (Sample(stop_ids=(7, 3 + odd)), {}, r"controller.stop_ids\[0\] = 4: 4 on rank 1 is 3 on rank 0"),
        (Sample(limits=[5, 6 + odd]), {}, r"controller.limits\[1\] = 7: 7 on rank 1 is 6 on rank 0"),
        (Sample(limits=[5] * odd), {}, "controller.limits = 1 entries: 1 entries on rank 1 is 0 entries on rank 0"),
        (Speculate(NGrams(), 2 + odd), {}, "controller.max_draft = 3: 3 on rank 1 is 2 on rank 0"),
        (Speculate(NGrams(2, 1 + odd), 2), {}, "controller.draft_trees = True: True on rank 1 is False on rank 0"),
        (Speculate(NGrams(2, 2 + odd), 4), {}, r"controller.draft_parents\[3\] = -1: -1 on rank 1 is 2 on rank 0"),
        (sample, {"parallel": mesh}, "parallel = DeviceMesh: is not a Parallel"),
    ):
        parallel = Parallel.over(mesh, context="cp", interleave=options.pop("interleave", 1))
        with pytest.raises(TreegenError, match=text):
            Engine(model, controller, **{"parallel": parallel, **SIZES, **options})
    engine = Engine(model, sample, parallel=parallel, **SIZES)
    os.environ["TREEGEN_CHECK"] = "1"
    try:
        with pytest.raises(RankError, match=r"prompts\[1\]\[2\] = 6: 6 on rank 1 is 5 on rank 0"):
            engine.run([[1, 2], [3, 4, 5 + odd]])
        checked = engine.run(PROMPTS)
    finally:
        del os.environ["TREEGEN_CHECK"]
    assert checked == engine.run(PROMPTS)


class Failing:
    """A model that does something else in its step number `last`."""

    def __init__(self, model: HFModel, last: int, fail: Callable[[], None]) -> None:
        self.shape, self.layers, self.max_tokens = model.shape, model.layers, model.max_tokens
        self.vocabulary, self.device = model.vocabulary, model.device
        self._model, self._left, self._fail = model, last, fail

    def __call__(self, step: Step, keep: Any) -> Any:
        self._left -= 1
        if not self._left:
            self._fail()
        return self._model(step, keep)


def failures() -> None:
    """A controller fails, then a model of rank 1, then rank 1 is killed: all ranks end, and pages are free."""
    model, rank, parallel = HFModel(tiny()), dist.get_rank(), Parallel(context=dist.group.WORLD)

    def score(prompt: list[int], continuations: list[list[int]]) -> list[float]:
        raise ArithmeticError("no score today")

    engine = Engine(
        model, Search(score, width=2, branching=2, thought_tokens=2, depth=2), parallel=parallel, **SIZES
    )  # fmt: skip
    text = "no score today" if rank == 0 else r"decide\(\) = rank 0: failed with ArithmeticError: no score today"
    with pytest.raises(ArithmeticError if rank == 0 else RankError, match=text):
        engine.run(PROMPTS)
    assert_free(engine)
    engine.controller = Sample(3, SAMPLING, max_new_tokens=8)
    assert [len(own) for own in engine.run(PROMPTS)] == [3, 3, 3]

    def fail() -> None:
        if rank == 1:
            raise ArithmeticError("no logits today")

    hasty = Parallel(context=dist.new_group(timeout=timedelta(seconds=5)))
    engine = Engine(Failing(model, 5, fail), CONTROLLERS["samples"](), parallel=hasty, **SIZES)
    began = time.monotonic()
    with pytest.raises(ArithmeticError if rank == 1 else RuntimeError):
        engine.run(PROMPTS)
    assert time.monotonic() - began < TIMEOUT
    assert_free(engine)
    dist.barrier()

    def kill() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    engine = Engine(Failing(model, 5, kill), CONTROLLERS["samples"](), parallel=parallel, **SIZES)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        engine.run(PROMPTS)
    assert time.monotonic() - began < TIMEOUT + 5
    assert_free(engine)
    print("rank 0 ended")
