"""IO counts as the papers give them: DeFT's table 4, FlashForge's memory access, FlashInfer's cascade."""

from __future__ import annotations

import pytest

from support.h200 import H200
from treegen import Shape, Tree, strategies
from treegen.cost.account import Account, account
from treegen.schedule.lower import lower
from treegen.strategies import Strategy, strategy_from
from treegen.target.problem import Problem

HEADS, DIM, FP16 = 6, 64, 2
SHAPE = Shape(HEADS, HEADS, DIM, dtype="fp16")  # as many KV heads as query heads, as the papers count
WORD = 8

TREES = {
    # N_tree, l_n and the tokens of every query's path, counted by hand.
    "few-shot": (Tree.parse("4000(3*32)"), 4096, 32, 32 * 4003),
    "one chain": (Tree.parse("100(20(8))"), 128, 1, 128),
    "reasoning": (
        Tree.parse("640(30(10*2,64),50(20,12*3),36)"),
        640 + 30 + 2 * 10 + 64 + 50 + 20 + 3 * 12 + 36,
        8,
        2 * 680 + 734 + 710 + 3 * 702 + 676,
    ),
    "speculative": (
        Tree.from_token_tree([(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (1, 0), (2,)], 1016),
        1016 + 8,
        8,
        8 * 1016 + 1 + 2 + 2 + 3 + 3 + 4 + 3 + 2,
    ),
    "forest": (Tree.parse("500(6*2)+400(50*2)+12"), 500 + 12 + 400 + 100 + 12, 5, 2 * 506 + 2 * 450 + 12),
}


def accounted(strategy: Strategy | str, tree: Tree, shape: Shape = SHAPE) -> Account:
    plan = strategy_from(strategy).plan(Problem(tree, shape, H200))
    return account(plan, lower(plan, Problem(tree, shape, H200)), Problem(tree, shape, H200))


def per_head(amount: int) -> float:
    """Elements per head of bytes that all heads move."""
    return amount / (FP16 * HEADS)


@pytest.mark.parametrize("name", TREES)
class TestDeftTable4:
    """DeFT, appendix, table 4: elements per head and layer. KV is counted once per group whatever its row tiles, and
    partial results are not; masks are shared by the heads of a layer.
    """

    def test_flash_decoding(self, name: str) -> None:
        tree, _, _, paths = TREES[name]
        found = accounted("query", tree)
        assert per_head(found.kv_hbm_bytes) == 2 * DIM * paths
        assert (found.score_bytes, found.mask_bytes, found.partial_bytes) == (0, 0, 0)

    def test_tree_attention_m(self, name: str) -> None:
        """Medusa: QK^T, scaled, masked and softmax are written and read, each 2 l_n N_tree; the mask has l_n N_tree."""
        tree, unique, rows, _ = TREES[name]
        found = accounted("medusa", tree)
        assert per_head(found.kv_hbm_bytes) == 2 * DIM * unique
        assert per_head(found.score_bytes) == 4 * (2 * rows * unique)
        assert found.mask_bytes / FP16 == rows * unique
        assert found.partial_bytes == 0

    def test_tree_attention_s(self, name: str) -> None:
        """SpecInfer: every query reads the whole tree, with a bit per query and token."""
        tree, unique, rows, _ = TREES[name]
        found = accounted("specinfer", tree)
        assert per_head(found.kv_hbm_bytes) == 2 * DIM * unique * rows
        assert found.mask_bytes / WORD == rows * unique / 64
        assert (found.score_bytes, found.partial_bytes) == (0, 0)

    @pytest.mark.parametrize("strategy", ["deft-node", "deft-node-chunk", "flashforge", "cascade"])
    def test_deft_node(self, name: str, strategy: str) -> None:
        """Also what divides nodes in other ways: all read a node once for all its queries, without a mask."""
        tree, unique, _, _ = TREES[name]
        found = accounted(strategy, tree)
        assert per_head(found.kv_hbm_bytes) == 2 * DIM * unique
        assert (found.score_bytes, found.mask_bytes) == (0, 0)

    @pytest.mark.parametrize("block", [48, 128, 100_000])
    def test_deft_flatten(self, name: str, block: int) -> None:
        """A word per token, shared by all queries of a block, also where a block has more than 64."""
        tree, unique, _, _ = TREES[name]
        found = accounted(strategies.deft_flatten(block, "bits"), tree)
        assert per_head(found.kv_hbm_bytes) == 2 * DIM * unique
        assert found.mask_bytes / WORD == unique
        assert found.score_bytes == 0

    def test_the_trees_are_what_is_said(self, name: str) -> None:
        tree, unique, rows, paths = TREES[name]
        assert (tree.unique_tokens, tree.num_rows, tree.path_tokens) == (unique, rows, paths)
        assert unique % 64 == 0


def test_a_block_of_more_than_64_queries_has_one_word_per_token() -> None:
    tree = Tree.parse("56(1*200)")
    assert accounted(strategies.deft_flatten(128, "bits"), tree).mask_bytes == WORD * 256


def test_words_of_a_row_are_whole() -> None:
    """SpecInfer's bits of a row fill words: 65 tokens take two."""
    assert accounted("specinfer", Tree.parse("60(5*3)")).mask_bytes == 3 * 2 * WORD


def test_only_what_queries_see_is_counted() -> None:
    """Pruned branches and the rest of a node that no query has reached are not part of N_tree."""
    tree = Tree.from_parents([-1, 0, 0], [100, 50, 60], rows=[(1, 28), (0, 100)])
    for name in ("medusa", "deft-node", "deft-flatten"):
        assert per_head(accounted(name, tree).kv_hbm_bytes) == 2 * DIM * 128
    assert accounted("medusa", tree).mask_bytes / FP16 == 2 * 128


@pytest.mark.parametrize(
    ("requests", "shared", "own", "ratio", "digits"), [(512, 122_880, 60, 409.8, 1e-9), (16, 131_072, 803, 14.66, 5e-3)]
)
def test_memory_access_of_flashforge(requests: int, shared: int, own: int, ratio: float, digits: float) -> None:
    """FlashForge's evaluation: 14.66 to 409.80 times less than FlashDecoding. Of two levels it is B r + 1 - r for B
    requests whose shared tokens are the fraction r of the tree; the settings are ours, they give the published ends.
    """
    tree = Tree.from_levels([1, requests], [shared, own])
    found = accounted("query", tree).kv_hbm_bytes / accounted("flashforge", tree).kv_hbm_bytes
    part = shared / (shared + requests * own)
    assert found == pytest.approx(requests * part + 1 - part, rel=1e-12)
    assert found == pytest.approx(ratio, abs=digits)


@pytest.mark.parametrize(
    ("nodes", "tokens"), [([1, 4], [100, 10]), ([1, 3, 12], [900, 64, 5]), ([2, 2, 4, 8, 80], [9, 200, 30, 1, 70])]
)
@pytest.mark.parametrize("heads", [(6, 6), (8, 2)])
def test_cascade(nodes: list[int], tokens: list[int], heads: tuple[int, int]) -> None:
    """FlashInfer's cascade: each level writes a partial per row, and each merge but the first level's reads the row's
    result so far and the level's partial; results go back to memory but for the last, which is the output.
    """
    shape = Shape(*heads, DIM, dtype="fp16")
    tree = Tree.from_levels(nodes, tokens)
    found = accounted("cascade", tree, shape)
    rows, levels = nodes[-1], len(nodes)
    unique = sum(count * length for count, length in zip(nodes, tokens, strict=True))
    assert found.kv_hbm_bytes == unique * 2 * DIM * FP16 * heads[1]
    state = heads[0] * (DIM + 1) * 4  # out and lse of a row in float32
    written, read = levels * rows + (levels - 2) * rows, (levels - 1) * 2 * rows
    assert found.partial_bytes == (written + read) * state
    assert found.launches == 2 * levels - 1


def test_partials_of_one_reduction() -> None:
    """DeFT-Node merges all nodes of a path at once: a partial per row and node, written and read."""
    tree = Tree.from_levels([1, 3, 12], [900, 64, 5])
    state = HEADS * (DIM + 1) * 4
    assert accounted("deft-node", tree).partial_bytes == 2 * 3 * 12 * state
    assert accounted("cascade", tree).partial_bytes == (4 * 12 + 4 * 12) * state
