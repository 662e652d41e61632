"""A test keeps one worker waiting for another one: how fast processes start and run decides nothing then."""

from __future__ import annotations

import math
import time
from pathlib import Path

__all__ = ["Gate", "await_file", "hold", "release"]


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


def await_file(file: Path, seconds: float = 30.0) -> None:
    """Wait until another process has made a file. If it has not in time, go on: the test's own assertion fails then."""
    until = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.005)


class Gate:
    """Where a worker waits while it is held. In an epoch's first batch it also waits for the third of ``ahead``."""

    def __init__(self, folder: Path, name: str, ahead: str = "") -> None:
        self.file, self.epoch, self.batches = _file(folder, name), -1, 0
        self._third, self._awaited = (str(folder / f"{each}-{{}}.third") for each in (name, ahead))
        self._follows = ahead != ""

    def step(self, epoch: int) -> None:
        self.batches = self.batches + 1 if epoch == self.epoch else 1
        if self.batches == 3:
            Path(self._third.format(epoch)).touch()
        if self.batches > 1:
            return
        self.epoch = epoch
        while self._held() <= epoch:
            time.sleep(0.01)
        if self._follows:
            await_file(Path(self._awaited.format(epoch)), 3.0)

    def _held(self) -> float:
        try:
            return int(self.file.read_text())
        except FileNotFoundError:
            return math.inf
