"""For processes that the tests start: what torchmetrics would import if it saw it, a third of what a process costs.

On PYTHONPATH, Python runs this file first. It hides packages that are not ours; most users do not have them either.
"""

import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any

HIDDEN = ("matplotlib", "scipy", "torchvision")


def hiding(find: Callable[[str], Any]) -> Callable[[str], Any]:
    def found(name: str) -> Any:
        if name in HIDDEN:
            raise importlib.metadata.PackageNotFoundError(name)
        return find(name)

    return found


class Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


importlib.metadata.version = hiding(importlib.metadata.version)
importlib.metadata.distribution = hiding(importlib.metadata.distribution)
sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
