"""Damaged, foreign, newer and hostile files of the policy cache are misses with one warning each, never errors."""

import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.policies import ENTRY, KEY, accept, cache_warnings, file_of, ship
from treegen.autotune_cache import entry as entry_module
from treegen.autotune_cache import folders
from treegen.autotune_cache.entry import MAX_BYTES, Entry
from treegen.autotune_cache.key import FORMAT
from treegen.autotune_cache.policy_cache import PolicyCache
from treegen.ir.errors import CacheWarning

POSIX = pytest.mark.skipif(os.name != "posix", reason="signals and links of POSIX")


def changed(**change: Any) -> bytes:
    """The entry with other parts; its checksum fits unless it is given."""
    value = {**ENTRY.to_object(), **change}
    if "checksum" not in change:
        value["checksum"] = entry_module.checksum({name: part for name, part in value.items() if name != "checksum"})
    return json.dumps(value).encode()


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "truncated": ENTRY.to_json().encode()[:-20],
    "binary": bytes(range(256)),
    "zeros": bytes(4096),
    "utf-16": ENTRY.to_json().encode("utf-16"),
    "bom": b"\xef\xbb\xbf" + ENTRY.to_json().encode(),
    "foreign": b'{"best_config": {"BLOCK": 64}, "time": 3.4}',
    "list": b"[1, 2]",
    "other kind": changed(kind="treegen tree"),
    "future": changed(key={**KEY.to_object(), "format": FORMAT + 1}),
    "future that looks otherwise": json.dumps({"kind": "treegen policy", "key": {"format": 9}, "wisdom": {}}).encode(),
    "past": changed(key={**KEY.to_object(), "format": FORMAT - 1}),
    "format of another type": changed(key={**KEY.to_object(), "format": True}),
    "format text": changed(key={**KEY.to_object(), "format": "1"}),
    "no checksum": json.dumps({k: v for k, v in ENTRY.to_object().items() if k != "checksum"}).encode(),
    "other checksum": changed(checksum="0" * 32),
    "a digit changed": ENTRY.to_json().encode().replace(b"12.5", b"12.6", 1),
    "versions list": changed(made_with=["3.6"]),
    "more": changed(code="import os"),
    "less": json.dumps({k: v for k, v in ENTRY.to_object().items() if k != "source"}).encode(),
    "other key": changed(key={**KEY.to_object(), "bucket": "another"}),
    "key lacks": changed(key={"bucket": "b"}),
    "key types": changed(key={**KEY.to_object(), "bucket": ["a"]}),
    "key text": changed(key="b"),
    "policy list": changed(policy=[1]),
    "policy nested": changed(policy={"a": {"b": 1}}),
    "policy float": changed(policy={"a": 1.5}),
    "policy flag": changed(policy={"a": True}),
    "policy control": changed(policy={"a": "\x1b[2J"}),
    "time negative": changed(measured_us=-1),
    "time text": changed(measured_us="1"),
    "time true": changed(measured_us=True),
    "candidates pair": changed(candidates=[["a", 1]]),
    "candidates object": changed(candidates={}),
    "too many candidates": changed(candidates=[["a", 1, "ok"]] * 251),
    "source number": changed(source=3),
    "lone surrogate": changed(source="\ud800"),
    "brackets": b"[" * 100_000,
    "objects": b'{"a":' * 50_000,
    "brackets in place": ENTRY.to_json().encode().replace(b"null", b"[" * 50_000 + b"]" * 50_000),
    "quotes": b'"' + b'\\"' * 100_000,
    "huge integer": ENTRY.to_json().encode().replace(b"4", b"4" * 10**5, 1),
    "huge exponent": ENTRY.to_json().encode().replace(b"12.5", b"1e999", 1),
    "long float": ENTRY.to_json().encode().replace(b"12.5", b"1." + b"5" * 10**5, 1),
    "nan": ENTRY.to_json().encode().replace(b"12.5", b"NaN", 1),
    "infinity": ENTRY.to_json().encode().replace(b"12.5", b"-Infinity", 1),
    "name twice": ENTRY.to_json().encode().replace(b'"policy"', b'"source": "x", "policy"', 1),
    "too large": ENTRY.to_json().encode() + b" " * MAX_BYTES,
}  # fmt: skip


def refused_with_one_warning(policy_cache: PolicyCache, path: Path) -> str:
    """The reason of a miss that comes with one warning, of the file, however often it is looked up."""
    found = []
    caches = (policy_cache, policy_cache, PolicyCache(path.parent))
    (text,) = cache_warnings(lambda: found.extend(each.lookup(KEY, accept) for each in caches))
    assert [(each.entry, each.where) for each in found] == [(None, "none")] * 3
    assert str(path) in text
    assert "remove it" in text
    assert "\n" not in text
    assert "\x1b" not in text
    return found[0].reason


