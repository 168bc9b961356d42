"""The policy cache: where a policy comes from, how long it takes, and what lists, moves and explains entries."""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from support.call_counts import calls
from support.paths import ROOT
from support.policies import ENTRY, KEY, POLICY, accept, cache_warnings, file_of, ship
from treegen import Shape, Tree
from treegen.autotune_cache.entry import Entry
from treegen.autotune_cache.key import FORMAT, key_for
from treegen.autotune_cache.policy_cache import PolicyCache
from treegen.autotune_cache.shipped_policies import ShippedPolicies
from treegen.ir.errors import FormatError
from treegen.search.bucket import policy_bucket
from treegen.target.targets import target_from

POSIX = pytest.mark.skipif(os.name != "posix", reason="signals and links of POSIX")


def test_lookup_order(policy_cache: PolicyCache, policies_folder: Path, tmp_path: Path) -> None:
    missed = policy_cache.lookup(KEY, accept)
    assert (missed.entry, missed.where) == (None, "none")
    assert KEY.digest[:12] in missed.reason
    shipped, kept = replace(ENTRY, source="shipped"), replace(ENTRY, source="kept")
    ship(tmp_path / "shipped", shipped)
    policy_cache = PolicyCache(tmp_path / "shipped")
    found = policy_cache.lookup(KEY, accept)
    assert (found.entry, found.where) == (shipped, "shipped")
    assert policy_cache.lookup(KEY, accept).where == "memory"
    file_of(policies_folder).write_text(kept.to_json())
    fresh = PolicyCache(tmp_path / "shipped")
    found = fresh.lookup(KEY, accept)
    assert (found.entry, found.where) == (kept, "user")
    file_of(policies_folder).unlink()
    found = fresh.lookup(KEY, accept)
    assert (found.entry, found.where) == (kept, "memory")


def test_store_replaces(policy_cache: PolicyCache, policies_folder: Path, tmp_path: Path) -> None:
    assert policy_cache.store(ENTRY) == file_of(policies_folder)
    better = replace(ENTRY, measured_us=11.0)
    policy_cache.store(better)
    assert policy_cache.lookup(KEY, accept).entry == better
    assert PolicyCache(tmp_path / "shipped").lookup(KEY, accept).entry == better
    assert [path.name for path in policies_folder.iterdir()] == [f"{KEY.digest}.json"]


def test_memory_belongs_to_its_cache_folder(
    policy_cache: PolicyCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy_cache.store(ENTRY)
    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(tmp_path / "other"))
    assert policy_cache.lookup(KEY, accept).entry is None


def test_a_hit_reads_one_file_and_no_folder(
    policy_cache: PolicyCache, policies_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        policy_cache.store(replace(ENTRY, key=replace(KEY, bucket=f"b{number}")))
    policy_cache.store(ENTRY)
    fresh, opened = PolicyCache(tmp_path / "shipped"), []
    opening = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **named: opened.append(path) or opening(path, *rest, **named))
    monkeypatch.setattr(os, "listdir", None)
    monkeypatch.setattr(os, "scandir", None)
    assert fresh.lookup(KEY, accept).where == "user"
    assert opened == [file_of(policies_folder)]
    assert fresh.lookup(KEY, accept).where == "memory"
    assert len(opened) == 1


def test_lookups_take_few_calls(policy_cache: PolicyCache, tmp_path: Path) -> None:
    entry = replace(ENTRY, candidates=(("strategy=cohort rows=4", 12.5, "ok"),) * 60)
    policy_cache.store(entry)

    assert calls(lambda: policy_cache.lookup(KEY, accept)) < 60
    assert calls(lambda: PolicyCache(tmp_path / "shipped").lookup(KEY, accept)) < 3000  # which reads its file


def test_a_policy_that_the_caller_refuses_is_a_miss_with_one_warning(
    policy_cache: PolicyCache, policies_folder: Path
) -> None:
    file_of(policies_folder).write_text(ENTRY.to_json())
    refusals = (lambda policy: False, lambda policy: bool(policy["absent"]))
    found = []
    (text,) = cache_warnings(lambda: found.extend(policy_cache.lookup(KEY, refusal) for refusal in refusals))
    assert f"{file_of(policies_folder)} holds a policy that this treegen does not take" in text
    assert [each.entry for each in found] == [None, None]
    assert "does not take" in found[0].reason
    assert "KeyError" in found[1].reason
    assert policy_cache.lookup(KEY, accept).where == "user"
    assert policy_cache.lookup(KEY, lambda policy: False).entry is None  # not from memory either


