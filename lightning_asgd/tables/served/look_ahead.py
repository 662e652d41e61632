"""The batch after the present one, loaded early, so that the rows that it needs can be fetched meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_asgd.core.lightning import private_names


class LookAhead:
    """Shows a module's ``prefetch_rows(batch)`` every batch one step before it is trained, if the module has it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._show: Callable[[Any], Any] | None = getattr(trainer.lightning_module, "prefetch_rows", None)

    def look(self) -> None:
        """A batch is about to be trained: load the next one."""
        if self._show is None:
            return
        fetcher = private_names.fetcher(self._trainer)
        if not isinstance(fetcher.iterator, _Held):
            fetcher.iterator = _Held(fetcher.iterator)
        ahead = fetcher.iterator.load()
        if ahead is not None:
            self._show(ahead[0])


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
