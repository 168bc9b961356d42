"""A policy and its key for tests of the policy cache, and where its files go."""

import warnings
from collections.abc import Callable
from pathlib import Path

from treegen.autotune_cache.entry import Entry
from treegen.autotune_cache.key import FORMAT, PolicyKey
from treegen.autotune_cache.policy_file import file_text
from treegen.ir.errors import CacheWarning

KEY = PolicyKey("rows 2^3", "32:8 heads", "h200", 1, 3, FORMAT)
POLICY = {"strategy": "cohort", "rows": 4, "split": None, "tiles": [16, 64]}
ENTRY = Entry(KEY, POLICY, 12.5, (("cohort", 12.5, "ok"), ("query", None, "timed out")), "a test", {"triton": "3.6"})


def accept(policy: object) -> bool:
    """Takes every policy."""
    return True


def ship(folder: Path, *entries: Entry) -> None:
    """Makes these the only entries shipped for the GPU h200."""
    (folder / "h200.json").write_text(file_text(entries))


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
