"""The one way in which files are written that are read back later, and a check of those that torch has written."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import socket
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import psutil

from lightning_asgd.core.foundation.errors import SnapshotError

_PIECE = 1 << 20  # bytes


def new_file(path: Path) -> BinaryIO:
    """Open a new file for writing, which other users cannot read. It follows no link: nothing may be there yet."""
    return cast(BinaryIO, open(path, "xb", opener=partial(os.open, mode=0o600)))


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to. At the end it is on the disk and replaces ``path``, which stays as it was if that fails."""
    mine = f"{path.name}.{socket.gethostname()}."
    for begun in path.parent.glob(f"{glob.escape(mine)}*.part"):
        process = begun.name.removeprefix(mine).partition(".")[0]
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            begun.unlink(missing_ok=True)  # of a process that was killed
    beside = path.with_name(f"{mine}{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        with new_file(beside) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def check_archive(path: Any) -> None:
    """Raise a ``SnapshotError`` if a checkpoint on this machine is not as it was written. torch does not check."""
    if not isinstance(path, str | os.PathLike) or not _is_archive(path):
        return  # of another format, or elsewhere
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as file:
                    while entry.CRC and file.read(_PIECE):  # compares at the end; 0: torch wrote none
                        pass
    except Exception as error:  # of any kind, since any byte may be another one
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # Python 3.10 seeks to a place before the file
            raise  # of the disk
        raise SnapshotError(
            f"The checkpoint {path} is damaged: {error}. Expected it as it was written. Use an earlier one, or a copy."
        ) from error


def _is_archive(path: str | os.PathLike[str]) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        return False
