"""Verifies draft tokens of two requests over one prompt, given by their parents and by FlashInfer's masks."""

import numpy as np
import torch

import treegen

PAGE_SIZE, HEADS, KV_HEADS, HEAD_DIM = 16, 8, 2, 64
PAGES = [[0, 1, 2, 3], [0, 1, 4]]  # of each request; the first two hold the prompt
DRAFTS = [treegen.token_tree_parents([(0,), (1,), (0, 0), (0, 1)]), [-1, 0, 1]]  # Medusa's paths; a chain
TOKENS = [57, 38]  # of each request, its draft tokens last


def mask_of(parents: list[int], tokens: int) -> np.ndarray:
    """Makes the mask of draft tokens: they see the request's earlier tokens, their ancestors and themselves."""
    mask = np.zeros((len(parents), tokens), bool)
    before = tokens - len(parents)
    for place, parent in enumerate(parents):
        mask[place] = mask[parent] if parent >= 0 else False
        mask[place, :before] = mask[place, before + place] = True
    return mask


def main() -> None:
    """Makes the tree of draft tokens in both ways, and compares the results of both kernels."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    k_cache, v_cache = torch.randn(2, 5, PAGE_SIZE, KV_HEADS, HEAD_DIM, generator=generator, device=device)
    q = torch.randn(sum(map(len, DRAFTS)), HEADS, HEAD_DIM, generator=generator, device=device)

    kv_indptr = np.cumsum([0, *map(len, PAGES)])
    kv_indices = [page for pages in PAGES for page in pages]
    kv_last_page_len = [(length - 1) % PAGE_SIZE + 1 for length in TOKENS]
    requests = treegen.Tree.from_page_table(kv_indptr, kv_indices, kv_last_page_len, PAGE_SIZE)
    tree = requests.with_drafts(DRAFTS, stored=True)
    kernel = treegen.compile(tree)
    out = kernel(q, k_cache, v_cache)
    print(f"{tree}: {kernel.verify(q, k_cache, v_cache)}")

    masks = [mask_of(parents, tokens) for parents, tokens in zip(DRAFTS, TOKENS, strict=True)]
    flat = np.concatenate([mask.reshape(-1) for mask in masks])
    qo_indptr = np.cumsum([0, *map(len, DRAFTS)])
    same = treegen.Tree.from_custom_mask(flat, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, PAGE_SIZE)
    difference = float((treegen.compile(same)(q, k_cache, v_cache) - out).abs().max())
    print(f"from masks: {same.num_rows} rows, {same.unique_tokens} unique tokens, differs by {difference:.1e} at most")
    if same.unique_tokens != tree.unique_tokens or difference > 1e-5:
        raise SystemExit("the two trees differ")


if __name__ == "__main__":
    main()
