"""The cache uses no folder in which others could plant files, and none in a home that does not exist; it warns once."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import treegen
from support.paths import ROOT
from support.policies import ENTRY, KEY, accept, cache_warnings, file_of
from treegen import cli
from treegen.autotune_cache import folders
from treegen.autotune_cache.policy_cache import PolicyCache, policies_folder
from treegen.autotune_cache.store import write_text
from treegen.environment import cache_root
from treegen.ir.errors import CacheWarning, FormatError

POSIX = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners and modes of POSIX")
AS_ROOT = pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root gives files to others")
SOMEBODY = 12345
FEW = "1,4/100,10"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a cache whose folders exist, in a process that has warned of nothing yet."""
    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(folders, "warned", set())
    folders.private_folder.cache_clear()
    for name in ("kernels", "policies"):
        (tmp_path / "cache" / name).mkdir(parents=True)
    return tmp_path / "cache"


def assert_private(root: Path, name: str, reason: str) -> None:
    """A folder of the cache is not used, for this reason, which one warning gives."""
    found: list[Path] = []
    texts = cache_warnings(lambda: found.extend(folders.cache_folder(name) for _ in range(2)))
    assert found == [folders.private_folder() / name] * 2
    assert len(texts) == 1
    assert texts[0].startswith(f"cache: {root} is not used (")
    assert reason in texts[0]
    assert "set TREEGEN_CACHE_DIR" in texts[0]


@POSIX
@pytest.mark.parametrize("place", ["", "kernels", "policies"])
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_folders_that_others_may_write_are_not_used(root: Path, place: str, mode: int) -> None:
    (root / place).chmod(mode)
    assert_private(root, place or "kernels", f"other users may write {root / place}, mode {mode:04o}")


@POSIX
def test_a_sticky_root_is_used_and_sticky_folders_in_it_are_not(root: Path) -> None:
    root.chmod(0o1777)
    assert folders.cache_folder("kernels") == root / "kernels"
    (root / "kernels").chmod(0o1777)
    assert_private(root, "kernels", "mode 1777")


@AS_ROOT
@pytest.mark.parametrize("place", ["", "policies"])
def test_folders_of_other_users_are_not_used(root: Path, place: str) -> None:
    os.chown(root / place, SOMEBODY, -1)
    assert_private(root, "policies", f"{root / place} belongs to another user, uid {SOMEBODY}")


@AS_ROOT
def test_links_of_other_users_are_not_followed(root: Path, tmp_path: Path) -> None:
    (root / "kernels").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (root / "kernels").symlink_to(tmp_path / "elsewhere")
    assert folders.cache_folder("kernels") == root / "kernels"
    os.chown(root / "kernels", SOMEBODY, -1, follow_symlinks=False)
    assert_private(root, "kernels", "belongs to another user")


@AS_ROOT
def test_users_read_what_root_has_put_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    assert folders.cache_folder("policies") == root / "policies"


def test_systems_without_user_ids_refuse_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.chmod(0o777)
    monkeypatch.delattr(os, "geteuid", raising=False)
    assert folders.cache_folder("kernels") == root / "kernels"


@POSIX
def test_what_the_cache_makes_it_uses_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(tmp_path / "new" / "cache"))
    before = os.umask(0)
    try:
        path = write_text("kernels", "a.py", "1\n")
        PolicyCache(tmp_path).decide(KEY, accept, lambda: ENTRY)
    finally:
        os.umask(before)
    assert path.parent == folders.cache_folder("kernels") == tmp_path / "new" / "cache" / "kernels"
    assert policies_folder() == tmp_path / "new" / "cache" / "policies"
    assert {folder.stat().st_mode & 0o777 for folder in (cache_root(), path.parent, policies_folder())} == {0o700}


@POSIX
def test_policies_that_others_may_have_put_there_are_not_taken(root: Path, tmp_path: Path) -> None:
    file_of(root / "policies").write_text(ENTRY.to_json())
    (root / "policies").chmod(0o777)
    policy_cache = PolicyCache(tmp_path / "shipped")
    with pytest.warns(CacheWarning, match="other users may write"):
        assert policy_cache.lookup(KEY, accept).where == "none"
    assert policy_cache.decide(KEY, accept, lambda: ENTRY).where == "made"
    assert policy_cache.clear() == 1
    assert file_of(root / "policies").is_file()


