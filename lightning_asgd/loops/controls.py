"""What a program calls while it trains in a loop of its own: in a plain loop, and with Fabric."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lightning_asgd.core.foundation.validation import whole
from lightning_asgd.loops.leased_pass import LeasedPass, SharedData, share
from lightning_asgd.loops.session import LoopSession


class LoopControls:
    """Epochs, batches and sync points of a worker whose loop is the program's own."""

    _data: SharedData | None = None

    @property
    def _in_use(self) -> LoopSession:
        """The worker's training; raises an :class:`ASGDError` if there is none now."""
        raise NotImplementedError

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the epochs until the workers have trained ``total`` together; see :meth:`stop`.

        A worker that joins later begins with the present one.
        """
        session = self._in_use
        while session.state.epoch < total and not session.stops:
            session.begin_epoch()
            yield session.state.epoch
            session.end_epoch()

    def batches(self, data: Any, *, accumulate: int = 1, **options: Any) -> Iterable[Any]:
        """One pass over a data set: the batches that this worker is granted.

        Each sample is trained once, on any worker; faster workers train more. Updates are exchanged between two
        batches. At the end all workers have trained, and hold the servers' weights.

        Args:
            data: a map-style data set, or one with shards, or a ``DataLoader``. All workers have the same; batch sizes
                may differ.
            accumulate: batches per optimizer step.
            options: arguments of ``DataLoader`` for a data set: ``batch_size``, ``shuffle``, ``num_workers``, ...

        Returns:
            The batches. Their ``len()`` is the number of this worker's batches if all are equally fast; shards of
            unknown length have none.

        Raises:
            ConfigurationError: workers cannot share the data.
        """
        return self._pass_over(data, accumulate, options)

    def _pass_over(self, data: Any, accumulate: int, options: dict[str, Any]) -> LeasedPass:
        session = self._in_use
        whole("accumulate", accumulate)
        if self._data is None or self._data.data is not data or self._data.options != options:
            self._close_data()
            self._data = share(data, options, session.state.seed)
        return LeasedPass(session, self._data, accumulate)

    def _close_data(self) -> None:
        data, self._data = self._data, None
        if data is not None:
            data.close()

    def sync(self) -> None:
        """Push what was trained and take the weights of all workers.

        In a job all workers wait for each other here and leave with the same weights; so all must call it, between two
        passes over :meth:`batches`, which end with it. In an elastic run no worker waits.
        """
        self._in_use.sync()

    def count_batch(self, batch: Any) -> None:
        """With ``units=``, count what a batch of the program's own data holds. To be called before the batch's step.

        Batches of :meth:`batches` are counted without it.

        Raises:
            ConfigurationError: it cannot be seen what the batch holds.
        """
        self._in_use.count_batch(batch)

    def stop(self) -> None:
        """End training with the present epoch of :meth:`epochs`: in a job and as the chief of a run for all workers."""
        self._in_use.stops = True

    @property
    def epoch(self) -> int:
        """Epochs that are over; in a loop without :meth:`epochs`, each pass over :meth:`batches` is one."""
        return self._in_use.state.epoch

    @property
    def progress(self) -> float:
        """Epochs that all workers have trained, with the part of the present one. Schedules can follow it."""
        return self._in_use.progress