@pytest.mark.parametrize("name", HOSTILE)
def test_a_bad_file_is_a_miss_with_one_warning_and_is_replaced(
    policy_cache: PolicyCache, policies_folder: Path, name: str
) -> None:
    path = file_of(policies_folder)
    path.write_bytes(HOSTILE[name])
    reason = refused_with_one_warning(policy_cache, path)
    if "future" in name:
        assert f"newer than {FORMAT}" in reason
    made = policy_cache.decide(KEY, accept, lambda: ENTRY)
    assert (made.entry, made.where) == (ENTRY, "made")
    assert Entry.from_json(path.read_bytes(), KEY.digest) == ENTRY


def test_nesting_is_refused_before_it_is_parsed(
    policy_cache: PolicyCache, policies_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treegen.autotune_cache.entry.json.loads", None)  # calling it would be an error
    path = file_of(policies_folder)
    path.write_bytes(HOSTILE["brackets"])
    assert "nested too deeply" in refused_with_one_warning(policy_cache, path)


def test_numbers_are_refused_before_they_are_parsed(policy_cache: PolicyCache, policies_folder: Path) -> None:
    path = file_of(policies_folder)
    path.write_bytes(HOSTILE["huge integer"])
    assert "a number of 100000 digits" in refused_with_one_warning(policy_cache, path)  # not Python's own limit


def test_no_more_is_read_than_entries_have(policy_cache: PolicyCache, policies_folder: Path) -> None:
    path = file_of(policies_folder)
    path.touch()
    os.truncate(path, 1 << 26)
    tracemalloc.start()
    assert f"larger than {MAX_BYTES} bytes" in refused_with_one_warning(policy_cache, path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 23


def test_a_bad_file_does_not_hide_a_shipped_entry(
    policy_cache: PolicyCache, policies_folder: Path, tmp_path: Path
) -> None:
    ship(tmp_path / "shipped", ENTRY)
    file_of(policies_folder).write_bytes(b"[")
    with pytest.warns(CacheWarning):
        assert policy_cache.lookup(KEY, accept).where == "shipped"


def test_a_folder_in_an_entrys_place(policy_cache: PolicyCache, policies_folder: Path) -> None:
    path = file_of(policies_folder)
    path.mkdir()
    assert "not a regular file" in refused_with_one_warning(policy_cache, path)
    assert policy_cache.decide(KEY, accept, lambda: ENTRY).where == "made"  # a further warning would be an error
    assert policy_cache.lookup(KEY, accept).where == "memory"
    assert path.is_dir()
    assert [path.name for path in policies_folder.iterdir()] == [path.name]


@POSIX
@pytest.mark.parametrize("kind", ["loop", "pipe", "device", "permissions"])
def test_what_cannot_be_read_is_not_waited_for(policy_cache: PolicyCache, policies_folder: Path, kind: str) -> None:
    path = file_of(policies_folder)
    if kind == "loop":
        path.symlink_to(path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_text(ENTRY.to_json())
        path.chmod(0)
        if os.geteuid() == 0:
            pytest.skip("root reads everything")
    reason = refused_with_one_warning(policy_cache, path)
    assert "cannot be read" in reason or "not a regular file" in reason
    assert policy_cache.decide(KEY, accept, lambda: ENTRY).where == "made"
    assert Entry.from_json(path.read_bytes(), KEY.digest) == ENTRY
    assert not path.is_symlink()


def test_a_cache_that_cannot_be_written_means_memory_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(blocked))
    policy_cache = PolicyCache(tmp_path / "shipped")
    with pytest.warns(CacheWarning, match=f"{blocked}.*TREEGEN_CACHE_DIR"):
        assert policy_cache.decide(KEY, accept, lambda: ENTRY).where == "made"
    assert policy_cache.decide(KEY, accept, lambda: pytest.fail("made again")).where == "memory"
    policy_cache.store(replace(ENTRY, source="again"))  # a second warning would be an error
    assert blocked.read_text() == "in the way"


def test_warnings_come_once_per_file(policies_folder: Path) -> None:
    texts = cache_warnings(
        lambda: [folders.warn_once(policies_folder / name, "is bad", "remove it") for name in ("a", "b", "a")]
    )
    assert texts == [f"cache: {policies_folder / name} is bad; remove it" for name in ("a", "b")]


@pytest.mark.parametrize(("old", "new"), [("12.5", "["), ('"entries"', '"others"'), ('"key"', '"keys"')])
def test_a_bad_shipped_file(
    policy_cache: PolicyCache, policies_folder: Path, tmp_path: Path, old: str, new: str
) -> None:
    ship(tmp_path / "shipped", ENTRY)
    path = tmp_path / "shipped" / "h200.json"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.warns(CacheWarning, match="h200.json cannot be read.*install treegen again"):
        assert policy_cache.lookup(KEY, accept).entry is None


def test_a_bad_shipped_entry(policy_cache: PolicyCache, policies_folder: Path, tmp_path: Path) -> None:
    ship(tmp_path / "shipped", ENTRY)
    path = tmp_path / "shipped" / "h200.json"
    path.write_text(path.read_text().replace('"policy"', '"polity"', 1))
    with pytest.warns(CacheWarning, match="shipped.*install treegen again"):
        assert "the shipped entry is not valid" in policy_cache.lookup(KEY, accept).reason
    assert [bool(each.reason) for each in policy_cache.entries()] == [True]
