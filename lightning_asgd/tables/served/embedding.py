"""An embedding with a table that is stored on the servers: no worker holds more than the rows that it uses."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import embedding

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import at_least, whole
from lightning_asgd.tables.served.client import TableClient
from lightning_asgd.tables.served.messages import TableSpec
from lightning_asgd.tables.served.row_store import ROW_OPTIMIZERS, copy_table, first_values, read_rows

log = logging.getLogger(__name__)

_SEEDS = 1 << 62
_APART = 8  # gradients of backward passes that are kept before they are added up


class ServedEmbedding(Module):
    """An embedding like ``torch.nn.Embedding`` whose table may be larger than a worker's memory.

    The table lies in files on the servers, whose optimizer updates it, so the module has no parameters. A worker
    fetches the rows that a batch needs and caches them. When one of its optimizers takes a step, it pushes the rows'
    gradients, divided by the number of workers. Outside of a fit, rows are read from the files.

    Args:
        num_embeddings: number of rows.
        embedding_dim: number of values in a row.
        folder: where each server keeps its part of the table, on its own machine. A relative path is taken from the
            directory in which the module is created. A fit continues with a table that is already there; give another
            folder to start again.
        optimizer: the servers' optimizer: ``"sgd"``, ``"adagrad"``, ``"row_adagrad"`` (Adagrad with one sum per row) or
            ``"adam"``.
        lr: its learning rate. You may change it at any time, on every worker.
        init_std: standard deviation of the normal distribution of the first values.
        seed: seed of the first values, which do not depend on the number of workers or servers. Tables with the same
            seed and width begin with equal rows, so give each its own.
        cache_rows: number of rows that a worker caches.
        max_age: number of steps after which a worker fetches a cached row again, since others may have changed it.

    Shape:
        Input: row numbers, of any shape ``(*)``. Output: ``(*, embedding_dim)``, in the default dtype.

    Raises:
        ConfigurationError: an argument is out of range, or the folder holds another table.
        IndexError: a row number is out of range.

    Example:
        >>> items = ServedEmbedding(10_000_000, 64, folder="tables/items", optimizer="row_adagrad", lr=0.05)

    References:
        Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014);
        Lian et al., "Persia" (2022).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        folder: str | Path,
        optimizer: str = "row_adagrad",
        lr: float = 0.01,
        init_std: float = 1.0,
        seed: int = 0,
        cache_rows: int = 1 << 16,
        max_age: int = 10,
    ) -> None:
        super().__init__()
        if optimizer not in ROW_OPTIMIZERS:
            raise ConfigurationError(f"optimizer={optimizer!r}. Expected one of {', '.join(ROW_OPTIMIZERS)}.")
        at_least("lr", lr, 0.0, finite=True)
        at_least("init_std", init_std, 0.0, finite=True)
        rows, width = whole("num_embeddings", num_embeddings), whole("embedding_dim", embedding_dim)
        if whole("seed", seed, 0) >= _SEEDS:
            raise ConfigurationError(f"seed={seed!r}. Expected a number below 2**62.")
        place = str(Path(folder).expanduser().absolute())
        self.table = TableSpec(place, rows, width, optimizer, float(init_std), seed)
        if not self.table.can_be:
            raise ConfigurationError(f"{self.table} was asked for. Expected {self.table.expected}.")
        self.lr = lr
        self.cache_rows, self.max_age = whole("cache_rows", cache_rows), whole("max_age", max_age)
        self._client: TableClient | None = None
        self.source = Path(place)
        """The folder of which rows are read outside of a fit."""
        self._gradients: list[tuple[Tensor, Tensor]] = []  # rows, and their gradients since the latest step

    def forward(self, indices: Tensor) -> Tensor:
        """Look up rows; see the class."""
        numbers, places = self._distinct(indices)
        rows = self._read(numbers).to(indices.device)
        if torch.is_grad_enabled():
            rows.requires_grad_().register_hook(partial(self._note, numbers))  # type: ignore[no-untyped-call]
        return embedding(places, rows.to(torch.get_default_dtype()))

    def prefetch(self, indices: Tensor) -> None:
        """Begin to fetch the rows of a later batch. Outside of a fit it does nothing."""
        if self._client is not None:
            self._client.prefetch(self._distinct(indices)[0])

    def attach(self, client: TableClient | None) -> None:
        """Use the servers from now on, or with None the files. A fit calls this."""
        self._client, self.source = client, Path(self.table.folder)
        self.discard()

    def step(self) -> None:
        """Push the gradients since the latest step, after an optimizer has taken one. A fit calls this."""
        self._add_up()
        found, self._gradients = self._gradients, []
        if self._client is None:
            return
        numbers, gradients = found[0] if found else (torch.empty(0, dtype=torch.int64), torch.empty(0))
        lr = float(self.lr)  # a program may have given a tensor
        at_least(f"lr of the served table in {self.table.folder}", lr, 0.0, finite=True)
        self._client.step(numbers, gradients, lr)

    def discard(self) -> None:
        """Forget the gradients since the latest step, as ``zero_grad()`` does. A fit calls this."""
        self._gradients.clear()

    def save(self, folder: str | Path) -> None:
        """Copy the table to another folder, which may hold an earlier copy.

        In a fit one worker calls it, and each server copies its part; else this process copies all parts. Raises a
        ``ConfigurationError`` if parts are missing, or the folder holds another table or other files.
        """
        to = Path(folder).expanduser().absolute()
        if self._client is not None:
            self._client.save(str(to))
        else:
            copy_table(self.source, to)

    def read_from(self, folder: str | Path) -> None:
        """Read rows from a copy of the table until the next fit, which continues with the table itself."""
        self.source = Path(folder).expanduser().absolute()

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        table = self.table
        return f"{table.rows}, {table.width}, folder={table.folder!r}, optimizer={table.optimizer!r}, lr={self.lr}"

    def _read(self, numbers: Tensor) -> Tensor:
        if self._client is not None:
            return self._client.read(numbers)
        if self.source == Path(self.table.folder) and not self.source.exists():
            log.warning("There is no table in %s yet: its rows have their first values.", self.source)
            return first_values(numbers, self.table)
        return read_rows(self.source, numbers, self.table)

    def _distinct(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The distinct rows asked for, ascending, and for each index its place among them."""
        if indices.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"Row numbers of {indices.dtype} were given to the served table in {self.table.folder}. Expected "
                "torch.int64 or torch.int32."
            )
        numbers, places = torch.unique(indices.detach(), return_inverse=True)
        numbers = numbers.to("cpu", torch.int64)
        if len(numbers) and not 0 <= int(numbers[0]) <= int(numbers[-1]) < self.table.rows:
            raise IndexError(
                f"Row numbers between {int(numbers[0])} and {int(numbers[-1])} were given to the served table in "
                f"{self.table.folder}. Expected 0 to {self.table.rows - 1}."
            )
        return numbers, places

    def _note(self, numbers: Tensor, gradient: Tensor) -> None:
        """A backward pass has computed the gradient of some rows."""
        if self._client is None:
            raise ConfigurationError(
                f"A gradient of the table in {self.table.folder} was computed outside of a fit, so no server would get "
                "it. Expected Trainer(strategy=ASGDStrategy(...)), or a loop with AsyncSGD."
            )
        self._gradients.append((numbers, gradient.detach().float().cpu()))
        if len(self._gradients) >= _APART:
            self._add_up()

    def _add_up(self) -> None:
        """Add up the gradients of each row."""
        found = self._gradients
        if len(found) > 1:
            numbers, places = torch.unique(torch.cat([each for each, _ in found]), return_inverse=True)
            parts = torch.cat([gradient for _, gradient in found])
            found[:] = [(numbers, parts.new_zeros(len(numbers), self.table.width).index_add_(0, places, parts))]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_client": None, "_gradients": []}
