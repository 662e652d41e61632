"""A file system that passes all on to a folder, and takes its time for each write: for disks.py.

python benchmarks/disks_slow.py FOLDER MOUNTPOINT
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import mfusepy

WRITE_S = 0.1


class Slow(mfusepy.Operations):  # type: ignore[misc]
    """The folder's files; writing and reaching the disk are slow."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def _at(self, path: str) -> str:
        return os.path.join(self.folder, path.lstrip("/"))

    def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
        found = os.lstat(self._at(path))
        names = ("st_atime", "st_ctime", "st_gid", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid")
        return {name: getattr(found, name) for name in names}

    def readdir(self, path: str, fh: Any) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def statfs(self, path: str) -> dict[str, Any]:
        found = os.statvfs(self._at(path))
        names = (
            "f_bavail",
            "f_bfree",
            "f_blocks",
            "f_bsize",
            "f_favail",
            "f_ffree",
            "f_files",
            "f_frsize",
            "f_namemax",
        )
        return {name: getattr(found, name) for name in names}

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._at(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._at(old), self._at(new))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def utimens(self, path: str, times: Any = None) -> None:
        os.utime(self._at(path), times)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        time.sleep(WRITE_S)
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: Any = None) -> None:
        os.truncate(self._at(path), length)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        time.sleep(WRITE_S)
        os.fsync(fh)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)


if __name__ == "__main__":
    mfusepy.FUSE(Slow(sys.argv[1]), sys.argv[2], foreground=True, nothreads=False)