@POSIX
def test_nothing_is_imported_into_a_folder_that_goes_away(root: Path, tmp_path: Path) -> None:
    policy_cache = PolicyCache(tmp_path / "shipped")
    policy_cache.store(ENTRY)
    policy_cache.export_to(tmp_path / "out.json")
    (root / "policies").chmod(0o777)
    with pytest.raises(FormatError, match=r"cache folder = .*other users may write.*TREEGEN_CACHE_DIR"):
        policy_cache.import_from(tmp_path / "out.json")


@POSIX
def test_warnings_name_the_callers_line(root: Path) -> None:
    root.chmod(0o777)
    q, (k, v) = torch.randn(4, 32, 128), torch.randn(2, 140, 8, 128)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        treegen.compile(treegen.Tree.parse(FEW))(q, k, v)
    assert [(each.category, each.filename) for each in caught] == [(CacheWarning, __file__)]


@POSIX
def test_the_command_line_warns_in_one_line(root: Path) -> None:
    root.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-m", "treegen", "cache", "clear", "-y"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert done.stdout.startswith("removed 0 entries from ")
    assert done.stderr.startswith(f"treegen: warning: cache: {root} is not used (other users may write")
    assert done.stderr.count("\n") == 1


@POSIX
def test_doctor_says_which_folders_are_not_used(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "policies").chmod(0o777)
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert f"  kernels: {root / 'kernels'}, 0 files, 0.0 MiB, writable" in lines
    assert f"  policies: {root / 'policies'}, 0 files, 0.0 MiB, NOT USED" in lines
    (note,) = [line for line in lines if "other users may write" in line]
    assert note.startswith(f"  {root / 'policies'} is not used")
    assert "set TREEGEN_CACHE_DIR" in note


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No home: neither in the environment nor in the password database."""
    for name in ("HOME", "USERPROFILE", "HOMEPATH", "XDG_CACHE_HOME", "TREEGEN_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(folders, "warned", set())
    folders.private_folder.cache_clear()
    if os.name == "posix":
        monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])


@pytest.mark.usefixtures("homeless")
def test_without_a_home_the_folder_is_private_and_all_goes_on(tmp_path: Path) -> None:
    q, (k, v) = torch.randn(4, 32, 128), torch.randn(2, 140, 8, 128)
    text = r"is not used \(there is no such home folder: HOME.* using a private .* folder; set TREEGEN_CACHE_DIR"
    with pytest.warns(CacheWarning, match=text) as caught:
        kernel = treegen.compile(treegen.Tree.parse(FEW), backend="triton")
    assert kernel.verify(q, k, v)
    assert [each.filename for each in caught] == [__file__]
    assert policies_folder() == folders.private_folder() / "policies"
    policy_cache = PolicyCache(tmp_path)
    assert policy_cache.decide(KEY, accept, lambda: ENTRY).where == "made"
    assert PolicyCache(tmp_path).lookup(KEY, accept).where == "user"


@pytest.mark.usefixtures("homeless")
def test_a_cache_folder_of_an_unknown_user_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEGEN_CACHE_DIR", "~surely-nobody/cache")
    with pytest.warns(CacheWarning, match="~surely-nobody/cache is not used .*the user is unknown"):
        assert folders.cache_folder("kernels") == folders.private_folder() / "kernels"


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize(
    "arguments", [["ls"], ["why", FEW], ["clear", "-y"], ["export", "out.json"]], ids=lambda each: each[0]
)
def test_commands_about_policies_without_a_home(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(CacheWarning, match=r"~/.cache/treegen is not used \(there is no such home folder"):
        assert cli.main(["cache", *arguments]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("homeless")
def test_import_and_doctor_without_a_home(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.warns(CacheWarning):
        PolicyCache(tmp_path).export_to(tmp_path / "out.json")
    capsys.readouterr()
    assert cli.main(["cache", "import", str(tmp_path / "out.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("treegen: error: cache folder = ~/.cache/treegen: is not used (there is no such home")
    assert "set TREEGEN_CACHE_DIR" in error
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "  ~/.cache/treegen/kernels is not used (there is no such home folder" in printed.out