def test_entries_lists_good_and_bad(policy_cache: PolicyCache, policies_folder: Path, tmp_path: Path) -> None:
    assert policy_cache.entries() == []
    shipped = replace(ENTRY, key=replace(KEY, bucket="shipped"))
    ship(tmp_path / "shipped", shipped)
    policy_cache.store(ENTRY)
    (policies_folder / ("0" * 64 + ".json")).write_text("{")
    (policies_folder / "notes.json").write_text("{}")
    (policies_folder / "notes.txt").write_text("mine")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        listed = policy_cache.entries()
    assert [(each.where, each.entry) for each in listed if each.entry] == [("user", ENTRY), ("shipped", shipped)]
    assert {each.name: bool(each.reason) for each in listed if not each.entry} == {
        "0" * 64 + ".json": True,
        "notes.json": True,
    }


def test_clear_removes_ours_alone(policy_cache: PolicyCache, policies_folder: Path, tmp_path: Path) -> None:
    ship(tmp_path / "shipped", ENTRY)
    policy_cache.store(ENTRY)
    (policies_folder / ("0" * 64 + ".json")).write_text("{")
    (policies_folder / f".{KEY.digest}.json.ab12_xyz").write_text("{")
    (policies_folder / f"{KEY.digest}.lock").write_text("")
    kept = ["notes.json", "0.json", f"{KEY.digest}.json.bak", f"x{KEY.digest}.lock", f".{KEY.digest}.json.d"]
    for name in kept[:-1]:
        (policies_folder / name).write_text("")
    (policies_folder / kept[-1]).mkdir()
    assert policy_cache.clear() == 2
    assert sorted(path.name for path in policies_folder.iterdir()) == sorted(kept)
    assert policy_cache.lookup(KEY, accept).where == "shipped"


def test_export_and_import(
    policy_cache: PolicyCache, policies_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(ENTRY, key=replace(KEY, bucket="other"))
    for entry in (ENTRY, other):
        policy_cache.store(entry)
    (policies_folder / ("0" * 64 + ".json")).write_text("{")
    exported = tmp_path / "exported.json"
    assert policy_cache.export_to(exported) == 2

    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(tmp_path / "second"))
    mine = replace(other, measured_us=1.0)
    policy_cache.store(mine)
    imported = policy_cache.import_from(exported)
    assert imported.taken == 1
    assert len(imported.refused) == 1
    assert "there already" in imported.refused[0]
    assert policy_cache.lookup(KEY, accept).entry == ENTRY
    assert policy_cache.lookup(other.key, accept).entry == mine


def test_import_takes_entries_alone_and_writes_nowhere_else(
    policy_cache: PolicyCache, policies_folder: Path, tmp_path: Path
) -> None:
    good = ENTRY.to_object()
    bad = [
        {**good, "name": "../../evil.json"},
        {**good, "key": {**good["key"], "bucket": "../../evil\x00"}},
        {**good, "key": {**good["key"], "format": FORMAT + 1}},
        {**good, "measured_us": 12.0},
        {**good, "policy": {"run": "x" * 1000}},
        3,
        [good],
    ]
    tricky = replace(ENTRY, key=replace(KEY, bucket="../../evil", target="/etc/passwd")).to_object()
    file = tmp_path / "in.json"
    file.write_text(json.dumps({"kind": "treegen policies", "format": FORMAT, "entries": [*bad, good, tricky]}))
    before = {path for path in tmp_path.rglob("*") if policies_folder not in path.parents}
    imported = policy_cache.import_from(file)
    assert imported.taken == 2
    assert len(imported.refused) == len(bad)
    assert {path for path in tmp_path.rglob("*") if policies_folder not in path.parents} - before <= {
        policies_folder,
        policies_folder.parent,
    }
    assert {path.stem for path in policies_folder.iterdir()} == {
        KEY.digest,
        replace(KEY, bucket="../../evil", target="/etc/passwd").digest,
    }


