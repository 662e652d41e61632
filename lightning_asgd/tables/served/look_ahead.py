"""The batch after the present one, loaded early, so that the rows that it needs can be fetched meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.worker.feature import Fit, WorkerFeature
from lightning_asgd.tables.served.clients import served


class LookAhead(WorkerFeature):
    """Shows a module's ``prefetch_rows(batch)`` every batch one step before it is trained, if the module has it."""

    @classmethod
    def wanted(cls, fit: Fit) -> bool:
        """See :class:`WorkerFeature`."""
        module = fit.trainer.lightning_module
        return bool(served(module)) and hasattr(module, "prefetch_rows")

    def before_batch(self) -> None:
        """A batch is about to be trained: load the next one."""
        fetcher = private_names.fetcher(self._fit.trainer)
        if not isinstance(fetcher.iterator, _Held):
            fetcher.iterator = _Held(fetcher.iterator)
        ahead = fetcher.iterator.load()
        if ahead is not None:
            self._fit.trainer.lightning_module.prefetch_rows(ahead[0])


class _Held(Iterator[Any]):
    """Yields what an iterator does, and may have the next item already."""

    def __init__(self, inner: Iterator[Any]) -> None:
        self._inner = inner
        self._item: Any = None

    def load(self) -> Any:
        """Hold the next item. Returns it, or None if there is none now, or if it was held before."""
        if self._item is not None:
            return None
        self._item = next(self._inner, None)
        return self._item

    def __next__(self) -> Any:
        if self._item is None:
            return next(self._inner)
        item, self._item = self._item, None
        return item
