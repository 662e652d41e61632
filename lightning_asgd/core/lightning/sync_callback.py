"""The callbacks that the strategy puts first in the Trainer's list: one marks sync points, one logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_asgd.core.lightning.class_trees import Extension, tree_of
from lightning_asgd.monitor.callback import ASGDMonitor


class SyncPoints(Extension):  # type: ignore[misc]
    """Ends the asynchronous phase before other callbacks look at weights or metrics. Extends Lightning's ``Callback``.

    Strategy hooks alone would not do: Lightning has none for the end of an epoch, and calls the one for the start of
    a validation after the callbacks'.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lease the training data by the workers' speeds."""
        trainer.strategy.fit_session.share_data()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Lease them again if they were reloaded."""
        trainer.strategy.fit_session.share_data()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Measure a step with what other callbacks do before it."""
        trainer.strategy.fit_session.note_fetched()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Find out whether this was the last batch before a sync point."""
        trainer.strategy.fit_session.after_batch(outputs, batch)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Have all workers validate the same weights."""
        if trainer.strategy.fit_session is not None:
            trainer.strategy.fit_session.sync_before_validation()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Have all workers end the epoch with the same weights."""
        trainer.strategy.fit_session.sync_at_epoch_end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the asynchronous phase also if training stopped within an epoch."""
        trainer.strategy.fit_session.sync_at_train_end()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Note a checkpoint with optimizer states, before the program's hooks take out what they like."""
        if trainer.strategy.fit_session is not None:
            trainer.strategy.fit_session.whole = checkpoint

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let other callbacks save without collectives: the other workers know nothing of the exception."""
        trainer.strategy.go_offline(exception)


def put_first(trainer: Any, *, monitor: bool) -> Callable[[], None]:
    """Put the strategy's own callbacks first in the Trainer's list. Returns the undo."""
    mine: list[Any] = []
    if not any(isinstance(callback, SyncPoints) for callback in trainer.callbacks):
        mine.append(tree_of(trainer).derive(SyncPoints, "Callback")())
    if monitor and trainer.loggers and not trainer.fast_dev_run and not is_monitored(trainer):
        mine.append(ASGDMonitor())
    trainer.callbacks[:0] = mine

    def undo() -> None:
        trainer.callbacks[:] = [callback for callback in trainer.callbacks if all(callback is not m for m in mine)]

    return undo


def is_monitored(trainer: Any) -> bool:
    """Whether an :class:`ASGDMonitor` collects metrics."""
    return any(isinstance(callback, ASGDMonitor) for callback in trainer.callbacks)
