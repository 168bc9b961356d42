"""Models of Transformers on several ranks: heads divided by the plans that Transformers has for its models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treegen.ir.errors import BackendError, InputError, ShapeError
from treegen.ir.shape import Shape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DIVIDING = ("colwise", "packed_colwise")
"""Styles of Transformers by which a rank has a part of a projection's outputs."""


def divide_heads(model: Any, mesh: DeviceMesh) -> None:
    """Divides a loaded model among the ranks of a mesh, by the plan that Transformers has for it.

    Does what `from_pretrained(..., tp_plan="auto")` does, also for models with random weights, and for a dimension of a
    mesh that has others. Each rank keeps its part of the weights; until then it needs memory for all of them, so divide
    models on the CPU that are too large for a GPU.

    Args:
        model: A causal language model of Transformers; it is changed.
        mesh: A device mesh of one dimension, for instance `mesh["tp"]`.

    Raises:
        BackendError: The installed Transformers cannot divide models.
        InputError: The mesh has several dimensions, Transformers has no plan for the model, or it is divided already.
        ShapeError: The ranks do not divide the heads.
    """
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError as cause:
        fix = "pip install 'transformers>=5.17'"
        raise BackendError("transformers", "this version", "cannot divide loaded models", fix) from cause
    if mesh.ndim != 1:
        raise InputError("mesh", f"{mesh.ndim} dimensions", "is not a line of ranks", 'give one of them: mesh["tp"]')
    if model.tp_size is not None:
        raise InputError("model", type(model).__name__, "is divided already", "give a model that is not")
    if not divides_heads(model):
        reason = "has no plan of Transformers that divides heads"
        raise InputError("model", type(model).__name__, reason, "use context parallel, or another model")
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    local_shape(Shape(heads, getattr(config, "num_key_value_heads", None) or heads, 128), mesh.size())
    if mesh.size() > 1:
        plan = DistributedConfig(tp_size=mesh.size(), tp_plan="auto")
        type(model).maybe_distribute_model(model, plan, mesh)


def divides_heads(model: Any) -> bool:
    """Says whether the plan of a model of Transformers divides the heads of its attention layers."""
    plan = getattr(model, "tp_plan", None) or {}
    return any("attn" in name and style in _DIVIDING for name, style in plan.items())


def local_shape(shape: Shape, ranks: int) -> Shape:
    """Returns the shape of a rank. Raises ShapeError unless the ranks divide query heads and KV heads.

    Args:
        shape: The shape of the whole model.
        ranks: The number of ranks.
    """
    for name in ("num_qo_heads", "num_kv_heads"):
        if getattr(shape, name) % ranks:
            reason = f"are no multiple of the {ranks} ranks that the model is divided among"
            raise ShapeError(name, getattr(shape, name), reason, "use fewer ranks")
    return replace(shape, num_qo_heads=shape.num_qo_heads // ranks, num_kv_heads=shape.num_kv_heads // ranks)
