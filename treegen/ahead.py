"""Ahead-of-time compilation: an emitted kernel becomes machine code for a GPU architecture, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from treegen.emit import Source
from treegen.ir.errors import BackendError
from treegen.ir.signature import KernelKey
from treegen.modules import load_module

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities, times ten, for which every template variant has to compile."""

_POINTER_TYPES = {"fp16": "*fp16", "bf16": "*bf16", "fp32": "*fp32"}
_TABLES = (
    "counts", "items", "rows", "tiles", "blocks", "work_indptr", "work", "merge_rows", "merge_indptr", "merge_slots",
    "epilogue_indptr", "epilogue_slots",
)  # fmt: skip
_FLOAT_POINTERS = ("lse", "part_out", "part_lse")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes: registers per thread, stack (spilled) bytes per thread, shared bytes per block."""

    registers: int
    stack: int
    shared: int


def compile_ahead(source: Source, architecture: int, *, aligned: bool = True) -> Resources:
    """Compiles a kernel for a compute capability (times ten) and reads its resources off the machine code.

    aligned: pointers and strides are multiples of 16 bytes and of 16, as in a contiguous cache. Raises BackendError
    under TRITON_INTERPRET=1, where kernels are not compiled.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        raise BackendError("TRITON_INTERPRET", 1, "replaces the compiler", "unset it before importing triton")
    kernel = getattr(load_module(source), source.kernel)
    constants = {"INTERPRETED": False} if "INTERPRETED" in kernel.arg_names else {}
    signature = {name: "constexpr" if name in constants else _type(name, source) for name in kernel.arg_names}
    divisible = [
        index
        for index, name in enumerate(kernel.arg_names)
        if aligned and (signature[name].startswith("*") or "stride" in name)
    ]
    attributes = {(index,): [["tt.divisibility", 16]] for index in divisible}
    options = {"num_warps": source.key.warps}
    if isinstance(source.key, KernelKey):
        options["num_stages"] = source.key.stages
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", architecture, 32), options=options
    )
    registers, stack = _usage(compiled.asm["cubin"])
    return Resources(registers, stack, compiled.metadata.shared)


def _type(name: str, source: Source) -> str:
    if name in _TABLES:
        return "*i32"
    if name in _FLOAT_POINTERS:
        return "*fp32"
    if name in ("k", "v"):
        assert isinstance(source.key, KernelKey)
        return _POINTER_TYPES[source.key.kv_dtype]
    if name in ("q", "out"):
        return _POINTER_TYPES[source.key.dtype]
    return "fp32" if name.endswith("_scale") else "i32"


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, as `cuobjdump -res-usage` of Triton's own package prints them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    handle, name = tempfile.mkstemp(suffix=".cubin")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        text = subprocess.run([str(tool), "-res-usage", name], capture_output=True, text=True, check=True).stdout
    finally:
        Path(name).unlink()
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if usage is None:
        raise BackendError("cuobjdump", text, "prints no resource usage", "install a complete triton package")
    return int(usage.group(1)), int(usage.group(2))
