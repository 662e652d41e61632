"""Rows of served tables: those that lie on the servers only."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_asgd.core.protocol.request import Count, LearningRate, Request, publish_path

__all__ = ["FetchRows", "LoadTable", "PushRows", "SaveTable", "ServedRows", "TableRequest", "TableSpec"]

_MOST = 1 << 44  # scalars of a table


@dataclass(frozen=True)
class TableSpec:
    """A served table. Server ``s`` of ``n`` has its rows ``s``, ``s + n``, ``s + 2n``, ..."""

    expected: ClassVar[str] = f"the absolute path of a folder, 1 to {_MOST} scalars, and init_std of at least 0"

    folder: str  # where the servers keep their files
    rows: int
    width: int  # scalars of a row
    optimizer: str  # with which the servers apply gradients
    init_std: float  # standard deviation of the first values
    seed: int  # of the first values
    name: str = ""  # in the module

    @property
    def can_be(self) -> bool:
        """Whether there can be such a table."""
        fits = self.rows > 0 < self.width and self.rows * self.width <= _MOST
        return fits and os.path.isabs(self.folder) and math.isfinite(self.init_std) and self.init_std >= 0

    def rows_of(self, server: int, servers: int) -> int:
        """How many of its rows a server has."""
        return len(range(server, self.rows, servers))


@dataclass(frozen=True)
class TableRequest(Request):
    """A message about a server's part of a table, which the first such message creates."""

    table: TableSpec
    server: int  # the server's number
    servers: int  # how many servers share the table


@dataclass(frozen=True)
class FetchRows(TableRequest):
    """Ask for rows; answered with :class:`ServedRows`."""

    numbers: Tensor  # shape `(k,)`, int64: of the rows, as this server counts its own


@dataclass(frozen=True)
class PushRows(TableRequest):
    """Gradients for the optimizer; answered with :class:`ServedRows`, the new values of the same rows."""

    numbers: Tensor  # shape `(k,)`, int64, ascending: of the rows, as this server counts its own
    gradients: Tensor  # shape `(k, width)`, float32
    lr: LearningRate
    client: int  # the sender's random number
    seq: Count  # number of this client's push, counted from 1; a server applies each number once


@dataclass(frozen=True)
class SaveTable(TableRequest):
    """Have a server copy its part of the table to another folder."""

    to: str


@dataclass(frozen=True)
class LoadTable(TableRequest):
    """Have a server replace its part of the table with the copy in another folder."""

    source: str


@dataclass(frozen=True)
class ServedRows:
    """Rows of a table."""

    values: Tensor  # shape `(k, width)`, float32
    updates: int  # number of pushes that the server's part of the table holds
    rejected: bool = False  # whether the push held or caused NaN or infinity, and was not applied


publish_path(globals())
