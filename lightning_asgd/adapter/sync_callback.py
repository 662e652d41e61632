"""The callback that marks sync points for the strategy. The strategy puts it first in the Trainer's list."""

from __future__ import annotations

from typing import Any

from lightning_asgd.adapter.class_trees import Extension

__all__ = ["SyncPoints"]


class SyncPoints(Extension):  # type: ignore[misc]
    """Ends the asynchronous phase before other callbacks look at weights or metrics. Extends Lightning's ``Callback``.

    Strategy hooks alone would not do: Lightning has none for the end of an epoch, and calls the one for the start of
    a validation after the callbacks'.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Share the training data out as the workers' speeds are."""
        trainer.strategy.share_data()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Do so again if the data have been reloaded."""
        trainer.strategy.share_data()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Find out whether this was the last batch before all workers meet."""
        trainer.strategy.end_batch()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Let everybody validate the same weights."""
        trainer.strategy.begin_validation()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Let everybody end the epoch with the same weights."""
        trainer.strategy.end_epoch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the asynchronous phase also where training was no whole epoch."""
        trainer.strategy.sync_point("train end")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let other callbacks save what they have without the other workers, who know nothing of it."""
        trainer.strategy.meet_nobody()
