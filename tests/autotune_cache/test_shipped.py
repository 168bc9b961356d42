"""The shipped policies: valid, taken by this treegen, and of the trees and shapes that docs/limits.md names."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import pytest

from support.call_counts import calls
from support.paths import ROOT
from treegen import Shape, Tree
from treegen.autotune_cache.entry import Entry, installed_versions
from treegen.autotune_cache.key import shape_text, target_text
from treegen.autotune_cache.policy_cache import POLICY_CACHE, PolicyCache
from treegen.autotune_cache.policy_file import file_text
from treegen.autotune_cache.shipped_policies import ShippedPolicies
from treegen.search.batch_choices import accepts_for_batches
from treegen.search.bucket import batch_bucket, policy_bucket
from treegen.search.policies import accepts
from treegen.strategies import strategy_from
from treegen.target.problem import Problem
from treegen.target.targets import target_from
from treegen.version import KERNEL_VERSION, SPACE_VERSION
from treegen.workloads.batch_pages import live_batch_of
from treegen.workloads.batches import batches
from treegen.workloads.specs import trees_of

HEADS = ((32, 8), (32, 32), (16, 1), (64, 8), (28, 4))
BATCH_HEADS = ("32:8", "8:1", "16:2", "64:8", "40:8", "32:32")


@pytest.fixture(scope="module")
def shipped() -> list[Entry]:
    listed = [each for each in PolicyCache().entries() if each.where == "shipped"]
    assert not [each.reason for each in listed if each.entry is None]
    return [each.entry for each in listed if each.entry is not None]


def of_batches(entry: Entry) -> bool:
    return entry.key.bucket.startswith("batch of ")


def accepted(entry: Entry) -> Callable[[Mapping[str, object]], bool]:
    """Tells whether a policy is one of the entry's kind."""
    return accepts_for_batches if of_batches(entry) else accepts


def test_each_was_measured_and_is_taken(shipped: list[Entry]) -> None:
    for entry in shipped:
        assert accepted(entry)(entry.policy)
        assert entry.measured_us is not None
        times = [time for _, time, _ in entry.candidates if time is not None]
        assert entry.measured_us == min(times)
        assert entry.key.target == target_text(target_from("h200"))


def test_each_is_of_these_kernels_and_this_space(shipped: list[Entry]) -> None:
    """`auto` passes over those of other versions."""
    assert {(entry.key.kernels, entry.key.space) for entry in shipped} == {(KERNEL_VERSION, SPACE_VERSION)}


def test_doctor_counts_all_as_usable_whatever_triton_is_installed(tmp_path: Path) -> None:
    """With the set-up of the README, whose Triton is newer than the one that measured them."""
    environment = {**os.environ, "TREEGEN_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "treegen", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    assert (done.returncode, found["policies"]) == (0, {"user": {}, "shipped": {"usable": 299}})
    if installed_versions()["triton"] != "3.6":
        assert any(note.startswith("299 policies were measured with triton 3.6, here ") for note in found["notes"])


def test_auto_takes_them(shipped: list[Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(POLICY_CACHE, "shipped", ShippedPolicies())
    tree, shape = Tree.parse("1,4,16,512/1024,256,128,32"), Shape(32, 8, 128, dtype="fp16")
    choice = strategy_from("auto").choose(Problem(tree, shape, target_from("h200")))
    assert choice.reason.startswith("measured as the fastest for such trees: ")


def test_lookups_take_few_calls_and_nothing_is_read_at_import(shipped: list[Entry], tmp_path: Path) -> None:
    policies = PolicyCache()
    assert policies.shipped.files == {}

    for where in ("shipped", "memory"):
        for entry in shipped:
            found = policies.lookup(entry.key, accepted(entry))
            assert (found.entry, found.where) == (entry, where)
    assert calls(lambda: policies.lookup(shipped[0].key, accepted(shipped[0]))) < 120


def test_the_file_is_sorted_and_has_a_line_for_each(shipped: list[Entry]) -> None:
    text = (ROOT / "autotune_cache" / "shipped" / "h200.json").read_text()
    assert text == file_text(shipped[::-1])
    assert len(text.splitlines()) == len(shipped) + 2


def test_fasttree_s_table_is_there_for_common_shapes(shipped: list[Entry], data_dir: Path) -> None:
    buckets = {policy_bucket(tree) for _, tree in trees_of(str(data_dir / "fasttree_kernel_bench.json"))}
    shapes = {
        shape_text(Shape(*heads, dim, dtype=dtype)) for heads, dim, dtype in product(HEADS, (64, 128), ("fp16", "bf16"))
    }
    assert {(each.key.bucket, each.key.shape) for each in shipped if not of_batches(each)} == set(
        product(buckets, shapes)
    )
    assert {tuple(entry.made_with.items()) for entry in shipped} == {
        (("treegen", "0.1.0"), ("triton", "3.6"), ("torch", "2.11"))
    }


def test_batches_of_the_suite_take_them(shipped: list[Entry], data_dir: Path) -> None:
    """Those of the suite and of seed 1, with the shapes that docs/limits.md names, but for MLA's."""
    shapes = {f"{heads} heads, head_dim {dim}, bf16, page_size 16" for heads in BATCH_HEADS for dim in (64, 128)}
    known = {(entry.key.bucket, entry.key.shape) for entry in shipped if of_batches(entry)}
    assert {shape for _, shape in known} <= shapes
    buckets = set()
    for seed in (0, 1):
        for batch in batches(data_dir, seed):
            buckets.add(f"batch of {batch_bucket(live_batch_of(batch).tree())}")
    assert {bucket for bucket, _ in known} <= buckets
