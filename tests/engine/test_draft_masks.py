"""Masks of draft trees: a row sees the prompt, itself and the drafts on its path, in whichever words their bits are."""

from __future__ import annotations

import random

import pytest
import torch

from treegen import LiveBatch, PageTable, Shape, compile_batch
from treegen.engine.draft_trees import DraftMask, draft_shape

PAGE, CPU = 16, torch.device("cpu")
SHAPE = Shape(2, 1, 16, dtype="fp32", page_size=PAGE)


@pytest.mark.parametrize(
    ("drafts", "prompt", "backend"),
    [*((*sizes, "torch") for sizes in ((7, 20), (32, 16), (33, 40), (70, 50))), (7, 20, "triton"), (33, 40, "triton"),
     pytest.param(70, 50, "triton", marks=pytest.mark.full)],
)  # fmt: skip
def test_rows_see_the_drafts_on_their_paths(drafts: int, prompt: int, backend: str) -> None:
    source, generator = random.Random(drafts), torch.Generator().manual_seed(drafts)
    parents = [source.randrange(-1, draft) if draft else -1 for draft in range(drafts)]
    total, count = prompt + drafts, -(-(prompt + drafts) // PAGE)
    table = torch.randperm(count, generator=generator).view(1, count).int()
    pages = PageTable(table, torch.tensor([total]).int(), count, qo_indptr=torch.tensor([0, drafts]).int())
    mask = DraftMask(drafts + 2, drafts, CPU)
    mask.fill([(0, prompt, tuple(parents))])
    kernel = compile_batch(
        SHAPE, pages, max_tokens=256, max_rows=drafts + 2, mask_mod=mask.mask_mod, backend=backend
    )  # fmt: skip
    batch = LiveBatch(PAGE)
    batch.add(total, rows=drafts)
    kernel.update(batch)
    kernel.step()
    k_cache, v_cache = (torch.randn(count, PAGE, 1, 16, generator=generator) for _ in range(2))
    q = torch.randn(drafts, 2, 16, generator=generator)
    out = kernel(q, k_cache, v_cache)
    assert isinstance(out, torch.Tensor)

    place = torch.arange(total)
    page = table[0, place // PAGE].long()
    keys, values = (cache[page, place % PAGE, 0].double() for cache in (k_cache, v_cache))
    sees = torch.ones(drafts, total, dtype=torch.bool)
    sees[:, prompt:] = torch.from_numpy(draft_shape(tuple(parents)).sees)
    scores = torch.einsum("rhd,td->rht", q.double(), keys) * 16**-0.5
    expected = scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1) @ values
    assert float((out - expected).abs().max()) < 1e-5


def test_the_mask_of_a_step_replaces_the_one_before() -> None:
    mask = DraftMask(4, 40, CPU)
    mask.fill([(1, 9, (-1, 0, 0))])
    assert mask.first.tolist()[1:] == [9, 9, 9]
    assert mask.seen.tolist() == [[0, 0], [0b1, 0], [0b11, 0], [0b101, 0]]
    mask.fill([(0, 5, (-1,))])
    assert mask.first[0] == 5
    assert mask.seen.tolist() == [[1, 0], [0, 0], [0, 0], [0, 0]]
    mask.fill([])
    assert not mask.seen.any()
