"""Tree: token runs that extend one another, and the query rows that attend to them."""

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
import treegen.ir.tree.page_tables as page_tables
import treegen.ir.tree.queries as queries
import treegen.ir.tree.requests as by_request
import treegen.ir.tree.tree_json as tree_json
import treegen.ir.tree.tree_text as tree_text
from treegen.ir.arrays import Ints, IntsLike, LazySequence, check_total, frozen, int32_array, listed
from treegen.ir.errors import TreeError
from treegen.ir.tree.kv import KVRuns
from treegen.ir.tree.request_kv import RequestKV
from treegen.ir.tree.signature import signature
from treegen.ir.tree.topology import Ranks, Topology, derive, derive_ranked, lengthened, ranks_of

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True, slots=True)
class Node:
    """One node for printing and passes: `rows` are the caller's rows attached here, as (row, sees)."""

    index: int
    parent: int
    tokens: int
    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """A forest of token runs with query rows; immutable.

    `parent[v]` is -1 for a root; `tokens[v]` may be 0. Row i, in the caller's order, is attached to `row_node[i]` and
    sees every token of that node's ancestors and the first `row_sees[i]` tokens of the node itself. `kv` says where
    tokens are; of a tree by request `requests` does (None for all others), and `kv` numbers the tokens only.
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
        """A tree from one parent (-1: root) and one length per node.

        `rows`: (node, sees) pairs in the caller's order; by default one row per leaf, by node index, that sees the
        whole leaf. `kv`: one sequence of token slots per node, or a KVRuns; by default nodes lie one after another
        from slot 0. Raises TreeError.
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
            row_node, row_sees = _checked_rows(rows, length)
        topology = derive(parent, length, row_node, row_sees)
        runs = KVRuns.contiguous(length) if kv is None else _checked_kv(kv, length)
        return cls(parent, length, row_node, row_sees, runs, topology)

    @classmethod
    def from_levels(cls, nodes_per_level: IntsLike, tokens_per_node: IntsLike) -> Tree:
        """Node j of level l hangs under node `j * n[l-1] // n[l]`; one row per leaf; 10,000,000 nodes at most. Raises
        TreeError.
        """
        return cls.from_parents(*build.from_levels(nodes_per_level, tokens_per_node))

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[Hashable]], *, block_size: int = 1) -> Tree:
        """Radix-merges sequences of tokens, or of block hashes that stand for `block_size` tokens each; row i is path
        i.

        Paths may be lists, arrays and CPU tensors, or all be the rows of one. Nodes are numbered in depth-first order
        of first appearance. Raises TreeError.
        """
        return cls.from_parents(*build.from_paths(paths, block_size))

    @classmethod
    def from_token_tree(cls, paths: Iterable[Sequence[int]], prefix: int) -> Tree:
        """A speculative token tree in Medusa's form: `1 + len(paths)` rows, the root token's first.

        Each path lists child ranks from the root token, which is implied. Node 0 holds the `prefix` context tokens,
        node 1 the root token, node i + 2 the token of path i; their KV lies in that order. Raises TreeError.
        """
        return cls.from_parents(*build.from_token_tree(paths, prefix))

    @classmethod
    def from_page_table(
        cls, kv_indptr: IntsLike, kv_indices: IntsLike, kv_last_page_len: IntsLike, page_size: int
    ) -> Tree:
        """The tree of a batch of requests in FlashInfer's form, one row each, that sees all of its request's tokens.

        kv_indptr [requests + 1]: offsets into kv_indices, the page ids of all requests; kv_last_page_len [requests]:
        tokens in the last page of each, 1..page_size (not read where a request has no pages). Requests that begin with
        the same pages share them; a page at different places of two requests is no shared prefix. Two that end in the
        same page may see different parts of it. Arrays and CPU tensors. Raises TreeError.
        """
        return cls._ranked(*page_tables.from_page_table(kv_indptr, kv_indices, kv_last_page_len, page_size))

    @classmethod
    def from_block_table(cls, block_table: npt.ArrayLike, seq_lens: IntsLike, page_size: int) -> Tree:
        """The tree of a batch of requests in vLLM's form: block_table [requests, blocks], padded with anything;
        seq_lens [requests]: tokens. As from_page_table. Raises TreeError.
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
        """The tree of a batch of requests that grow, one row each, by who shares how much with whom.

        seq_lens [requests]: tokens. Request i begins with the first `shared_tokens[i]` tokens, rounded down to whole
        pages, of request `shared_with[i]` (-1: of none), which may come later in the batch. `requests` of the tree says
        which request's tokens each node holds. The last node of a request goes on to its present length, and has at
        least one token here, also where there is none yet, so that plans have a place for it. Arrays and CPU tensors.
        Raises TreeError, also for requests that share in a cycle, or more tokens than one of them has.
        """
        parts, topology, requests = by_request.from_requests(seq_lens, shared_with, shared_tokens, page_size=page_size)
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
        """The tree of a batch of requests under FlashInfer's masks, one row per query.

        custom_mask: for each request in turn a flat mask [queries, tokens], true where a query sees a token, in bool;
        or as uint8 its bits, each request's from a new byte on and the lowest bit first (`segment_packbits(...,
        bitorder="little")`). qo_indptr [requests + 1]: offsets of queries. kv_indptr: offsets of tokens in a cache
        without pages; with kv_indices and kv_last_page_len a page table as in from_page_table.

        A node's tokens need not be neighbours, and are in order of the request's. Requests share the slots that all of
        their queries see, as far as these begin alike. Raises TreeError for a mask that no tree has, where one query
        sees two tokens of which two others see one each; it names them, counted within the request.
        """
        parts, topology = custom_masks.from_custom_mask(
            custom_mask, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, page_size
        )
        return cls(*parts, topology)

    @classmethod
    def of_parts(cls, parts: page_tables.TreeParts) -> Tree:
        """The tree of arrays that treegen itself has made, with nodes in depth-first order; unchecked."""
        return cls._ranked(parts, ranks_of(parts.row_node, *parts[1:4]))

    @classmethod
    def _ranked(cls, parts: page_tables.TreeParts, ranks: Ranks) -> Tree:
        """The same where the rows' ranks are known."""
        return cls(*parts, derive_ranked(parts.parent, parts.tokens, parts.row_node, parts.row_sees, ranks))

    @classmethod
    def joined(cls, trees: Sequence[Tree]) -> Tree:
        """One forest of several trees: nodes and rows of each behind those of the tree before, and stored so.

        Raises TreeError.
        """
        trees = listed("trees", trees, "give at least one tree")
        if not trees:
            raise TreeError("trees", [], "is empty", "give at least one tree")
        for index, tree in enumerate(trees):
            check_is_tree(f"trees[{index}]", tree)
        nodes = np.array([len(tree.tokens) for tree in trees])
        before = np.cumsum(nodes) - nodes
        parent = np.concatenate([tree.parent for tree in trees])
        parent = frozen(np.where(parent >= 0, parent + np.repeat(before, nodes), -1))
        tokens = frozen(np.concatenate([tree.tokens for tree in trees]))
        rows = np.repeat(before, [tree.num_rows for tree in trees])
        row_node = frozen(np.concatenate([tree.row_node for tree in trees]) + rows)
        row_sees = frozen(np.concatenate([tree.row_sees for tree in trees]))
        topology = derive(parent, tokens, row_node, row_sees)
        return cls(parent, tokens, row_node, row_sees, KVRuns.contiguous(tokens), topology)

    @classmethod
    def from_networkx(cls, graph: networkx.DiGraph[Any]) -> Tree:
        """A directed forest whose nodes carry `tokens` and, optionally, `rows` (a list of sees). Raises TreeError."""
        return cls.from_parents(*build.from_networkx(graph))

    @classmethod
    def parse(cls, text: str) -> Tree:
        """A tree from its text: levels `1,4/100,10` or nested `100(10*4)`, with blanks between words or without, and
        10,000,000 nodes at most. Raises FormatError, TreeError.
        """
        return cls.from_parents(*tree_text.parse(text))

    @classmethod
    def from_json(cls, text: str) -> Tree:
        """The inverse of `to_json`. Raises FormatError for anything else, TreeError for an impossible tree."""
        parts, runs = tree_json.read(text)
        tree = cls.from_parents(*parts)
        return tree if runs is None else tree.with_kv(KVRuns.from_runs(tree.tokens, runs))

    @classmethod
    def load(cls, path: str | Path) -> Tree:
        """A tree from a file in any of the forms that `treegen.workloads.tree_files` reads. Raises FormatError,
        TreeError.
        """
        tree: Tree = _FILES["load"](path)
        return tree

    def save(self, path: str | Path) -> None:
        """Writes `to_json()` to a file."""
        _FILES["save"](path, self.to_json())

    def to_json(self) -> str:
        """A versioned JSON form that `from_json` reads back to an equal tree."""
        return tree_json.write(self)

    def to_networkx(self) -> networkx.DiGraph[int]:
        """A directed graph with `tokens` and `rows` on its nodes (the order of rows across nodes is not kept)."""
        import networkx

        graph: networkx.DiGraph[int] = networkx.DiGraph()
        for node in self.nodes:
            graph.add_node(node.index, tokens=node.tokens, rows=[sees for _, sees in node.rows])
        graph.add_edges_from((int(p), v) for v, p in enumerate(self.parent) if p >= 0)
        return graph

    def with_kv(self, kv: KVRuns | Sequence[IntsLike]) -> Tree:
        """The same topology with its tokens elsewhere."""
        runs = _checked_kv(kv, self.tokens)
        return Tree(self.parent, self.tokens, self.row_node, self.row_sees, runs, self.topology)

    def lengthened(self, tokens: IntsLike) -> Tree:
        """The same nodes and rows with other lengths, stored one after another: much cheaper than a new tree.

        Every row goes on seeing the whole of its node. Raises TreeError where one does not, or a node becomes empty or
        is no longer so.
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
        """The tree in which each of these rows (default: all) sees so many tokens more.

        A row that is the only one of a leaf, and sees all of it, makes its node longer. Any other gets a new node below
        what it sees, behind all nodes and in the order of `rows`; where it ends inside of its node, that is cut in two
        first: the front keeps the number, and the rest, with all children, is a new node before those of rows.

        slots: KV slots of the new tokens, [rows, tokens], or flat for one token a row; by default the slots behind the
        last one that each row sees. Raises TreeError for a slot that another token of the tree is in, or that two new
        tokens would be in.
        """
        parts, topology = edits.appended(self, rows, tokens, slots)
        return Tree(*parts, topology)

    def branched(self, row: int, copies: int) -> Tree:
        """The tree in which a row is `copies` rows that see the same: itself, and new ones behind all rows. Raises
        TreeError.
        """
        parts, topology = edits.branched(self, row, copies)
        return Tree(*parts, topology)

    def pruned(self, rows: IntsLike) -> Tree:
        """The tree without these rows, and without nodes that no other row is at or below.

        The others keep their order, nodes as well as rows, and their numbers close up: old row i has the number `i -
        sum(row < i for row in rows)`. Without any row left, the tree is one root without tokens. Raises TreeError.
        """
        parts, topology = edits.pruned(self, rows)
        return Tree(*parts, topology)

    def with_drafts(
        self, parents: IntsLike | Sequence[IntsLike], slots: npt.ArrayLike | None = None, *, stored: bool = False
    ) -> Tree:
        """The tree of draft tokens to verify below what each row sees, one row each in place of the rows.

        parents: of a row's draft tokens the place of each one's parent among them, -1 below the row; a list for every
        row, or one for all (`treegen.token_tree_parents` makes it of Medusa's paths). A draft token's row sees what the
        row sees, the token's ancestors, and itself. Rows are in order of the rows, for each its draft tokens as listed;
        a row without draft tokens ends. slots: of the draft tokens in that order, flat, where no token of the tree is;
        by default the first slots after the tree's last. stored: the draft tokens are in the tree already, as the last
        tokens that each row sees. Nodes are cut and numbered as by `appended`, and dropped where no row is below.
        Raises TreeError.
        """
        parts, topology = queries.with_drafts(self, parents, slots, stored)
        return Tree(*parts, topology)

    def with_causal_queries(self, counts: int | IntsLike) -> Tree:
        """The tree in which the last tokens that each row sees are queries: `counts` of each, or of all rows.

        Every such token is a row, in order of the rows and then of tokens, that sees all up to itself: causal append,
        or the chunk of a prefill, on a tree that has the new tokens' KV already. A row of count 0 ends. Raises
        TreeError.
        """
        parts, topology = queries.with_causal_queries(self, counts)
        return Tree(*parts, topology)

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
        """Query rows."""
        return len(self.row_node)

    @property
    def unique_tokens(self) -> int:
        """Tokens that at least one row sees, each counted once (DeFT's N_tree)."""
        return int(self.topology.spans.lengths.sum())

    @property
    def path_tokens(self) -> int:
        """Visible tokens summed over rows (DeFT's sum of N_i)."""
        spans = self.topology.spans
        return int((spans.lengths * (spans.hi.astype(np.int64) - spans.lo)).sum())

    @property
    def text(self) -> str | None:
        """A text that `parse` reads to the same topology; None when the rows are not one whole-leaf row per leaf."""
        return tree_text.write(self)

    def positions(self) -> Ints:
        """For every row the 0-based depth, in tokens, of the last token that it sees; -1 for a row that sees nothing.

        A new array, which may be written to; `torch.from_numpy` makes a tensor of it without a copy.
        """
        return (self.topology.prefix[self.row_node] + self.row_sees - 1).astype(np.int32)

    def slots(self, row: int) -> Ints:
        """The slots that a row sees, root first; a new array, as of `positions`. Raises TreeError."""
        row = int(int32_array("row", [row], low=0, high=self.num_rows - 1)[0])
        node = int(self.row_node[row])
        runs = [self.kv.slots(node)[: self.row_sees[row]]]
        while (node := int(self.parent[node])) >= 0:
            runs.append(self.kv.slots(node))
        return np.concatenate(runs[::-1])

    def signature(self) -> str:
        """A digest of the topology alone: independent of sibling order, row order and KV locations."""
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
        """Numbers of rows, nodes and tokens."""
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
    """Sets what `Tree.load` and `Tree.save` call: the language itself does no input or output."""
    _FILES.update(load=load, save=save)


def check_is_tree(argument: str, value: object) -> None:
    """Raises TreeError, with what would make a tree of the value, for anything but a Tree."""
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
    """The tree of arrays that were pickled, which come back without the mark that they are read-only."""
    parent, tokens, row_node, row_sees, *runs = map(frozen, arrays)
    topology = derive(parent, tokens, row_node, row_sees)
    return Tree(parent, tokens, row_node, row_sees, KVRuns(*runs), topology, requests)


def _checked_kv(kv: KVRuns | Sequence[IntsLike], tokens: Ints) -> KVRuns:
    check_total(tokens)
    if not isinstance(kv, KVRuns):
        return KVRuns.from_slots(tokens, kv)
    kv.check_fits(tokens)
    return kv


def _checked_rows(rows: Iterable[tuple[int, int]], tokens: Ints) -> tuple[Ints, Ints]:
    reason, fix = "is not a (node, sees) pair", "give node and sees for every row"
    pairs = listed("rows", rows, fix)
    for index, pair in enumerate(pairs):
        if type(pair) is not tuple:
            pairs[index] = listed(f"rows[{index}]", pair, fix, reason)
        if len(pairs[index]) != 2:
            raise TreeError(f"rows[{index}]", pair, reason, fix)
    node = int32_array("rows' node", [pair[0] for pair in pairs], low=0, high=len(tokens) - 1)
    sees = int32_array("rows' sees", [pair[1] for pair in pairs], low=0)
    beyond = np.flatnonzero(sees > tokens[node])
    if len(beyond):
        row = int(beyond[0])
        reason = f"sees beyond node {node[row]}, which has {tokens[node[row]]} tokens"
        raise TreeError(f"rows[{row}]", (int(node[row]), int(sees[row])), reason, "lower sees")
    return node, sees
