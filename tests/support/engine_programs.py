"""What ranks do in tests of engines on several ranks: each function runs in all ranks, and fails by an assertion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from support.tiny_models import PROMPTS, tiny
from treegen.distributed import Parallel
from treegen.engine import Beam, Engine, NGrams, Sample, Sampling, Speculate
from treegen.engine.control import Controller
from treegen.integrations import HFModel, divide_heads

VOCABULARY = 96
"""A number of tokens that ranks divide."""
SAMPLING = Sampling(0.9, seed=3)
CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "greedy": lambda: Sample(max_new_tokens=8),
    "samples": lambda: Sample(3, SAMPLING, max_new_tokens=8),
    "beams": lambda: Beam(3, max_new_tokens=6),
    "drafts": lambda: Speculate(NGrams(), max_draft=3, n=2, sampling=SAMPLING, max_new_tokens=10),
}
SIZES: dict[str, Any] = {"num_pages": 60, "page_size": 4, "max_rows": 40, "max_branches": 9}


def tokens_of(model: HFModel, controller: Controller, **options: Any) -> list[list[list[int]]]:
    """The tokens of the results of each prompt, prompts decoded twice, the second time from the prefix cache."""
    engine = Engine(model, controller, **SIZES | options)
    first, second = engine.run(PROMPTS), engine.run(PROMPTS)
    engine.sequences.check()
    assert engine.sequences.available == engine.pool.num_pages
    found = [[[each.tokens for each in own] for own in results] for results in (first, second)]
    assert found[0] == found[1]
    return found[0]


def heads() -> None:
    """Divides heads among all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallel = Parallel.over(mesh, tensor="tp")
    for name in ("Llama", "Mistral"):
        whole, own = HFModel(tiny(name, vocab_size=VOCABULARY)), tiny(name, vocab_size=VOCABULARY)
        divide_heads(own, mesh)
        model = HFModel(own)
        assert (model.shape.num_qo_heads, model.shape.num_kv_heads, model.ranks) == (2, 1, 2)
        for controller in CONTROLLERS.values() if name == "Llama" else [CONTROLLERS["samples"]]:
            assert tokens_of(model, controller(), parallel=parallel) == tokens_of(whole, controller())
