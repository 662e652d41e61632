"""The files of one server's part of a served table. They survive the server's process.

``rows-0-of-2.table``     per row: its number of updates, its values, its optimizer's state, a checksum; mapped
``rows-0-of-2.clients``   per client: its number, its latest push, when that was, a checksum; mapped into memory
``rows-0-of-2.journal``   the latest push: the rows as they are after it
``rows-0-of-2.lock``      locked while a process may write to these files

A push is written to the journal, then to the two mapped files, and is then acknowledged. What a process has written to
a file survives the process. So only the latest push can be half applied, and the next process applies it again from the
journal. A power failure may lose more; resume from a checkpoint then.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import secrets
import struct
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_asgd.core.foundation.errors import ConfigurationError, ProtocolError, SnapshotError
from lightning_asgd.core.foundation.whole_file import new_file, whole_file

COPIED = (".table", ".clients")
"""Ends of the names of the files that a copy of a table consists of."""

_CLIENTS = 4096  # whose latest pushes are remembered
_HEADER = struct.Struct("<8sQQqqqI")  # magic, rows, columns, client, number of the push, number of updates, checksum
_MAGIC = b"asgdrows"
_DESCRIPTION = "table.json"
_INCOMPLETE = "A copy was not finished: copy the whole folder again, or remove it to begin a new table."
_FORMAT = 2  # of the files; the first one had no checksums
_AT_ONCE = 64 << 20  # bytes that are copied at a time
_TRIES = 3  # to read rows while they may be written
_LOCKED_S = 10.0  # for a process that was replaced to end
_OPEN = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)


def claim_folder(folder: Path, description: Mapping[str, Any]) -> None:
    """Write a folder's description, or raise a ``ConfigurationError`` if it describes another table."""
    path, own = folder / _DESCRIPTION, folder / f"{_DESCRIPTION}.{secrets.token_hex(4)}"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists() and all(each.name.startswith(_DESCRIPTION) for each in folder.iterdir()):
        with new_file(own) as file:
            file.write(json.dumps({**description, "format": _FORMAT}).encode())
        with contextlib.suppress(FileExistsError):
            os.link(own, path)  # whole, and only once: other servers may be here too
        own.unlink(missing_ok=True)
    check_description(folder, description)


def check_description(folder: Path, expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """A folder's description. Raises a ``ConfigurationError`` if it holds no table, or another one."""
    found, expected = read_description(folder), {**expected, "format": _FORMAT}
    differs = {name: found.get(name) for name in expected if found.get(name) != expected[name]}
    if differs:
        raise ConfigurationError(
            f"The folder {folder} holds a table with {_listed(differs)}. Expected "
            f"{_listed({name: expected[name] for name in differs})}. Give the table another folder, or remove this one."
        )
    return found


def read_description(folder: Path) -> dict[str, Any]:
    """What a folder's table is. Raises a ``ConfigurationError`` if it holds none."""
    try:
        found: dict[str, Any] = json.loads((folder / _DESCRIPTION).read_text())
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"The folder {folder} {'holds other files' if folder.exists() else 'does not exist'}. Expected a served "
            "table, or for a new one an empty folder."
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder / _DESCRIPTION} could not be read: {error}. Expected JSON.") from error
    return found


def part_name(server: int, servers: int) -> str:
    """What the names of the files of a server's part begin with."""
    return f"rows-{server}-of-{servers}"


def _listed(description: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in description.items())


