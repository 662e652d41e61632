"""One server's part of a served table: first values that follow from a seed, then steps of an optimizer.

An optimizer changes some rows and their state in place, and no others.

=================  =====================================================================================================
``sgd``            ``w -= lr * g``
``adagrad``        ``h += g^2; w -= lr * g / (sqrt(h) + eps)``, as ``torch.optim.Adagrad`` (Duchi et al. 2011)
``row_adagrad``    the same with one ``h`` per row, to which the mean of ``g^2`` is added (DLRM, Naumov et al. 2019)
``adam``           as ``torch.optim.SparseAdam``, but bias correction counts each row's own updates (Kingma, Ba 2015)
=================  =====================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_asgd.core.foundation.errors import ConfigurationError, ProtocolError
from lightning_asgd.tables.served.messages import ServedRows, TableSpec
from lightning_asgd.tables.served.row_files import (
    COPIED,
    RowFiles,
    check_description,
    claim_folder,
    copy_file,
    part_name,
    read_records,
)

_EPS = 1e-10
_BETA1, _BETA2, _ADAM_EPS = 0.9, 0.999, 1e-8


@dataclass(frozen=True)
class RowOptimizer:
    """An optimizer of rows.

    ``step(values, state, updates, gradients, lr)`` changes ``values``, shape ``(k, width)``, and ``state``, shape ``(k,
    state)``, in place. ``updates``, shape ``(k, 1)``, is each row's number of updates, this one included; ``gradients``
    has shape ``(k, width)``.
    """

    state: Callable[[int], int]  # scalars of state per row, given its width
    step: Callable[[Tensor, Tensor, Tensor, Tensor, float], None]


def _sgd(values: Tensor, state: Tensor, updates: Tensor, gradients: Tensor, lr: float) -> None:
    values.sub_(gradients, alpha=lr)


def _adagrad(values: Tensor, state: Tensor, updates: Tensor, gradients: Tensor, lr: float) -> None:
    state.addcmul_(gradients, gradients)
    values.addcdiv_(gradients, state.sqrt().add_(_EPS), value=-lr)


def _row_adagrad(values: Tensor, state: Tensor, updates: Tensor, gradients: Tensor, lr: float) -> None:
    state.add_(gradients.square().mean(1, keepdim=True))
    values.sub_(gradients / state.sqrt().add_(_EPS), alpha=lr)


def _adam(values: Tensor, state: Tensor, updates: Tensor, gradients: Tensor, lr: float) -> None:
    mean, square = state[:, : values.shape[1]], state[:, values.shape[1] :]
    mean.lerp_(gradients, 1 - _BETA1)
    square.mul_(_BETA2).addcmul_(gradients, gradients, value=1 - _BETA2)
    counts = updates.double()
    step = (lr * torch.sqrt(1 - _BETA2**counts) / (1 - _BETA1**counts)).float()
    values.sub_(step * mean / square.sqrt().add_(_ADAM_EPS))


ROW_OPTIMIZERS = {
    "sgd": RowOptimizer(lambda width: 0, _sgd),
    "adagrad": RowOptimizer(lambda width: width, _adagrad),
    "row_adagrad": RowOptimizer(lambda width: 1, _row_adagrad),
    "adam": RowOptimizer(lambda width: 2 * width, _adam),
}


_TOP = np.uint64(32)
_BELOW = np.uint64(0xFFFFFFFF)
_AT_ONCE = 1 << 22  # scalars of first values that are computed at a time


def first_values(rows: Tensor, table: TableSpec) -> Tensor:
    """The first values of some rows, shape ``(k, width)``: normal, and determined by the seed and the row's number.

    So a server need not write rows that were never trained, and the values do not depend on the number of servers.
    """
    step = max(1, _AT_ONCE // table.width)
    parts = [_first_values(rows[start : start + step], table) for start in range(0, max(len(rows), 1), step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _first_values(rows: Tensor, table: TableSpec) -> Tensor:
    half = (table.width + 1) // 2
    with np.errstate(over="ignore"):
        at = rows.numpy().astype(np.uint64)[:, None] * np.uint64(half) + np.arange(half, dtype=np.uint64)
        mixed = _mixed(at + _mixed(np.array([table.seed], dtype=np.int64).astype(np.uint64)))
    radius = np.sqrt(-2 * np.log(((mixed >> _TOP).astype(np.float64) + 1) / 2.0**32))
    angle = (mixed & _BELOW).astype(np.float64) * (2 * math.pi / 2**32)
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)[:, : table.width]
    return torch.from_numpy((normal * table.init_std).astype(np.float32))


def _mixed(x: np.ndarray) -> np.ndarray:
    """Pseudo-random numbers of 64 bits: SplitMix64 (Steele et al. 2014)."""
    x = x * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def _columns(table: TableSpec) -> int:
    """Scalars that are kept of a row: its number of updates, its values, its optimizer's state."""
    return 1 + table.width + ROW_OPTIMIZERS[table.optimizer].state(table.width)


def _description(table: TableSpec) -> dict[str, Any]:
    """What the description of a folder must agree with, but for the number of servers."""
    return {name: getattr(table, name) for name in ("rows", "width", "optimizer", "init_std", "seed")}


def _with_first_values(records: Tensor, numbers: Tensor, table: TableSpec) -> Tensor:
    """Fill in the values of rows that were never updated, in place."""
    new = records[:, 0] == 0
    if bool(new.any()):
        records[new, 1 : 1 + table.width] = first_values(numbers[new], table)
    return records


