"""The one way in which files are written that are read back later."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

import psutil

__all__ = ["new_file", "whole_file"]


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
