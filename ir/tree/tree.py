"""Tree: runs of tokens that extend one another, and the query rows that attend to them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import treegen.ir.tree.build as build
import treegen.ir.tree.custom_masks as custom_masks
import treegen.ir.tree.edits as edits
import treegen.ir.tree.joining as joining
import treegen.ir.tree.networkx_form as networkx_form
import treegen.ir.tree.page_tables as page_tables
import treegen.ir.tree.queries as queries
import treegen.ir.tree.requests as by_request
import treegen.ir.tree.tree_json as tree_json
import treegen.ir.tree.tree_text as tree_text
from treegen.ir.arrays import Ints, IntsLike, LazySequence, frozen, int32_array, listed
from treegen.ir.errors import TreeError
from treegen.ir.notebook_form import Drawn
from treegen.ir.tree.kv import KVRuns
from treegen.ir.tree.request_kv import RequestKV
from treegen.ir.tree.shards import Shard, shard_slots, sharded
from treegen.ir.tree.signature import signature
from treegen.ir.tree.topology import Ranks, Topology, derive, derive_ranked, lengthened, ranks_of
from treegen.ir.tree.tree_checks import checked_kv, checked_rows

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True, slots=True)
class Node:
    """One node for printing and passes, as a small object.

    Attributes:
        index: The number of the node.
        parent: Its parent, -1 for a root.
        tokens: Its tokens.
        rows: The rows that are attached to it, as pairs (row, sees).
    """

    index: int
    parent: int
    tokens: int
    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Tree(Drawn):
    """A forest of nodes, which are runs of tokens, with query rows; immutable.

    Make one with `from_levels`, `from_parents` and the other class methods. Node v extends its parent, `parent[v]` (-1
    for a root), by `tokens[v]` tokens, which may be 0. Row i, in the caller's order, is attached to node `row_node[i]`.
    It sees every token of this node's ancestors and the first `row_sees[i]` tokens of the node itself. `kv` says in
    which slots tokens are. A tree by request names its tokens in `requests` instead (None for other trees), and `kv`
    only numbers them.
    """

    parent: Ints
    tokens: Ints
    row_node: Ints
    row_sees: Ints
    kv: KVRuns
    topology: Topology = field(repr=False)
    requests: RequestKV | None = field(default=None, repr=False)

    @classmethod
    def from_parents(
        cls,
        parents: IntsLike,
        tokens: IntsLike,
        rows: Iterable[tuple[int, int]] | None = None,
        kv: KVRuns | Sequence[IntsLike] | None = None,
    ) -> Tree:
        """Makes a tree of one parent and one length per node.

        Args:
            parents: The parent of each node, -1 for a root.
            tokens: The tokens of each node.
            rows: A pair (node, sees) for each row, in the caller's order; by default one row per leaf, by node index,
                that sees the whole leaf.
            kv: A sequence of token slots for each node, or a KVRuns; by default the nodes lie one after another from
                slot 0.

        Raises:
            TreeError: The arrays are no forest, or a row lies outside of its node.
        """
        length = int32_array("tokens", tokens, low=0)
        if len(length) == 0:
            raise TreeError("tokens", length.tolist(), "a tree needs at least one node", "give one length per node")
        parent = int32_array("parents", parents, low=-1, high=len(length) - 1)
        if len(parent) != len(length):
            raise TreeError(
                "parents", f"{len(parent)} entries", f"does not match {len(length)} nodes", "give one parent per node"
            )
        if rows is None:
            leaf = np.ones(len(parent), bool)
            leaf[parent[parent >= 0]] = False
            row_node = frozen(np.flatnonzero(leaf))
            row_sees = frozen(length[row_node])
        else:
            row_node, row_sees = checked_rows(rows, length)
        topology = derive(parent, length, row_node, row_sees)
        runs = KVRuns.contiguous(length) if kv is None else checked_kv(kv, length)
        return cls(parent, length, row_node, row_sees, runs, topology)

    @classmethod
    def from_levels(cls, nodes_per_level: IntsLike, tokens_per_node: IntsLike) -> Tree:
        """Makes a tree of levels, with one row per leaf. Node j of level l has the parent `j * n[l-1] // n[l]`.

        Args:
            nodes_per_level: The number of nodes of each level, from the roots down; 10,000,000 nodes in all at most.
            tokens_per_node: The tokens of each node of a level.

        Raises:
            TreeError: The lists differ in length, or have impossible numbers.
        """
        return cls.from_parents(*build.from_levels(nodes_per_level, tokens_per_node))

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[Hashable]], *, block_size: int = 1) -> Tree:
        """Makes the radix tree of sequences. Row i is path i; nodes are in depth-first order of first appearance.

        Args:
            paths: Sequences of tokens, or of block hashes: lists, arrays or CPU tensors, or the rows of one array.
            block_size: Tokens that each entry of a path stands for.

        Raises:
            TreeError: The paths are no sequences.
        """
        return cls.from_parents(*build.from_paths(paths, block_size))

    @classmethod
    def from_token_tree(cls, paths: Iterable[Sequence[int]], prefix: int) -> Tree:
        """Makes a speculative token tree in Medusa's form, with `1 + len(paths)` rows; the first is the root token's.

        Node 0 holds the context, node 1 the root token, and node i + 2 the token of path i. Their KV lies in this
        order.

        Args:
            paths: For each token its child ranks from the root token, which is not listed itself.
            prefix: Tokens of the context.

        Raises:
            TreeError: A path is empty, occurs twice or lacks its parent.
        """
        return cls.from_parents(*build.from_token_tree(paths, prefix))

    @classmethod
    def from_page_table(
        cls, kv_indptr: IntsLike, kv_indices: IntsLike, kv_last_page_len: IntsLike, page_size: int
    ) -> Tree:
        """Makes the tree of a batch of requests in FlashInfer's form. Each request has a row that sees all its tokens.

        Requests that begin with the same pages share them. A page at different places of two requests is not shared.
        Two requests that end in the same page may see different parts of it.

        Args:
            kv_indptr: `[requests + 1]`; offsets into kv_indices. This and the next are lists, arrays or CPU tensors.
            kv_indices: The page ids of all requests, one request after another.
            kv_last_page_len: `[requests]`; tokens in the last page of each request, from 1 to page_size; any number of
                0 to page_size where a request has no pages.
            page_size: Tokens of a page.

        Raises:
            TreeError: The arrays are no page table.
        """
        return cls._ranked(*page_tables.from_page_table(kv_indptr, kv_indices, kv_last_page_len, page_size))

    @classmethod
    def from_block_table(cls, block_table: npt.ArrayLike, seq_lens: IntsLike, page_size: int) -> Tree:
        """Makes the tree of a batch of requests in vLLM's form; otherwise as from_page_table.

        Args:
            block_table: `[requests, blocks]` page ids; entries after a request's last page may be anything.
            seq_lens: `[requests]`; tokens of each request.
            page_size: Tokens of a page.

        Raises:
            TreeError: The arrays are no block table.
        """
        return cls._ranked(*page_tables.from_block_table(block_table, seq_lens, page_size))

    @classmethod
    def from_requests(
        cls,
        seq_lens: IntsLike,
        shared_with: IntsLike | None = None,
        shared_tokens: IntsLike | None = None,
        *,
        page_size: int = 1,
    ) -> Tree:
        """Makes the tree by request of a batch of growing requests, with one row each.

        The tree's `requests` say for each node whose tokens it holds. The last node of a request reaches to the
        request's present length. It has at least one token in the tree, also where the request has none yet, so that
        plans have a place for it. Trees made of this one by edits, and its JSON text, do not name requests; their slots
        are placeholders.

        Args:
            seq_lens: `[requests]`; tokens of each request. All arrays are lists, arrays or CPU tensors.
            shared_with: `[requests]`; the request that each one shares its first tokens with, -1 for none. It may come
                later in the batch.
            shared_tokens: `[requests]`; the number of shared tokens, which is rounded down to whole pages.
            page_size: Tokens of a page.

        Raises:
            TreeError: Requests share in a cycle, or more tokens than one of them has, or the arrays do not match.
        """
        parts, topology, requests = by_request.from_requests(seq_lens, shared_with, shared_tokens, page_size)
        return cls(*parts, topology, requests)

    @classmethod
    def from_custom_mask(
        cls,
        custom_mask: npt.ArrayLike,
        qo_indptr: IntsLike,
        kv_indptr: IntsLike,
        kv_indices: IntsLike | None = None,
        kv_last_page_len: IntsLike | None = None,
        page_size: int = 1,
    ) -> Tree:
        """Makes the tree of a batch of requests under FlashInfer's masks, with one row per query.

        A node's tokens need not be neighbours in the request; they keep the request's order. On a path, tokens that
        more queries see come before those that fewer see, wherever they are in the request: positions, which windows,
        ALiBi and score functions read, are those on the path. Requests share the first slots that all of their queries
        see.

        Args:
            custom_mask: For each request in turn a flat mask `[queries, tokens]`, true where a query sees a token. In
                bool, or as uint8 its bits, the lowest first; each request begins a new byte
                (`segment_packbits(..., bitorder="little")`).
            qo_indptr: `[requests + 1]`; offsets of queries.
            kv_indptr: `[requests + 1]`; offsets of tokens in a cache without pages, or with kv_indices and
                kv_last_page_len of a page table, as in from_page_table.
            kv_indices: The page ids of all requests.
            kv_last_page_len: `[requests]`; tokens in the last page of each request.
            page_size: Tokens of a page.

        Raises:
            TreeError: The arrays do not match, or the mask is not that of a tree: one query sees two tokens, and two
                other queries see one of these each. The message names the tokens, counted within the request.
        """
        parts, topology = custom_masks.from_custom_mask(
            custom_mask, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, page_size
        )
        return cls(*parts, topology)

    @classmethod
    def of_parts(cls, parts: page_tables.TreeParts) -> Tree:
        """Makes a tree of arrays of treegen's own making, with nodes in depth-first order; unchecked."""
        return cls._ranked(parts, ranks_of(parts.row_node, *parts[1:4]))

    @classmethod
    def _ranked(cls, parts: page_tables.TreeParts, ranks: Ranks) -> Tree:
        """Makes the same tree where the rows' ranks are known."""
        return cls(*parts, derive_ranked(parts.parent, parts.tokens, parts.row_node, parts.row_sees, ranks))

    @classmethod
    def joined(cls, trees: Sequence[Tree]) -> Tree:
        """Joins trees to one forest: nodes and rows of each tree follow those of the tree before.

        So do slots, which are numbered anew from 0: page tables and KV runs of the trees are left out (`with_kv`).

        Args:
            trees: At least one tree.

        Raises:
            TreeError: There is no tree, or an entry is none.
        """
        given = listed("trees", trees, "give at least one tree")
        for index, tree in enumerate(given):
            check_is_tree(f"trees[{index}]", tree)
        parts, topology = joining.joined(given)
        return cls(*parts, topology)

    @classmethod
    def from_networkx(cls, graph: networkx.DiGraph[Any]) -> Tree:
        """Makes a tree of a networkx graph.

        Args:
            graph: A directed forest. Nodes have an attribute `tokens` and optionally `rows`, a list with the tokens of
                the node that each of its rows sees.

        Raises:
            TreeError: The graph is no forest, or an attribute is missing.
        """
        return cls.from_parents(*networkx_form.read(graph))

    @classmethod
    def parse(cls, text: str) -> Tree:
        """Makes a tree of its text.

        Args:
            text: Levels, `1,4/100,10` (nodes per level, tokens per node), or nested, `100(10*4)`. Blanks between words
                do not count. 10,000,000 nodes at most.

        Raises:
            FormatError: The text is none of both.
            TreeError: The tree is impossible.
        """
        return cls.from_parents(*tree_text.parse(text))

    @classmethod
    def from_json(cls, text: str) -> Tree:
        """Makes a tree of the text that `to_json` wrote. Raises FormatError or TreeError for any other text."""
        parts, runs = tree_json.read(text)
        tree = cls.from_parents(*parts)
        return tree if runs is None else tree.with_kv(KVRuns.from_runs(tree.tokens, runs))

    @classmethod
    def load(cls, path: str | Path) -> Tree:
        """Reads a tree from a file.

        Args:
            path: A file in one of the forms that `treegen.workloads.tree_files` reads.

        Raises:
            FormatError: The file cannot be read, or has no known form.
            TreeError: The tree is impossible.
        """
        tree: Tree = _FILES["load"](path)
        return tree

    def save(self, path: str | Path) -> None:
        """Writes the tree as JSON to a file. Raises FormatError when that fails."""
        _FILES["save"](path, self.to_json())

    def to_json(self) -> str:
        """Returns a versioned JSON text, which `from_json` reads back to a tree of the same nodes, rows and KV slots.

        Which requests hold the tokens (`Tree.from_requests`) is not written.
        """
        return tree_json.write(self)

    def to_networkx(self) -> networkx.DiGraph[int]:
        """Returns a directed graph with `tokens` and `rows` on its nodes, without the order of rows across nodes."""
        return networkx_form.write(self)

    def with_kv(self, kv: KVRuns | Sequence[IntsLike]) -> Tree:
        """Returns the same tree with its tokens in other slots.

        Args:
            kv: A sequence of token slots for each node, or a KVRuns.

        Raises:
            TreeError: The slots do not match the nodes' tokens.
        """
        runs = checked_kv(kv, self.tokens)
        return Tree(self.parent, self.tokens, self.row_node, self.row_sees, runs, self.topology)

    def lengthened(self, tokens: IntsLike) -> Tree:
        """Returns the same nodes and rows with other lengths, stored one after another; much cheaper than a new tree.

        Raises TreeError where a row does not see all of its node, or a node becomes empty or is no longer empty.
        """
        length = int32_array("tokens", tokens, low=0)
        if len(length) != len(self.tokens) or ((length > 0) != (self.tokens > 0)).any():
            reason = "differs from the tree's in number or in which are 0"
            raise TreeError("tokens", length.tolist(), reason, "make a new tree")
        if (self.row_sees != self.tokens[self.row_node]).any():
            row = int((self.row_sees != self.tokens[self.row_node]).argmax())
            raise TreeError(f"rows[{row}]", int(self.row_sees[row]), "ends inside its node", "make a new tree")
        topology = lengthened(self.topology, length)
        sees = frozen(length[self.row_node])
        return Tree(self.parent, length, self.row_node, sees, KVRuns.contiguous(length), topology)

    def appended(self, rows: IntsLike | None = None, tokens: int = 1, slots: npt.ArrayLike | None = None) -> Tree:
        """Returns the tree in which some rows see more tokens.

        A row that is the only row of a leaf, and sees all of it, makes its node longer. Any other row gets a new node
        for its tokens; new nodes follow all others, in the order of `rows`. Where a row ends inside of its node, the
        node is cut in two first: its beginning keeps the number, and its rest, with all children, is a new node before
        those of the rows.

        Args:
            rows: The rows that grow; by default all.
            tokens: New tokens of each row.
            slots: KV slots of the new tokens, `[rows, tokens]`, or flat for one token a row; by default the slots after
                the last one that each row sees.

        Raises:
            TreeError: A slot holds another token of the tree already, or would hold two new ones.
        """
        parts, topology = edits.appended(self, rows, tokens, slots)
        return Tree(*parts, topology)

    def branched(self, row: int, copies: int) -> Tree:
        """Returns the tree in which a row is `copies` rows that see the same tokens; new rows follow all others.

        Args:
            row: The row to copy.
            copies: Rows afterwards, the row itself included.

        Raises:
            TreeError: There is no such row, or no such number.
        """
        parts, topology = edits.branched(self, row, copies)
        return Tree(*parts, topology)

    def pruned(self, rows: IntsLike) -> Tree:
        """Returns the tree without these rows, and without nodes that no remaining row uses.

        Nodes and rows keep their order and are renumbered: old row i becomes row `i - sum(row < i for row in rows)`.
        Without any row left, the tree is one root without tokens.

        Args:
            rows: The rows to remove.

        Raises:
            TreeError: There is no such row.
        """
        parts, topology = edits.pruned(self, rows)
        return Tree(*parts, topology)

    def with_drafts(
        self, parents: IntsLike | Sequence[IntsLike], slots: npt.ArrayLike | None = None, *, stored: bool = False
    ) -> Tree:
        """Returns the tree in which draft tokens are the rows, to be verified, in place of the rows.

        The row of a draft token sees the tokens that the tree's row sees, the draft token's ancestors, and itself. Rows
        are in the order of the tree's rows, and for each in the order of its list. A row without draft tokens ends.
        Nodes are cut and numbered as by `appended`, and removed where no row uses them.

        Args:
            parents: For each draft token of a row the place of its parent in the list, -1 for the row itself. A list
                for every row, or one for all rows (`treegen.token_tree_parents` makes it of Medusa's paths).
            slots: The slots of the draft tokens, flat, in the order of the new rows; no token of the tree may be there.
                By default the first slots after the tree's last one.
            stored: Whether the draft tokens are in the tree already, as the last tokens that each row sees.

        Raises:
            TreeError: A parent or a slot is impossible.
        """
        parts, topology = queries.with_drafts(self, parents, slots, stored)
        return Tree(*parts, topology)

    def with_causal_queries(self, counts: int | IntsLike) -> Tree:
        """Returns the tree in which the last tokens that each row sees are queries: causal append, or chunked prefill.

        Each such token becomes a row that sees all tokens up to itself, in the order of the tree's rows and then of
        tokens. The tree has the tokens' KV already. A row of count 0 ends.

        Args:
            counts: The number of query tokens of each row, or one number for all.

        Raises:
            TreeError: A row does not see this number of tokens.
        """
        parts, topology = queries.with_causal_queries(self, counts)
        return Tree(*parts, topology)

    def shard(self, rank: int, size: int, interleave: int = 1) -> Tree:
        """Returns the tree of the tokens that one of several ranks holds, in context parallelism.

        Positions on each path are dealt to the ranks in turn, `interleave` neighbouring ones at a time. Nodes and rows
        stay, also where a rank holds no token of a node or of a row's path. The rank's tokens lie one after another
        from slot 0, node by node; `with_kv` places them elsewhere. The attention states of all ranks, merged, are those
        of the whole tree.

        Args:
            rank: The rank, from 0.
            size: The number of ranks.
            interleave: Neighbouring positions that are dealt to one rank.

        Raises:
            TreeError: A number is out of range, or the tree names tokens by request.
        """
        check_is_by_slot("tree", self)
        parts, topology = sharded(self, Shard(rank, size, interleave))
        return Tree(*parts, topology)

    def shard_slots(self, rank: int, size: int, interleave: int = 1) -> Ints:
        """Returns the slots of this tree's tokens that a rank holds, in the order of the slots of `shard`.

        So `k_cache[tree.shard_slots(rank, size)]` is the cache of the rank's tree. Arguments and errors as of `shard`.
        """
        check_is_by_slot("tree", self)
        return shard_slots(self, Shard(rank, size, interleave))

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes as small objects made on access."""
        return LazySequence(len(self.parent), self._node)

    def _node(self, index: int) -> Node:
        topology = self.topology
        rows = topology.row_of_rank[topology.rank_lo[index] : topology.rank_own[index]]
        own = tuple((int(row), int(self.row_sees[row])) for row in rows)
        return Node(index, int(self.parent[index]), int(self.tokens[index]), own)

    @property
    def num_rows(self) -> int:
        """The number of query rows."""
        return len(self.row_node)

    @property
    def unique_tokens(self) -> int:
        """The tokens that at least one row sees, each counted once (DeFT's N_tree)."""
        return self.topology.unique_tokens

    @property
    def path_tokens(self) -> int:
        """The tokens that rows see, summed over rows (DeFT's sum of N_i)."""
        return self.topology.path_tokens

    @property
    def text(self) -> str | None:
        """A text that `parse` reads to the same topology; None unless each leaf has one row, which sees all of it."""
        return tree_text.write(self)

    def positions(self) -> Ints:
        """Returns the position of each row: that of the last token that it sees, from 0; -1 if it sees none.

        Returns:
            A new int32 array `[rows]`, which may be written to; `torch.from_numpy` makes a tensor of it without a copy.
        """
        return (self.topology.prefix[self.row_node] + self.row_sees - 1).astype(np.int32)

    def slots(self, row: int) -> Ints:
        """Returns the slots that a row sees, from the root on.

        Args:
            row: The row.

        Returns:
            A new int32 array.

        Raises:
            TreeError: There is no such row.
        """
        row = int(int32_array("row", [row], low=0, high=self.num_rows - 1)[0])
        node = int(self.row_node[row])
        runs = [self.kv.slots(node)[: self.row_sees[row]]]
        while (node := int(self.parent[node])) >= 0:
            runs.append(self.kv.slots(node))
        return np.concatenate(runs[::-1])

    def signature(self) -> str:
        """Returns a digest of the topology alone, without the order of siblings and rows, and without slots."""
        return signature(self.parent, self.tokens, self.topology, self.row_sees)

    def __copy__(self) -> Tree:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tree:
        return self

    def __reduce__(self) -> tuple[Callable[..., Tree], tuple[Any, ...]]:
        kv = self.kv
        arrays = (self.parent, self.tokens, self.row_node, self.row_sees, kv.indptr, kv.start, kv.length)
        return _unpickled, (self.requests, *arrays)

    def __repr__(self) -> str:
        return f"<treegen.Tree: {self.size_text}>"

    @property
    def size_text(self) -> str:
        """The numbers of rows, nodes and tokens, as text."""
        return f"{self.num_rows} rows, {len(self.parent)} nodes, {int(self.tokens.sum(dtype=np.int64))} tokens"

    def __str__(self) -> str:
        text = tree_text.beginning(self, 60) or "custom rows"
        shown = text if len(text) <= 60 else text[:57] + "..."
        return (
            f"tree {shown} | nodes {len(self.parent)}, rows {self.num_rows}, "
            f"unique tokens {self.unique_tokens}, path tokens {self.path_tokens}"
        )


_FILES: dict[str, Callable[..., Any]] = {}


def use_files(load: Callable[[str | Path], Tree], save: Callable[[str | Path, str], None]) -> None:
    """Sets the functions that `Tree.load` and `Tree.save` call, because ir does no input or output."""
    _FILES.update(load=load, save=save)


def check_is_tree(argument: str, value: object) -> None:
    """Raises TreeError for anything but a Tree, and names the function that makes a tree of the value."""
    if isinstance(value, str):
        fix = "give treegen.Tree.parse(text), or treegen.Tree.load(path) for a file"
        raise TreeError(argument, value, "is a text, not a Tree", fix)
    if not isinstance(value, Tree):
        fix = "make one with treegen.Tree.from_parents or its siblings"
        raise TreeError(argument, value, "is not a Tree", fix)


def check_is_by_slot(argument: str, tree: Tree) -> None:
    """Raises TreeError for a tree by request, which does not say in which slots its tokens are."""
    if tree.requests is not None:
        fix = "use treegen.compile_batch with a LiveBatch, or give it slots by with_kv"
        raise TreeError(argument, str(tree)[:80], "names tokens by request, not by slot", fix)


def _unpickled(requests: RequestKV | None, *arrays: Ints) -> Tree:
    """Makes a tree of pickled arrays, and marks them as read-only again."""
    parent, tokens, row_node, row_sees, *runs = map(frozen, arrays)
    topology = derive(parent, tokens, row_node, row_sees)
    return Tree(parent, tokens, row_node, row_sees, KVRuns(*runs), topology, requests)
