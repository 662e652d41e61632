"""What a Trainer's worker does when the engine that started it ends, or is about to end it.

In an elastic run the worker leaves. That is the same everywhere: Lightning's flag of a SIGTERM ends the fit after the
present batch, the worker gives its leases back, and the process ends with exit code 0. The others continue.

In a job Lightning's own handler writes a checkpoint and has SLURM requeue the job, once the present batch is trained or
the sync point is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.worker.collectives import Phase
from lightning_asgd.core.worker.feature import Fit, WorkerFeature
from lightning_asgd.engines.engine import end_with_agent, requeue_job


def heed_engine(trainer: Any, note: Callable[[int, Any], None]) -> Callable[[], None]:
    """Leave the run with torchrun's agent, and before SLURM's time limit. Returns the undo.

    ``note`` handles SIGTERM, as which SLURM's warning counts. Lightning's own handler requeues a job on its rank 0
    only, which is one worker of the run and not one of each job, and writes a checkpoint first.
    """
    end_with_agent()

    def requeue_and_leave(signum: int, frame: Any) -> None:
        requeue_job()
        note(signum, frame)

    return private_names.requeue_job.replace(trainer, requeue_and_leave)


def defer_requeueing(trainer: Any) -> Callable[[], None]:
    """Have a job requeued where :meth:`Requeueing.handle` is called, during a fit. Returns the undo."""
    return private_names.requeue_job.replace(trainer, Requeueing(trainer))


def requeueing_of(trainer: Any) -> Requeueing:
    """The handler that :func:`defer_requeueing` has set. If it was not called, an unused handler."""
    handler = private_names.requeue_job(trainer)
    return handler if isinstance(handler, Requeueing) else Requeueing(trainer)


class HeedsInValidation:
    """The part of the strategy that heeds SLURM's signal in a validation, which may outlast the job."""

    fit_session: Any

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Write a checkpoint first if asked to: Lightning can resume a validation here. Then call the module's."""
        if self.fit_session is not None and not self.fit_session.in_search:
            self.fit_session.call_features("pause")
        return super().validation_step(*args, **kwargs)  # type: ignore[misc]


class Requeueing:
    """The handler of SLURM's signal in a job: Lightning's own, which writes a checkpoint, where a checkpoint is whole.

    Within a batch or a sync point the signal may interrupt an exchange, whose weights are then half merged, or a call
    to a server whose lock this thread holds: while it ``defers``, that is called, and the signal waits for
    :meth:`handle`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.defers: Callable[[], None] | None = None
        self.came: tuple[int, Any] | None = None

    def __call__(self, signum: int, frame: Any) -> None:
        """Note the signal."""
        self.came = signum, frame
        (self.defers or self.handle)()

    def handle(self) -> None:
        """Call Lightning's handler if the signal has come."""
        came, self.came = self.came, None
        if came is None:
            return
        collectives = self._trainer.strategy.collectives
        phase = collectives.phase
        if phase is Phase.SYNC:  # other workers may have got the signal elsewhere: no collective would pair up
            collectives.phase = Phase.OFFLINE
        try:
            private_names.requeue_job.original(self._trainer)(*came)
        finally:
            if phase is Phase.SYNC:
                collectives.phase = phase


class DeferredRequeueing(WorkerFeature):
    """From the beginning of a fit to its end a signal waits until a checkpoint is whole."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._handler = requeueing_of(fit.trainer)

    def begin(self) -> None:
        """See :class:`WorkerFeature`."""
        self._handler.defers = lambda: self._fit.due.append(self._handler.handle)

    def pause(self) -> None:
        """See :class:`WorkerFeature`."""
        self._handler.handle()

    def end(self) -> None:
        """See :class:`WorkerFeature`."""
        self._handler.defers = None
        self._handler.handle()
