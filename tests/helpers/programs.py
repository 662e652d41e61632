"""Programs that the tests start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.helpers.lean import forked_servers

ROOT = Path(__file__).resolve().parents[2]


def environment(*, lean: bool = True, **extra: str) -> dict[str, str]:
    """Variables of a process that imports this project, and with ``lean`` little else: see tests/helpers/lean."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LIGHTNING_ASGD")}
    path = os.pathsep.join([*([str(ROOT / "tests" / "helpers" / "lean")] if lean else []), str(ROOT)])
    return {**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}


@contextlib.contextmanager
def forking_servers() -> Iterator[None]:
    """This process's servers are forks of it."""
    with mock.patch("subprocess.Popen", forked_servers.Popen):
        yield
