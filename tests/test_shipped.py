"""The shipped policies: valid, taken by this treegen, and of the trees and shapes that the README names."""

from itertools import product
from pathlib import Path

import pytest

from treegen import Shape
from treegen.autotune_cache.entry import Entry
from treegen.autotune_cache.key import shape_text, target_text, template_digest
from treegen.autotune_cache.policies import PolicyCache
from treegen.bucket import policy_bucket
from treegen.search.policies import accepts
from treegen.search.space import space_digest
from treegen.specs import trees_of
from treegen.targets import target_from
from treegen.version import VERSION

HEADS = ((32, 8), (32, 32), (16, 1), (64, 8), (28, 4))


@pytest.fixture(scope="module")
def shipped() -> list[Entry]:
    listed = [each for each in PolicyCache().entries() if each.where == "shipped"]
    assert not [each.reason for each in listed if each.entry is None]
    return [each.entry for each in listed if each.entry is not None]


def test_each_was_measured_and_is_taken(shipped: list[Entry]) -> None:
    for entry in shipped:
        assert accepts(entry.policy)
        assert entry.measured_us is not None
        times = [time for _, time, _ in entry.candidates if time is not None]
        assert entry.measured_us == min(times)
        assert entry.key.target == target_text(target_from("h200"))


def test_each_is_of_these_templates_and_this_search(shipped: list[Entry]) -> None:
    """`auto` passes over those of another state. Triton's version is that of the machine that measured them."""
    states = {(entry.key.templates, entry.key.space, entry.key.treegen) for entry in shipped}
    assert states == {(template_digest(), space_digest(), VERSION)}


def test_fasttree_s_table_is_there_for_common_shapes(shipped: list[Entry], data_dir: Path) -> None:
    buckets = {policy_bucket(tree) for _, tree in trees_of(str(data_dir / "fasttree_kernel_bench.json"))}
    shapes = {
        shape_text(Shape(*heads, dim, dtype=dtype)) for heads, dim, dtype in product(HEADS, (64, 128), ("fp16", "bf16"))
    }
    assert {(entry.key.bucket, entry.key.shape) for entry in shipped} == set(product(buckets, shapes))
    assert len({entry.key.triton for entry in shipped}) == 1
