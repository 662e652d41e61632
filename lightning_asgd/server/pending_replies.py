"""Requests that are answered later. Knows neither network, clock nor threads.

A request is known by its object, since a worker may send equal ones. It is kept here until it is answered, so that no
other can have its number meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch.futures import Future

from lightning_asgd.errors import ASGDError
from lightning_asgd.protocol import Failure

__all__ = ["Completion", "PendingReplies", "failure"]


class Completion(NamedTuple):
    """A reply that is due; an error fails the request."""

    request: Any
    reply: Any


def failure(error: ASGDError) -> Failure:
    """An error as it is sent to a worker."""
    return Failure(type(error).__name__, str(error))


class PendingReplies:
    """Requests that are answered later, in the order of their arrival."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[Any, Future[Any]]] = {}  # by id of the request

    def __contains__(self, request: Any) -> bool:
        return id(request) in self._pending

    def of(self, *kinds: type) -> list[Any]:
        """The pending requests of these kinds."""
        return [request for request, _ in self._pending.values() if isinstance(request, kinds)]

    def add(self, request: Any) -> Future[Any]:
        """Keep a request; its reply comes with the future."""
        future: Future[Any] = Future()
        self._pending[id(request)] = request, future
        return future

    def take(self, request: Any) -> Future[Any]:
        """Remove a request; the caller replies to it."""
        return self._pending.pop(id(request))[1]

    def complete_all(self, kind: type, reply: Any, workers: Collection[int] | None = None) -> None:
        """Reply to all requests of a kind, or to those of some workers."""
        for request in self.of(kind):
            if workers is None or request.worker in workers:
                self.complete(request, reply)

    def complete(self, request: Any, reply: Any) -> None:
        """Reply to a request, unless it was answered before; an error fails it."""
        _, future = self._pending.pop(id(request), (None, None))
        if future is not None:
            future.set_result(failure(reply) if isinstance(reply, ASGDError) else reply)