@POSIX
def test_import_does_not_write_through_links(policy_cache: PolicyCache, policies_folder: Path, tmp_path: Path) -> None:
    policy_cache.store(ENTRY)
    policy_cache.export_to(tmp_path / "in.json")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    file_of(policies_folder).unlink()
    file_of(policies_folder).symlink_to(victim)
    assert policy_cache.import_from(tmp_path / "in.json").taken == 1
    assert victim.read_text() == "mine"
    assert not file_of(policies_folder).is_symlink()


@pytest.mark.parametrize(
    "text", ["", "[", "[" * 100_000, "[]", "{}", '{"kind": "treegen policies", "format": 9, "entries": []}',
             '{"kind": "treegen policies", "format": 2, "entries": {"../x": {}}}', ENTRY.to_json()],
)  # fmt: skip
def test_import_refuses_other_files(
    policy_cache: PolicyCache, policies_folder: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "in.json").write_text(text)
    with pytest.raises(FormatError):
        policy_cache.import_from(tmp_path / "in.json")
    assert not policies_folder.exists()


def test_why_names_the_nearest_entries_and_what_differs(policy_cache: PolicyCache, tmp_path: Path) -> None:
    assert "no entries" in policy_cache.why(KEY)[0]
    near = replace(ENTRY, key=replace(KEY, bucket="rows 2^4"))
    far = replace(ENTRY, key=replace(KEY, bucket="rows 2^4", target="a100", kernels=0))
    policy_cache.store(far)
    ship(tmp_path / "shipped", near)
    lines = policy_cache.why(KEY)
    assert lines[0] == f"shipped entry {near.key.digest[:12]} differs in 1 of 6 fields"
    assert lines[1] == "  bucket: rows 2^3; the entry: rows 2^4"
    assert lines[2] == f"user entry {far.key.digest[:12]} differs in 3 of 6 fields"
    assert "  target: h200; the entry: a100" in lines
    policy_cache.store(ENTRY)
    assert policy_cache.why(KEY)[0].endswith("is the one asked for")


def test_why_prefers_buckets_with_more_in_common(policy_cache: PolicyCache) -> None:
    for bucket in (
        "rows 2^9, levels 3, tokens 2^9",
        "rows 2^3, levels 2, tokens 2^9",
        "rows 2^9, levels 2, tokens 2^8",
    ):
        policy_cache.store(replace(ENTRY, key=replace(KEY, bucket=bucket)))
    key = replace(KEY, bucket="rows 2^3, levels 2, tokens 2^8")
    buckets = [line.partition("the entry: ")[2] for line in policy_cache.why(key) if "bucket" in line]
    assert buckets[-1] == "rows 2^9, levels 3, tokens 2^9"


def test_shipped_entries_are_valid_and_their_folder_is_found() -> None:
    assert ShippedPolicies().folder.is_dir()
    assert all(listed.entry for listed in PolicyCache().entries() if listed.where == "shipped")


def test_the_cache_imports_neither_torch_nor_triton() -> None:
    program = "import sys, treegen.cli.cache_commands; print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_a_tree_finds_its_policy_again(policy_cache: PolicyCache) -> None:
    shape, target = Shape(32, 8, 128), target_from(None)
    key = key_for(policy_bucket(Tree.from_levels([1, 256], [256, 32])), shape, target)
    policy_cache.store(Entry(key, POLICY, None))
    again = key_for(policy_bucket(Tree.from_levels([1, 256], [260, 30])), shape, target)
    assert policy_cache.lookup(again, accept).where == "memory"


def test_merged_entries_replace_those_of_the_folder_on_request(policy_cache: PolicyCache) -> None:
    other = replace(ENTRY, measured_us=99.0)
    policy_cache.store(other)
    assert policy_cache.merge([ENTRY.to_object()]).taken == 0
    assert policy_cache.lookup(KEY, accept).entry == other
    assert policy_cache.merge([other.to_object()], replace=True).taken == 0
    assert policy_cache.merge([ENTRY.to_object(), {"kind": "other"}], replace=True).taken == 1
    assert policy_cache.lookup(KEY, accept).entry == ENTRY