class RowFiles:
    """See the module's docstring. ``columns`` is the number of scalars that are kept of each of ``count`` rows.

    Raises a ``ConfigurationError`` if another process has the files, or if the disk is full.
    """

    def __init__(self, folder: Path, server: int, servers: int, count: int, columns: int) -> None:
        self._folder, self._name = folder, part_name(server, servers)
        with contextlib.ExitStack() as opened:
            self._lock = os.open(self._path(".lock"), _OPEN, 0o600)
            opened.callback(os.close, self._lock)
            _lock(self._lock, self._path(".lock"))
            if self._path(".table").exists() and not self._path(".clients").exists():
                raise ConfigurationError(f"{self._path('.clients')} is missing. {_INCOMPLETE}")
            _create_whole(self._path(".clients"), torch.int64.itemsize * _CLIENTS * 4)
            self._clients = _mapped(self._path(".clients"), torch.int64, (_CLIENTS, 4), complete=True)
            if self.updates and not self._path(".table").exists():
                raise ConfigurationError(f"{self._path('.table')} is missing. {_INCOMPLETE}")
            shape = count, columns + 1
            self._records = _mapped(self._path(".table"), torch.float32, shape, complete=self.updates > 0)
            self._inode = os.stat(self._path(".table")).st_ino
            self._journal = os.open(self._path(".journal"), _OPEN, 0o600)
            opened.callback(os.close, self._journal)
            self._replay_journal()
            _check_sums(self._clients, self._path(".clients"))
            self._opened = opened.pop_all()

    @property
    def are_gone(self) -> bool:
        """Whether the files were removed, or others took their place."""
        try:
            return os.stat(self._path(".table")).st_ino != self._inode
        except FileNotFoundError:
            return True

    @property
    def updates(self) -> int:
        """How many pushes the rows hold."""
        return int(self._clients[:, 2].max())

    def latest(self, client: int) -> int:
        """The number of a client's latest push; 0 if none is known."""
        place = self._place(client)
        return int(self._clients[place[0], 1]) if len(place) else 0

    def read(self, numbers: Tensor) -> Tensor:
        """Some rows, shape ``(k, columns)``. Raises a ``SnapshotError`` if one of them is not as it was written."""
        return _check_sums(self._records.index_select(0, numbers), self._path(".table"))

    def write(self, numbers: Tensor, records: Tensor, client: int, seq: int) -> None:
        """Apply a push: its rows and its number, both or neither, even if the process is killed."""
        records = torch.cat([records, _sums(records).view(-1, 1).view(torch.float32)], 1)
        rows, values = numbers.numpy().tobytes(), records.numpy().tobytes()
        fields = *records.shape, client, seq, self.updates + 1
        head = _HEADER.pack(_MAGIC, *fields, _checksum(fields, rows, values))
        at = 0
        for part in (head, rows, values):
            _write(self._journal, part, at)
            at += len(part)
        self._apply(numbers, records, *fields[2:])

    def save(self, folder: Path) -> None:
        """Copy the files to another folder."""
        for end in COPIED:
            copy_file(self._path(end), folder / f"{self._name}{end}")

    def load(self, folder: Path) -> None:
        """Replace the contents with those of another folder."""
        for end in COPIED:
            source, target = folder / f"{self._name}{end}", self._path(end)
            if not source.exists() or source.stat().st_size != target.stat().st_size:
                raise ConfigurationError(
                    f"{source} is missing, or has another size than {target}. Expected a copy of the same table on the "
                    "same number of servers."
                )
        noted = folder / f"{self._name}.clients"
        _check_sums(torch.from_numpy(np.fromfile(noted, np.int64)).view(-1, 4), noted)
        os.ftruncate(self._journal, 0)
        for end in COPIED:
            _overwrite(folder / f"{self._name}{end}", self._path(end))

    def close(self) -> None:
        """Let another process have the files."""
        del self._records, self._clients
        self._opened.close()

    def _path(self, end: str) -> Path:
        return self._folder / f"{self._name}{end}"

    def _place(self, client: int) -> Tensor:
        """Where a client's latest push is noted; empty if it is not."""
        return ((self._clients[:, 0] == client) & (self._clients[:, 1] > 0)).nonzero().view(-1)

    def _apply(self, numbers: Tensor, records: Tensor, client: int, seq: int, updates: int) -> None:
        self._records.index_copy_(0, numbers, records)
        place = self._place(client)
        oldest = self._clients[:, 2].argmin()
        noted = torch.tensor([[client, seq, updates]])
        self._clients[place[0] if len(place) else oldest] = torch.cat([noted, _sums(noted).view(-1, 1)], 1)[0]

    def _replay_journal(self) -> None:
        """Apply the journal's push again, since the process before may have ended halfway."""
        head = os.pread(self._journal, _HEADER.size, 0)
        if len(head) < _HEADER.size:
            return
        magic, *fields, checksum = _HEADER.unpack(head)
        count, columns = fields[:2]
        middle, end = _HEADER.size + count * 8, _HEADER.size + count * (8 + columns * 4)
        whole = end <= os.fstat(self._journal).st_size
        if magic != _MAGIC or columns != self._records.shape[1] or not count or not whole:
            return  # it was not written to its end, so nothing of it was applied
        if fields[4] not in (self.updates, self.updates + 1):
            return  # the files are a copy that was put in the place of these, and has other pushes
        rows, values = _read(self._journal, _HEADER.size, middle), _read(self._journal, middle, end)
        if _checksum(fields, rows, values) != checksum:
            return
        numbers = torch.frombuffer(bytearray(rows), dtype=torch.int64)
        if not 0 <= int(numbers.min()) <= int(numbers.max()) < len(self._records):
            raise ProtocolError(
                f"{self._path('.journal')} names rows above {len(self._records)}. Expected this table's."
            )
        self._apply(numbers, torch.frombuffer(bytearray(values), dtype=torch.float32).view(-1, columns), *fields[2:])


