"""The policy cache: which policy was measured as the fastest for a key, in memory, in the user's folder, shipped.

A lookup opens one file of the user's folder and scans none; a GPU's shipped policies are read once per process. What
cannot be used (damaged, foreign, newer, hostile) is a miss with one warning per process, never an error. Processes that
need the same policy at the same time make it once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from treegen.autotune_cache.entry import MAX_BYTES, Entry, Policy, entry_from
from treegen.autotune_cache.folders import OWN_FOLDER, cache_folder, make_folder, refusal, warn_once
from treegen.autotune_cache.key import PolicyKey
from treegen.autotune_cache.lock import held
from treegen.autotune_cache.policy_file import PolicyFile, exported, file_text
from treegen.autotune_cache.store import WRITABLE, read_regular, replace_text
from treegen.environment import cache_root
from treegen.ir.errors import FormatError
from treegen.text_files import save_text

if TYPE_CHECKING:
    from importlib.abc import Traversable

Where = Literal["memory", "user", "shipped", "made", "none"]
_MOST_NEAREST = 3
_FOLDER = "policies"
_ENTRY = re.compile(r"[0-9a-f]{64}\.json")
_GPU_NAME = re.compile(r"[\w.-]+")
_OURS = re.compile(r"[0-9a-f]{64}\.(json|lock)|\.[0-9a-f]{64}\.json\.\w+")
_REMOVE = "remove it, or run `treegen cache clear`"


@dataclass(frozen=True, slots=True)
class CachedPolicy:
    """What a lookup gave: an entry and where it is from ("made": by this call), or None, "none" and why."""

    entry: Entry | None
    where: Where
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """A file of the user's folder, or an entry of a shipped file: its name, and the entry or why there is none.

    name: of a file, or the digest of a shipped entry's key.
    """

    name: str
    where: Where
    entry: Entry | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Imported:
    """The number of entries that were taken out of a file, and the reason for each refused one."""

    taken: int
    refused: tuple[str, ...]


class PolicyCache:
    """Finds and stores measured policies by key.

    Args:
        shipped: The folder of shipped files, one per GPU; by default the package's own.
        wait_s: Seconds to wait for another process that is making an entry.
    """

    def __init__(self, shipped: Path | None = None, wait_s: float = 600.0) -> None:
        self._given_shipped = shipped
        self._shipped_files: dict[str, PolicyFile | None] = {}
        self._wait_s = wait_s
        self._memory: dict[tuple[str, PolicyKey], Entry] = {}

    def lookup(self, key: PolicyKey, accept: Callable[[Policy], bool]) -> CachedPolicy:
        """The entry of a key whose policy the caller accepts: from memory, else the user's folder, else a shipped one.

        Never raises: `accept` may, which is a refusal.
        """
        folder = policies_folder()
        kept = self._memory.get((str(folder), key))
        if kept is not None and not _refusal(kept, accept):
            return CachedPolicy(kept, "memory")
        digest = key.digest
        reasons = []
        path = folder / f"{digest}.json"
        places: tuple[tuple[Where, object, str, tuple[Entry | None, str]], ...] = (
            ("user", path, _REMOVE, _read(path, digest)),
            ("shipped", f"shipped entry {digest[:12]}", "install treegen again", self._shipped_entry(key)),
        )
        for where, place, fix, (entry, problem) in places:
            reason = problem if entry is None else _refusal(entry, accept)
            if entry is not None and not reason:
                self._memory[str(folder), key] = entry
                return CachedPolicy(entry, where)
            if reason:
                warn_once(place, reason, fix)
                reasons.append(f"the {where} entry {reason}")
        return CachedPolicy(
            None, "none", "; ".join(reasons) or f"no entry {digest[:12]} in {folder}, and none is shipped"
        )

    def decide(self, key: PolicyKey, accept: Callable[[Policy], bool], make: Callable[[], Entry]) -> CachedPolicy:
        """Looks a policy up; on a miss calls `make` and stores the entry that it returns.

        One process makes the entry of a key, and the others wait for it; when it dies or raises, the next one does.
        Where the folder cannot be written, every process makes its own.

        Raises:
            FormatError: `make` returned an entry of another key. Errors of `make` pass through.
        """
        found = self.lookup(key, accept)
        if found.entry is not None:
            return found
        path = policies_folder() / f"{key.digest}.lock"
        with ExitStack() as stack:
            try:
                make_folder(path.parent)
                if not stack.enter_context(held(path, self._wait_s)):
                    warn_once(path, f"was held by another process for {self._wait_s:g} s", _REMOVE)
            except OSError as cause:
                warn_once(path.parent, f"cannot be written ({_kind(cause)}): policies are not kept", WRITABLE)
            found = self.lookup(key, accept)
            if found.entry is not None:
                return found
            entry = make()
            if entry.key != key:
                raise FormatError("make", entry.key, "gave an entry of another key", "make one for the key asked for")
            self.store(entry)
            return CachedPolicy(entry, "made")

    def store(self, entry: Entry) -> Path | None:
        """Keeps an entry in memory and in the user's folder, in place of what was there.

        Returns the file, or None, with a warning, when the folder cannot be written.
        """
        folder, digest = policies_folder(), entry.key.digest
        self._memory[str(folder), entry.key] = entry
        try:
            return replace_text(folder, f"{digest}.json", entry.to_json())
        except OSError as cause:
            path = folder / f"{digest}.json"
            if path.is_dir():
                warn_once(path, "is a folder in an entry's place", _REMOVE)
            else:
                warn_once(folder, f"cannot be written ({_kind(cause)}): policies are not kept", WRITABLE)
            return None

    def entries(self) -> list[Listed]:
        """All files of the user's folder by name, and then all shipped entries; temporaries and locks are left out."""
        listed = list(_listed(policies_folder()))
        for name in _names(self._shipped):
            policies = self._shipped_file(name.removesuffix(".json")) if name.endswith(".json") else None
            for each in policies.entries() if policies else ():
                if isinstance(each, FormatError):
                    listed.append(Listed(name, "shipped", None, _invalid(each)))
                else:
                    listed.append(Listed(each.key.digest, "shipped", each))
        return listed

    def why(self, key: PolicyKey) -> list[str]:
        """The entries that differ from a key in the fewest fields, and in what, line by line; for people to read."""
        valid = [(listed, listed.entry) for listed in self.entries() if listed.entry is not None]
        valid.sort(key=lambda pair: _distance(key, pair[1].key))
        if not valid:
            return [f"no entries in {policies_folder()}, and none are shipped"]
        lines = []
        for listed, entry in valid[:_MOST_NEAREST]:
            differing = _differing(key, entry.key)
            differ = (
                f"differs in {len(differing)} of {len(fields(key))} fields" if differing else "is the one asked for"
            )
            lines.append(f"{listed.where} entry {listed.name[:12]} {differ}")
            lines += [f"  {name}: {getattr(key, name)}; the entry: {getattr(entry.key, name)}" for name in differing]
        return lines

    def clear(self) -> int:
        """Forgets the user's entries; removes their files, temporaries and free locks, nothing else in the folder.

        Returns how many entries' files are gone.
        """
        folder = policies_folder()
        for place in [place for place in self._memory if place[0] == str(folder)]:
            del self._memory[place]
        removed = 0
        for name in _names(folder):
            if _OURS.fullmatch(name):
                with suppress(OSError):
                    if name.endswith(".lock"):
                        with held(folder / name, 0):  # a lock that is held stays: its holder removes it
                            continue
                    (folder / name).unlink()
                    removed += _ENTRY.fullmatch(name) is not None
        return removed

    def export_to(self, path: str | Path) -> int:
        """Writes all valid entries of the user's folder into one JSON file and returns their number.

        Raises FormatError when the file cannot be written.
        """
        found = [listed.entry for listed in _listed(policies_folder()) if listed.entry is not None]
        save_text(path, file_text(found))
        return len(found)

    def import_from(self, path: str | Path) -> Imported:
        """Stores the entries of a file that `export_to` wrote; entries that the user's folder has already stay.

        An entry's place follows from its key alone. Nothing is imported into a temporary folder.

        Args:
            path: The file.

        Returns:
            The number of stored entries, and the reason for each refused one.

        Raises:
            FormatError: The file as a whole is not one of treegen's, or the cache folder cannot be written or is not
                safe to use.
        """
        if reason := refusal(cache_root() / _FOLDER):
            raise FormatError("cache folder", str(cache_root()), reason, OWN_FOLDER)
        folder = policies_folder()
        taken, refused = 0, []
        for number, value in enumerate(exported(Path(path))):
            try:
                entry = entry_from(value)
            except FormatError as error:
                refused.append(f"entry {number}: {error.argument} {error.reason}")
                continue
            digest = entry.key.digest
            if _read(folder / f"{digest}.json", digest)[0] is not None:
                refused.append(f"entry {number}: {digest[:12]} is there already")
                continue
            try:
                replace_text(folder, f"{digest}.json", entry.to_json())
            except OSError as cause:
                reason = f"cannot be written ({_kind(cause)})"
                raise FormatError("cache folder", str(folder), reason, WRITABLE) from cause
            self._memory.pop((str(folder), entry.key), None)
            taken += 1
        return Imported(taken, tuple(refused))

    @property
    def _shipped(self) -> Traversable:
        return _shipped_folder() if self._given_shipped is None else self._given_shipped

    def _shipped_entry(self, key: PolicyKey) -> tuple[Entry | None, str]:
        """The shipped entry of a key; or None and why, an empty text when there is none."""
        policies = self._shipped_file(key.target.partition(" (")[0])
        try:
            return policies.entry(key) if policies else None, ""
        except FormatError as error:
            return None, _invalid(error)

    def _shipped_file(self, gpu: str) -> PolicyFile | None:
        """The file shipped for a GPU, read once; None if there is none."""
        if gpu not in self._shipped_files:
            path = self._shipped.joinpath(f"{gpu}.json")
            try:
                found = PolicyFile(path.read_text("utf-8")) if _GPU_NAME.fullmatch(gpu) and path.is_file() else None
            except (OSError, ValueError, KeyError, TypeError) as cause:
                warn_once(path, f"cannot be read ({type(cause).__name__})", "install treegen again")
                found = None
            self._shipped_files[gpu] = found
        return self._shipped_files[gpu]


