"""Bad input to shapes, strategies, targets and `compile`.

Every error is a TreegenError whose message is one line: `argument = value: reason; fix`.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import treegen
from support.rejections import Make, rejected
from treegen import Shape, Tree, strategies
from treegen.ir.errors import (
    BackendError,
    FormatError,
    InputError,
    PlanError,
    ShapeError,
    StrategyError,
    TreeError,
    TreegenError,
)
from treegen.strategies import strategy_from
from treegen.target.targets import target_from

SHAPES = {
    "heads that do not divide": ((6, 4, 64), {}, ("num_qo_heads = 6", "multiple of num_kv_heads = 4")),
    "more kv heads": ((4, 8, 64), {}, ("num_qo_heads = 4", "multiple of num_kv_heads = 8")),
    "no heads": ((0, 1, 64), {}, ("num_qo_heads = 0", "positive integer")),
    "negative kv heads": ((8, -8, 64), {}, ("num_kv_heads = -8", "positive integer")),
    "fractional heads": ((8.0, 8, 64), {}, ("num_qo_heads = 8.0", "positive integer")),
    "heads that are a word": (("8", 8, 64), {}, ("num_qo_heads = 8", "positive integer")),
    "heads that are a flag": ((True, True, 64), {}, ("num_qo_heads = True", "positive integer")),
    "no head dim": ((8, 8, 0), {}, ("head_dim = 0", "positive integer")),
    "odd head dim": ((8, 8, 65), {}, ("head_dim = 65", "multiple of 8")),
    "large head dim": ((8, 8, 1024), {}, ("head_dim = 1024", "576")),
    "odd head dim of v": ((8, 8, 64), {"head_dim_v": 60}, ("head_dim_v = 60", "multiple of 8")),
    "large head dim of v": ((8, 8, 64), {"head_dim_v": 1024}, ("head_dim_v = 1024", "512")),
    "unknown dtype": ((8, 8, 64), {"dtype": "int8"}, ("dtype = int8", "not a supported type", "fp16, bf16, fp32")),
    "dtype that is no type": ((8, 8, 64), {"dtype": None}, ("dtype = None", "not a supported type")),
    "unknown kv dtype": ((8, 8, 64), {"kv_dtype": "fp8"}, ("kv_dtype = fp8", "not a supported type")),
    "mixed dtypes": ((8, 8, 64), {"kv_dtype": "fp16"}, ("kv_dtype = fp16", "differs from dtype = bf16")),
    "no page size": ((8, 8, 64), {"page_size": 0}, ("page_size = 0", "positive integer")),
    "large pages": ((8, 8, 64), {"page_size": 4096}, ("page_size = 4096", "1024")),
    "unknown layout": ((8, 8, 64), {"kv_layout": "HDN"}, ("kv_layout = HDN", "is unknown", "NHD, HND")),
}

TREE = Tree.parse("3(2)")
OTHERS: dict[str, tuple[Make, type[TreegenError], tuple[str, ...]]] = {
    "unknown strategy": (
        lambda: strategy_from("deft"),
        StrategyError,
        ("strategy = deft", "not registered", "deft-node"),
    ),
    "strategy that is a list": (
        lambda: strategy_from(["query"]),
        StrategyError,
        ("strategy = ['query']", "not registered"),
    ),
    "strategy that is None": (lambda: strategy_from(None), StrategyError, ("strategy = None", "not registered")),
    "factory for a strategy": (
        lambda: strategy_from(strategies.query),
        StrategyError,
        ("strategy = ", "not registered"),
    ),
    "taken name": (
        lambda: treegen.register_strategy("query", strategies.query),
        StrategyError,
        ("name = query", "taken", "other than"),
    ),
    "split of nothing": (lambda: strategies.query(split=0), StrategyError, ("split = 0", "not a positive integer")),
    "negative chunk": (
        lambda: strategies.deft_node_chunk(chunk=-1),
        StrategyError,
        ("chunk = -1", "not a positive integer"),
    ),
    "fractional block": (
        lambda: strategies.deft_flatten(block=1.5),
        StrategyError,
        ("block = 1.5", "not a positive integer"),
    ),
    "block that is a flag": (lambda: strategies.deft_flatten(block=True), StrategyError, ("block = True",)),
    "chunk that is None": (lambda: strategies.deft_node_chunk(chunk=None), StrategyError, ("chunk = None",)),
    "unknown target": (lambda: target_from("h2000"), BackendError, ("target = h2000", "not known", "h200", "cpu")),
    "target that is a number": (lambda: target_from(90), BackendError, ("target = 90", "not known")),
    "target that is a list": (lambda: target_from(["h200"]), BackendError, ("target = ['h200']", "not known")),
    "compile: tree": (lambda: treegen.compile("3(2)"), TreeError, ("tree = 3(2)", "not a Tree", "treegen.Tree.parse")),
    "compile: strategy": (lambda: treegen.compile(TREE, strategy="best"), StrategyError, ("strategy = best",)),
    "compile: shape": (
        lambda: treegen.compile(TREE, shape=(8, 8, 64)),
        InputError,
        ("shape = (8, 8, 64)", "not a Shape"),
    ),
    "compile: target": (lambda: treegen.compile(TREE, target="z80"), BackendError, ("target = z80", "not known")),
    "compile: backend": (
        lambda: treegen.compile(TREE, backend="cuda"),
        BackendError,
        ("backend = cuda", "unknown", "torch"),
    ),
    "compile: NaN sm_scale": (
        lambda: treegen.compile(TREE, sm_scale=float("nan")),
        InputError,
        ("sm_scale = nan", "finite"),
    ),
    "compile: negative sm_scale": (
        lambda: treegen.compile(TREE, sm_scale=-0.1),
        InputError,
        ("sm_scale = -0.1", "at least 0", "negate q"),
    ),
    "compile: sm_scale": (lambda: treegen.compile(TREE, sm_scale="0.1"), InputError, ("sm_scale = 0.1",)),
    "update": (
        lambda: treegen.compile(TREE, backend="torch").update("3(2)"),
        TreeError,
        ("tree = 3(2)", "not a Tree", "treegen.Tree.parse"),
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes(case: str) -> None:
    arguments, named, words = SHAPES[case]
    rejected(lambda: Shape(*arguments, **named), ShapeError, *words)


def test_shapes_take_torch_types() -> None:
    torch = pytest.importorskip("torch")
    assert Shape(8, 8, 64, dtype=torch.float16) == Shape(8, 8, 64, dtype="fp16")
    assert Shape(8, 8, 64, dtype="torch.bfloat16", head_dim_v=64, kv_dtype="bfloat16") == Shape(8, 8, 64)
    rejected(lambda: Shape(8, 8, 64, dtype=torch.int32), ShapeError, "dtype = torch.int32", "fp16, bf16, fp32")


@pytest.mark.parametrize("case", OTHERS)
def test_strategies_targets_and_compile(case: str) -> None:
    make, error, words = OTHERS[case]
    rejected(make, error, *words)


def test_late_and_unknown_options_are_not_ignored() -> None:
    for call in (
        lambda: treegen.compile(TREE, stratgy="query"),
        lambda: treegen.compile(TREE, "query"),
        lambda: Tree.from_parents([-1], [3], row=[(0, 1)]),
        lambda: Shape(8, 8, 64, layout="NHD"),
        lambda: strategies.deft_flatten(blocks=3),
    ):
        with pytest.raises(TypeError):
            call()


# The errors themselves


def test_long_and_many_line_values_are_shortened() -> None:
    error = TreegenError("argument", "a\n b\t" + "c" * 500, "is long", "cut it")
    assert str(error).startswith("argument = a b ccc")
    assert str(error).endswith("...: is long; cut it")
    assert len(str(error)) < 100
    assert error.value == "a\n b\t" + "c" * 500
    assert str(TreegenError("argument", np.zeros((3, 3)), "is a matrix", "flatten it")).count("\n") == 0


@pytest.mark.parametrize(
    "error", [BackendError, FormatError, InputError, PlanError, ShapeError, StrategyError, TreeError]
)
def test_errors_are_values(error: type[TreegenError]) -> None:
    """One root, a ValueError for callers who know nothing of treegen, and fit to cross process borders."""
    made = error("argument", 3, "is odd", "give 4")
    assert issubclass(error, treegen.TreegenError)
    assert isinstance(made, ValueError)
    back = pickle.loads(pickle.dumps(made))
    assert type(back) is error
    assert str(back) == str(made) == "argument = 3: is odd; give 4"
    assert (back.argument, back.value, back.reason, back.fix) == ("argument", 3, "is odd", "give 4")
