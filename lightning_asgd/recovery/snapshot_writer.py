"""When a server writes its snapshots, and what became of the latest one."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from lightning_asgd.recovery.snapshot_store import Snapshot, Snapshots


class SnapshotWriter(AbstractContextManager["SnapshotWriter"]):
    """Writes a server's snapshots from a thread, and with ``at_end`` a last one when it is closed.

    ``take`` returns what is to be written, or None if nothing has happened since the last time. ``complain`` gets a
    sentence about each failure. All servers of a machine share the clock, so that their snapshots are of the same time.
    """

    def __init__(
        self,
        take: Callable[[], Snapshot | None],
        snapshots: Snapshots,
        every_s: float,
        complain: Callable[[str], None],
        *,
        at_end: bool = True,
    ) -> None:
        self._take, self._snapshots, self._every_s = take, snapshots, every_s
        self._complain, self._at_end = complain, at_end
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_asgd.snapshots", daemon=True)
        self._latest = ""  # what was written last
        self._current_at = time.monotonic()  # when that was all there is to write
        self.error = ""  # why the latest attempt failed; empty if it did not

    def __enter__(self) -> SnapshotWriter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        if self._at_end:
            self.write()

    def _run(self) -> None:
        while not self._end.wait(self._every_s - time.time() % self._every_s):
            self.write()

    def write(self) -> None:
        """Write a snapshot now."""
        try:
            now, snapshot = time.monotonic(), self._take()
            if snapshot is not None:
                size = self._snapshots.write(snapshot)
                self._latest = f"version {snapshot.version}, {size / 1e6:,.1f} MB"
            self._current_at, self.error = now, ""
        except Exception as error:  # a full disk, too little memory: the next one may be written
            why, folder = str(error), self._snapshots.folder
            with contextlib.suppress(OSError):  # the folder is gone
                why += f" ({shutil.disk_usage(folder).free / 1e6:,.0f} MB are free)"
            self._complain(f"No snapshot was written to {folder}: {why}. {self.report()}.")
            self.error = why  # last: a server may end once it is set

    def report(self) -> str:
        """How old the latest snapshot is, and what it holds."""
        age = f"{time.monotonic() - self._current_at:.0f} s"
        return f"The latest snapshot is {age} old ({self._latest})" if self._latest else f"No snapshot for {age}"
