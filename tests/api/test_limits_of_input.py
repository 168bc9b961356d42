"""Input at the edges: sizes beyond what is counted in int32, integers that are none, arrays of odd forms, memory that
overlaps. All of it is refused in one line, before work or memory that its size does not bound, or simply works.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import treegen
from support.call_counts import calls
from support.rejections import Make, rejected
from treegen import KVRuns, Shape, Tree, TreeAttentionWrapper, TreegenError, cli, strategies
from treegen.ir.errors import FormatError, InputError, ShapeError, StrategyError, TreeError
from treegen.workloads import generate, tree_files

Case = tuple[Make, type[TreegenError], tuple[str, ...]]

TREE = Tree.parse("10(5,3)")
LONG = Tree.parse("2147483646")
TWICE = Tree.parse("1073741823*2").with_kv(KVRuns.from_pages([2**30 - 1] * 2, [[0], [0]], 2**30))
MOST = 2**31 - 1
HUGE = 10**5000  # too long for Python to write down

SIZES: dict[str, Case] = {
    "pages of a table": (
        lambda: Tree.from_page_table([0, 1], [0], [1], 2**31),
        TreeError,
        ("page_size = 2147483648", "exceeds 2147483647"),
    ),
    "pages of a block table": (lambda: Tree.from_block_table([[0]], [1], 2**40), TreeError, ("page_size", "exceeds")),
    "pages of runs": (lambda: KVRuns.from_pages([1], [[0]], 2**31), TreeError, ("page_size", "exceeds")),
    "pages of a mask": (
        lambda: Tree.from_custom_mask([True], [0, 1], [0, 1], [0], [1], 2**70),
        TreeError,
        ("page_size", "exceeds"),
    ),
    "pages of a shape": (lambda: Shape(8, 8, 64, page_size=2**31), ShapeError, ("page_size = 2147483648", "exceeds")),
    "heads": (lambda: Shape(2**31, 1, 64), ShapeError, ("num_qo_heads = 2147483648", "exceeds")),
    "heads of 5,000 digits": (lambda: Shape(8, HUGE, 64), ShapeError, ("num_kv_heads = a value of type int",)),
    "levels": (
        lambda: Tree.from_levels([1, MOST], [1, 1]),
        TreeError,
        ("nodes_per_level = [1, 2147483647]", "makes 2147483648 nodes", "at or below 10000000"),
    ),
    "copies of rows": (lambda: TREE.branched(0, 2**33), TreeError, ("copies = 8589934592", "exceeds 2147483647")),
    "copies in int32": (lambda: TREE.branched(0, MOST), TreeError, ("copies", "makes 2147483648 rows")),
    "copies of 5,000 digits": (lambda: TREE.branched(0, HUGE), TreeError, ("copies = a value of type int",)),
    "new tokens": (lambda: TREE.appended(tokens=MOST), TreeError, ("tokens = 2147483647", "makes 4294967294 tokens")),
    "one token too many": (
        lambda: TWICE.appended(None, 1, [[2**30], [2**30 + 1]]),
        TreeError,
        ("tokens = 2147483648", "total exceeds 2^31 - 1", "split the forest"),
    ),
    "queries": (
        lambda: LONG.with_causal_queries(MOST - 1),
        TreeError,
        ("counts = 2147483646", "makes 2147483646 rows"),
    ),
    "tokens of runs that overlap": (
        lambda: Tree.from_parents([-1, 0], [MOST] * 2, kv=KVRuns.from_runs([MOST] * 2, [[(0, MOST)]] * 2)),
        TreeError,
        ("tokens = 4294967294", "total exceeds 2^31 - 1"),
    ),
    "tokens of pages": (
        lambda: Tree.from_custom_mask([], [0, MOST], [0, 4], [0] * 4, [1], MOST),
        TreeError,
        ("kv_indices", "total exceeds 2^31 - 1 tokens"),
    ),
    "steps of a template": (
        lambda: tree_files.Template([-1], [1], [MOST]),
        FormatError,
        ("end[0] = 2147483647", "outside 0..10000000"),
    ),
    "shuffled pages": (
        lambda: generate.in_shuffled_pages(LONG, 1),
        TreeError,
        ("page_size = 1", "makes 2147483646 pages"),
    ),
    "window": (
        lambda: treegen.compile(TREE, window_left=2**63),
        InputError,
        ("window_left = 9223372036854775808", "-1..2147483647"),
    ),
    "soft-cap": (lambda: treegen.compile(TREE, logits_soft_cap=10**400), InputError, ("logits_soft_cap", "finite")),
    "scale": (lambda: treegen.compile(TREE, sm_scale=10**400), InputError, ("sm_scale", "finite")),
    "scale of keys": (lambda: treegen.compile(TREE, k_scale=10**400), InputError, ("k_scale", "finite")),
    "tokens of a work item": (lambda: strategies.query(split=2**31), StrategyError, ("split", "exceeds")),
    "work items": (
        lambda: treegen.compile(LONG, strategy=strategies.query(split=1)),
        StrategyError,
        ("tokens of a part = 1", "makes 2147483646 parts"),
    ),
    "work items in whole tiles": (
        lambda: treegen.compile(LONG, strategy=strategies.cohort(split=16, merge="final")),
        StrategyError,
        ("tokens of a part = 16", "makes 134217728 parts"),
    ),
    "room for work items": (
        lambda: treegen.compile(TREE, strategy="query", max_items=10**9).workspace_size(),
        InputError,
        ("max_rows, max_items = ", "words of tables", "1 GiB"),
    ),
    "slot behind the last": (lambda: KVRuns.from_slots([1], [[MOST]]), TreeError, ("kv[0][0] = 2147483647", "outside")),
    "row": (lambda: TREE.slots(2), TreeError, ("row[0] = 2", "outside 0..1")),
}

INTEGERS: dict[str, Case] = {
    "digits of another script": (lambda: Tree.parse("٣٢"), FormatError, ("number of tokens", "'٣' at position 0")),
    "digits in levels": (lambda: Tree.parse("1,٢/3,4"), FormatError, ("tree = ", "'٢' at position 2")),
    "raised digits": (lambda: Tree.parse("5(²)"), FormatError, ("number of tokens", "'²' at position 2")),
    "raised copies": (lambda: Tree.parse("5*³"), FormatError, ("positive number of copies", "'³' at position 2")),
    "digits in a node list": (
        lambda: Tree.from_parents(*treegen.ir.tree.tree_text.parse_node_list("1\n-1 0 ٣ 0")),
        FormatError,
        ("line 2 is not four integers",),
    ),
    "underscores in a node list": (
        lambda: Tree.from_parents(*treegen.ir.tree.tree_text.parse_node_list("1\n-1 0 1_0 0")),
        FormatError,
        ("line 2 is not four integers",),
    ),
    "booleans of NumPy in a list": (lambda: Tree.from_parents([-1], [np.True_]), TreeError, ("tokens[0] = ", "True")),
    "booleans of PyTorch in a list": (
        lambda: Tree.from_parents([-1, 0], [5, torch.tensor(True)]),
        TreeError,
        ("tokens[1] = ", "True"),
    ),
    "an array of booleans": (lambda: TREE.pruned(np.array([True, False])), TreeError, ("rows[0] = ", "True")),
    "a tensor of booleans": (lambda: TREE.pruned(torch.tensor([True, False])), TreeError, ("rows[0] = ", "True")),
    "booleans beside slots": (lambda: TREE.appended([0, 1], slots=[True, 50]), TreeError, ("slots[0] = True",)),
    "booleans in nested slots": (lambda: TREE.appended([0, 1], 1, [[60], [True]]), TreeError, ("slots[1] = True",)),
    "booleans in a block table": (
        lambda: Tree.from_block_table([[True, 2]], [3], 2),
        TreeError,
        ("block_table[0] = True",),
    ),
    "a flag for a row": (lambda: TREE.branched(True, 2), TreeError, ("row[0] = True", "not an integer")),
    "a flag for counts": (lambda: TREE.with_causal_queries(True), TreeError, ("counts[0] = True", "not an integer")),
    "a flag for a scale": (lambda: treegen.compile(TREE, sm_scale=True), InputError, ("sm_scale = True",)),
    "a number for a flag": (lambda: TREE.with_drafts([-1], stored=1), TreeError, ("stored = 1", "not a bool")),
}

ARRAYS: dict[str, Case] = {
    "ragged slots": (lambda: TREE.with_drafts([-1, 0], slots=[[1], [2, 3]]), TreeError, ("slots", "not an array")),
    "ragged slots of rows": (lambda: TREE.appended(slots=[[1], [2, 3]]), TreeError, ("slots", "not an array")),
    "one slot without dimensions": (lambda: TREE.appended(slots=torch.tensor(3)), TreeError, ("slots = shape ()",)),
    "drafts without dimensions": (lambda: TREE.with_drafts(np.array(3)), TreeError, ("parents = array(3)", "list")),
    "paths without dimensions": (lambda: Tree.from_paths(torch.tensor(3)), TreeError, ("paths", "not a list")),
    "a path without dimensions": (lambda: Tree.from_paths([np.array(3)]), TreeError, ("paths[0]", "not a sequence")),
    "rows without dimensions": (
        lambda: Tree.from_parents([-1], [3], rows=np.array(0)),
        TreeError,
        ("rows", "not a list"),
    ),
    "kv without dimensions": (lambda: TREE.with_kv(torch.tensor(3)), TreeError, ("kv", "not a list")),
    "slots of no node": (lambda: KVRuns.from_slots([1], None), TreeError, ("kv = None", "one sequence of slots")),
    "runs of no node": (lambda: KVRuns.from_runs([1], [3]), TreeError, ("kv[0] = 3", "(start, length)")),
    "runs that are lists": (
        lambda: TREE.with_kv(KVRuns([0, 9], [0], [5])),  # type: ignore[arg-type]
        TreeError,
        ("kv.indptr", "int32", "from_runs"),
    ),
    "runs of other nodes": (
        lambda: Tree.from_parents([-1], [5]).with_kv(
            KVRuns(*(np.array(column, np.int32) for column in ([0, 9], [0], [5])))
        ),
        TreeError,
        ("kv.indptr = [0, 9]", "1 starts"),
    ),
    "a table without dimensions": (
        lambda: Tree.from_block_table(np.array(3), [1], 1),
        TreeError,
        ("block_table = shape ()", "not a table"),
    ),
    "offsets without dimensions": (lambda: Tree.from_page_table(torch.tensor(0), [], [], 1), TreeError, ("kv_indptr",)),
    "a tensor without memory": (
        lambda: Tree.from_parents([-1], torch.empty(1, device="meta", dtype=torch.int32)),
        TreeError,
        ("tokens",),
    ),
    "tokens that are tensors": (
        lambda: Tree.from_paths([[torch.tensor(1), torch.tensor(2)]]),
        TreeError,
        ("paths", "tensors for tokens", "one flat tensor per path"),
    ),
    "trees that are texts": (lambda: Tree.joined([TREE, "5"]), TreeError, ("trees[1] = 5", "Tree.parse")),
    "a file that is a number": (lambda: Tree.load(3), FormatError, ("path = 3", "not a path")),
    "a factory that is none": (
        lambda: treegen.register_strategy("mine", 3),  # type: ignore[arg-type]
        StrategyError,
        ("factory = 3", "not a function"),
    ),
    "a target that is an array": (lambda: treegen.compile(TREE, target=np.empty(0)), TreegenError, ("target",)),
    "a tensor without entries to read": (
        lambda: treegen.compile(TREE, score_mod=lambda score, b, h, q, k: score + torch.empty(0)[k]),
        InputError,
        ("score_mod", "no entries"),
    ),
}
CASES = {**SIZES, **INTEGERS, **ARRAYS}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_at_once_in_one_line(name: str) -> None:
    make, error, words = CASES[name]
    tracemalloc.start()
    try:
        if error is TreegenError:
            with pytest.raises(error):
                make()
        else:
            rejected(make, error, *words)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "value", [HUGE, "[" * 2000, [[[[[[[[1]]]]]]]], list(range(10**6))], ids=["int", "text", "deep", "long"]
)
def test_errors_show_the_beginning_of_any_value(value: object) -> None:
    assert len(str(TreegenError("argument", value, "is odd", "give another"))) < 200
    assert calls(lambda: str(TreegenError("argument", value, "is odd", "give another"))) < 500


def test_requests_without_queries_cost_nothing() -> None:
    tracemalloc.start()
    try:
        tree = Tree.from_custom_mask(np.empty(0, bool), [0, 0], [0, MOST])
        assert (tree.num_rows, tree.unique_tokens) == (0, 0)
        assert Tree.from_custom_mask([], [0], [0]).num_rows == 0
        mixed = Tree.from_custom_mask([True, True, False], [0, 0, 1], [0, MOST - 3, MOST])
        assert mixed.slots(0).tolist() == [MOST - 3, MOST - 2]
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_texts_of_any_depth() -> None:
    """Levels are not copied into those above them, which took 44 s for 200,000 levels."""
    depth = 200_000
    tree = Tree.parse("1(" * depth + "1" + ")" * depth)
    assert tree.parent.tolist() == list(range(-1, depth))


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("1, 4 / 100, 10", "1,4/100,10"),
        (" 1 ,4\t_ 100 , 10\n", "1,4/100,10"),
        ("1 , 4  100 , 10", "1,4/100,10"),
        ("100 ( 10 * 4 , 3 ) * 2 + 7", "100(10*4,3)*2+7"),
        ("5\n(\n 3,\n 2 * 3\n)", "5(3,2*3)"),
        ("5(2(1)*2)*3", "5(2(1),2(1))+5(2(1),2(1))+5(2(1),2(1))"),
        ("4*3", "4+4+4"),
    ],
)
def test_blanks_and_copies_in_texts(text: str, same: str) -> None:
    assert Tree.parse(text).to_json() == Tree.parse(same).to_json()


def test_page_sizes_up_to_int32() -> None:
    tree = Tree.from_page_table([0, 1, 2], [0, 0], [5, 7], MOST)
    assert tree.positions().tolist() == [4, 6]
    assert tree.slots(1).tolist() == list(range(7))
    assert Tree.from_block_table([[0], [0]], [5, 7], MOST).to_json() == tree.to_json()
    assert KVRuns.from_pages([MOST], [[0, 0]], 2**30).length.tolist() == [2**30, 2**30 - 1]


@pytest.mark.parametrize("make", [np.array, torch.tensor, lambda path: torch.tensor(path, dtype=torch.int32), tuple])
def test_paths_take_arrays_and_tensors(make: Callable[[Any], Any]) -> None:
    paths = [[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3, 7]]
    expected = Tree.from_paths(paths).to_json()
    assert Tree.from_paths([make(path) for path in paths]).to_json() == expected
    assert Tree.from_paths(make(paths)).to_json() == expected
    assert Tree.from_paths([make(paths[0]), *paths[1:]]).to_json() == expected


def test_arrays_of_rows_of_slots_and_of_drafts() -> None:
    rows, slots = np.array([[0, 3], [1, 2]]), torch.tensor([[1, 2], [8, 9]])
    tree = Tree.from_parents([-1, 0], [3, 2], rows=rows.tolist())
    for form in (np.array, torch.tensor):
        assert Tree.from_parents(form([-1, 0]), form([3, 2]), rows=form(rows)).to_json() == tree.to_json()
    assert KVRuns.from_slots([2, 2], slots).start.tolist() == [1, 8]
    drafts = TREE.with_drafts([[-1, 0], [-1, 0]]).to_json()
    assert TREE.with_drafts(torch.tensor([[-1, 0], [-1, 0]])).to_json() == drafts
    assert TREE.with_drafts([torch.tensor(-1), torch.tensor(0)]).to_json() == drafts


def test_what_a_tree_tells_becomes_tensors_without_a_warning() -> None:
    """Warnings are errors in the tests."""
    for array in (TREE.positions(), TREE.slots(0), TREE.kv.slots(1)):
        tensor = torch.from_numpy(array)
        assert tensor.dtype == torch.int32
        tensor += 100  # the tree's own arrays stay as they are
    assert TREE.positions().tolist() == [14, 12]
    assert TREE.slots(1).tolist() == [*range(10), 15, 16, 17]


def caches() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, K and V that fit TREE."""
    return torch.randn(2, 4, 16), torch.randn(18, 2, 16), torch.randn(18, 2, 16)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_an_out_whose_elements_share_memory_is_refused(backend: str) -> None:
    kernel, tensors = treegen.compile(TREE, backend=backend), caches()
    expected = kernel(*tensors)
    for out in (
        torch.zeros(1, 4, 16).expand(2, 4, 16),
        torch.zeros(2, 1, 16).expand(2, 4, 16),
        torch.zeros(200).as_strided((2, 4, 16), (56, 16, 1)),
    ):
        rejected(lambda out=out: kernel(*tensors, out=out), InputError, "out = strides", "share memory", "like q")
        assert not out.any()
    for out in (
        torch.empty(4, 2, 16).transpose(0, 1),
        torch.empty(2, 9, 16)[:, 1:8:2],
        torch.empty(6, 4, 24)[::3, :, 8:],
    ):
        assert torch.equal(kernel(*tensors, out=out), expected)


