"""A policy and its key for tests of the policy cache, and where its files go."""

import warnings
from collections.abc import Callable
from pathlib import Path

from treegen.autotune_cache.entry import Entry
from treegen.autotune_cache.key import FORMAT, PolicyKey
from treegen.ir.errors import CacheWarning

KEY = PolicyKey("rows 2^3", "32:8 heads", "h200", "templates", "space", "0.1.0", "3.6", FORMAT)
POLICY = {"strategy": "cohort", "rows": 4, "split": None, "tiles": [16, 64]}
ENTRY = Entry(KEY, POLICY, 12.5, (("cohort", 12.5, "ok"), ("query", None, "timed out")), "a test")


def accept(policy: object) -> bool:
    """Takes every policy."""
    return True


def ship(folder: Path, entry: Entry) -> None:
    """Puts an entry into a folder of shipped ones."""
    (folder / f"{entry.key.digest}.json").write_text(entry.to_json())


def file_of(folder: Path) -> Path:
    """Where ENTRY belongs in a policies' folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{KEY.digest}.json"


def cache_warnings(action: Callable[[], object]) -> list[str]:
    """The warnings of an action, all of the cache."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    assert [each.category for each in caught] == [CacheWarning] * len(caught)
    return [str(each.message) for each in caught]
