"""The key of a cached policy: everything that decides whether a policy measured once is the fastest again."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path

from treegen.ir.errors import FormatError
from treegen.ir.shape import MAX_HEAD_DIM_V, Shape
from treegen.targets import Target
from treegen.version import VERSION

FORMAT = 1
"""Of keys and entries; whoever changes what a field means raises it."""
_LONGEST_TEXT = 300
_LONGEST_NAME = 100
_PRINTABLE = re.compile(r"[ -~]*")
_VERSION_LINE = re.compile(r"""^__version__ *= *['"](\d+\.\d+)""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PolicyKey:
    """What a policy was measured for. Texts are printable ASCII of at most 300 characters; raises FormatError.

    Only content enters: no times of files, no hash seeds, nothing of what the process did before.
    """

    bucket: str  # the tree, coarsely (treegen.bucket.policy_bucket)
    shape: str  # heads, head dims, types and pages (shape_text)
    target: str  # the device (target_text)
    templates: str  # digest of what kernels are emitted from (template_digest)
    space: str  # digest of the search space (treegen.search.space.space_digest)
    treegen: str  # version of treegen
    triton: str  # version of Triton, major.minor; "none" where it is not installed
    format: int  # of the cache's files (FORMAT)

    def __post_init__(self) -> None:
        for name in _NAMES:
            value = getattr(self, name)
            if name == "format":
                if type(value) is not int:
                    raise FormatError("key.format", value, "is not a whole number", f"give {FORMAT}")
            elif not isinstance(value, str) or len(value) > _LONGEST_TEXT or not _PRINTABLE.fullmatch(value):
                reason = f"is not printable ASCII of at most {_LONGEST_TEXT} characters"
                raise FormatError(f"key.{name}", value, reason, "give another text")

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, as 64 hexadecimal digits: the entry's file name."""
        return hashlib.sha256(json.dumps(self.to_object(), sort_keys=True).encode()).hexdigest()

    def to_object(self) -> dict[str, str | int]:
        """The fields as a JSON object."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(field.name for field in fields(PolicyKey))


def key_for(bucket: str, shape: Shape, target: Target, space: str) -> PolicyKey:
    """The key of a bucket of trees, by this treegen with this Triton. space: the digest of the search space."""
    treegen, triton = versions()
    return PolicyKey(bucket, shape_text(shape), target_text(target), template_digest(), space, treegen, triton, FORMAT)


@lru_cache(256)
def shape_text(shape: Shape) -> str:
    """All of a shape: `32:8 heads, head_dim 128, bf16`, and every field whose value does not follow from these; but
    the layout of pages, whose kernels are the same, so that a policy serves both.
    """
    heads, dims = (shape.num_qo_heads, shape.num_kv_heads), (shape.head_dim, min(shape.head_dim, MAX_HEAD_DIM_V))
    plain = Shape(*heads, *dims, dtype=shape.dtype, kv_layout=shape.kv_layout)
    others = [field.name for field in fields(shape) if getattr(shape, field.name) != getattr(plain, field.name)]
    text = f"{shape.num_qo_heads}:{shape.num_kv_heads} heads, head_dim {shape.head_dim}, {shape.dtype}"
    return ", ".join([text, *(f"{name} {getattr(shape, name)}" for name in others)])


def target_text(target: Target) -> str:
    """The device: name and hardware, without what is measured or fitted for cost models."""
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


@cache
def template_digest() -> str:
    """SHA-256 over the names and texts of all kernel templates, and of the module that fills them in."""
    digest = hashlib.sha256()
    texts = {path.name: path for path in files("treegen.templates").iterdir() if path.name.endswith(".jinja")}
    texts["emit.py"] = files("treegen").joinpath("emit.py")
    for name in sorted(texts):
        text = texts[name].read_text("utf-8").encode()
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


@cache
def versions() -> tuple[str, str]:
    """The versions of treegen and, as major.minor, of Triton, which is not imported for it."""
    try:
        found = importlib.util.find_spec("triton")
        text = Path(found.origin).read_text("utf-8") if found is not None and found.origin else ""
    except (OSError, ValueError):
        text = ""
    version = _VERSION_LINE.search(text)
    return VERSION, version[1] if version else "none"