def test_an_lse_is_checked_before_the_launch() -> None:
    wrapper = TreeAttentionWrapper()
    wrapper.plan([0, 1, 2], [0, 1], [2, 3], 4, 2, 16, 4, q_data_type=torch.float32)
    pages, q, out = (torch.randn(2, 4, 2, 16), torch.randn(2, 4, 2, 16)), torch.randn(2, 4, 16), torch.zeros(2, 4, 16)
    for lse, words in (
        (True, "bool: is not a tensor"),
        (torch.empty(2, 1).expand(2, 4), "share memory"),
        (torch.empty(2, 3), "needs (2, 4)"),
    ):
        rejected(lambda lse=lse: wrapper.run(q, pages, out=out, lse=lse, return_lse=True), InputError, "lse", words)
        assert not out.any()
    lse = torch.empty(2, 4)
    assert wrapper.run(q, pages, lse=lse, return_lse=True)[1] is lse


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_verify_clamps_indices_as_kernels_do(backend: str) -> None:
    bias, seen = torch.randn(4, 3), torch.tensor([True, False])

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h - 9, kv_idx - 6] + bias[7 + h, kv_idx]

    kernel = treegen.compile(
        TREE, score_mod=score_mod, mask_mod=lambda b, h, q, k: seen[k - 8] | (k > 11), backend=backend
    )
    assert kernel.verify(*caches()).passed


def test_a_text_in_place_of_a_tree_is_named() -> None:
    fix = "give treegen.Tree.parse(text), or treegen.Tree.load(path) for a file"
    rejected(lambda: treegen.compile("1,4/100,10"), TreeError, "tree = 1,4/100,10", "is a text", fix)
    rejected(lambda: treegen.compile(TREE).update("1,4/100,10"), TreeError, "tree = 1,4/100,10", "is a text", fix)


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "٣٢"],
        ["explain", "5", "--heads", "٣٢:8"],
        ["explain", "5", "--page-size", "٣٢"],
        ["explain", "5", "--page-size", "2147483648"],
        ["explain", "1,9999999999/1,1"],
        ["io", "few-shot:width=٣"],
        ["generate", "few-shot", "--width", "2147483648"],
    ],
)
def test_the_command_line_refuses_it_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("treegen: error: ")
