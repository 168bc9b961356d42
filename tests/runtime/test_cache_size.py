"""Caches that are shorter than what a tree refers to are refused by every call, and trees that CUDA graphs would read
beyond the end of their caches by every edit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import treegen
from treegen import KVRuns, Shape, Tree, TreeAttentionWrapper
from treegen.ir.errors import InputError

SHAPE = Shape(4, 2, 16, dtype="fp32")
TREE = Tree.parse("1,3/20,4")  # slots 0 to 31
APART = TREE.with_kv(
    [range(20), range(20, 24), range(30, 34), range(40, 44)]
)  # each row may go on behind its last slot
BACKENDS = ("torch", "triton")
FIXED = {"max_rows": 8}

backends = pytest.mark.parametrize("backend", BACKENDS)
capacities = pytest.mark.parametrize("options", [{}, FIXED], ids=["exact", "fixed"])


def compiled(tree: Tree, backend: str, **options: Any) -> treegen.Kernel:
    return treegen.compile(tree, strategy="deft-node", **{"shape": SHAPE, "backend": backend, **options})


def tensors(rows: int, slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, slots, 2, 16, generator=generator)
    return torch.randn(rows, 4, 16, generator=generator), k, v


def refuses(kernel: treegen.Kernel, slots: int, last: int) -> None:
    """The kernel refuses caches with too few slots, and serves those with one slot more than `last`."""
    rows = kernel.tree.num_rows
    for _ in range(2):
        with pytest.raises(InputError) as caught:
            kernel(*tensors(rows, slots))
        message = f"k_cache = {slots} slots: the tree refers to slot {last}; give a cache of at least {last + 1} slots"
        assert str(caught.value).startswith(message)
    assert kernel.verify(*tensors(rows, last + 1))


@backends
@capacities
def test_a_first_call(backend: str, options: dict[str, int]) -> None:
    refuses(compiled(TREE, backend, **options), 31, 31)


@backends
def test_a_refused_first_call_leaves_the_shape_open(backend: str) -> None:
    kernel = compiled(TREE, backend, shape=None)
    plan = kernel.plan
    with pytest.raises(InputError, match="k_cache = 31 slots"):
        kernel(*tensors(3, 31))
    assert kernel.plan is plan
    assert kernel.verify(*(tensor.half() for tensor in tensors(3, 32)))


EDITS: dict[str, tuple[Tree, Callable[[treegen.Kernel], object], int]] = {
    "update": (TREE, lambda kernel: kernel.update(Tree.parse("1,3/20,5")), 34),
    "step": (APART, lambda kernel: kernel.step(), 44),
    "two steps": (APART, lambda kernel: (kernel.step(), kernel.step()), 45),
    "step into slots": (APART, lambda kernel: (kernel.step(), kernel.step([25, 60, 45])), 60),
    "append": (APART, lambda kernel: kernel.append([2], 3), 46),
    "step and append": (APART, lambda kernel: (kernel.step(), kernel.append([2, 0], 3)), 47),
    "branch": (APART, lambda kernel: (kernel.branch(0, 2), kernel.append([3], slots=[50])), 50),
    "prune": (APART, lambda kernel: (kernel.step(), kernel.prune([0])), 44),
}


@backends
@capacities
@pytest.mark.parametrize("name", EDITS)
def test_calls_after_an_edit(name: str, options: dict[str, int], backend: str) -> None:
    tree, edit, last = EDITS[name]
    kernel = compiled(tree, backend, **options)
    before = tree.kv.last_slot + 1
    assert kernel.verify(*tensors(3, before))
    edit(kernel)
    refuses(kernel, min(before, last), last)


@backends
def test_kernels_that_read_no_early_slot_still_refer_to_it(backend: str) -> None:
    tree = TREE.with_kv([np.arange(100, 120), *(np.arange(4 * row, 4 * row + 4) for row in range(3))])
    refuses(compiled(tree, backend, window_left=2), 119, 119)


@backends
def test_pages(backend: str) -> None:
    tree = TREE.with_kv(KVRuns.from_pages(TREE.tokens, [[0, 1, 2, 3, 5], [4], [6], [9]], 4))
    for kv_layout in ("NHD", "HND"):
        shape = Shape(4, 2, 16, dtype="fp32", page_size=4, kv_layout=kv_layout)
        kernel = compiled(tree, backend, shape=shape)
        k, v = (torch.randn(sizes) for sizes in shape.cache_sizes(10))
        q = torch.randn(3, 4, 16)
        with pytest.raises(InputError, match="k_cache = 9 pages: the tree refers to page 9; give a cache of"):
            kernel(q, k[:9], v[:9])
        assert kernel.verify(q, k, v)


@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_page_ids_in_the_wrapper(use_cuda_graph: bool) -> None:
    buffers = (torch.empty(3), torch.empty(8), torch.empty(2)) if use_cuda_graph else ()
    wrapper = TreeAttentionWrapper(None, "NHD", use_cuda_graph, False, *buffers)
    q, cache = torch.randn(2, 4, 16), torch.randn(9, 2, 4, 2, 16)
    for last in (8, 7):
        wrapper.plan([0, 2, 4], [3, 1, 3, last], [4, 2], 4, 2, 16, 4, q_data_type="float32")
        assert wrapper.kernel.verify(q, cache[:, 0], cache[:, 1])
        with pytest.raises(InputError, match=f"k_cache = {last} pages: the tree refers to page {last};"):
            wrapper.run(q, cache[:last])


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_code(compiler: str) -> None:
    torch._dynamo.reset()
    kernel, (q, k, v) = compiled(APART, "torch"), tensors(3, 45)
    layer = torch.compile(lambda q: kernel(q, k, v), fullgraph=True, backend=compiler)
    kernel.step()
    assert torch.equal(layer(q), kernel(q, k, v))
    kernel.step()
    with pytest.raises(InputError, match="k_cache = 45 slots: the tree refers to slot 45"):
        layer(q)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[treegen.Kernel, int], None]:
    """Calls a kernel with caches of this size as if a CUDA graph captured it."""

    def captured(kernel: treegen.Kernel, slots: int) -> None:
        with monkeypatch.context() as during:
            during.setattr(treegen.runtime.prepared_calls, "captures", lambda q: True)
            kernel(*tensors(kernel.tree.num_rows, slots))

    return captured


@backends
def test_graphs_bound_the_trees_of_a_fixed_capacity(
    backend: str, capture: Callable[[treegen.Kernel, int], None]
) -> None:
    kernel = compiled(APART, backend, **FIXED)
    for slots in (60, 46, 50):
        capture(kernel, slots)
    with pytest.raises(InputError, match="k_cache = 40 slots"):
        capture(kernel, 40)
    kernel.step()
    kernel.step()
    before = kernel.tree
    for beyond in (
        lambda: kernel.step(),
        lambda: kernel.append([2], 9),
        lambda: kernel.step([26, 46, 36]),
        lambda: kernel.update(before.appended()),
        lambda: kernel.update(Tree.parse("1,3/20,9")),
    ):
        with pytest.raises(InputError, match=r"tree = slot \d+: a CUDA graph .* captured with a cache of 46 slots"):
            beyond()
        assert kernel.tree is before
        assert kernel.verify(*tensors(3, 46))
    kernel.update(Tree.parse("1,3/20,8"))
    assert kernel.verify(*tensors(3, 46))


def test_graphs_bound_the_page_ids_of_a_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = TreeAttentionWrapper(None, "NHD", True, False, torch.empty(3), torch.empty(8), torch.empty(2))
    q, cache, shape = torch.randn(2, 4, 16), torch.randn(9, 2, 4, 2, 16), (4, 2, 16, 4)
    wrapper.plan([0, 2, 4], [3, 1, 3, 7], [4, 2], *shape, q_data_type="float32")
    monkeypatch.setattr(treegen.runtime.prepared_calls, "captures", lambda q: True)
    expected = wrapper.run(q, cache[:8])
    with pytest.raises(InputError, match=r"tree = slot 33: .* a cache of 32 slots; capture another kernel or wrapper"):
        wrapper.plan([0, 2, 4], [3, 1, 3, 8], [4, 2], *shape, q_data_type="float32")
    assert torch.equal(wrapper.run(q, cache), expected)


@backends
def test_graphs_bound_no_trees_without_a_capacity(backend: str, capture: Callable[[treegen.Kernel, int], None]) -> None:
    kernel = compiled(APART, backend)
    kernel.step()
    capture(kernel, 45)
    for slots in (46, 47):
        kernel.step()  # has tables of its own, which no graph reads
        assert kernel.tree.kv.last_slot == slots - 1
        assert kernel.verify(*tensors(3, slots))
