"""Trees that are equal in every array."""

from __future__ import annotations

from support.forests import token_slots
from treegen import Tree


def rows_of(tree: Tree) -> list[tuple[int, int]]:
    return list(zip(tree.row_node.tolist(), tree.row_sees.tolist(), strict=True))


def assert_same(found: Tree, expected: Tree) -> None:
    """Equal in every array."""
    assert found.parent.tolist() == expected.parent.tolist()
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert rows_of(found) == rows_of(expected)
    assert token_slots(found) == token_slots(expected)
