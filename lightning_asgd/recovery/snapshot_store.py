"""What a server writes down now and then, so that a run outlives it: without pickle, and whole or not at all.

A snapshot is of one server at one moment: its weights, what its algorithm keeps, and, on the first server, what the
workers noted and which units of the epochs are done, of just these weights. Several servers write theirs at about the
same time, not at the same update; asynchronous training lives with that all the time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.core.foundation.errors import SnapshotError
from lightning_asgd.core.foundation.whole_file import whole_file
from lightning_asgd.core.protocol import PROTOCOL, Epoch, Policy, codec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """One server's state."""

    run: str  # name of the run
    server: int  # number of the server
    policy: Policy  # what the run does about workers that are silent
    admitted: int  # the highest number that was given to a worker
    notes: dict[str, Any]  # see :class:`~lightning_asgd.core.protocol.RunMetadata`
    epochs: tuple[Epoch, ...]  # those that workers may be in, with the units that are done
    # Per fragment, what :meth:`~lightning_asgd.core.server.shard.Shard.snapshot` returned first.
    shards: dict[int, dict[str, Any]]

    @property
    def version(self) -> int:
        """Version of the first shard."""
        return int(self.shards[min(self.shards)]["version"])


class Snapshots:
    """A folder with one file per server, the latest snapshot of each."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, server: int) -> Path:
        """Where a server's snapshot is."""
        return self.folder / f"server{server}.pt"

    def lock(self, run: str, *, joins: bool) -> int:
        """Keep other hosts from the folder while the returned file is open; hosts of its run (``joins``) share it."""
        file, name = os.open(self.folder / "serve.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), run.encode()
        shared = joins and os.pread(file, len(name) + 1, 0) == name
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise SnapshotError(
                f"Another `lightning-asgd serve` writes its snapshots to {self.folder}. Expected a folder of its own "
                "for each. Stop the other one, join it with --join if it serves the same run, or pass another folder."
            ) from None
        except OSError as error:  # a file system without locks
            log.warning(f"Nothing keeps another `serve` from {self.folder}: no files can be locked there ({error}).")
            return file
        if not shared:
            os.ftruncate(file, 0)
            os.pwrite(file, name, 0)
            os.fsync(file)  # so that other machines see it on a shared disk
            fcntl.flock(file, fcntl.LOCK_SH)
        return file

    def write(self, snapshot: Snapshot) -> int:
        """Put a snapshot in the place of the one before, once it is written in full. Returns its size in bytes."""
        header, buffers = codec.encode({name: getattr(snapshot, name) for name in Snapshot.__dataclass_fields__})
        tensors = [_tensor(buffer) for buffer in buffers]
        content = {"protocol": PROTOCOL, "header": header.decode(), "buffers": tensors}
        content["checksum"] = _checksum(content)
        self.folder.mkdir(parents=True, exist_ok=True)
        with whole_file(self.path(snapshot.server)) as file:
            torch.save(content, file)
            return file.tell()

    def read(self, server: int) -> Snapshot | None:
        """A server's snapshot; None if there is none, or the first server has none: then the run had not begun."""
        path = self.path(server)
        return self._read(path) if self.path(0).exists() and path.exists() else None

    def _read(self, path: Path) -> Snapshot:
        try:
            content = torch.load(path, weights_only=True)
            protocol, header, buffers = content["protocol"], content["header"], content["buffers"]
            if protocol == PROTOCOL:
                if content.get("checksum") not in (None, _checksum(content)):  # None: written by an earlier release
                    raise ValueError("its checksum does not match")
                return Snapshot(**codec.decode(header.encode(), [buffer.numpy() for buffer in buffers]))
        except Exception as error:  # torch's own text recommends to open what may harm
            raise SnapshotError(
                f"The snapshot {path} cannot be read ({type(error).__name__}). Expected a file that `lightning-asgd "
                "serve` wrote. Move the folder away to start the run over, for example from a checkpoint."
            ) from error
        raise SnapshotError(
            f"The snapshot {path} was written with protocol {protocol} of lightning-asgd. Expected {PROTOCOL}: use the "
            "version that wrote it, or move the folder away to start the run over."
        )

    def check(self, run: str, servers: int) -> int | None:
        """The first server's version, if ``servers`` servers can continue a run; None if the run is to begin."""
        found = {path.name for path in self.folder.glob("server*.pt")}
        versions = {}
        for server in range(servers):
            if self.path(server).exists():
                snapshot = self._read(self.path(server))
                versions[server] = snapshot.version
                if snapshot.run != run:
                    raise SnapshotError(
                        f"{self.folder} holds snapshots of run {snapshot.run!r}. Expected those of run {run!r}. Pass "
                        "that run's name, or another folder."
                    )
                del snapshot  # it may be large
        if 0 not in versions and not any(versions.values()):
            return None
        if found != {self.path(server).name for server in range(servers)}:
            raise SnapshotError(
                f"{self.folder} holds {', '.join(sorted(found))}. Expected one snapshot of each of {servers} servers. "
                "Pass the number of servers that wrote them, or move the folder away to start the run over."
            )
        return versions[0]


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


def _checksum(content: dict[str, Any]) -> str:
    found = hashlib.blake2b(content["header"].encode(), digest_size=16)
    for buffer in content["buffers"]:
        found.update(buffer.numpy())
    return found.hexdigest()


def _tensor(buffer: Any) -> Tensor:
    if not len(buffer):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(buffer) if isinstance(buffer, bytes) else buffer, dtype=torch.uint8)
