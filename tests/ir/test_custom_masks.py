"""Trees from masks in FlashInfer's form: rows see exactly what the mask says, and masks of no tree are refused."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treegen
from support.forests import examples, forests, token_slots, visible, visible_slots
from treegen import Tree
from treegen.backends import oracle
from treegen.ir.errors import TreeError
from treegen.ir.tree import custom_masks


def packed(masks: list[np.ndarray]) -> np.ndarray:
    """Every request's bits from a new byte on, the lowest first."""
    parts = [np.packbits(mask.reshape(-1), bitorder="little") for mask in masks]
    return np.concatenate([np.empty(0, np.uint8), *parts])


def flat(masks: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, bool), *(mask.reshape(-1) for mask in masks)])


def check(tree: Tree, masks: list[np.ndarray], slots: list[list[int]]) -> None:
    """Every row sees the slots of its mask, each once."""
    assert tree.num_rows == sum(len(mask) for mask in masks)
    row = 0
    for mask, own in zip(masks, slots, strict=True):
        for line in mask:
            expected = [own[token] for token in np.flatnonzero(line)]
            assert sorted(visible_slots(tree, row)) == sorted(expected)
            row += 1


@examples(250)
@given(
    tree=forests(max_nodes=25, max_tokens=10, kv=("default", "slots"), salt=91),
    seed=st.integers(0, 2**32 - 1),
    requests=st.sampled_from((1, 0, 2, 5, 30)),
    as_bits=st.sampled_from((False, True)),
    in_order=st.sampled_from((True, False)),
    entries=st.sampled_from((1 << 22, 7)),
)
def test_masks_of_trees(tree: Tree, seed: int, requests: int, as_bits: bool, in_order: bool, entries: int) -> None:
    """The rows of a tree, dealt to requests; each lists the tokens that its rows see, and some that none does."""
    source = random.Random(seed)
    dense, all_slots = visible(tree), [slot for slots in token_slots(tree) for slot in slots]
    masks, slots = [], []
    owners = [source.randrange(requests) for _ in range(tree.num_rows)] if requests else []
    for request in range(requests):
        mask = dense[[row for row, owner in enumerate(owners) if owner == request]]
        kept = [token for token in range(mask.shape[1]) if mask[:, token].any() or source.random() < 0.2]
        if not in_order:
            source.shuffle(kept)
        masks.append(mask[:, kept])
        slots.append([all_slots[token] for token in kept])
    indptr = [np.cumsum([0, *map(len, parts)]).tolist() for parts in (masks, slots)]
    indices = [slot for own in slots for slot in own]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(custom_masks, "MOST_ENTRIES", entries)
        made = Tree.from_custom_mask((packed if as_bits else flat)(masks), *indptr, indices)
    check(made, masks, slots)
    if requests == 1 and in_order:
        assert len(made.tokens) <= len(tree.tokens) + 1  # rows that see nothing may have a node of their own
        assert made.unique_tokens == tree.unique_tokens


def token_tree_mask(parents: list[int], prefix: int) -> np.ndarray:
    """The mask of draft tokens behind a prefix."""
    mask = np.zeros((len(parents), prefix + len(parents)), bool)
    mask[:, :prefix] = True
    for token, parent in enumerate(parents):
        if parent >= 0:
            mask[token] = mask[parent]
        mask[token, prefix + token] = True
    return mask


@pytest.mark.parametrize("as_bits", [False, True])
def test_paged_requests_that_share_a_prefix(as_bits: bool) -> None:
    parents = [[-1, 0, 0, 1, 1], [-1], [-1, -1, 0]]
    lengths = [40, 45, 16]  # prefixes; the first 32 tokens of the first two and 16 of the third are in the same pages
    pages = [[3, 9, 4], [3, 9, 6], [3, 8]]
    masks = [token_tree_mask(own, length) for own, length in zip(parents, lengths, strict=True)]
    slots = [
        [page * 16 + offset for page in own for offset in range(16)][: mask.shape[1]]
        for own, mask in zip(pages, masks, strict=True)
    ]
    tree = Tree.from_custom_mask(
        torch.from_numpy((packed if as_bits else flat)(masks)),
        torch.tensor([0, 5, 6, 9]),
        torch.tensor([0, 3, 6, 8], dtype=torch.int32),
        torch.tensor([page for own in pages for page in own]),
        torch.tensor([13, 14, 3]),
        page_size=16,
    )
    check(tree, masks, slots)
    assert tree.unique_tokens == len({slot for own in slots for slot in own})
    roots = np.flatnonzero(tree.parent < 0)
    assert token_slots(tree)[roots.item()] == list(range(48, 64))

    q = torch.randn(9, 4, 16)
    k, v = torch.randn(2, 10, 16, 2, 16)
    out = treegen.compile(tree, backend="torch")(q, k, v)
    begin = 0
    for mask, own in zip(masks, slots, strict=True):
        keys, values = (cache.flatten(0, 1)[own].repeat_interleave(2, 1).transpose(0, 1) for cache in (k, v))
        rows = slice(begin, begin := begin + len(mask))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[rows].transpose(0, 1), keys, values, attn_mask=torch.from_numpy(mask)
        )
        assert oracle.error(out[rows], expected.transpose(0, 1)) < oracle.TOLERANCE["fp32"]


