"""Runs a tree over two caches: one stores nodes in order, the other in shuffled pages, as an engine does."""

import random

import torch

import treegen
from treegen import KVRuns, Tree

PAGE_SIZE = 16


def main() -> None:
    """Compiles the tree for both caches, and shows that they give the same attention."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    tree = Tree.from_parents([-1, 0, 0, 1, 1], [100, 37, 16, 5, 50])

    # Every node begins on a new page; the last page of a node may have free slots.
    counts = [-(-tokens // PAGE_SIZE) for tokens in tree.tokens.tolist()]
    free = random.Random(0).sample(range(32), sum(counts))
    pages = [[free.pop() for _ in range(count)] for count in counts]
    paged_tree = tree.with_kv(KVRuns.from_pages(tree.tokens, pages, PAGE_SIZE))

    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn(tree.num_rows, 8, 64, generator=generator, device=device).to(dtype)
    tokens = int(tree.tokens.sum())
    k_cache, v_cache = torch.randn(2, tokens, 2, 64, generator=generator, device=device).to(dtype)

    # The same keys and values, in pages: [pages, PAGE_SIZE, num_kv_heads, head_dim].
    k_pages, v_pages = torch.zeros(2, 32, PAGE_SIZE, 2, 64, device=device, dtype=dtype)
    for node in range(len(tree.nodes)):
        from_slots = torch.from_numpy(tree.kv.slots(node).copy()).long().to(device)
        to_slots = torch.from_numpy(paged_tree.kv.slots(node).copy()).long().to(device)
        k_pages.flatten(0, 1)[to_slots] = k_cache[from_slots]
        v_pages.flatten(0, 1)[to_slots] = v_cache[from_slots]

    kernel = treegen.compile(paged_tree)
    report = kernel.verify(q, k_pages, v_pages)
    in_order = treegen.compile(tree)(q, k_cache, v_cache)
    difference = float((kernel(q, k_pages, v_pages) - in_order).abs().max())
    print(f"row 0 reads pages {sorted({slot // PAGE_SIZE for slot in paged_tree.slots(0).tolist()})}")
    print(f"on {device}, backend {kernel.backend}: {report}")
    print(f"largest difference from the cache in order: {difference:.1e}")
    if not report.passed:
        raise SystemExit("the output is wrong")


if __name__ == "__main__":
    main()
