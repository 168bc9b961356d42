"""Kernels that record when they ran: other kernels have no trace of it, and theirs differ by nothing else."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from support.canonical_kernels import canonical_kernels
from treegen.codegen.emit import Source, emit_merge, emit_partial
from treegen.codegen.kernel_signature import ParameterKind, kernel_signature
from treegen.ir.keys import KernelKey, MergeKey

NORMAL = {name: each.key for name, each in canonical_kernels().items() if not each.key.recorded}
RECORDING = ("record", "place_and_time", "times,", "times + ", "globaltimer", "clock64", "smid")


def emitted(key: KernelKey | MergeKey) -> Source:
    return emit_partial(key) if isinstance(key, KernelKey) else emit_merge(key)


def kernel_of(source: Source) -> list[str]:
    """The lines of a module's kernel, without blank lines."""
    begin = "merge_heads" if isinstance(source.key, MergeKey) else source.kernel
    return [line for line in source.text.partition(f"def {begin}(")[2].splitlines() if line.strip()]


@pytest.mark.parametrize("name", NORMAL)
def test_normal_kernels_have_no_trace_of_recording(name: str) -> None:
    code = "\n".join(kernel_of(emitted(NORMAL[name])))
    assert [word for word in RECORDING if word in code] == []
    assert ParameterKind.TIMES not in {parameter.kind for parameter in kernel_signature(NORMAL[name])}


@pytest.mark.parametrize("name", NORMAL)
def test_recording_adds_lines_and_changes_none(name: str) -> None:
    key = NORMAL[name]
    added = {
        "    times,",
        "record = times + program * RECORD_FIELDS",
        "record = times + turn * RECORD_FIELDS",
        "record = times + tl.program_id(0) * RECORD_FIELDS",
        "times, INTERPRETED,",
        "times, INTERPRETED: tl.constexpr,",
        "record_start(record, INTERPRETED)",
        "record_end(record, INTERPRETED)",
    }
    if isinstance(key, MergeKey):
        added |= {"    INTERPRETED: tl.constexpr,"}
    kept = [line for line in kernel_of(emitted(replace(key, recorded=True))) if line not in added]
    kept = [line for line in kept if line.strip() not in added]
    assert kept == kernel_of(emitted(key))


def test_a_record_has_as_many_fields_as_kernels_write() -> None:
    text = emitted(replace(NORMAL["sm_90 merge"], recorded=True)).text
    written = {int(place or 0) for place in re.findall(r"tl\.store\(record(?: \+ (\d))?,", text)}
    assert f"RECORD_FIELDS = tl.constexpr({len(written)})" in text
    assert written == set(range(len(written)))