def test_a_ragged_cache_and_a_causal_mask() -> None:
    masks = [np.tri(4, 7, 3, dtype=bool), np.tri(3, 3, dtype=bool), np.zeros((0, 5), bool), np.zeros((2, 1), bool)]
    tree = Tree.from_custom_mask(flat(masks), [0, 4, 7, 7, 9], [0, 7, 10, 15, 16])
    check(tree, masks, [list(range(7)), [7, 8, 9], [10, 11, 12, 13, 14], [15]])
    # What all see, and one node for the chain of the others; of the second request all is one node.
    assert sorted(tree.tokens[tree.tokens > 0].tolist()) == [1, 2, 3, 4]


def test_windows_cross() -> None:
    band = np.tri(4, 4, 0, dtype=bool) & ~np.tri(4, 4, -2, dtype=bool)
    with pytest.raises(TreeError) as caught:
        Tree.from_custom_mask(flat([np.ones((1, 2), bool), band]), [0, 1, 5], [0, 2, 6])
    message = str(caught.value)
    told = re.search(
        r"custom_mask of request 1 = tokens (\d) and (\d): cross: row (\d) sees both, row (\d) only token (\d), row "
        r"(\d) only token (\d)",
        message,
    )
    assert told is not None, message
    one, other, both, first, _, second, _ = map(int, told.groups())
    assert band[both, one]
    assert band[both, other]
    assert band[first, [one, other]].tolist() == [True, False]
    assert band[second, [one, other]].tolist() == [False, True]


@examples(200)
@given(seed=st.integers(0, 2**32 - 1), rows=st.sampled_from(range(1, 7)), tokens=st.sampled_from(range(9)))
def test_any_mask_is_a_tree_or_has_two_tokens_that_cross(seed: int, rows: int, tokens: int) -> None:
    mask = np.random.default_rng(seed).random((rows, tokens)) < random.Random(seed).choice((0.2, 0.5, 0.9))
    sets = [frozenset(np.flatnonzero(column).tolist()) for column in mask.T]
    laminar = all(a <= b or b <= a or not a & b for a in sets for b in sets)
    if laminar:
        check(Tree.from_custom_mask(flat([mask]), [0, rows], [0, tokens]), [mask], [list(range(tokens))])
        return
    with pytest.raises(TreeError, match="cross") as caught:
        Tree.from_custom_mask(flat([mask]), [0, rows], [0, tokens])
    one, other = map(int, re.findall(r"\d+", str(caught.value.value)))
    assert sets[one] & sets[other]
    assert sets[one] - sets[other]
    assert sets[other] - sets[one]


