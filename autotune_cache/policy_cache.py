"""The policy cache: the fastest measured policy for a key, from memory, the user's folder or the shipped files.

    lookup   memory ──miss──▶ one file of the user's folder ──miss──▶ the shipped file of the GPU ──miss──▶ None

A lookup opens one file of the user's folder and scans none; a GPU's shipped policies are read once per process. A file
that cannot be used (damaged, foreign, newer, hostile) is a miss with one warning per process, never an error. Processes
that need the same policy at the same time make it once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treegen.autotune_cache.entry import Entry, Policy, entry_from
from treegen.autotune_cache.folders import OWN_FOLDER, cache_folder, make_folder, refusal, warn_once
from treegen.autotune_cache.key import PolicyKey
from treegen.autotune_cache.listed_entries import (
    ENTRY_NAME,
    Listed,
    Where,
    file_names,
    listed_files,
    os_reason,
    read_entry,
)
from treegen.autotune_cache.lock import held
from treegen.autotune_cache.nearest_keys import nearest_texts
from treegen.autotune_cache.policy_file import exported, file_text
from treegen.autotune_cache.shipped_policies import ShippedPolicies
from treegen.autotune_cache.store import WRITABLE, replace_text
from treegen.environment import cache_root
from treegen.ir.errors import FormatError
from treegen.text_files import save_text

_FOLDER = "policies"
_OURS = re.compile(r"[0-9a-f]{64}\.(json|lock)|\.[0-9a-f]{64}\.json\.\w+")
_REMOVE = "remove it, or run `treegen cache clear`"


@dataclass(frozen=True, slots=True)
class CachedPolicy:
    """The result of a lookup: an entry and its place ("made": by this call), or None, "none" and the reason."""

    entry: Entry | None
    where: Where
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
        self.shipped = ShippedPolicies(shipped)
        self._wait_s = wait_s
        self._memory: dict[tuple[str, PolicyKey], Entry] = {}

    def lookup(self, key: PolicyKey, accept: Callable[[Policy], bool]) -> CachedPolicy:
        """Returns the entry of a key whose policy the caller accepts: from memory, the user's folder or shipped.

        It never raises; an error of `accept` is a refusal.
        """
        folder = policies_folder()
        kept = self._memory.get((str(folder), key))
        if kept is not None and not _refusal(kept, accept):
            return CachedPolicy(kept, "memory")
        digest = key.digest
        reasons = []
        path = folder / f"{digest}.json"
        places: tuple[tuple[Where, object, str, tuple[Entry | None, str]], ...] = (
            ("user", path, _REMOVE, read_entry(path, digest)),
            ("shipped", f"shipped entry {digest[:12]}", "install treegen again", self.shipped.entry(key)),
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
                warn_once(path.parent, f"cannot be written ({os_reason(cause)}): policies are not kept", WRITABLE)
            found = self.lookup(key, accept)
            if found.entry is not None:
                return found
            entry = make()
            if entry.key != key:
                raise FormatError("make", entry.key, "gave an entry of another key", "make one for the key asked for")
            self.store(entry)
            return CachedPolicy(entry, "made")

    def store(self, entry: Entry) -> Path | None:
        """Keeps an entry in memory and in the user's folder, in place of an earlier one.

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
                warn_once(folder, f"cannot be written ({os_reason(cause)}): policies are not kept", WRITABLE)
            return None

    def entries(self) -> list[Listed]:
        """Returns all files of the user's folder by name, and then all shipped entries.

        Temporaries and locks are left out.
        """
        return [*listed_files(policies_folder()), *self.shipped.entries()]

    def why(self, key: PolicyKey) -> list[str]:
        """Returns lines about the entries that differ from a key in the fewest fields, for people to read."""
        return nearest_texts(key, self.entries(), policies_folder())

    def clear(self) -> int:
        """Forgets the user's entries; removes their files, temporaries and free locks, and nothing else in the folder.

        Returns the number of entries whose files are gone.
        """
        folder = policies_folder()
        for place in [place for place in self._memory if place[0] == str(folder)]:
            del self._memory[place]
        removed = 0
        for name in file_names(folder):
            if _OURS.fullmatch(name):
                with suppress(OSError):
                    if name.endswith(".lock"):
                        with held(folder / name, 0):  # a lock that is held stays: its holder removes it
                            continue
                    (folder / name).unlink()
                    removed += ENTRY_NAME.fullmatch(name) is not None
        return removed

    def export_to(self, path: str | Path) -> int:
        """Writes all valid entries of the user's folder into one JSON file, and returns their number.

        Raises FormatError when the file cannot be written.
        """
        found = [listed.entry for listed in listed_files(policies_folder()) if listed.entry is not None]
        save_text(path, file_text(found))
        return len(found)

    def import_from(self, path: str | Path) -> Imported:
        """Stores the entries of a file that `export_to` wrote; entries that the user's folder has already stay.

        Args:
            path: The file.

        Returns:
            The number of stored entries, and the reason for each refused one.

        Raises:
            FormatError: The file as a whole is not one of treegen's; and as `merge`.
        """
        return self.merge(exported(Path(path)))

    def merge(self, values: Iterable[Any], *, replace: bool = False) -> Imported:
        """Stores entries that were measured elsewhere.

        An entry's place follows from its key alone. Nothing is stored in a temporary folder.

        Args:
            values: JSON objects of entries, not yet checked.
            replace: Stores them in place of other entries of the user's folder, which stay otherwise.

        Returns:
            The number of stored entries, and the reason for each refused one.

        Raises:
            FormatError: The cache folder cannot be written or is not safe to use.
        """
        if reason := refusal(cache_root() / _FOLDER):
            raise FormatError("cache folder", str(cache_root()), reason, OWN_FOLDER)
        folder = policies_folder()
        taken, refused = 0, []
        for number, value in enumerate(values):
            try:
                entry = entry_from(value)
            except FormatError as error:
                refused.append(f"entry {number}: {error.argument} {error.reason}")
                continue
            digest = entry.key.digest
            kept = read_entry(folder / f"{digest}.json", digest)[0]
            if kept == entry or (kept is not None and not replace):
                refused.append(f"entry {number}: {digest[:12]} is there already")
                continue
            try:
                replace_text(folder, f"{digest}.json", entry.to_json())
            except OSError as cause:
                reason = f"cannot be written ({os_reason(cause)})"
                raise FormatError("cache folder", str(folder), reason, WRITABLE) from cause
            self._memory.pop((str(folder), entry.key), None)
            taken += 1
        return Imported(taken, tuple(refused))


def policies_folder() -> Path:
    """Returns the folder of the user's entries: `policies` in the cache folder, or in a private temporary one."""
    return cache_folder(_FOLDER)


def _refusal(entry: Entry, accept: Callable[[Policy], bool]) -> str:
    """Returns the reason why the caller does not take an entry's policy; empty when it does."""
    try:
        return "" if accept(entry.policy) else "holds a policy that this treegen does not take"
    except Exception as error:  # an entry is data from outside, and its contents must never stop a caller
        return f"holds a policy that this treegen does not take ({type(error).__name__})"


POLICY_CACHE = PolicyCache()
"""The cache of compilation and the command line."""
