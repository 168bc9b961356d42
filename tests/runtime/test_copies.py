"""Copies of kernels and wrappers: by copy, deepcopy and pickle, each with a plan and tables of its own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import treegen
from treegen import Shape, Tree, TreeAttentionWrapper, strategies
from treegen.ir.errors import InputError
from treegen.ir.plan import Plan
from treegen.strategies import Strategy
from treegen.target.problem import Problem

SHAPE = Shape(4, 2, 16, dtype="fp32")
TREE = Tree.parse("1,3/70,4")
WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda kernel: pickle.loads(pickle.dumps(kernel)),
}

ways = pytest.mark.parametrize("way", WAYS)


def near(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - 0.1 * (q_idx - kv_idx)


def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx % 2 == 0


@dataclass(frozen=True)
class Own(Strategy):
    """A strategy of a caller's."""

    name: str = "own"

    def plan(self, problem: Problem, on_pass: Any = None) -> Plan:
        """See Strategy."""
        return strategies.query().plan(problem, on_pass)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no shape": {"shape": None},
    "fixed capacity": {"max_rows": 9, "max_items": 40},
    "functions": {"score_mod": near, "mask_mod": even, "logits_soft_cap": 20.0},
    "tensors": {"sinks": torch.arange(4.0), "alibi_slopes": torch.ones(4), "k_scale": torch.ones(2), "v_scale": 2.0},
    "window": {"window_left": 5, "strategy": "auto"},
    "batch-invariant": {"batch_invariant": True, "strategy": "auto", "window_left": 5},
    "own strategy": {"strategy": Own()},
}


def compiled(tree: Tree = TREE, **options: Any) -> treegen.Kernel:
    return treegen.compile(tree, **{"strategy": "deft-node", "shape": SHAPE, "backend": "torch", **options})


def tensors(tree: Tree, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, tree.kv.last_slot + 1, 2, 16, generator=generator).to(dtype)
    return torch.randn(tree.num_rows, 4, 16, generator=generator).to(dtype), k, v


@ways
@pytest.mark.parametrize("name", OPTIONS)
def test_a_copy_gives_what_the_kernel_gives(name: str, way: str) -> None:
    kernel = compiled(**OPTIONS[name])
    made = WAYS[way](kernel)
    assert made.plan.to_json() == kernel.plan.to_json()
    assert made.capacity == kernel.capacity
    assert (made.shape, made.choice, made.target) == (kernel.shape, kernel.choice, kernel.target)
    assert torch.equal(made(*tensors(TREE)), kernel(*tensors(TREE)))
    again = WAYS[way](kernel)  # of a kernel that has been called
    assert torch.equal(again(*tensors(TREE)), kernel(*tensors(TREE)))
    assert again.verify(*tensors(TREE))


@ways
@pytest.mark.parametrize("options", [{}, {"max_rows": 9, "max_items": 40}], ids=["exact", "fixed"])
def test_kernel_and_copy_go_their_own_ways(options: dict[str, int], way: str) -> None:
    apart = TREE.with_kv([range(70), range(100, 104), range(200, 204), range(300, 304)])
    kernel = compiled(apart, backend="triton", **options)
    kernel(*tensors(apart))
    kernel.step()
    kernel.step()
    made = WAYS[way](kernel)
    assert made.tree.to_json() == kernel.tree.to_json()
    kernel.step()
    made.append([0], 3)
    made.step()
    assert made.tree.to_json() == apart.appended(tokens=2).appended([0], 3).appended().to_json()
    assert kernel.tree.to_json() == apart.appended(tokens=3).to_json()
    for each in (kernel, made):
        assert each.verify(*tensors(each.tree))
    made.update(TREE)
    assert made.verify(*tensors(TREE))
    assert kernel.verify(*tensors(kernel.tree))


def test_a_copy_of_an_unused_kernel_takes_the_shape_of_its_own_first_call() -> None:
    kernel = compiled(shape=None)
    made = copy.deepcopy(kernel)
    kernel(*tensors(TREE))
    assert made.verify(*tensors(TREE, torch.float16))


