"""Engines and kernels serve calls inside torch.inference_mode and outside of it, in any order."""

from __future__ import annotations

import itertools

import pytest
import torch

import treegen
from support.tiny_models import PROMPTS, padded, tiny
from treegen import LiveBatch, PageTable, Shape
from treegen.engine import Beam, DraftModel, Engine, Sample, Speculate
from treegen.engine.control import Controller
from treegen.integrations import HFModel, generate

ORDERS = list(itertools.product((False, True), repeat=3))
"""Whether what is kept is made, used first and used again inside torch.inference_mode."""


@pytest.mark.parametrize("order", ORDERS)
def test_generate(order: tuple[bool, ...]) -> None:
    model, lengths = tiny(), (2, 20, 6)  # the second call makes a larger engine
    expected = [
        model.generate(**padded(PROMPTS[:2]), pad_token_id=0, max_new_tokens=length, do_sample=False).tolist()
        for length in lengths
    ]
    for inside, length, tokens in zip(order, lengths, expected, strict=True):
        with torch.inference_mode(inside):
            made = model.generate(
                **padded(PROMPTS[:2]), pad_token_id=0, max_new_tokens=length, do_sample=False, custom_generate=generate
            )
        assert made.tolist() == tokens


@pytest.mark.parametrize("name", ["Sample", "Beam", "DraftModel"])
@pytest.mark.parametrize("order", ORDERS)
def test_engines(name: str, order: tuple[bool, ...]) -> None:
    model, found = HFModel(tiny()), []
    made, *runs = order
    with torch.inference_mode(made):
        controllers: dict[str, Controller] = {"Sample": Sample(max_new_tokens=5), "Beam": Beam(3, 5)}
        if name == "DraftModel":
            controllers[name] = Speculate(DraftModel(model, num_pages=50), max_new_tokens=5)
        engine = Engine(model, controllers[name], num_pages=60)
    for inside in runs:
        with torch.inference_mode(inside):
            found.append([[branch.tokens for branch in branches] for branches in engine.run(PROMPTS[:2])])
        assert torch.is_grad_enabled()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("backend", "order"), [*(("torch", order) for order in ORDERS), *(("triton", order) for order in ORDERS[2::4])]
)
def test_kernels_of_batches(backend: str, order: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treegen.runtime.batch_room.RESERVE", 64)
    pages = PageTable(torch.arange(4, dtype=torch.int32).view(2, 2), torch.tensor([20, 30], dtype=torch.int32), 4)
    shape, batch = Shape(4, 2, 16, dtype="fp32", page_size=16), LiveBatch(page_size=16)
    q, (k, v) = torch.randn(2, 4, 16), torch.randn(2, 4, 16, 2, 16)
    for tokens in (20, 30):
        batch.add(tokens)
    made, *calls = order
    with torch.inference_mode(made):
        kernel = treegen.compile_batch(shape, pages, max_tokens=32, backend=backend)
    outs = []
    for inside in calls:
        with torch.inference_mode(inside):
            kernel.update(batch)
            kernel.step()
            outs.append(kernel(q, k, v))
            kernel.seat(batch)
    assert torch.equal(*outs)
