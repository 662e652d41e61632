"""The served tables of a module, while a worker trains it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.tables.served.client import TableClient
from lightning_asgd.tables.served.embedding import ServedEmbedding


def served(module: Module) -> dict[str, ServedEmbedding]:
    """A module's served tables by name."""
    return {name: each for name, each in module.named_modules() if isinstance(each, ServedEmbedding)}


class TableClients:
    """Attaches a module's tables to the servers. Where there are none, nothing costs anything."""

    def __init__(self, module: Module, connection: Callable[[], Connection], share: Callable[[], float]) -> None:
        tables = served(module)
        folders = [each.table.folder for each in tables.values()]
        if len(set(folders)) < len(folders):
            raise ConfigurationError(
                f"The served tables {', '.join(tables)} have the folders {', '.join(folders)}. Expected one for each "
                "table. A copy of a table, such as a target network's, needs its own."
            )
        self._tables = {
            name: (each, TableClient(replace(each.table, name=name), connection, each.cache_rows, each.max_age, share))
            for name, each in tables.items()
        }
        self._undo: list[Callable[[], None]] = []
        self._knows_no_scaler = False

    def __bool__(self) -> bool:
        return bool(self._tables)

    def attach(self) -> None:
        """Read and train the tables on the servers, until :meth:`close`. The worker has joined."""
        for table, client in self._tables.values():
            table.attach(client)

    def used(self) -> tuple[int, int, int]:
        """Of all tables: rows that were read, rows that were fetched, and the ages of the former."""
        found = [client.stats for _, client in self._tables.values()]
        return sum(s.read for s in found), sum(s.fetched for s in found), sum(s.ages for s in found)

    def watch(self, optimizers: Sequence[Any]) -> None:
        """Push gradients whenever one of these takes a step. Raises a ``ConfigurationError`` if one does not tell."""
        for optimizer in optimizers if self._tables else ():
            if not hasattr(optimizer, "register_step_post_hook"):
                raise ConfigurationError(
                    f"The optimizer {type(optimizer).__name__} has no register_step_post_hook(), but the module has a "
                    "ServedEmbedding, which learns with an optimizer's steps. Expected a torch.optim.Optimizer."
                )
            self._undo.append(optimizer.register_step_post_hook(self._step).remove)
            self._undo.append(self._follow_zero_grad(optimizer))

    def _follow_zero_grad(self, optimizer: Any) -> Callable[[], None]:
        """Have an optimizer's ``zero_grad()`` forget the gradients of rows, too."""
        zero, own = optimizer.zero_grad, vars(optimizer).get("zero_grad")

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            zero(*args, **kwargs)
            self.discard()

        optimizer.zero_grad = zero_grad
        return lambda: vars(optimizer).update(zero_grad=own) if own else vars(optimizer).pop("zero_grad", None)

    def _step(self, *_: Any) -> None:
        if not self._knows_no_scaler:
            self._knows_no_scaler = True
            _refuse_scaler()
        for table, _client in self._tables.values():
            table.step()

    def discard(self) -> None:
        """Forget the gradients since the latest step."""
        for table, _ in self._tables.values():
            table.discard()

    def forget(self) -> None:
        """Wait until pushes are acknowledged, and empty the caches: other workers have changed rows."""
        for _, client in self._tables.values():
            client.forget()

    def load(self, folder: Path, *, asks: bool) -> None:
        """Have the servers take the tables from a folder; all workers call it, and one ``asks``."""
        for name, (_, client) in self._tables.items():
            if asks:
                client.load(str(folder.absolute() / name))
            else:
                client.note_replaced()

    def close(self) -> None:
        """Detach the tables."""
        while self._undo:
            self._undo.pop()()
        for table, _ in self._tables.values():
            table.attach(None)


def _refuse_scaler() -> None:
    """Raise a ``ConfigurationError`` if a GradScaler has the optimizer take this step: rows' gradients are scaled."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler) and caller.is_enabled():
            raise ConfigurationError(
                "A GradScaler scales the loss, as with precision='16-mixed', but the module has a ServedEmbedding. Its "
                "gradients would stay scaled. Expected another precision, such as 'bf16-mixed'."
            )
        frame = frame.f_back
