"""Results of long measurements in a file, a line of JSON each, so that they continue where they were interrupted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common import CONSOLE

Key = tuple[Any, ...]  # of values that JSON has


class Ledger:
    """What was found by runs, by key. A line counts as long as ``version`` of its key is the same.

    Attributes:
        found: by key.
    """

    def __init__(self, file: Path, version: Callable[[Key], str]) -> None:
        self.file, self.version = file, version
        self.found: dict[Key, Any] = {}
        for entry in map(json.loads, file.read_text().splitlines() if file.exists() else ()):
            key = tuple(entry.get("key", ()))
            if key and entry["version"] == version(key):
                self.found[key] = entry["found"]

    def complete(self, keys: Iterable[Key], run: Callable[..., Any]) -> None:
        """Do the runs that are missing. ``run`` takes what the key holds, and returns what JSON can hold."""
        todo = list(keys)
        self.file.parent.mkdir(exist_ok=True)
        for number, key in enumerate(todo, 1):
            if key in self.found:
                continue
            begun = time.monotonic()
            found = self.found[key] = run(*key)
            with self.file.open("a") as file:
                file.write(json.dumps({"key": key, "version": self.version(key), "found": found}) + "\n")
            values = ", ".join(f"{value:.4f}" for value in (found if isinstance(found, list) else [found]))
            about = ", ".join(map(str, key))
            CONSOLE.print(f"{number}/{len(todo)}  {about}: {values}, {time.monotonic() - begun:.0f} s")
