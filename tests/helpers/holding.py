"""A test keeps one worker waiting while another one starts: how long it takes to import torch decides nothing then."""

from __future__ import annotations

import math
import time
from pathlib import Path

__all__ = ["Gate", "hold", "release"]


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.held"


def hold(folder: Path, *names: str, epoch: int = 0) -> None:
    """Keep workers waiting in the first step of an epoch, or of the next one: others can train the rest of it."""
    for name in names:
        new = _file(folder, name).with_suffix(".new")
        new.write_text(str(epoch))
        new.rename(_file(folder, name))  # a worker may be reading it


def release(folder: Path, *names: str) -> None:
    for name in names:
        _file(folder, name).unlink()


class Gate:
    """Where a worker waits while it is held."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file, self.epoch = _file(folder, name), -1

    def step(self, epoch: int) -> None:
        if epoch == self.epoch:
            return
        self.epoch = epoch
        while self._held() <= epoch:
            time.sleep(0.01)

    def _held(self) -> float:
        try:
            return int(self.file.read_text())
        except FileNotFoundError:
            return math.inf
