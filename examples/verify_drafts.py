"""Verifies draft tokens of two requests over one prompt: from their parents, and from FlashInfer's mask."""

import numpy as np
import torch

import treegen

PAGE_SIZE, HEADS, KV_HEADS, HEAD_DIM = 16, 8, 2, 64
PAGES = [[0, 1, 2, 3], [0, 1, 4]]  # of each request; the first two hold the prompt
TOKENS = [52, 35]  # of each request, before its draft tokens
DRAFTS = [treegen.token_tree_parents([(0,), (1,), (0, 0), (0, 1)]), [-1, 0, 1]]  # Medusa's paths; a chain


def slot(request: int, token: int) -> int:
    """Where a token of a request is in the cache."""
    return PAGES[request][token // PAGE_SIZE] * PAGE_SIZE + token % PAGE_SIZE


def mask_of(parents: list[int], tokens: int) -> np.ndarray:
    """What draft tokens see: all tokens of the request, the draft tokens above them, and themselves."""
    mask = np.zeros((len(parents), tokens + len(parents)), bool)
    for place, parent in enumerate(parents):
        mask[place] = mask[parent] if parent >= 0 else False
        mask[place, :tokens] = mask[place, tokens + place] = True
    return mask


def page_table(tokens: list[int]) -> tuple[list[int], list[int], list[int]]:
    """The requests' page table in FlashInfer's form."""
    counts = [-(-length // PAGE_SIZE) for length in tokens]
    indices = [page for pages, count in zip(PAGES, counts, strict=True) for page in pages[:count]]
    return np.cumsum([0, *counts]).tolist(), indices, [(length - 1) % PAGE_SIZE + 1 for length in tokens]


def main() -> None:
    """Makes the tree of draft tokens both ways, and compares what their kernels give."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    k_cache, v_cache = torch.randn(2, 5, PAGE_SIZE, KV_HEADS, HEAD_DIM, generator=generator, device=device)
    q = torch.randn(sum(map(len, DRAFTS)), HEADS, HEAD_DIM, generator=generator, device=device)

    prefixes = treegen.Tree.from_page_table(*page_table(TOKENS), PAGE_SIZE)
    slots = [slot(request, TOKENS[request] + place) for request in (0, 1) for place in range(len(DRAFTS[request]))]
    tree = prefixes.with_drafts(DRAFTS, slots)
    kernel = treegen.compile(tree)
    out = kernel(q, k_cache, v_cache)
    print(f"{tree}: {kernel.verify(q, k_cache, v_cache)}")

    masks = [mask_of(parents, tokens) for parents, tokens in zip(DRAFTS, TOKENS, strict=True)]
    flat = np.concatenate([mask.reshape(-1) for mask in masks])
    table = page_table([mask.shape[1] for mask in masks])
    same = treegen.Tree.from_custom_mask(flat, [0, 5, 8], *table, PAGE_SIZE)
    difference = float((treegen.compile(same)(q, k_cache, v_cache) - out).abs().max())
    print(f"from masks: {same.num_rows} rows, {same.unique_tokens} unique tokens, differs by {difference:.1e} at most")
    if same.unique_tokens != tree.unique_tokens or difference > 1e-5:
        raise SystemExit("the two trees differ")


if __name__ == "__main__":
    main()
