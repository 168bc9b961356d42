"""Ahead-of-time compilation: an emitted kernel becomes machine code for a GPU architecture, without a GPU.

Triton's own launcher compiles, with stand-ins for the tensors and for the device. So it makes the very code that a
launch on contiguous tensors asks for, under the name by which a later process finds it in Triton's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from treegen.codegen.compile_counter import expected_compiles
from treegen.codegen.emit import Source
from treegen.codegen.kernel_signature import (
    KernelSignature,
    ParameterKind,
    Tensors,
    call_values,
    captured_values,
    kernel_signature,
    switch_values,
)
from treegen.codegen.kernel_usage import stack_accesses_in_loops, usage
from treegen.codegen.launch_options import launch_options
from treegen.codegen.load import load_module
from treegen.codegen.register_layout import check_pairs
from treegen.ir.errors import BackendError
from treegen.ir.keys import KernelKey, MergeKey
from treegen.ir.shape import Shape
from treegen.target.targets import Target
from treegen.target.tile_config import ELEMENTS_PER_WORD

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities, times ten, for which every template variant has to compile."""

_DTYPES = {
    "fp16": "torch.float16",
    "bf16": "torch.bfloat16",
    "fp32": "torch.float32",
    "e4m3": "torch.float8_e4m3fn",
    "e5m2": "torch.float8_e5m2",
}
_ANY = 2  # rows, pages and the like, which decide nothing
_SCALE = 0.5  # scales decide nothing as long as they are no whole numbers
_SOME_KV_HEADS = 8


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes: registers per thread, stack (spilled) bytes per thread, shared bytes per block, and
    instructions that access the stack in innermost loops with matrix products.
    """

    registers: int
    stack: int
    shared: int
    in_loops: int


def compile_for(source: Source, shape: Shape, target: Target) -> None:
    """Compiles a kernel as launches on a target with contiguous tensors of this shape will ask for it, into Triton's
    cache (TRITON_CACHE_DIR).

    Meanwhile no other thread may launch kernels: Triton takes the stand-in for its device.
    `treegen.tuning.compile_pool` does it in processes of their own. Raises BackendError for a target without a GPU, and
    under TRITON_INTERPRET=1, where kernels are not compiled; otherwise what Triton raises.
    """
    if not target.capability:
        raise BackendError("target", target.name, "has no GPU", "name the GPU to compile for")
    _compiled(source, shape, target.capability)


def compile_ahead(source: Source, architecture: int, partial_dtype: str = "fp32") -> Resources:
    """Compiles a kernel for a compute capability (times ten) and some heads, and reads its resources off the code.

    Raises as `compile_for`.
    """
    compiled = _compiled(source, replace(_shape_of(source.key), partial_dtype=partial_dtype), architecture)
    registers, stack = usage(compiled.asm["cubin"])
    in_loops = stack_accesses_in_loops(compiled.asm["cubin"]) if stack else 0
    return Resources(registers, stack, compiled.metadata.shared, in_loops)


def _shape_of(key: KernelKey | MergeKey) -> Shape:
    """A shape with which the key goes."""
    heads = _SOME_KV_HEADS
    if isinstance(key, MergeKey):
        return Shape(heads, heads, key.head_dim_v, dtype=key.dtype)
    return Shape(
        heads * key.group,
        heads,
        key.head_dim,
        key.head_dim_v,
        dtype=key.dtype,
        kv_dtype=key.kv_dtype,
        page_size=key.page_size,
        shared_kv=key.shared_kv,
    )


def _compiled(source: Source, shape: Shape, architecture: int) -> Any:
    """Triton's compiled kernel."""
    import triton

    if triton.knobs.runtime.interpret:
        raise BackendError("TRITON_INTERPRET", 1, "replaces the compiler", "unset it before importing triton")
    kernel = getattr(load_module(source), source.kernel)
    arguments = _arguments(source.key, shape, architecture)
    options = launch_options(source.key, architecture)
    with device_of(architecture), expected_compiles():
        compiled = kernel.warmup(*arguments, grid=(1,), **options)
    check_pairs(compiled)
    return compiled


@dataclass(frozen=True, slots=True)
class _Contiguous:
    """Stands for a contiguous tensor at an aligned address."""

    dtype: str
    shape: tuple[int, ...]

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dim: int) -> int:
        elements = 1
        for size in self.shape[dim + 1 :]:
            elements *= size
        return elements

    def data_ptr(self) -> int:
        return 0


_STAND_INS = {
    ParameterKind.TABLE: _Contiguous("torch.int32", (_ANY,)),
    ParameterKind.HEAD_VALUES: _Contiguous("torch.float32", (_ANY,)),
    ParameterKind.COUNT: _ANY,
    ParameterKind.TIMES: _Contiguous("torch.int64", (_ANY,)),
}
"""What stands for arguments that neither the shape nor the key says more about."""


def _arguments(key: KernelKey | MergeKey, shape: Shape, architecture: int) -> tuple[Any, ...]:
    """Stand-ins for the arguments of a launch."""
    scoring = key.scoring if isinstance(key, KernelKey) else None
    captured = () if scoring is None else scoring.captured
    values = {
        **call_values(shape, _tensors(shape, key), _SCALE, _SCALE),
        **captured_values(_Contiguous(f"torch.{kind}", (_ANY,) * dims) for kind, dims in captured),
        **switch_values(interpreted=False, capability=architecture),
    }
    for parameter in kernel_signature(key):
        if parameter.kind in _STAND_INS:
            values[parameter.name] = _STAND_INS[parameter.kind]
    return KernelSignature.of(key).arguments(values)


def _tensors(shape: Shape, key: KernelKey | MergeKey) -> Tensors:
    dtype, heads = _DTYPES[shape.dtype], shape.num_qo_heads
    kv_dtype, (k_sizes, v_sizes) = _DTYPES[shape.kv_dtype], shape.cache_sizes(_ANY)
    if isinstance(key, KernelKey) and key.packed_fp8:
        kv_dtype, (k_sizes, v_sizes) = (
            "torch.int32",
            ((*sizes[:-1], sizes[-1] // ELEMENTS_PER_WORD) for sizes in (k_sizes, v_sizes)),
        )
    elif isinstance(key, KernelKey) and key.emulate_e4m3:
        kv_dtype = "torch.uint8"
    return Tensors(
        q=_Contiguous(dtype, (_ANY, heads, shape.head_dim)),
        k=_Contiguous(kv_dtype, k_sizes),
        v=_Contiguous(kv_dtype, v_sizes),
        out=_Contiguous(dtype, (_ANY, heads, shape.head_dim_v)),
        lse=_Contiguous(_DTYPES["fp32"], (_ANY, heads)),
        part_out=_Contiguous(_DTYPES[shape.partial_dtype], (_ANY,)),
        part_lse=_Contiguous(_DTYPES["fp32"], (_ANY,)),
        flags=_Contiguous("torch.int64", (_ANY,)),
    )


class _Device:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_device(self) -> str:
        """A name of its own: Triton keeps binders and kernels per device."""
        return f"sm_{self._architecture} ahead of time"

    def get_current_stream(self, device: object) -> int:
        """No stream."""
        return 0

    def get_current_target(self) -> Any:
        """The architecture."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, 32)


@contextmanager
def device_of(architecture: int) -> Iterator[None]:
    """Within it Triton compiles for this architecture."""
    from triton.runtime import driver

    before = dict(vars(driver))  # without a GPU there may be no driver yet, and asking for one fails
    driver.set_active(_Device(architecture))
    try:
        yield
    finally:
        vars(driver).update(before)
