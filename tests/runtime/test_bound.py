"""Bound calls hand compiled kernels what Triton's own launches would get, and Kernel keeps one per form of tensors."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from triton.runtime import driver

import treegen
from treegen import Shape, Tree
from treegen.backends import triton_program
from treegen.backends.bound_call import BoundCall
from treegen.backends.check_inputs import KV_TORCH_DTYPES
from treegen.backends.kv_scales import Scales
from treegen.backends.triton_program import ProgramRoom, TritonProgram
from treegen.codegen import compile_counter
from treegen.ir.errors import InputError, PerformanceWarning
from treegen.schedule.lower import lower
from treegen.schedule.pipeline import planned_device_schedule
from treegen.scoring.options import ScoreOptions, Scoring
from treegen.strategies import Strategy, cohort, strategy_from
from treegen.target.problem import Problem
from treegen.target.targets import target_from

STREAM = 77
SHAPE = Shape(4, 2, 16, dtype="fp32", page_size=4)
MERGED = Tree.parse("1,4/300,3")  # the prompt's results are merged with the leaves'
SINGLE = Tree.parse("3*2")


class Launched(NamedTuple):
    """What a kernel was launched with: arguments by name, tensors as pointers; how: by Triton or directly."""

    how: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    stream: int | None


class RecordingKernel:
    """Stands in for a Triton kernel: notes launches, by Triton itself and direct ones, and computes nothing."""

    def __init__(self, kernel: Any, launched: list[Launched]) -> None:
        self.arg_names = kernel.arg_names
        self.launched = launched
        self.warmed: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def _named(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        pointers = (a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
        named = dict(zip(self.arg_names, pointers, strict=False))
        return named | {name: value for name, value in options.items() if name in self.arg_names}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.launched.append(Launched("triton", grid, self._named(arguments, options), None))

        return launch

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Any:
        self.warmed.append((grid, self._named(arguments, options)))

        def on_grid(_: Any, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: Any, stream: int) -> None:
                assert len(arguments) == len(self.arg_names)
                assert not any(isinstance(argument, torch.Tensor) for argument in arguments)
                self.launched.append(Launched("directly", grid, self._named(arguments, {}), stream))

            return launch

        return type("Compiled", (), {"__getitem__": on_grid, "asm": {"ttgir": ""}})()


@pytest.fixture
def stream() -> list[int]:
    """The current stream, alone in a list."""
    return [STREAM]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, stream: list[int]) -> list[Launched]:
    """All launches of a test, which compute nothing, on a device of which the CPU plays the part."""
    launched: list[Launched] = []
    kernels: dict[Any, RecordingKernel] = {}
    load = triton_program.module_of

    def recording(source: Any) -> SimpleNamespace:
        kernel = kernels.setdefault(source, RecordingKernel(getattr(load(source), source.kernel), launched))
        return SimpleNamespace(**{source.kernel: kernel})

    monkeypatch.setattr(triton_program, "module_of", recording)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda index: stream[index]))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return launched


def tensors(tree: Tree) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pages = -(-(tree.kv.last_slot + 1) // SHAPE.page_size)
    q = torch.randn(tree.num_rows, SHAPE.num_qo_heads, SHAPE.head_dim)
    k, v = torch.randn(2, pages, SHAPE.page_size, SHAPE.num_kv_heads, SHAPE.head_dim)
    return q, k, v


def program_of(tree: Tree, strategy: str) -> TritonProgram:
    target = target_from("h200")
    schedule = lower(strategy_from(strategy).plan(Problem(tree, SHAPE, target)), Problem(tree, SHAPE, target))
    return TritonProgram(schedule, SHAPE, torch.device("cpu"))


@pytest.mark.parametrize(
    ("tree", "strategy", "launches"),
    [(MERGED, "deft-node", 2), (MERGED, "cascade", 3), (SINGLE, "query", 1), (MERGED, "flashforge", 2)],
)
@pytest.mark.parametrize("own_lse", [False, True])
def test_kernels_get_what_triton_would_hand_them(
    launched: list[Launched], tree: Tree, strategy: str, launches: int, own_lse: bool
) -> None:
    program = program_of(tree, strategy)
    q, k, v = tensors(tree)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    program(q, k, v, out, lse, 0.25, 1.0)
    expected = list(launched)
    launched.clear()
    call = program.bind(q, k, v, out, 0.25, 1.0)
    assert isinstance(call, BoundCall)
    assert launched == []
    call(q, k, v, out, lse if own_lse else None)
    assert len(launched) == len(expected) == launches
    scratch = {"part_out", "part_lse", *(() if own_lse else ("lse",))}
    for direct, by_triton in zip(launched, expected, strict=True):
        assert (direct.how, direct.stream) == ("directly", STREAM)
        assert direct.grid == (*by_triton.grid, 1, 1)
        assert list(direct.arguments) == list(by_triton.arguments)
        differing = {name for name, value in direct.arguments.items() if value != by_triton.arguments[name]}
        assert differing <= scratch


BIAS, VALID = torch.randn(400, 4), torch.ones(7, 9, 400, dtype=torch.bool).transpose(0, 1)
SLOPES, SINKS = torch.linspace(0.1, 0.4, 4), torch.linspace(-1, 2, 4)


class Asked(NamedTuple):
    """What is launched, and the parameters of kernels that it is there for."""

    parameters: set[str]
    strategy: str | Strategy = "deft-node"
    tree: Tree = MERGED
    shape: Shape = SHAPE
    scoring: ScoreOptions | None = None
    scaled: bool = False


EVERY_SCORE = ScoreOptions(
    score_mod=lambda score, b, h, q_idx, kv_idx: score + BIAS[kv_idx, h],
    mask_mod=lambda b, h, q_idx, kv_idx: VALID[q_idx % 9, h, kv_idx],
    alibi_slopes=SLOPES,
    sinks=SINKS,
)
WAITING = Asked(
    {"flags", "parts"},
    cohort(64, split_shared_rows=32, merge="final"),
    Tree.parse("1,4,8,64/40,16,16,16"),
    Shape(4, 1, 32),
)
ASKED = {
    "plain": Asked({"items", "merge_rows"}),
    "sinks": Asked({"sinks"}, scoring=ScoreOptions(sinks=SINKS)),
    "scales": Asked({"k_scales", "v_scales"}, scaled=True),
    "captured": Asked({"captured_0_size_0", "captured_2_stride_2", "row_positions"}, scoring=EVERY_SCORE),
    "dealt": Asked({"work_indptr", "work"}, "flashforge"),
    "merging": Asked({"epilogue_indptr", "epilogue_partials"}, cohort(16, split_shared_rows=2, merge="final")),
    "waiting": WAITING,
    "words": Asked({"k_scales"}, shape=Shape(4, 2, 64, dtype="fp16", kv_dtype="e4m3"), scaled=True),
    "dealt, with all": Asked(
        {"work", "k_scales", "captured_0", "sinks"}, "flashforge", MERGED, SHAPE, EVERY_SCORE, True
    ),
    "waiting, with all": WAITING._replace(scoring=EVERY_SCORE, scaled=True),
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=list(ASKED))
def test_every_argument_is_what_its_name_says(launched: list[Launched], asked: Asked) -> None:
    shape, problem = asked.shape, Problem(asked.tree, asked.shape, target_from("h200"))
    strategy = strategy_from(asked.strategy) if isinstance(asked.strategy, str) else asked.strategy
    schedule = planned_device_schedule(strategy.plan(problem), problem)
    scoring = None if asked.scoring is None else Scoring.of(asked.scoring)
    k_scale, v_scale = torch.rand(2, shape.num_kv_heads) + 1
    scales, rows = Scales.of(k_scale, v_scale) if asked.scaled else None, asked.tree.num_rows
    program = TritonProgram(schedule, shape, torch.device("cpu"), ProgramRoom(most_rows=rows), scales, scoring)
    program.capability = 90
    q = torch.zeros(rows, shape.num_qo_heads, shape.head_dim, dtype=KV_TORCH_DTYPES[shape.dtype])
    pages = -(-(asked.tree.kv.last_slot + 1) // shape.page_size)
    k, v = (torch.zeros(sizes).to(KV_TORCH_DTYPES[shape.kv_dtype]) for sizes in shape.cache_sizes(pages))
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2])
    program.bind(q, k, v, out, 0.25, 2.0)(q, k, v, out, lse)

    expected = {name: tensor.data_ptr() for name, tensor in {"q": q, "k": k, "v": v, "out": out, "lse": lse}.items()}
    for name, tensor in {"q": q, "out": out}.items():
        expected |= {f"{name}_stride_row": tensor.stride(0), f"{name}_stride_head": tensor.stride(1)}
    for name, tensor in {"k": k, "v": v}.items():
        strides = (tensor if shape.kv_dtype == shape.dtype else tensor.view(torch.int32)).stride()
        for what, stride in zip(("page", "token", "head"), (strides[0], *strides)[-4:-1], strict=True):
            expected[f"{name}_stride_{what}"] = stride
    expected |= {"heads": shape.num_qo_heads, "kv_heads": shape.num_kv_heads, "parts": 1}
    expected |= {"score_scale": 0.25 / math.log(2), "lse_scale": 2 * math.log(2)}
    expected |= {"INTERPRETED": False, "DEPENDENT": True}
    expected |= {"k_scales": k_scale.data_ptr(), "v_scales": v_scale.data_ptr(), "sinks": SINKS.data_ptr()}
    for number, tensor in enumerate((SLOPES, BIAS, VALID)):
        expected[f"captured_{number}"] = tensor.data_ptr()
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            expected |= {f"captured_{number}_size_{axis}": size, f"captured_{number}_stride_{axis}": stride}
    assert program.workspace is not None
    base, scratch = program.workspace.data_ptr(), program.scratch(rows)
    expected |= {"part_lse": base, "part_out": base + scratch.out_at, "flags": base + scratch.flags_at}
    table, arena = program.tables.table.data_ptr(), schedule.pack()
    for name in ("rows", "tiles", "work_indptr", "work", "epilogue_indptr", "epilogue_partials", "merge_partials"):
        expected[name] = table + 4 * getattr(arena, name)
    expected |= {"runs": table + 4 * arena.packed_runs, "row_positions": table + 4 * arena.positions}

    assert len(launched) == schedule.launches
    assert asked.parameters <= {name for each in launched for name in each.arguments}
    for how, _, arguments, _ in launched:
        assert how == "directly"
        for name in {"items", "merge_rows", "merge_indptr"} & arguments.keys():  # of a config or of a round
            assert arguments.pop(name) in [table + 4 * place for place in getattr(arena, name)]
        assert arguments == {name: expected[name] for name in arguments}


def test_scratch_does_not_overlap(launched: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(MERGED, "deft-node")
    q, k, v = tensors(MERGED)
    call = program.bind(q, k, v, torch.empty_like(q), 0.25, 1.0)
    made: list[torch.Tensor] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: made.append(empty(*size, **options)) or made[-1])
    call(q, k, v, torch.empty_like(q), None)
    (scratch,) = made
    begin, end = scratch.data_ptr(), scratch.data_ptr() + scratch.nbytes
    arguments, slots = launched[0].arguments, program.schedule.num_partials
    assert slots > 0
    of_row = 4 * SHAPE.num_qo_heads
    sizes = {"part_lse": slots * of_row, "part_out": slots * of_row * SHAPE.head_dim, "lse": len(q) * of_row}
    parts = sorted((arguments[name], arguments[name] + size) for name, size in sizes.items())
    assert parts[0][0] == begin
    assert parts[-1][1] == end
    assert all(before[1] <= after[0] and after[0] % 16 == begin % 16 for before, after in pairwise(parts))


def test_calls_follow_their_tensors_and_stream(launched: list[Launched], stream: list[int]) -> None:
    kernel = treegen.compile(SINGLE, strategy="query", shape=SHAPE, backend="triton")
    q, k, v = tensors(SINGLE)
    outs = [kernel(q, k, v), kernel(q + 1, k + 1, v + 1)]
    others = [tensors(SINGLE), tensors(SINGLE)]
    for other in others:
        outs.append(torch.empty_like(q))
        assert kernel(*other, out=outs[-1]) is outs[-1]
    stream[0] = 5
    kernel(q, k, v, out=outs[0])
    assert [each.how for each in launched] == ["directly"] * 5
    assert [each.arguments["out"] for each in launched[:4]] == [out.data_ptr() for out in outs]
    for each, other in zip(launched[2:4], others, strict=True):
        assert [each.arguments[name] for name in "qkv"] == [tensor.data_ptr() for tensor in other]
    assert [each.stream for each in launched] == [STREAM] * 4 + [5]


def test_every_form_is_checked_and_bound_anew(launched: list[Launched]) -> None:
    kernel = treegen.compile(SINGLE, strategy="query", shape=SHAPE, backend="triton")
    q, k, v = tensors(SINGLE)
    kernel(q, k, v)
    wide = torch.empty(*q.shape[:2], 2 * SHAPE.head_dim)
    strided = wide[..., : SHAPE.head_dim]
    kernel(strided, k, v)
    assert launched[0].arguments["q_stride_head"] == SHAPE.head_dim
    assert launched[1].arguments["q_stride_head"] == 2 * SHAPE.head_dim
    kernel(q, k, v, lse_base="log2", out=torch.empty_like(q))
    assert launched[2].arguments["lse_scale"] != launched[0].arguments["lse_scale"]
    for wrong in ((q[:1], k, v), (q.double(), k, v), (q, k[..., :8], v), (q.tolist(), k, v), (q, None, v)):
        with pytest.raises(InputError):
            kernel(*wrong)
    with pytest.raises(InputError, match="out"):
        kernel(q, k, v, out=torch.empty(1))
    with pytest.raises(InputError, match="lse_base"):
        kernel(q, k, v, lse_base="log10")
    assert len(launched) == 3


def test_another_tree_is_bound_anew(launched: list[Launched]) -> None:
    kernel = treegen.compile(SINGLE, strategy="query", shape=SHAPE, backend="triton")
    q, k, v = tensors(SINGLE)
    kernel(q, k, v)
    # The table of the tree before is kept, so that the next cannot take its address.
    before = kernel.calls.prepared.programs["triton", q.device].tables.table
    grown = Tree.parse("5*3")
    kernel.update(grown)
    with pytest.raises(InputError, match="2 rows"):
        kernel(q, k, v)
    kernel(*tensors(grown))
    after = kernel.calls.prepared.programs["triton", q.device].tables.table
    for each, table in zip(launched, (before, after), strict=True):
        assert 0 <= each.arguments["items"] - table.data_ptr() < table.numel() * table.element_size()
    assert before.data_ptr() != after.data_ptr()


@pytest.mark.parametrize("strategy", ["deft-node", "query", "cascade"])
def test_a_fixed_capacity_keeps_launches_and_addresses(launched: list[Launched], strategy: str) -> None:
    kernel = treegen.compile(MERGED, strategy=strategy, shape=SHAPE, backend="triton", max_rows=9)
    q, (k, v) = torch.zeros(9, 4, 16), torch.zeros(2, 118, 4, 2, 16)
    out, other = torch.empty_like(q), torch.empty_like(q)
    kernel(q, k, v, out=out)
    expected = list(launched)
    tables = kernel.calls.prepared.programs["triton", q.device].tables.table
    for tree in (Tree.parse("1,9/200,30"), SINGLE, MERGED):
        launched.clear()
        before = tables.clone()
        kernel.update(tree)
        assert not torch.equal(tables, before)
        kernel(q, k, v, out=out)
        assert launched == expected
    launched.clear()
    kernel(q, k, v, return_lse=True, out=other)
    for own, each in zip(launched, expected, strict=True):
        changed = {name for name, value in own.arguments.items() if value != each.arguments[name]}
        assert changed <= {"out", "lse"}


def test_few_forms_are_kept(launched: list[Launched]) -> None:
    kernel = treegen.compile(SINGLE, strategy="query", shape=SHAPE, backend="triton")
    q, k, _ = tensors(SINGLE)
    for pages in range(200):
        more = torch.zeros(len(k) + pages, *k.shape[1:])
        kernel(q, more, more)
    assert len(kernel.calls.prepared.calls) <= 64


def test_a_compilation_warns_where_the_kernel_is_called(
    launched: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = compile_counter.CompileState(watching=True, surprises=[("merge of 0123", 2.0)])
    monkeypatch.setattr(compile_counter, "state", state)
    kernel = treegen.compile(SINGLE, strategy="query", shape=SHAPE, backend="triton")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel(*tensors(SINGLE))
    assert [(warning.category, warning.filename) for warning in caught] == [(PerformanceWarning, __file__)]
