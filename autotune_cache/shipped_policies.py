"""The policies that come with the package: a file per GPU, read once per process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import TYPE_CHECKING

from treegen.autotune_cache.entry import Entry
from treegen.autotune_cache.folders import warn_once
from treegen.autotune_cache.key import PolicyKey
from treegen.autotune_cache.listed_entries import Listed, file_names, invalid_text
from treegen.autotune_cache.policy_file import PolicyFile
from treegen.ir.errors import FormatError

if TYPE_CHECKING:
    from importlib.abc import Traversable

_GPU_NAME = re.compile(r"[\w.-]+")


class ShippedPolicies:
    """Finds and lists shipped policies.

    Args:
        folder: The folder of the files; by default the package's own.

    Attributes:
        files: The files that were read, by GPU; None for a GPU without one.
    """

    def __init__(self, folder: Traversable | None = None) -> None:
        self._folder = folder
        self.files: dict[str, PolicyFile | None] = {}

    @property
    def folder(self) -> Traversable:
        """The folder of the files."""
        return files("treegen.autotune_cache.shipped") if self._folder is None else self._folder

    def entry(self, key: PolicyKey) -> tuple[Entry | None, str]:
        """Returns the shipped entry of a key; or None and the reason, which is empty when there is none."""
        policies = self._file(key.target.partition(" (")[0])
        try:
            return policies.entry(key) if policies else None, ""
        except FormatError as error:
            return None, invalid_text(error)

    def entries(self) -> Iterator[Listed]:
        """Yields all shipped entries, file by file."""
        for name in file_names(self.folder):
            policies = self._file(name.removesuffix(".json")) if name.endswith(".json") else None
            for each in policies.entries() if policies else ():
                if isinstance(each, FormatError):
                    yield Listed(name, "shipped", None, invalid_text(each))
                else:
                    yield Listed(each.key.digest, "shipped", each)

    def _file(self, gpu: str) -> PolicyFile | None:
        """Returns the file of a GPU, read once; None if there is none."""
        if gpu not in self.files:
            path = self.folder.joinpath(f"{gpu}.json")
            try:
                found = PolicyFile(path.read_text("utf-8")) if _GPU_NAME.fullmatch(gpu) and path.is_file() else None
            except (OSError, ValueError, KeyError, TypeError) as cause:
                warn_once(path, f"cannot be read ({type(cause).__name__})", "install treegen again")
                found = None
            self.files[gpu] = found
        return self.files[gpu]