class RowStore:
    """The part of a table on server ``server`` of ``servers``. It continues from the files in the table's folder.

    Raises a ``ConfigurationError`` if these hold another table, or another process has them.
    """

    def __init__(self, table: TableSpec, server: int, servers: int) -> None:
        if table.optimizer not in ROW_OPTIMIZERS:
            raise ConfigurationError(
                f"optimizer={table.optimizer!r} of a served table. Expected one of {', '.join(ROW_OPTIMIZERS)}."
            )
        if not 0 <= server < servers:
            raise ProtocolError(f"A worker asked for part {server} of a table that has {servers} parts.")
        claim_folder(Path(table.folder), {**_description(table), "servers": servers})
        self.table, self.server, self.servers = table, server, servers
        self._optimizer = ROW_OPTIMIZERS[table.optimizer]
        self.rows = table.rows_of(server, servers)
        self._files = RowFiles(Path(table.folder), server, servers, self.rows, _columns(table))

    def read(self, numbers: Tensor) -> ServedRows:
        """Some rows, by their numbers on this server. Raises a ``ProtocolError`` for rows that it does not have."""
        self._check(numbers)
        return ServedRows(self._values(self._records(numbers)).contiguous(), self._files.updates)

    def push(self, numbers: Tensor, gradients: Tensor, lr: float, client: int, seq: int) -> ServedRows:
        """Take an optimizer step for some rows, whose numbers ascend, unless this push was taken before."""
        self._check(numbers)
        fits = gradients.dtype == torch.float32 and gradients.shape == (len(numbers), self.table.width)
        fits = fits and gradients.layout == torch.strided and client > 0 < seq and math.isfinite(lr) and lr >= 0
        if not fits:
            raise ProtocolError(
                f"Gradients of shape {tuple(gradients.shape)}, {gradients.dtype}, were pushed to {len(numbers)} rows "
                f"with lr={lr}, as number {seq}. Expected shape {(len(numbers), self.table.width)}, float32, lr of at "
                "least 0, and numbers from 1 on."
            )
        rejected = False
        if len(numbers) and seq > self._files.latest(client):
            records = self._records(numbers)
            records[:, 0] += 1
            state = records[:, 1 + self.table.width :]
            self._optimizer.step(self._values(records), state, records[:, :1], gradients, lr)
            rejected = not bool(torch.isfinite(records).all())
            if not rejected:
                self._files.write(numbers, records, client, seq)
        return replace(self.read(numbers), rejected=rejected)

    def save(self, folder: str) -> None:
        """Copy this part to another folder."""
        claim_folder(Path(folder), {**_description(self.table), "servers": self.servers})
        self._files.save(Path(folder))

    def load(self, folder: str) -> None:
        """Replace this part with a copy of it. Raises a ``ConfigurationError`` if that is of another table."""
        check_description(Path(folder), {**_description(self.table), "servers": self.servers})
        self._files.load(Path(folder))

    @property
    def is_gone(self) -> bool:
        """Whether the files were removed."""
        return self._files.are_gone

    def close(self) -> None:
        """Let another process have the files."""
        self._files.close()

    def _check(self, numbers: Tensor) -> None:
        fits = numbers.dtype == torch.int64 and numbers.dim() == 1 and numbers.layout == torch.strided
        if fits and len(numbers):
            fits = 0 <= int(numbers[0]) <= int(numbers[-1]) < self.rows and bool((numbers[1:] > numbers[:-1]).all())
        if not fits:
            raise ProtocolError(
                f"A worker named {numbers.numel()} rows by {numbers.dtype}. Expected ascending whole numbers from 0 to "
                f"{self.rows - 1} (int64)."
            )

    def _records(self, numbers: Tensor) -> Tensor:
        return _with_first_values(self._files.read(numbers), numbers * self.servers + self.server, self.table)

    def _values(self, records: Tensor) -> Tensor:
        return records[:, 1 : 1 + self.table.width]


def read_rows(folder: Path, numbers: Tensor, table: TableSpec) -> Tensor:
    """Some rows of the copy of a table in a folder, which a server may be writing to; reads these rows only.

    Raises a ``ConfigurationError`` if the folder does not hold this table, or not all of its parts.
    """
    servers = int(check_description(folder, _description(table))["servers"])
    values = torch.empty(len(numbers), table.width, dtype=torch.float32)
    for server in range(servers):
        mine = numbers % servers == server
        path, count = folder / f"{part_name(server, servers)}.table", table.rows_of(server, servers)
        if not bool(mine.any()):
            continue
        if not path.exists():
            raise ConfigurationError(
                f"{path} does not exist on this machine. Expected every part of the table: each server writes its part "
                "on its own machine. Copy them into one folder, or use a folder that all machines share."
            )
        found = read_records(path, count, _columns(table), numbers[mine] // servers)
        values[mine] = _with_first_values(found, numbers[mine], table)[:, 1 : 1 + table.width]
    return values


def copy_table(folder: Path, to: Path) -> None:
    """Copy a table that no server writes to. Raises a ``ConfigurationError`` unless all of its parts are here."""
    description = check_description(folder, {})
    servers = int(description["servers"])
    names = [f"{part_name(server, servers)}{end}" for server in range(servers) for end in COPIED]
    for name in names:
        if not (folder / name).exists():
            raise ConfigurationError(f"{folder / name} does not exist on this machine. Expected the whole table.")
    claim_folder(to, description)
    for name in names:
        copy_file(folder / name, to / name)
