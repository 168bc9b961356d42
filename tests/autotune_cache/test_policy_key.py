"""Keys and entries of the policy cache: content alone decides, and texts are strict and bounded."""

import os
import subprocess
import sys
from copy import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from support.paths import ROOT
from support.policies import ENTRY, KEY, POLICY
from treegen import Shape
from treegen.autotune_cache.entry import MAX_BYTES, Entry, differing_versions, installed_versions, policy_text
from treegen.autotune_cache.key import PolicyKey, key_for, shape_text, target_text
from treegen.ir.errors import FormatError
from treegen.target.targets import target_from
from treegen.version import VERSION


@pytest.mark.parametrize("name", [field.name for field in fields(PolicyKey)])
def test_every_field_of_a_key_changes_its_digest(name: str) -> None:
    other = replace(KEY, **{name: 9 if name in ("kernels", "space", "format") else "other"})
    assert len({KEY.digest, other.digest, replace(other, **{name: getattr(KEY, name)}).digest}) == 2


@pytest.mark.parametrize("name", [field.name for field in fields(Shape) if field.name != "kv_layout"])
def test_every_field_of_a_shape_changes_the_key(name: str) -> None:
    shape = Shape(32, 8, 128)
    others = {"num_kv_heads": 4, "dtype": "fp16", "kv_dtype": "fp16"}
    other = copy(shape)  # also the values that shapes do not take yet
    object.__setattr__(other, name, others.get(name, 64))
    assert shape_text(other) != shape_text(shape)
    target = target_from(None)
    assert key_for("b", other, target).digest != key_for("b", shape, target).digest


def test_policies_serve_both_layouts() -> None:
    assert shape_text(Shape(32, 8, 128, page_size=16, kv_layout="HND")) == shape_text(Shape(32, 8, 128, page_size=16))


def test_shapes_have_distinct_texts() -> None:
    shapes = [
        Shape(query, kv, dim, dtype=dtype, page_size=page)
        for query in (8, 32) for kv in (1, 8) for dim in (64, 128) for dtype in ("fp16", "bf16") for page in (1, 16)
    ]  # fmt: skip
    assert len(set(map(shape_text, shapes))) == len(shapes)
    assert shape_text(Shape(32, 8, 128)) == "32:8 heads, head_dim 128, bf16"


def test_the_key_names_the_hardware_and_not_the_cost_model() -> None:
    target = target_from("h200")
    assert target_text(target).startswith("h200 (sm_90, 132 SMs, ")
    refitted = replace(target, constants=replace(target.constants, launch_us=1.0), grid=None, constants_of="x")
    assert target_text(refitted) == target_text(target)
    for change in ({"name": "h100"}, {"sms": 114}, {"memory_gbps": 4800.5}, {"l2_bytes": 1}, {"capability": 100}):
        assert target_text(replace(target, **change)) != target_text(target)
    odd = key_for("b", Shape(1, 1, 8), replace(target, name="naïve\nGPU\x1b[31m" + 300 * "x"))
    assert odd.target.isprintable()


@pytest.mark.parametrize("text", ["x" * 301, "a\nb", "\x1b[31m", "é", "\ud800", 3, None])
def test_key_texts_are_plain(text: Any) -> None:
    with pytest.raises(FormatError, match=r"key\.bucket"):
        replace(KEY, bucket=text)


def test_versions_of_packages_are_recorded_and_are_no_part_of_the_key() -> None:
    triton = pytest.importorskip("triton")
    here = installed_versions()
    assert here == {
        "treegen": VERSION,
        "triton": ".".join(triton.__version__.split(".")[:2]),
        "torch": ".".join(torch.__version__.split(".")[:2]),
    }
    assert differing_versions(replace(ENTRY, made_with=here)) == []
    other = replace(ENTRY, made_with={**here, "triton": "3.0"})
    assert differing_versions(other) == [f"triton 3.0, here {here['triton']}"]
    assert other.key == ENTRY.key


def test_the_digest_is_the_same_in_every_process() -> None:
    program = (
        "import sys\n"
        "from treegen import Shape, Tree\n"
        "if len(sys.argv) > 1:\n"
        "    from treegen.report.explain import explain\n"
        "    str(explain(Tree.parse('1,4/100,10'), ['query']))\n"
        "    import triton\n"
        "from treegen.autotune_cache.key import key_for\n"
        "from treegen.search.bucket import policy_bucket\n"
        "from treegen.target.targets import target_from\n"
        "tree = Tree.from_levels([1, 4], [100, 10])\n"
        "print(key_for(policy_bucket(tree), Shape(32, 8, 128), target_from(None)).digest)\n"
    )
    digests = set()
    for seed, *arguments in (("0",), ("1",), ("2", "work")):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert done.stderr == ""
        digests.add(done.stdout)
    assert len(digests) == 1


def test_an_entry_comes_back_from_its_text() -> None:
    assert Entry.from_json(ENTRY.to_json().encode(), KEY.digest) == ENTRY
    assert ENTRY.policy == {**POLICY, "tiles": (16, 64)}
    assert policy_text(ENTRY.policy) == "strategy=cohort rows=4 split=none tiles=16,64"
    with pytest.raises(TypeError):
        ENTRY.policy["rows"] = 5  # type: ignore[index]


def test_the_largest_entry_fits() -> None:
    worst = '"' * 1000
    policy = {f"{number:02}{worst}"[:160]: [10**16] * 16 for number in range(32)}
    key = replace(KEY, **dict.fromkeys(("bucket", "shape", "target"), '"' * 300))
    entry = Entry(key, policy, 1 / 3, ((worst, 1 / 3, worst),) * 999, worst)
    assert len(entry.to_json()) <= MAX_BYTES
    assert Entry.from_json(entry.to_json().encode(), key.digest) == entry


def test_texts_and_times_of_candidates_are_tamed_not_refused() -> None:
    failed = (
        "é\x1b[31m",
        float("nan"),
        "CUDA error:\n\tillegal \ud800 access" + 300 * "!",
    )
    entry = Entry(KEY, POLICY, float("inf"), (failed,), "naïve")
    assert entry.measured_us is None
    assert entry.candidates[0][1] is None
    assert all(text.isascii() and text.isprintable() and len(text) <= 160 for text in entry.candidates[0][::2])
    assert Entry.from_json(entry.to_json().encode(), KEY.digest) == entry


@pytest.mark.parametrize(
    "policy",
    [
        None, [], "text", {1: 2}, {"": 1}, {"a\n": 1}, {"x" * 161: 1}, {"a": 1.5}, {"a": True}, {"a": {}}, {"a": [[1]]},
        {"a": ["b"]}, {"a": [True]}, {"a": 10**18}, {"a": [1] * 17}, {"a": "\x00"}, {str(n): n for n in range(33)},
    ],
)  # fmt: skip
def test_what_is_no_policy(policy: Any) -> None:
    with pytest.raises(FormatError, match="policy"):
        Entry(KEY, policy, None)