def copy_file(source: Path, target: Path) -> None:
    """Copy a file piece by piece, keeping its holes; the target is there once it is whole.

    Raises a ``ConfigurationError`` if it would be copied to itself, or if the disk is full.
    """
    if target.exists() and source.samefile(target):
        raise ConfigurationError(f"{source} would be copied to itself. Expected another folder.")
    try:
        with source.open("rb") as reader, whole_file(target) as writer:
            size = os.fstat(reader.fileno()).st_size
            writer.truncate(size)
            _copy(reader.fileno(), writer.fileno(), size)
    except OSError as error:
        raise ConfigurationError(f"{source} could not be copied to {target}: {error}. Expected space.") from error


def read_records(path: Path, count: int, columns: int, numbers: Tensor) -> Tensor:
    """Some rows of a file that a server may be writing to: what it writes meanwhile is read again.

    Raises a ``ConfigurationError`` if the file has another size, and a ``SnapshotError`` if a row is damaged.
    """
    if (found := path.stat().st_size) != (size := count * (columns + 1) * 4):
        raise ConfigurationError(f"{path} has {found} bytes. Expected {size}. {_INCOMPLETE}")
    mapped = np.memmap(path, dtype=np.float32, mode="r", shape=(count, columns + 1))
    for _ in range(_TRIES - 1):
        with contextlib.suppress(SnapshotError):
            return _check_sums(torch.from_numpy(mapped[numbers.numpy()]), path)
    return _check_sums(torch.from_numpy(mapped[numbers.numpy()]), path)


def _sums(records: Tensor) -> Tensor:
    """Each row's checksum, shape ``(k,)``, int32: another one if a bit is flipped, and 0 for a row of zeros, a hole."""
    words = records.contiguous().view(torch.int32)
    odd = torch.arange(1, 2 * words.shape[1], 2, dtype=torch.int32)
    mixed = words * odd  # modulo 2^32
    mixed ^= (mixed >> 15) & 0x1FFFF  # else two flipped signs would cancel
    return mixed.mul_(odd).sum(1, dtype=torch.int32)


def _check_sums(rows: Tensor, path: Path) -> Tensor:
    """The rows without their checksums, which are in the last column."""
    records, last = rows[:, :-1], rows[:, -1:].contiguous()
    noted = last.view(torch.int32) if last.dtype == torch.float32 else last
    if damaged := int((_sums(records) != noted[:, 0]).sum()):
        raise SnapshotError(
            f"{path} is damaged: {damaged} of {len(rows)} rows that were read are not what was written. Look at the "
            f"disk, empty the folder {path.parent}, and resume from a checkpoint that has a copy of the table."
        )
    return records