ONES = np.ones(6, bool)
BAD = {
    "too short": (lambda: Tree.from_custom_mask(ONES[:5], [0, 2], [0, 3]), ["5 entries", "the 6 of all requests"]),
    "not packed": (
        lambda: Tree.from_custom_mask(ONES.view(np.uint8), [0, 2], [0, 3]),
        ["6 bytes of packed bits", "the 1 of all", "bool where it is not packed"],
    ),
    "numbers": (lambda: Tree.from_custom_mask(np.ones(6), [0, 2], [0, 3]), ["float64", "give bool, or uint8"]),
    "two-dimensional": (lambda: Tree.from_custom_mask(np.ones((2, 3), bool), [0, 2], [0, 3]), ["(2, 3)", "flat"]),
    "requests": (lambda: Tree.from_custom_mask(ONES, [0, 1, 2], [0, 3]), ["qo_indptr = 2 requests", "1 requests"]),
    "falling": (lambda: Tree.from_custom_mask(ONES, [0, 2, 1], [0, 3, 4]), ["qo_indptr[2] = 1", "falls"]),
    "first": (lambda: Tree.from_custom_mask(ONES, [0, 2], [1, 4]), ["kv_indptr = [1]", "begin with 0"]),
    "no pages": (lambda: Tree.from_custom_mask(ONES, [0, 2], [0, 3], page_size=4), ["kv_indices", "page_size"]),
    "no last page": (
        lambda: Tree.from_custom_mask(ONES, [0, 2], [0, 1], [3], page_size=4),
        ["kv_last_page_len", "is missing"],
    ),
    "pages": (lambda: Tree.from_custom_mask(ONES, [0, 2], [0, 3], [1, 2]), ["kv_indptr", "0 to 2 pages"]),
    "page": (lambda: Tree.from_custom_mask(ONES, [0, 2], [0, 3], [1, 2, -1]), ["kv_indices[2] = -1", "outside"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_masks_are_refused(name: str) -> None:
    make, pieces = BAD[name]
    with pytest.raises(TreeError) as caught:
        make()
    assert all(piece in str(caught.value) for piece in pieces), str(caught.value)


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: np.ndarray) -> torch.Tensor:
    """float64 attention of a request's queries over its tokens [tokens, heads, dim]; 0 for one that sees nothing."""
    scores = torch.einsum("qhd,thd->hqt", q.double(), k.double()) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.from_numpy(mask), -torch.inf)
    weights = torch.nan_to_num(scores.softmax(-1))
    return torch.einsum("hqt,thd->qhd", weights, v.double())


@examples(40)
@given(
    seed=st.integers(0, 2**32 - 1),
    density=st.sampled_from((0.0, 0.5, 0.9, 1.0)),
    page_size=st.sampled_from((1, 4)),
    as_bits=st.sampled_from((False, True)),
    strategy=st.sampled_from(("query", "deft-node", "cohort", "deft-flatten", "medusa")),
)
def test_masks_of_any_shape(seed: int, density: float, page_size: int, as_bits: bool, strategy: str) -> None:
    check_any_mask(np.random.default_rng(seed), density, page_size, as_bits, strategy, "torch")


def test_masks_of_any_shape_in_kernels() -> None:
    for density, page_size in ((0.5, 1), (0.9, 4)):
        check_any_mask(np.random.default_rng(page_size), density, page_size, False, "deft-node", "triton")


def check_any_mask(
    source: np.random.Generator, density: float, page_size: int, as_bits: bool, strategy: str, backend: str
) -> None:
    pages = source.integers(0, 6, 3)
    last = np.where(pages > 0, source.integers(1, page_size + 1, 3), 0)
    tokens = np.where(pages > 0, (pages - 1) * page_size + last, 0)
    queries = source.integers(0, 5, 3)
    masks = [source.random((rows, width)) < density for rows, width in zip(queries, tokens, strict=True)]
    for mask in masks:
        mask[:, : mask.shape[1] // 2] = True  # a prefix that all see
    shared = source.permutation(20)
    indices = [np.append(shared[: max(count - 1, 0)], 20 + r)[:count] for r, count in enumerate(pages)]
    tree, mask_mod = treegen.masked_tree(
        packed(masks) if as_bits else flat(masks),
        np.append(0, queries.cumsum()),
        np.append(0, pages.cumsum()),
        np.concatenate(indices),
        last,
        page_size,
    )
    assert tree.num_rows == queries.sum()
    q = torch.randn(tree.num_rows, 2, 16, generator=torch.Generator().manual_seed(0))
    k, v = torch.randn(2, 23, page_size, 2, 16, generator=torch.Generator().manual_seed(1))
    out = treegen.compile(tree, mask_mod=mask_mod, strategy=strategy, backend=backend)(q, k, v)
    for r, mask in enumerate(masks):
        own = slice(int(queries[:r].sum()), int(queries[: r + 1].sum()))
        keys, values = (cache[indices[r]].flatten(0, 1)[: tokens[r]] for cache in (k, v))
        torch.testing.assert_close(out[own].double(), masked_attention(q[own], keys, values, mask), atol=1e-5, rtol=0)


def test_a_mask_of_a_tree_needs_no_mask_mod() -> None:
    causal, crossing = np.tri(3, dtype=bool), np.array([[1, 1, 0], [0, 1, 1], [0, 0, 1]], bool)
    tree, mask_mod = treegen.masked_tree(flat([causal]), [0, 3], [0, 3])
    assert mask_mod is None
    check(tree, [causal], [[0, 1, 2]])
    tree, mask_mod = treegen.masked_tree(flat([crossing]), [0, 3], [0, 3])
    assert mask_mod is not None
    assert tree.path_tokens == 9
    with pytest.raises(TreeError, match="custom_mask"):
        treegen.masked_tree(flat([crossing])[1:], [0, 3], [0, 3])


def test_tokens_that_more_queries_see_come_first() -> None:
    """Also where they are behind the others in the request."""
    tree = Tree.from_custom_mask(flat([np.array([[1, 1, 1], [0, 0, 1]], bool)]), [0, 2], [0, 3])
    assert [tree.slots(row).tolist() for row in (0, 1)] == [[2, 0, 1], [2]]