def test_tensors_are_shared_by_copy_alone() -> None:
    sinks = torch.zeros(4)
    kernel = compiled(sinks=sinks)
    shallow, deep = copy.copy(kernel), copy.deepcopy(kernel)
    before = kernel(*tensors(TREE))
    sinks += 3
    assert torch.equal(shallow(*tensors(TREE)), kernel(*tensors(TREE)))
    assert torch.equal(deep(*tensors(TREE)), before)
    assert not torch.equal(kernel(*tensors(TREE)), before)


def test_a_model_is_copied_with_its_kernels() -> None:
    model = torch.nn.Linear(2, 2)
    model.sinks = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    model.kernel = compiled(sinks=model.sinks)
    made = copy.deepcopy(model)
    made.sinks += 3
    assert not torch.equal(made.kernel(*tensors(TREE)), model.kernel(*tensors(TREE)))


class Local(Own):
    """Stands for a class that no other process finds."""

    __qualname__ = "somewhere.<locals>.Local"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("score_mod", {"score_mod": lambda score, b, h, q_idx, kv_idx: score * 2}),
        ("mask_mod", {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx > 2}),
        ("strategy", {"strategy": Local()}),
    ],
)
def test_what_cannot_be_pickled_is_named(name: str, options: dict[str, Any]) -> None:
    kernel = compiled(**options)
    with pytest.raises(InputError, match=rf"^{name} = .* cannot be pickled: .*; define it .* pickle the kernel's tree"):
        pickle.dumps(kernel)
    for made in (copy.copy(kernel), copy.deepcopy(kernel)):
        assert made.verify(*tensors(TREE))


@ways
@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_wrappers(use_cuda_graph: bool, way: str) -> None:
    buffers = (torch.empty(3), torch.empty(8), torch.empty(2)) if use_cuda_graph else ()
    wrapper = TreeAttentionWrapper(None, "NHD", use_cuda_graph, False, *buffers)
    shape, options = (4, 2, 16, 4), {"q_data_type": "float32", "window_left": 9}
    q, cache = torch.randn(2, 4, 16), torch.randn(9, 2, 4, 2, 16)
    empty = WAYS[way](wrapper)
    wrapper.plan([0, 2, 4], [3, 1, 3, 8], [4, 2], *shape, **options)
    made = WAYS[way](wrapper)
    expected = wrapper.run(q, cache)
    assert torch.equal(made.run(q, cache), expected)
    made.plan([0, 2, 4], [1, 2, 3, 4], [1, 1], *shape, **options)
    assert not torch.equal(made.run(q, cache), expected)
    assert torch.equal(wrapper.run(q, cache), expected)
    with pytest.raises(InputError, match="no plan"):
        empty.run(q, cache)
    empty.plan([0, 2, 4], [3, 1, 3, 8], [4, 2], *shape, **options)
    assert torch.equal(empty.run(q, cache), expected)


@ways
def test_masks_of_any_shape(way: str) -> None:
    window = torch.ones(6, 6).tril().triu(-2).bool()
    tree, mask_mod = treegen.masked_tree(window.flatten().numpy(), [0, 6], [0, 6], device="cpu")
    kernel = compiled(tree, mask_mod=mask_mod)
    made = WAYS[way](kernel)
    assert torch.equal(made(*tensors(tree)), kernel(*tensors(tree)))
    assert made.verify(*tensors(tree))


@ways
def test_copies_of_trees_are_read_only(way: str) -> None:
    tree = Tree.from_page_table([0, 3, 6], [9, 1, 2, 9, 1, 4], [5, 16], 16).branched(0, 2)
    made = WAYS[way](tree)
    assert made.to_json() == tree.to_json()
    assert made.signature() == tree.signature()
    arrays = made.parent, made.tokens, made.row_node, made.row_sees, made.kv.start, made.kv.length, made.kv.indptr
    assert not any(array.flags.writeable for array in arrays)
