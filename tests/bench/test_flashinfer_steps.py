"""What FlashInfer's masked prefill is told in steps with drafts. The package itself is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.tiny_models import VOCABULARY, tiny
from treegen.bench import flashinfer_steps
from treegen.engine import Engine, ForcedDrafts
from treegen.integrations import HFModel

PARENTS = [-1, -1, 0, 0, 3]
SEES = np.array([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]], bool)


def test_masks_of_trees_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts, in pages of four tokens; the third row of the table is free."""
    plans: list[tuple[Any, ...]] = []

    class Wrapper:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def plan(self, qo: Any, kv: Any, ids: Any, last: Any, *_: object, custom_mask: Any, **__: object) -> None:
            plans.append((qo.diff().tolist(), kv.diff().tolist(), ids.tolist(), last.tolist(), custom_mask.numpy()))

        def run(self, q: torch.Tensor, caches: object, out: torch.Tensor) -> None:
            out.zero_()

    package = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setattr(flashinfer_steps, "flashinfer_package", lambda: package)
    engine = Engine(
        HFModel(tiny()), ForcedDrafts(PARENTS, [3, 2, 1], VOCABULARY), num_pages=40, page_size=4, max_branches=3,
        make_kernel=lambda step, kind, _: flashinfer_steps.FlashInferDraftSteps(step, kind),
    )  # fmt: skip
    engine.run([list(range(9)), list(range(50, 55))])
    assert len(plans) == 3
    for step, (queries, pages, ids, last, mask) in enumerate(plans):
        assert queries == [6, 6, 0, 0]
        stored = [prompt + (0, 3, 5)[step] for prompt in (9, 5)]
        tokens = [4 * (count - 1) + rest for count, rest in zip(pages, last, strict=True)]
        assert tokens == [stored[0] + 6, stored[1] + 6, 1, 1]
        assert len(ids) == sum(pages)
        assert ids[-2:] == [40, 40]  # the spare page
        begin = 0
        for count, length in zip(queries[:2], tokens[:2], strict=True):
            own = mask[begin : begin + count * length].reshape(count, length)
            begin += count * length
            assert own[:, : length - 5].all()
            assert (own[1:, length - 5 :] == SEES).all()
            assert not own[0, length - 5 :].any()
        assert begin == len(mask)
