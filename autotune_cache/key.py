"""The key of a cached policy: the facts that decide whether a measured policy is the fastest again."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, fields
from functools import lru_cache

from treegen.ir.errors import FormatError
from treegen.ir.shape import MAX_HEAD_DIM_V, Shape
from treegen.target.targets import Target
from treegen.version import KERNEL_VERSION, SPACE_VERSION

FORMAT = 2
"""The format of keys and entries; a change of what a field means raises it."""
_LONGEST_TEXT = 300
_LONGEST_NAME = 100
_PRINTABLE = re.compile(r"[ -~]*")


@dataclass(frozen=True, slots=True)
class PolicyKey:
    """The facts that a policy was measured for, as printable ASCII texts of at most 300 characters.

    Versions of Triton, torch and treegen are not part of the key: a policy that was fastest with one version is a good
    choice with another. They are recorded in the entry (Entry.made_with), and a difference is reported. Raises
    FormatError.
    """

    bucket: str  # the tree, coarsely (treegen.search.bucket.policy_bucket)
    shape: str  # heads, head dims, types and pages (shape_text)
    target: str  # the device (target_text)
    kernels: int  # treegen.version.KERNEL_VERSION
    space: int  # treegen.version.SPACE_VERSION
    format: int  # of the cache's files (FORMAT)

    def __post_init__(self) -> None:
        for name in _NAMES:
            value = getattr(self, name)
            if name in _NUMBERS:
                if type(value) is not int:
                    raise FormatError(f"key.{name}", value, "is not a whole number", "give one")
            elif not isinstance(value, str) or len(value) > _LONGEST_TEXT or not _PRINTABLE.fullmatch(value):
                reason = f"is not printable ASCII of at most {_LONGEST_TEXT} characters"
                raise FormatError(f"key.{name}", value, reason, "give another text")

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, as 64 hexadecimal digits: the name of the entry's file."""
        return hashlib.sha256(json.dumps(self.to_object(), sort_keys=True).encode()).hexdigest()

    def to_object(self) -> dict[str, str | int]:
        """Returns the fields as a JSON object."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(field.name for field in fields(PolicyKey))
_NUMBERS = ("kernels", "space", "format")


def key_for(bucket: str, shape: Shape, target: Target) -> PolicyKey:
    """Returns the key of a bucket of trees for this treegen's kernels and search space."""
    return PolicyKey(bucket, shape_text(shape), target_text(target), KERNEL_VERSION, SPACE_VERSION, FORMAT)


@lru_cache(256)
def shape_text(shape: Shape) -> str:
    """Returns a shape as text: `32:8 heads, head_dim 128, bf16`, and each field whose value does not follow from these.

    The layout of pages is left out: kernels of both layouts are the same, so a policy serves both.
    """
    heads, dims = (shape.num_qo_heads, shape.num_kv_heads), (shape.head_dim, min(shape.head_dim, MAX_HEAD_DIM_V))
    plain = Shape(*heads, *dims, dtype=shape.dtype, kv_layout=shape.kv_layout)
    others = [field.name for field in fields(shape) if getattr(shape, field.name) != getattr(plain, field.name)]
    text = f"{shape.num_qo_heads}:{shape.num_kv_heads} heads, head_dim {shape.head_dim}, {shape.dtype}"
    return ", ".join([text, *(f"{name} {getattr(shape, name)}" for name in others)])


@lru_cache(16)
def target_text(target: Target) -> str:
    """Returns the device as text: name and hardware, without measured or fitted data of cost models."""
    name = ascii(target.name)[1:-1][:_LONGEST_NAME]
    facts = (
        f"sm_{target.capability}",
        f"{target.sms} SMs",
        f"{target.shared_bytes} bytes shared of {target.shared_bytes_per_sm}",
        f"{target.l2_bytes} bytes L2",
        f"{target.memory_gbps:.17g} GB/s",
        f"{target.tensor_tflops:.17g} TFLOP/s",
    )
    return f"{name} ({', '.join(facts)})"