def policies_folder() -> Path:
    """Where the user's entries are: `policies` in the cache folder, or in a private one (see `cache_folder`)."""
    return cache_folder(_FOLDER)


@cache
def _shipped_folder() -> Traversable:
    return files("treegen.autotune_cache.shipped")


def _kind(cause: OSError) -> str:
    return cause.strerror or type(cause).__name__


def _invalid(error: FormatError) -> str:
    return f"is not valid: {error.argument} {error.reason}"


def _read(path: Path, digest: str) -> tuple[Entry | None, str]:
    """The entry in a file; or None and why, an empty text when there is no file."""
    try:
        return Entry.from_json(read_regular(path, MAX_BYTES), digest), ""
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as cause:
        return None, f"cannot be read ({_kind(cause)})"
    except FormatError as error:
        return None, _invalid(error)
    except ValueError as cause:
        return None, str(cause)


def _refusal(entry: Entry, accept: Callable[[Policy], bool]) -> str:
    """Why the caller does not take an entry's policy; empty when it does."""
    try:
        return "" if accept(entry.policy) else "holds a policy that this treegen does not take"
    except Exception as error:  # an entry is data from outside, and what it holds must never stop a caller
        return f"holds a policy that this treegen does not take ({type(error).__name__})"


def _names(folder: Traversable) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def _listed(folder: Path) -> Iterator[Listed]:
    """The files of the user's folder."""
    for name in _names(folder):
        if _ENTRY.fullmatch(name):
            yield Listed(name, "user", *_read(folder / name, name.removesuffix(".json")))
        elif name.endswith(".json"):
            yield Listed(name, "user", None, "is not named by a digest")


def _differing(mine: PolicyKey, theirs: PolicyKey) -> list[str]:
    return [field.name for field in fields(mine) if getattr(mine, field.name) != getattr(theirs, field.name)]


def _distance(mine: PolicyKey, theirs: PolicyKey) -> tuple[int, int]:
    """Fields that differ, and among equals the parts of texts that do."""
    differing = _differing(mine, theirs)
    parts = sum(
        len(set(str(getattr(mine, name)).split(", ")) ^ set(str(getattr(theirs, name)).split(", ")))
        for name in differing
    )
    return len(differing), parts


POLICY_CACHE = PolicyCache()
"""The cache that compilation and the command line use."""
