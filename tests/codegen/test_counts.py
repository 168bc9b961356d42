"""Counts of loaded and compiled kernels, and the warning of a compilation at run time."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

import treegen
from support.paths import ROOT
from treegen import Shape, Tree
from treegen.codegen import compile_counter, load
from treegen.codegen.emit import emit_merge
from treegen.codegen.merge_forms import merge_key
from treegen.ir.errors import PerformanceWarning


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has loaded and compiled nothing, and in which nobody listens to Triton."""
    monkeypatch.setattr(compile_counter, "state", compile_counter.CompileState())
    monkeypatch.setattr(knobs.compilation, "listener", None)


def report(module: str = "treegen_kernel_0123", cache_hit: bool = False, seconds: float = 2.0) -> None:
    """What Triton's compiler tells its listener."""
    source = SimpleNamespace(name="merge", fn=SimpleNamespace(__module__=module))
    times = SimpleNamespace(total=seconds * 1e6)
    knobs.compilation.listener(src=source, metadata={}, metadata_group={}, times=times, cache_hit=cache_hit)


def test_modules_are_counted_once(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "loaded", {})
    for staged in (False, True, False):
        load.load_module(emit_merge(merge_key(Shape(12, 4, 80), several_rounds=staged, rows=512, longest=9)))
    assert treegen.kernel_counts() == treegen.KernelCounts(loaded=2, compiled=0)


def test_the_interpreter_counts_modules_and_no_compilations(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "loaded", {})
    kernel = treegen.compile(Tree.parse("40(5,7)"), strategy="deft-node", backend="triton")
    kernel(torch.randn(2, 2, 64), *torch.randn(2, 52, 1, 64))
    assert treegen.kernel_counts() == treegen.KernelCounts(loaded=2, compiled=0)


def test_only_our_own_cold_compilations_count(fresh: None) -> None:
    compile_counter.count_loaded()
    report()
    report(cache_hit=True)
    report(module="someone.else")
    knobs.compilation.listener(
        src=SimpleNamespace(name="file.ttir"), metadata={}, metadata_group={}, times=None, cache_hit=False
    )
    assert treegen.kernel_counts() == treegen.KernelCounts(loaded=1, compiled=1)


def test_a_listener_that_was_there_hears_all_once(fresh: None) -> None:
    heard: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: heard.append(cache_hit)
    compile_counter.count_loaded()
    compile_counter.count_loaded()
    report()
    report(module="someone.else", cache_hit=True)
    assert heard == [False, True]
    assert treegen.kernel_counts().compiled == 1


def test_the_first_launch_that_compiled_warns_once_and_names_kernel_time_and_cure(fresh: None) -> None:
    compile_counter.count_loaded()
    compile_counter.warn_of_compiles()  # nothing compiled: a warning would be an error
    report(seconds=2.0)
    report(seconds=1.5)
    with pytest.warns(PerformanceWarning, match=r"3\.5 s .*merge of 0123 and 1 more.*treegen warm") as caught:
        compile_counter.warn_of_compiles()
    assert caught[0].filename == __file__
    report()
    compile_counter.warn_of_compiles()
    assert treegen.kernel_counts().compiled == 3


def test_compilations_on_purpose_count_and_do_not_warn(fresh: None) -> None:
    compile_counter.count_loaded()
    with compile_counter.expected_compiles():
        report()
    compile_counter.warn_of_compiles()
    assert treegen.kernel_counts().compiled == 1
    report()
    with pytest.warns(PerformanceWarning):
        compile_counter.warn_of_compiles()


def test_counting_imports_neither_triton_nor_emission() -> None:
    program = "import sys, treegen; print(treegen.kernel_counts(), {'torch', 'triton', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "KernelCounts(loaded=0, compiled=0) set()\n", done.stderr