def _overwrite(source: Path, target: Path) -> None:
    """Copy a file over another one of the same size, which this process has mapped: it never becomes shorter."""
    if source.samefile(target):
        return
    with source.open("rb") as reader, target.open("r+b") as writer:
        size = os.fstat(reader.fileno()).st_size
        at = 0
        while at < size:  # what is a hole in the source may have been written in the target
            begin = min(_data_from(reader.fileno(), at, size), _data_from(writer.fileno(), at, size))
            at = min(begin + _AT_ONCE, size)
            _write(writer.fileno(), _read(reader.fileno(), begin, at), begin)


def _copy(reader: int, writer: int, size: int) -> None:
    """Copy what is not a hole."""
    at = 0
    while (begin := _data_from(reader, at, size)) < size:
        at = min(os.lseek(reader, begin, os.SEEK_HOLE), begin + _AT_ONCE)
        _write(writer, _read(reader, begin, at), begin)


def _data_from(file: int, at: int, size: int) -> int:
    """Where the next data begin that are not a hole; at ``size`` if there are none."""
    try:
        return os.lseek(file, at, os.SEEK_DATA) if at < size else size
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return size


def _create_whole(path: Path, size: int) -> None:
    """Create a file of zeros unless it exists. It has its whole size once it has its name, even after a kill."""
    if path.exists():
        return
    with whole_file(path) as file:
        _reserve(file.fileno(), size, path)


def _mapped(path: Path, dtype: torch.dtype, shape: tuple[int, int], *, complete: bool) -> Tensor:
    """Map a file. A ``complete`` file must have its full size; otherwise it may be new or shorter."""
    size = max(1, shape[0] * shape[1]) * dtype.itemsize
    file = os.open(path, _OPEN, 0o600)
    try:
        found = os.fstat(file).st_size
        if found > size or (complete and found < size):
            raise ConfigurationError(f"{path} has {found} bytes. Expected {size}. {_INCOMPLETE}")
        _reserve(file, size, path)
        mapped = mmap.mmap(file, size)
    finally:
        os.close(file)
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)  # else each row that is read brings its neighbours
    return (
        torch.frombuffer(mapped, dtype=dtype, count=shape[0] * shape[1]).view(shape) if shape[0] else torch.empty(shape)
    )


def _reserve(file: int, size: int, path: Path) -> None:
    """Set a file's size, and have its disk space now: to write to a mapped hole of a full disk kills the process."""
    before = os.fstat(file).st_size
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            os.ftruncate(file, before)
            raise ConfigurationError(
                f"{size} bytes for {path} could not be reserved: {error}. Free space on that disk, or give the table "
                "another folder."
            ) from error
    if os.fstat(file).st_size < size:
        os.ftruncate(file, size)


def _lock(file: int, path: Path) -> None:
    import fcntl  # not everywhere

    until = time.monotonic() + _LOCKED_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if time.monotonic() > until:
                holder = os.pread(file, 20, 0).decode(errors="replace")
                raise ConfigurationError(
                    f"The table's file {path} is in use by process {holder} on its machine. Expected one job at a time "
                    "for a folder."
                ) from error
            time.sleep(0.1)
    os.ftruncate(file, 0)
    _write(file, str(os.getpid()).encode(), 0)


def _checksum(fields: Any, rows: bytes, values: bytes) -> int:
    return zlib.crc32(values, zlib.crc32(rows, zlib.crc32(repr(tuple(fields)).encode())))


def _write(file: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, at)
        at, view = at + done, view[done:]


def _read(file: int, begin: int, end: int) -> bytes:
    parts = []
    while begin < end:
        part = os.pread(file, min(end - begin, _AT_ONCE), begin)
        if not part:
            raise OSError(errno.EIO, f"the file ends at {begin}, expected {end}")
        parts.append(part)
        begin += len(part)
    return b"".join(parts)
