"""``DataStallMonitor``: how long a fit waits for data and for exchanges, while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.class_trees import CallbackExtension, Extension


class DataStallMonitor(CallbackExtension, Extension):  # type: ignore[misc]
    """Logs the share of the training time in which batches are waited for, and that of waiting for exchanges.

    Logged as ``stall/data`` and ``stall/sync``, shares of the time since the fit began, by any strategy; the latter is
    0 where there are no exchanges. Validations and what lies between epochs are not counted. On a GPU, which works
    through a queue, ``stall/data`` is an upper bound: while the next batch is waited for, the device may still be busy
    with the one before. What part of it is fetching and what preparing,
    :func:`lightning_asgd.data_stalls.probe.stalls` tells. Extends Lightning's ``Callback``.

    Attributes:
        steps: batches trained.
        data_s: seconds in which a batch was waited for.
        sync_s: seconds in which an exchange was waited for, those at sync points not counted.
        total_s: seconds of all batches, waiting included.

    Example:
        >>> from pytorch_lightning import Trainer
        >>> trainer = Trainer(callbacks=[DataStallMonitor()], accelerator="cpu", logger=False)
    """

    def __init__(self) -> None:
        self.steps = 0
        self.data_s = self.sync_s = self.total_s = 0.0
        self._fetching_since = self._counted_until = 0.0
        self._undo: Callable[[], None] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count."""
        self.steps = 0
        self.data_s = self.sync_s = self.total_s = 0.0
        self._undo = when_batches_are_fetched(trainer, self._before, self._after)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count a batch."""
        self._count()
        self.steps += 1
        stats = getattr(trainer.strategy, "stats", None)
        self.sync_s = getattr(stats, "wait_s", 0.0)
        total_s = self.total_s or 1.0
        pl_module.log_dict({"stall/data": self.data_s / total_s, "stall/sync": self.sync_s / total_s})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the Trainer as it was."""
        self._stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the Trainer as it was."""
        self._stop()

    def _before(self) -> None:
        self._fetching_since = self._counted_until = time.perf_counter()

    def _after(self) -> None:
        self.data_s += time.perf_counter() - self._fetching_since
        self._count()

    def _count(self) -> None:
        now = time.perf_counter()
        self.total_s += now - self._counted_until
        self._counted_until = now

    def _stop(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None


def when_batches_are_fetched(trainer: Any, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Have something called around every wait for a training batch, from the next epoch on. Returns the undo."""

    def call_and_start() -> None:
        before()
        private_names.before_fetch.original(trainer)()

    def stop_and_call() -> None:
        private_names.after_fetch.original(trainer)()
        after()

    undo_before = private_names.before_fetch.replace(trainer, call_and_start)
    undo_after = private_names.after_fetch.replace(trainer, stop_and_call)

    def undo() -> None:
        undo_before()
        undo_after()

    return undo
